"""The checks of models, for the tests of any package."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.compression_plan import Plan
from kvjax.engine.feed import feed
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
  prompt_hidden,
)
from kvjax.engine.generate import reserve
from kvjax.engine.prefill import prefill
from kvjax.errors import InputError
from kvjax.methods import FullKV
from kvjax.model import Model, Vocabulary
from kvjax.model import check_model as check_kind
from kvjax.options.budgets import Retention
from kvjax.prompts import Prompts
from kvjax.testing.checks import explain, require

# Tokens of the longest row, and those that follow a prompt: a block, whose rows
# have some of its tokens, and single ones.
_LENGTH, _BLOCK, _SINGLE = 48, (5, 3, 1), 3
_SHIFT = 7
# Errors of rounding, relative to the largest logit or key: of float32, and of
# narrower dtypes.
_EXACT, _ROUNDED = 1e-4, 0.05


def check_model(model: Model, params: PyTree) -> None:
  """Checks that a model meets the engine's requirements.

  It reads random tokens: padding, batch mates and later tokens must not change
  what it computes for a token, and a token that follows a cached prompt must
  get the logits that it gets within a prompt. The activations that some methods
  read are checked too, if the model provides them; those before the rotation
  only if it has `rerotate`. This takes a few seconds on a CPU with a small
  model, so give one of the same kind with few layers.

  Args:
    model: the model, whose context has 32 tokens or more. Windows of 48 tokens
      or more are not reached. It is refused if its rotation depends on the
      length of a prompt, as that of dynamic NTK scaling does: cached keys keep
      theirs.
    params: its weights, which may be random but must tell tokens apart. Give
      float32, and let the model compute in it: narrower dtypes hide errors as
      small as their rounding.

  Raises:
    InputError: a check fails; the message says what is wrong.

  Examples:
    >>> from kvjax.testing import TinyModel, check_model
    >>> model = TinyModel()
    >>> check_model(model, model.init())
  """
  check_kind(model)
  subject = _Subject.of(model, params)
  _check_causality(subject)
  _check_rows(subject)
  _check_cache(subject)
  _check_activations(subject)


@dataclasses.dataclass(frozen=True)
class _Subject:
  """A model and what it computes for a batch of prompts.

  Attributes:
    model: the model.
    params: its weights.
    name: name of its class.
    tokens: token ids; arbitrary after the end of a row.
    lengths: number of tokens of each row.
    vocab: number of token ids.
    logits: logits after every token.
  """

  model: Model
  params: PyTree
  name: str
  tokens: Int[np.ndarray, "B S"]
  lengths: Int[np.ndarray, " B"]
  vocab: int
  logits: Float[np.ndarray, "B S V"]

  @classmethod
  def of(cls, model: Model, params: PyTree) -> "_Subject":
    """Draws prompts and runs the model.

    Raises:
      InputError: its context is too short, it fails, or its logits are of
        another shape or dtype, not finite, or all alike.
    """
    name = type(model).__name__
    longest = min(_LENGTH, model.geometry.max_positions - _SHIFT)
    require(
      longest + _SHIFT >= 32,
      f"{name} needs a context of 32 tokens for these checks; it has "
      f"{model.geometry.max_positions}.",
    )
    lengths = np.array([longest, longest // 2 + 1, longest * 2 // 3])
    start = np.zeros((len(lengths), longest), np.int32)
    with explain(f"{name} fails to read a prompt"):
      like = jax.eval_shape(
        functools.partial(_all_logits, model), params, start, lengths
      )
    require(
      like.dtype == jnp.float32 and like.shape[:-1] == start.shape,
      f"The logits of {name} must be float32, one per token id along the last "
      f"axis of the hidden states; of {start.shape} tokens they are "
      f"{like.dtype} of shape {like.shape}.",
    )
    draw = np.random.default_rng(0)
    vocab = like.shape[-1]
    if isinstance(model, Vocabulary):
      vocab = model.vocab_size
    tokens = draw.integers(0, vocab, start.shape, np.int32)
    logits = _run(model, params, tokens, lengths)
    real = np.arange(longest)[None] < lengths[:, None]
    require(
      bool(np.all(np.isfinite(logits[real]))),
      f"The logits of {name} must be finite; some are not.",
    )
    require(
      bool(np.ptp(logits[real], axis=0).max() > 0),
      f"{name} gives all tokens the same logits, which checks nothing; give "
      "weights that tell tokens apart.",
    )
    return cls(model, params, name, tokens, lengths, vocab, logits)

  def run(
    self, tokens: Int[np.ndarray, "B S"], lengths: Int[np.ndarray, " B"]
  ) -> Float[np.ndarray, "B S V"]:
    """Computes the logits after every token of other prompts."""
    return _run(self.model, self.params, tokens, lengths)

  def expect(
    self, found: Float[np.ndarray, "*A V"], wanted: Any, sentence: str
  ) -> None:
    """Refuses logits that differ by more than rounding."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    error = float(np.abs(found - wanted).max())
    require(
      error <= self.tolerance * scale,
      f"{sentence} Logits differ by {error:.2g}, and are up to {scale:.2g}.",
    )

  @functools.cached_property
  def tolerance(self) -> float:
    """Rounding of the narrowest dtype of the weights and the activations.

    A model of mixed precision has float32 weights.
    """
    seen = jax.eval_shape(lambda: _activations(self, 0))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((self.params, seen))}
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    narrow = any(dtype.itemsize < 4 for dtype in floats)
    return _ROUNDED if narrow else _EXACT


@functools.partial(jax.jit, static_argnums=0)
def _all_logits(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> Float[Array, "B S V"]:
  return model.logits(params, prompt_hidden(model, params, tokens, lengths))


def _run(
  model: Model,
  params: PyTree,
  tokens: Int[np.ndarray, "B S"],
  lengths: Int[np.ndarray, " B"],
) -> Float[np.ndarray, "B S V"]:
  with jax.default_matmul_precision("highest"):
    return np.asarray(_all_logits(model, params, tokens, lengths))


def _check_causality(subject: _Subject) -> None:
  """Refuses tokens that depend on later ones."""
  last = int(subject.lengths[0]) - 1
  changed = subject.tokens.copy()
  changed[0, last] = (changed[0, last] + 1) % subject.vocab
  subject.expect(
    subject.run(changed, subject.lengths)[0, :last],
    subject.logits[0, :last],
    f"What {subject.name} computes for a token must not depend on later ones; "
    "it does.",
  )


def _check_rows(subject: _Subject) -> None:
  """Refuses tokens that depend on padding or on other rows."""
  name, lengths = subject.name, subject.lengths
  for row, length in enumerate(lengths):
    own = subject.tokens[row : row + 1]
    wanted = subject.logits[row : row + 1, :length]
    subject.expect(
      subject.run(own, lengths[row : row + 1])[:, :length],
      wanted,
      f"What {name} computes for a row must not depend on other rows; it does.",
    )
    padded = np.pad(own[:, :length], ((0, 0), (0, 8)))
    subject.expect(
      subject.run(padded, lengths[row : row + 1])[:, :length],
      wanted,
      f"What {name} computes for a token must not depend on padding, whose "
      "positions are -1; it does.",
    )


def _check_cache(subject: _Subject) -> None:
  """Refuses logits after a cached prompt that are not those within one."""
  model, params, name = subject.model, subject.params, subject.name
  rows = np.arange(len(subject.lengths))
  read = subject.lengths - max(_BLOCK) - _SINGLE
  prompts = Prompts.of(
    [subject.tokens[row, : read[row]].tolist() for row in rows]
  )
  plan = Plan(FullKV(), Retention(1))
  with (
    explain(f"{name} fails to fill a cache or to go on from it"),
    jax.default_matmul_precision("highest"),
  ):
    cache, logits = prefill(model, params, prompts, plan)
    cache = reserve(cache, max(_BLOCK) + _SINGLE)
    found = [(read - 1, np.asarray(logits))]
    for counts in (np.array(_BLOCK), *[np.ones(len(rows), int)] * _SINGLE):
      index = read[:, None] + np.arange(counts.max())[None]
      block = np.take_along_axis(subject.tokens, index, axis=1)
      logits, cache = _feed(model, params, cache, block, counts)
      read = read + counts
      found.append((read - 1, np.asarray(logits)))
  for place, after in found:
    subject.expect(
      after,
      subject.logits[rows, place],
      f"{name} must give a token after a cached prompt the logits that it gets "
      "within one; it does not. What depends on a token's place must read "
      "`positions`.",
    )


@functools.partial(jax.jit, static_argnums=0)
def _feed(
  model: Model, params: PyTree, cache: Any, block: Any, counts: Any
) -> tuple[Float[Array, "B V"], Any]:
  return feed(model, params, cache, block, counts)


def _check_activations(subject: _Subject) -> None:
  """Refuses activations for methods that are not what they are called."""
  layers = _activations(subject, 0)
  for layer in layers:
    _check_shapes(subject, layer)
  # What deeper layers attend to may depend on more than distances.
  _check_move(subject, layers[0], _activations(subject, _SHIFT)[0])
  for layer in layers:
    _check_rotation(subject, layer)


def _check_shapes(subject: _Subject, seen: Activations) -> None:
  """Refuses inputs and projections of other shapes."""
  name = subject.name
  if seen.inputs is not None:
    require(
      seen.inputs.shape[:2] == subject.tokens.shape,
      f"The inputs that {name} passes on must be [B, S, E]; they are "
      f"{seen.inputs.shape}.",
    )
  if seen.output_projection is not None:
    shape = seen.output_projection.shape
    expected = (seen.queries.shape[1], seen.values.shape[3])
    require(
      shape[:2] == expected,
      f"The output_projection of {name} must be [N, Dv, E], with {expected} "
      f"first; it is {shape}.",
    )


def _check_move(
  subject: _Subject, here: Activations, there: Activations
) -> None:
  """Refuses a wrong `rerotate`.

  Args:
    subject: the model.
    here: what the first layer with a cache attends to.
    there: the same for tokens that are `_SHIFT` places later.
  """
  by = jnp.full(here.positions.shape, _SHIFT, jnp.int32)
  moved = _moved(here, here.keys, by)
  require(
    moved is None or _alike(subject, moved, there.keys),
    f"rerotate of {subject.name} must turn keys at positions p to those at "
    "p + by; it does not.",
  )


def _check_rotation(subject: _Subject, seen: Activations) -> None:
  """Refuses vectors that are not those of a layer before its rotation.

  Those may be scaled by channel, as some long-context rotations do.
  """
  for kind in ("keys", "queries"):
    rotated = getattr(seen, kind)
    unrotated = getattr(seen, f"{kind}_unrotated")
    back = _moved(seen, rotated, -seen.positions)
    if unrotated is None or back is None:
      continue
    require(
      unrotated.shape == rotated.shape
      and _alike(subject, unrotated, back, scaled=True),
      f"The {kind}_unrotated of {subject.name} must be its {kind} before they "
      "are rotated, which `rerotate` turns back to position 0; they are not.",
    )


def _moved(
  seen: Activations, vectors: Array, by: Int[Array, "B S"]
) -> Array | None:
  """Moves vectors of a layer, or returns None if its model cannot."""
  if seen.rerotate is None:
    return None
  by = jnp.broadcast_to(by[:, None], vectors.shape[:3])
  try:
    return seen.rerotate(vectors, by)
  except InputError:
    return None


def _alike(
  subject: _Subject, found: Array, wanted: Array, *, scaled: bool = False
) -> bool:
  """Whether the vectors of real tokens are equal up to rounding.

  Args:
    subject: the model.
    found: [B, N, S, D].
    wanted: the same.
    scaled: whether they may differ by a positive factor per channel.
  """
  real = np.arange(wanted.shape[2])[None] < subject.lengths[:, None]
  x, y = (
    np.asarray(each, np.float32).swapaxes(1, 2)[real]
    for each in (found, wanted)
  )
  if scaled:
    products = np.maximum((x * y).sum((0, 1)), 0)
    x *= products / np.maximum((x * x).sum((0, 1)), 1e-30)
  scale = max(float(np.abs(y).max()), 1e-6)
  return bool(np.abs(x - y).max() <= subject.tolerance * scale)


def _activations(subject: _Subject, shift: int) -> list[Activations]:
  """Returns what each layer with a cache attends to, of moved tokens."""
  tokens, lengths = jnp.asarray(subject.tokens), jnp.asarray(subject.lengths)
  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  positions = jnp.where(positions < 0, -1, positions + shift)
  layers = subject.model.geometry.layers

  def attend(
    layer: int, state: None, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Activations]:
    del layer, state
    return attend_to_prompt(activations), activations

  with jax.default_matmul_precision("highest"):
    _, states = hidden_states(
      subject.model,
      subject.params,
      tokens,
      positions,
      [None] * len(layers),
      attend,
    )
  return [seen for seen, spec in zip(states, layers, strict=True) if spec.cache]
