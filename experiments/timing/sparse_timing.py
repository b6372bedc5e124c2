"""Times the attention of a layer to all keys, and to what is retrieved."""

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import progress_bar, stopwatch
from kvjax.experiments.timing import kernel_timing
from kvjax.experiments.timing.index_builders import (
  KEY_CENTERS,
  QUERY_CENTERS,
  around,
)
from kvjax.experiments.timing.kernel_timing import Bandwidth
from kvjax.retrieval.base import Retrieval

FULL = "full"
# Tokens that a layer decodes per round.
_TOKENS = 8


class Heads(NamedTuple):
  """Heads of a layer, by default those of Llama-3.1-8B, and their dtype."""

  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  dtype: str = "float32"


class Attended(NamedTuple):
  """Attention of a layer to its cache, for one token of one row.

  Attributes:
    name: name of the method.
    cache_bytes: bytes of keys, values and index.
    read_tokens: tokens that a token attends to, mean over KV heads.
    seconds: seconds per token in each round.
    index_seconds: seconds to build the index, without compilation.
  """

  name: str
  cache_bytes: int
  read_tokens: float
  seconds: Sequence[float]
  index_seconds: float = 0.0

  @property
  def token(self) -> float:
    """Seconds per token in the median round."""
    return statistics.median(self.seconds)


def measure(
  retrievals: Mapping[str, Retrieval],
  keys: int,
  length: int,
  heads: Heads,
  rounds: int,
  seed: int,
) -> tuple[Bandwidth, list[Attended]]:
  """Attends to every cache, and reads an array, in turns.

  Keys and queries are Gaussians around Gaussian centers, so that neighboring
  queries are as similar as CTkvr's paper finds them, with a cosine of 0.8.

  Args:
    retrievals: methods by their names.
    keys: keys that a token retrieves.
    length: tokens of the prompt.
    heads: heads of the layer.
    rounds: number of timings of each, after compilation.
    seed: seed of keys, values and queries.

  Returns:
    The bandwidth; and the attention to the full cache and to those of the
    methods.

  Raises:
    InputError: a method reads all keys at this length.
  """
  drawn = _draw(seed, length + (1 + rounds) * _TOKENS, heads)
  prompt = _part(drawn, 0, length)
  stacks: dict[str, Layer] = {}
  sizes: dict[str, int] = {}
  indexing: dict[str, float] = {}
  names = [FULL, *retrievals]
  for name in progress_bar.track(names, "indexing"):
    layer, indexing[name] = _layer(retrievals.get(name), prompt, keys)
    if layer is None:
      raise InputError(
        f"{name} reads all of {length} tokens; give a longer --length or fewer "
        "--keys."
      )
    sizes[name] = layer.nbytes
    grown = layer.grow((1 + rounds) * _TOKENS)
    stacks[name] = jax.tree.map(lambda x: x[None], grown)
  reads = {name: float(np.mean(s.num_attended)) for name, s in stacks.items()}
  del prompt
  starts = {name: itertools.count(length, _TOKENS) for name in names}

  def attend(name: str) -> float:
    tokens = jax.block_until_ready(_tokens(drawn, next(starts[name])))
    (stacks[name], _), seconds = stopwatch.timed(
      lambda: _decode(stacks[name], tokens)
    )
    return seconds / _TOKENS

  for name in progress_bar.track(names, "compiling"):
    attend(name)
  reading, *times_of = stopwatch.in_turns(
    [
      kernel_timing.reading(kernel_timing.READ),
      *(functools.partial(attend, name) for name in names),
    ],
    progress_bar.track(range(rounds), "timing"),
  )
  return Bandwidth(kernel_timing.READ, reading), [
    Attended(name, sizes[name], reads[name], times, indexing[name])
    for name, times in zip(names, times_of, strict=True)
  ]


HEADING = (
  *("method", "tokens", "MiB", "reads", "index, ms", "ms a token", "× full"),
)


def table(results: Mapping[int, Sequence[Attended]]) -> Table:
  """Builds the table of all lengths; the full caches, first, are baselines."""
  lines = [
    (
      result.name,
      f"{length:,}",
      f"{result.cache_bytes / 2**20:,.1f}",
      f"{result.read_tokens:,.0f}",
      f"{1e3 * result.index_seconds:,.1f}"
      if result is not full
      else wording.NOTHING,
      wording.milliseconds(result.token),
      f"{full.token / result.token:.2f}",
    )
    for length, (full, *others) in results.items()
    for result in (full, *others)
  ]
  return Table("", HEADING, lines)


@functools.partial(jax.jit, donate_argnums=0)
def _decode(
  stack: Layer, tokens: Activations
) -> tuple[Layer, Float[Array, "J B N S D"]]:
  """Appends tokens to the only layer of a stack, and attends from each."""

  def one(
    stack: Layer, token: Activations
  ) -> tuple[Layer, Float[Array, "B N S D"]]:
    output, stack = stack.step(token, jnp.zeros((), jnp.int32))
    return stack, output

  return jax.lax.scan(one, stack, tokens)


def _layer(
  retrieval: Retrieval | None, prompt: Activations, keys: int
) -> tuple[Layer | None, float]:
  """Makes the cache of a layer; returns the seconds of its index, too."""
  cache = LayerCache.of(prompt)
  if retrieval is None:
    return cache, 0.0
  count, layer = jnp.full(1, keys, jnp.int32), jnp.zeros((), jnp.int32)
  index = (
    jax.jit(SparseLayer.of, static_argnums=(0, 5))
    .lower(retrieval, layer, cache, prompt, count, keys)
    .compile()
  )
  jax.block_until_ready(prompt)
  return stopwatch.timed(lambda: index(layer, cache, prompt, count))


def _draw(seed: int, length: int, heads: Heads) -> Activations:
  """Draws the activations of one row."""
  rng = np.random.default_rng(seed)
  kv, group = heads.kv_heads, heads.heads // heads.kv_heads

  def per_head(centers: int, repeats: int) -> Float[Array, "1 H T D"]:
    # Heads of a group are about the same topics.
    topics = [rng.integers(centers, size=length) for _ in range(kv)]
    drawn = [
      around(rng, centers, topic, heads.head_dim)
      for topic in topics
      for _ in range(repeats)
    ]
    return jnp.asarray(np.stack(drawn), heads.dtype)[None]

  keys = per_head(KEY_CENTERS, 1)
  return Activations(
    queries=per_head(QUERY_CENTERS, group),
    keys=keys,
    values=per_head(KEY_CENTERS, 1),
    keys_unrotated=keys,
    positions=jnp.arange(length, dtype=jnp.int32)[None],
  )


def _part(drawn: Activations, start: int, end: int) -> Activations:
  """The activations of some of the tokens."""
  keys = drawn.keys[:, :, start:end]
  return Activations(
    queries=drawn.queries[:, :, start:end],
    keys=keys,
    values=drawn.values[:, :, start:end],
    keys_unrotated=keys,
    positions=drawn.positions[:, start:end],
  )


def _tokens(drawn: Activations, start: int) -> Activations:
  """The activations of the tokens of a round, with a leading axis of tokens."""
  parts = [_part(drawn, at, at + 1) for at in range(start, start + _TOKENS)]
  return jax.tree.map(lambda *x: jnp.stack(x), *parts)
