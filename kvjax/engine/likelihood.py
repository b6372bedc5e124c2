"""How likely a model finds texts: prompts, and answers given a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.feed import append_block
from kvjax.engine.forward import prompt_hidden
from kvjax.errors import InputError
from kvjax.model import Model, check_context
from kvjax.prompts import Prompts

# Positions, of all rows together, whose logits there are at a time.
_AT_ONCE = 256


def negative_log_likelihood(
  model: Model, params: PyTree, prompts: Prompts
) -> Float[Array, " B"]:
  """NLL(c): the mean of -ln p over each prompt's tokens but the first.

  In nats, in float32, and NaN for a prompt of one token. It takes a forward
  pass of its own; `kvjax.measured_sweep` has it from the pass that prefills.

  Raises:
    InputError: a prompt is longer than the model's context.
  """
  lengths = np.asarray(prompts.lengths)
  check_context(model, lengths)
  tokens = jnp.asarray(prompts.tokens)
  return _nll(model, params, tokens, jnp.asarray(lengths))


def answer_nll(
  model: Model,
  params: PyTree,
  cache: Cache,
  questions: Prompts,
  answers: Prompts,
) -> Float[Array, " B"]:
  """Mean of -ln p over the tokens of given answers, after their questions.

  In nats, in float32. The cache itself is left as it was.

  Args:
    model: the functions.
    params: the weights.
    cache: what is left of each row's context.
    questions: one for each row, with what stands before the answer.
    answers: one for each row.

  Raises:
    InputError: rows, questions and answers differ in number, the cache goes on
      evicting, or all together are longer than the model's context.
  """
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
  asked, said = np.asarray(questions.lengths), np.asarray(answers.lengths)
  pairs = zip(questions.rows(), answers.rows(), strict=True)
  both = Prompts.of([question + answer for question, answer in pairs])
  seen = np.asarray(cache.next_positions)
  check_context(
    model,
    seen + asked + said,
    "What the cache has seen, with all that follows,",
  )
  return _answer_nll(
    model,
    params,
    cache,
    jnp.asarray(both.tokens),
    jnp.asarray(asked, jnp.int32),
    jnp.asarray(said, jnp.int32),
  )


def prompt_nll(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, " B"]:
  """As `negative_log_likelihood`, from the hidden states of a forward pass."""
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  foretold = index < lengths[:, None] - 1
  return _mean_nll(model, params, hidden, tokens, foretold)


def _mean_nll(
  model: Model,
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  foretold: Bool[Array, "B S"],
) -> Float[Array, " B"]:
  """Mean of -ln p of the tokens that follow those marked; NaN for none.

  The logits of all positions would take V / E times the memory of the hidden
  states; there are only those of a few positions at a time, for the gradient
  too, which computes them again.
  """
  rows, length, _ = hidden.shape
  width = min(max(_AT_ONCE // rows, 1), length)
  # What the last position foretells is not there, and never marked.
  targets = jnp.roll(tokens, -1, axis=1)

  @jax.checkpoint
  def part(start: Int[Array, ""]) -> Float[Array, " B"]:
    # The last part may begin within the one before.
    begin = jnp.minimum(start, length - width)
    own, wanted, marked = (
      jax.lax.dynamic_slice_in_dim(x, begin, width, axis=1)
      for x in (hidden, targets, foretold)
    )
    marked &= (begin + jnp.arange(width, dtype=jnp.int32) >= start)[None]
    logits = model.logits(params, own)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return jnp.sum(jnp.where(marked, losses, 0.0), axis=1)

  starts = jnp.arange(0, length, width, dtype=jnp.int32)
  total = jnp.sum(jax.lax.map(part, starts), axis=0)
  count = jnp.sum(foretold.astype(jnp.float32), axis=1)
  return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.nan)


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
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  asked: Int[Array, " B"],
  said: Int[Array, " B"],
) -> Float[Array, " B"]:
  width = tokens.shape[1]
  room = [
    None if stack.capacity is None else stack.capacity + width
    for stack in cache.stacks
  ]
  cache = cache.grow(room)
  hidden, _ = append_block(model, params, cache, tokens, asked + said)
  index = jnp.arange(width, dtype=jnp.int32)[None]
  foretold = (index >= asked[:, None] - 1) & (
    index < (asked + said)[:, None] - 1
  )
  return _mean_nll(model, params, hidden, tokens, foretold)
