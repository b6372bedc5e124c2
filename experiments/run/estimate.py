"""Estimates how long work takes, from its operations and the device's rates."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path
from jaxtyping import Array

import kvjax
from kvjax.engine.plan_fit import recites
from kvjax.experiments.run import multihost, stopwatch
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.memory import cache_bytes
from kvjax.models.language_model import DecoderModel
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes

# Width of a product and bytes of a copy that are timed: large compared with a
# launch on a GPU, and a fraction of a second on two slow cores.
_WIDTH, _COPIED = 1536, 2**26
_ROUNDS = 2
# Of these rates, what a model's programs reach: about a third in recorded runs.
_REACHED = 1 / 3
_MINUTE, _HOUR = 60.0, 3600.0


class Rates(NamedTuple):
  """What a model's programs do in a second.

  Attributes:
    operations: multiplications and additions in products of matrices.
    nbytes: bytes that are read or written.
  """

  operations: float
  nbytes: float

  @classmethod
  @functools.cache
  def probe(cls, dtype: jnp.dtype) -> "Rates":
    """Times a product and a copy; all hosts of a mesh must call it."""
    matrix = jnp.zeros((_WIDTH, _WIDTH), dtype)
    array = jnp.zeros(_COPIED // dtype.itemsize, dtype)
    # In place, as caches are written: new memory takes much longer to map.
    return cls(
      _REACHED * 2 * _WIDTH**3 / _time(lambda x: x @ x, matrix),
      _REACHED * 2 * _COPIED / _time(lambda x: x + 1, array),
    )


class Batch(NamedTuple):
  """Contexts that are prefilled together.

  Attributes:
    rows: number of contexts, as for the others padded.
    context: tokens of a context.
    fed: tokens that every cache is fed after it, in one or a few steps.
    steps: tokens that are decoded from every cache, one by one.
  """

  rows: int
  context: int
  fed: int
  steps: int


def estimate(
  lm: Pretrained, candidates: Sequence[Candidate], batches: Iterable[Batch]
) -> float:
  """Estimates the seconds of batches, of which each host takes its share.

  Answers are as long as allowed; the time to compile programs is left out.

  What methods compute themselves is left out, but for replays of the prompt;
  what caches recite for a calibrated budget counts.
  """
  sizes = _Sizes.of(lm)
  rates = Rates.probe(jax.tree.leaves(lm.params)[0].dtype)
  mesh = jax.sharding.get_abstract_mesh()
  devices = max(mesh.size, 1)
  # Along "data", devices have the same weights.
  weights = sizes.weights * mesh.shape.get("data", 1)
  seconds = 0.0
  for batch in batches:
    caches = batch.rows * sum(
      cache_bytes(lm, each, batch.context) for each in candidates
    )
    rows = batch.rows * len(candidates)
    multiplied = _prefill(lm, candidates, batch, sizes.body)
    multiplied += 2.0 * sizes.body * rows * batch.fed
    step = max(
      2.0 * (sizes.body + sizes.head) * rows / rates.operations,
      weights / rates.nbytes,
    )
    seconds += multiplied / rates.operations
    seconds += batch.steps * (step + caches / rates.nbytes)
  return seconds / devices / multihost.sharing()


def expected(seconds: float) -> str:
  """Says what `estimate` has found, in sentences."""
  return (
    f"Expect about {in_words(seconds)} here, less if answers are short. The "
    "first time, programs are compiled, which adds some seconds for each "
    "method, budget and length."
  )


def in_words(seconds: float, digits: int = 1) -> str:
  """Rounds a time to a few digits, as in `40 s`, `3 min` or `2 h`."""
  for name, unit in (("s", 1.0), ("min", _MINUTE), ("h", _HOUR)):
    number = max(float(f"{seconds / unit:.{digits - 1}e}"), 1.0)
    if number < _MINUTE or name == "h":
      break
  return f"{number:g} {name}"


class _Sizes(NamedTuple):
  """Numbers of a model.

  Attributes:
    body: parameters that multiply every token.
    head: parameters of the output matrix, which multiply every decoded token.
    weights: bytes of all.
  """

  body: float
  head: int
  weights: int

  @classmethod
  def of(cls, lm: Pretrained) -> "_Sizes":
    if not isinstance(lm.model, DecoderModel):
      return cls._of_others(lm)
    config, experts = lm.config, lm.config.experts
    head = config.vocab_size * config.hidden_size
    share = 1.0 if experts is None else experts.per_token / experts.count
    body = 0.0
    for path, leaf in tree_flatten_with_path(lm.params)[0]:
      of_experts = any(getattr(key, "key", "") == "experts" for key in path)
      body += leaf.size * (share if of_experts else 1.0)
    # The embedding is looked up.
    body -= head if config.tie_embeddings else 2 * head
    return cls(body, head, tree_bytes(lm.params))

  @classmethod
  def _of_others(cls, lm: Pretrained) -> "_Sizes":
    """Takes what is not of a layer for the output matrix."""
    layers = lm.model.layer_weights(lm.params)
    body = sum(leaf.size for leaf in jax.tree.leaves(layers))
    head = sum(leaf.size for leaf in jax.tree.leaves(lm.params)) - body
    return cls(body, head, tree_bytes(lm.params))


def _prefill(
  lm: Pretrained, candidates: Sequence[Candidate], batch: Batch, body: float
) -> float:
  """Counts the operations of all passes over the contexts."""
  blocks = sum(c.plan.schedule.block is not None for c in candidates)
  shared = len(candidates) > blocks
  replays = {
    (replay.chunk, replay.overlap, replay.weight == "gradient")
    for candidate in candidates
    if (replay := candidate.plan.method.traits.replay) is not None
  }
  # A token of a replay sees the whole context, and so three times the keys of
  # a token of the context on average; gradients also go backward.
  again = sum(3 if backward else 1 for *_, backward in replays)
  attended = 0.0
  for spec in lm.model.geometry.layers:
    keys = batch.context / 2
    if spec.window is not None:
      keys = min(keys, spec.window)
    if spec.cache:
      attended += 2 * spec.heads * (spec.key_dim + spec.value_width) * keys
  recitals = [
    len(budget.calibration.grid)
    for candidate in candidates
    if isinstance(budget := candidate.plan.budget, kvjax.Calibrated)
    and recites(candidate.plan)
  ]
  # Each has a pass of its own; the full cache recites, too.
  passes = blocks + shared + len(recitals)
  again += sum(recitals) + len(recitals)
  per_token = (passes + again) * 2 * body + (passes + 3 * again) * attended
  return per_token * batch.rows * batch.context


def _time(run: Callable[[Array], Array], operand: Array) -> float:
  """Times a function of an array of the same shape, which it replaces."""
  program = jax.jit(run, donate_argnums=0)

  def replace() -> Array:
    nonlocal operand
    operand = program(operand)
    return operand

  return min(stopwatch.repeated(replace, _ROUNDS))
