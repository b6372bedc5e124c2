"""Likelihood of prompts, and of answers given a cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.capacity import check_cache, check_caches
from kvjax.engine.feed import append_block
from kvjax.engine.forward import prompt_hidden
from kvjax.errors import InputError
from kvjax.hosts import is_traced, read
from kvjax.model import Model, check_context, check_model, check_tokens
from kvjax.prompts import Prompts, check_batch, check_unprotected

# Maximum number of positions, over all rows, whose logits exist at a time.
_AT_ONCE = 256


def negative_log_likelihood(
  model: Model, params: PyTree, prompts: Prompts
) -> Float[Array, " B"]:
  """Computes NLL(c), the mean of -ln p over each prompt's tokens but the first.

  It is in nats, in float32, and NaN for a prompt of one token. This runs its
  own forward pass; `kvjax.measured_sweep` computes the same during prefill.

  Raises:
    InputError: an argument has a wrong type, a prompt is longer than the
      model's context or has a token that it does not embed, or prompts are
      arguments of `jax.jit`.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> kvjax.negative_log_likelihood(model, params, prompts).shape
    (2,)
  """
  check_model(model)
  check_batch(prompts)
  lengths = prompts.known_lengths
  check_context(model, lengths)
  check_tokens(model, prompts.tokens, lengths)
  tokens = jnp.asarray(prompts.tokens)
  return _nll(model, params, tokens, jnp.asarray(lengths))


def answer_nll(
  model: Model,
  params: PyTree,
  cache: Cache,
  questions: Prompts,
  answers: Prompts,
) -> Float[Array, " B"]:
  """Computes the mean of -ln p over given answers, after their questions.

  It is in nats, in float32, and has gradients, also through a prefill of whole
  prompts; those of methods that replay prompts are to be taken outside of
  `jax.jit`. The cache is left unchanged. Where gradients are taken, and within
  `jax.jit`, the length of its context is not checked.

  Args:
    model: the functions.
    params: the weights.
    cache: the cache of each row's context.
    questions: one question per row, with everything before the answer.
    answers: one answer per row.

  Raises:
    InputError: an argument has a wrong type, rows, questions and answers differ
      in number, questions or answers have a mask or a token that the model does
      not embed, the cache is of another model, has been donated or evicts while
      decoding, or all together are longer than the model's context.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> questions = kvjax.Prompts.of([[7], [8, 9]])
    >>> answers = kvjax.Prompts.of([[3, 4], [5]])
    >>> kvjax.answer_nll(model, params, cache, questions, answers).shape
    (2,)
  """
  asked = _asked(model, cache, questions, answers)
  return _answer_nll(model, params, cache, asked)


def token_nll(
  model: Model,
  params: PyTree,
  cache: Cache,
  questions: Prompts,
  answers: Prompts,
) -> Float[Array, "B A"]:
  """Computes -ln p of each token of given answers; arbitrary for padding.

  Arguments and errors are those of `answer_nll`.
  """
  asked = _asked(model, cache, questions, answers)
  return _token_nll(model, params, cache, asked)


class _Asked(NamedTuple):
  """Questions, each followed by its answer, and the answers again."""

  tokens: Int[Array, "B S"]
  question_lengths: Int[Array, " B"]
  answers: Int[Array, "B A"]
  answer_lengths: Int[Array, " B"]


def _asked(
  model: Model, cache: Cache, questions: Prompts, answers: Prompts
) -> _Asked:
  """Checks the arguments of `answer_nll`, and joins questions and answers."""
  # Only a single cache is judged.
  check_caches([cache])
  check_batch(questions)
  check_batch(answers)
  check_unprotected(questions)
  check_unprotected(answers)
  rows = len(cache.next_positions)
  if not rows == questions.tokens.shape[0] == answers.tokens.shape[0]:
    raise InputError(
      f"The cache has {rows} rows, {questions.tokens.shape[0]} questions and "
      f"{answers.tokens.shape[0]} answers; give one of each per row."
    )
  if cache.plan is not None:
    raise InputError(
      "Answers are judged by a cache that stays as it is; this one goes on "
      f"evicting {cache.plan.schedule}."
    )
  question_lengths, answer_lengths = (
    questions.known_lengths,
    answers.known_lengths,
  )
  pairs = zip(questions.rows(), answers.rows(), strict=True)
  # One block, in which the answer follows its question without padding. Its
  # width depends on shapes alone: batches of one shape share a program.
  both = Prompts.of(
    [question + answer for question, answer in pairs],
    questions.tokens.shape[1] + answers.tokens.shape[1],
  )
  check_cache(model, cache)
  total = question_lengths + answer_lengths
  if not is_traced(cache.next_positions):
    total = total + read(cache.next_positions)
  check_context(model, total, "The context, with all that follows,")
  check_tokens(model, both.tokens, both.known_lengths)
  return _Asked(
    jnp.asarray(both.tokens),
    jnp.asarray(question_lengths, jnp.int32),
    jnp.asarray(answers.tokens),
    jnp.asarray(answer_lengths, jnp.int32),
  )


def prompt_nll(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, " B"]:
  """Computes NLL(c) of prompts from the hidden states of a forward pass."""
  masks = _predicted(tokens, lengths)[None]
  return _mean_nll(model, params, hidden, _following(tokens), masks)[0]


def prompt_and_tail_nll(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  tail: int,
) -> Float[Array, "2 B"]:
  """Computes NLL(c) of prompts, and the same of their last `tail` tokens.

  The last tokens of a prompt of fewer are all but the first.
  """
  predicted = _predicted(tokens, lengths)
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  last = predicted & (index >= lengths[:, None] - 1 - tail)
  masks = jnp.stack([predicted, last])
  return _mean_nll(model, params, hidden, _following(tokens), masks)


def _following(tokens: Int[Array, "B S"]) -> Int[Array, "B S"]:
  """The token after each position; the last one wraps around."""
  # What wraps around is masked by `_predicted`.
  return jnp.roll(tokens, -1, axis=1)


def _predicted(
  tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
) -> Bool[Array, "B S"]:
  """Positions whose next token belongs to the prompt."""
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  return index < lengths[:, None] - 1


def _mean_nll(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  targets: Int[Array, "B S"],
  predicted: Bool[Array, "M B S"],
) -> Float[Array, "M B"]:
  """Mean of -ln p of the targets at the positions in each mask."""
  return _mean(_losses(model, params, hidden, targets), predicted)


def _mean(
  losses: Float[Array, "B S"], masks: Bool[Array, "M B S"]
) -> Float[Array, "M B"]:
  """Mean of the losses in each mask; NaN for a row without any."""
  total = jnp.sum(jnp.where(masks, losses[None], 0.0), axis=2)
  count = jnp.sum(masks.astype(jnp.float32), axis=2)
  return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.nan)


def _losses(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  targets: Int[Array, "B S"],
) -> Float[Array, "B S"]:
  """-ln p of a target at each position.

  The logits of all positions would take V / E times the memory of the hidden
  states. Therefore they are computed for a few positions at a time, and again
  for the gradient.
  """
  import optax

  rows, length, _ = hidden.shape
  width = min(max(_AT_ONCE // rows, 1), length)

  @jax.checkpoint
  def part(start: Int[Array, ""]) -> Float[Array, "B W"]:
    part_hidden, labels = (
      jax.lax.dynamic_slice_in_dim(x, start, width, axis=1)
      for x in (hidden, targets)
    )
    logits = model.logits(params, part_hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

  starts = jnp.arange(0, length, width, dtype=jnp.int32)
  # One part after another: vmap would hold the logits of all of them.
  parts = jax.lax.map(part, jnp.minimum(starts, length - width))
  before = jnp.swapaxes(parts[:-1], 0, 1).reshape(rows, -1)
  # The last part may overlap the one before.
  rest = length - before.shape[1]
  return jnp.concatenate([before, parts[-1][:, width - rest :]], axis=1)


@functools.partial(jax.jit, static_argnames=("model",))
def _nll(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, " B"]:
  hidden = prompt_hidden(model, params, tokens, lengths)
  return prompt_nll(model, params, hidden, tokens, lengths)


@functools.partial(jax.jit, static_argnames=("model",))
def _answer_nll(
  model: Model, params: PyTree, cache: Cache, asked: _Asked
) -> Float[Array, " B"]:
  losses = _token_nll(model, params, cache, asked)
  index = jnp.arange(losses.shape[1], dtype=jnp.int32)[None]
  return _mean(losses, (index < asked.answer_lengths[:, None])[None])[0]


@functools.partial(jax.jit, static_argnames=("model",))
def _token_nll(
  model: Model, params: PyTree, cache: Cache, asked: _Asked
) -> Float[Array, "B A"]:
  tokens, question_lengths, answers, answer_lengths = asked
  width = tokens.shape[1]
  hidden, _ = append_block(
    model, params, cache.widen(width), tokens, question_lengths + answer_lengths
  )
  # Logits are needed where the next token belongs to the answer.
  index = jnp.arange(answers.shape[1], dtype=jnp.int32)[None]
  # The first is the question's last token, which predicts the answer's first.
  places = jnp.minimum(question_lengths[:, None] - 1 + index, width - 1)
  hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
  return _losses(model, params, hidden, answers)
