"""Statistics of a model's queries: means, spreads and main directions."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float, Int, PyTree

from kvjax import files
from kvjax.activations import Activations
from kvjax.engine import prompt_programs
from kvjax.errors import InputError
from kvjax.heads import by_kv_head
from kvjax.hosts import read
from kvjax.methods.expected_attention import moments, queries_at_zero
from kvjax.methods.q_filters import main_directions
from kvjax.methods.triattention import pair_lengths
from kvjax.model import (
  LayerSpec,
  Model,
  check_context,
  check_model,
  check_tokens,
)
from kvjax.options.bounds import check_count
from kvjax.prompts import Prompts, check_rows

# Queries of a head whose main direction is computed, as in the authors' code.
_ROWS = 3000


@dataclasses.dataclass(frozen=True, eq=False)
class QueryStatistics:
  """Statistics of a model's queries over some texts, all float32.

  Attributes:
    query_mean: means of the queries at position 0, for `ExpectedAttention`.
    query_cov: their covariances, over the count less one.
    q_filters: minus the main direction of rotated queries, averaged over each
      group, for `QFilters`.
    query_abs: mean lengths of the pairs of channels that RoPE rotates, for each
      of both channels, for `TriAttention`.
  """

  query_mean: Float[np.ndarray, "L N D"]
  query_cov: Float[np.ndarray, "L N D D"]
  q_filters: Float[np.ndarray, "L K D"]
  query_abs: Float[np.ndarray, "L N D"]

  def save(self, path: files.Path) -> None:
    """Writes a file of safetensors, which those methods read.

    Raises:
      InputError: the file cannot be written.
    """
    arrays = {name: np.ascontiguousarray(x) for name, x in vars(self).items()}
    files.write_bytes(path, safetensors.numpy.save(arrays))


def calibrate_queries(
  model: Model,
  params: PyTree,
  rows: Sequence[Sequence[int]],
  *,
  sinks: int = 4,
  seed: int = 0,
  on_text: Callable[[], None] = lambda: None,
) -> QueryStatistics:
  """Measures the statistics of a model's queries over some texts.

  Every text has the same share of the 3,000 queries of each head, drawn at
  random, whose main direction is computed. One text is in memory at a time.

  Source: arXiv 2510.00636 (means and covariances), arXiv 2503.02812, Section 3
  (filters), arXiv 2604.04921 (lengths of pairs), and the code of their authors.

  Args:
    model: the functions.
    params: the weights.
    rows: token ids of the texts; some twenty of 2,048 tokens are enough.
    sinks: number of first tokens of each text whose queries do not count.
    seed: seed of the drawn queries.
    on_text: called after each text of more than `sinks` tokens.

  Raises:
    InputError: these are no rows of token ids, there are too few tokens, or
      more than the model's context, or some that it does not embed, `sinks` or
      `seed` is no whole number of 0 or more, its layers differ in their heads,
      or its queries cannot be moved.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> texts = [list(range(40)), list(range(20, 60))]
    >>> found = kvjax.calibrate_queries(model, model.init(), texts)
    >>> found.q_filters.shape
    (2, 2, 8)
  """
  check_model(model)
  check_rows(rows)
  # Queries of padding have position -1, and would count.
  check_count("sinks", sinks, 0)
  check_count("seed", seed, 0)
  rows = [row for row in rows if len(row) > sinks]
  if sum(len(row) - sinks for row in rows) < 2:
    raise InputError(
      f"Statistics of queries need texts of more than {sinks} tokens, whose "
      "first ones do not count; give longer ones."
    )
  check_context(model, np.array([len(row) for row in rows]), "A text")
  texts = [Prompts.of([list(row)]) for row in rows]
  for text in texts:
    check_tokens(model, text.tokens, text.known_lengths)
  spec, layers = _common_spec(model), model.geometry.num_layers
  pooled = [_Pooled(spec) for _ in range(layers)]
  share = -(-_ROWS // len(rows))
  random = np.random.default_rng(seed)
  for text, row in zip(texts, rows, strict=True):
    eligible = np.arange(sinks, len(row))
    drawn = random.permutation(eligible)[:share]
    # Of one length for all texts, so that they share a program.
    places = np.full(share, -1, np.int32)
    places[: len(drawn)] = np.sort(drawn)
    for layer, found in _measure(model, params, text, places, sinks):
      pooled[layer].add(read(found), len(row) - sinks, len(drawn))
    on_text()
  return QueryStatistics(
    *(
      np.stack(parts).astype(np.float32)
      for parts in zip(*(each.result() for each in pooled), strict=True)
    )
  )


def _common_spec(model: Model) -> LayerSpec:
  """The heads of all layers that attend.

  Raises:
    InputError: they differ.
  """
  specs = [spec for spec in model.geometry.layers if spec.cache]
  sizes = {(spec.heads, spec.kv_heads, spec.key_dim) for spec in specs}
  if len(sizes) > 1:
    raise InputError(
      "Statistics of queries are stored for layers with equal heads; those of "
      "this model differ."
    )
  return specs[0]


_Found = tuple[
  Float[Array, "1 N D"],
  Float[Array, "1 N D D"],
  Float[Array, "1 N D"],
  Float[Array, "1 N R D"],
]


def _measure(
  model: Model,
  params: PyTree,
  text: Prompts,
  places: Int[np.ndarray, " R"],
  sinks: int,
) -> Iterator[tuple[int, _Found]]:
  """Yields the moments and the drawn queries of every layer that attends."""
  layers = prompt_programs.forward_layers(
    model, params, text, {"rerotate"}, queries=None
  )
  for layer, (_, activations) in enumerate(layers):
    if activations is not None:
      yield layer, _of_layer(activations, jnp.asarray(places), jnp.int32(sinks))


@jax.jit
def _of_layer(
  activations: Activations, places: Int[Array, " R"], sinks: Int[Array, ""]
) -> _Found:
  """Mean, covariance and lengths at position 0, and some of the queries."""
  with jax.default_matmul_precision("highest"):
    drawn = jnp.take(activations.queries, jnp.maximum(places, 0), axis=2)
    real = (places >= 0)[None, None, :, None]
    drawn = jnp.where(real, drawn.astype(jnp.float32), 0.0)
    queries, counted = queries_at_zero(activations, sinks)
    assert activations.rerotate is not None
    mean, covariance = moments(queries, counted, covariance=True)
    lengths = pair_lengths(queries, activations.rerotate)
    length, _ = moments(lengths, counted, covariance=False)
  assert covariance is not None
  return mean, covariance, length, drawn


class _Pooled:
  """Moments and drawn queries of a layer, pooled over texts in float64."""

  def __init__(self, spec: LayerSpec) -> None:
    heads, dim = spec.heads, spec.key_dim
    self._kv_heads = spec.kv_heads
    self._count = 0
    self._mean = np.zeros((heads, dim))
    self._products = np.zeros((heads, dim, dim))
    self._lengths = np.zeros((heads, dim))
    self._drawn = [np.zeros((heads, 0, dim), np.float32)]

  def add(self, found: tuple[np.ndarray, ...], count: int, drawn: int) -> None:
    """Adds a text of `count` queries, `drawn` of which are given."""
    mean, covariance, lengths, queries = (each[0] for each in found)
    shift = mean.astype(np.float64) - self._mean
    total = self._count + count
    self._products += covariance.astype(np.float64) * count
    self._products += (
      shift[:, :, None] * shift[:, None] * (self._count * count / total)
    )
    self._mean += shift * (count / total)
    self._lengths += (lengths - self._lengths) * (count / total)
    self._count = total
    self._drawn.append(queries[:, :drawn])

  def result(self) -> tuple[np.ndarray, ...]:
    """The fields of `QueryStatistics`; zeros for a layer without attention."""
    queries = np.concatenate(self._drawn, axis=1)
    with jax.default_matmul_precision("highest"):
      directions = main_directions(jnp.asarray(queries))
    filters = -by_kv_head(directions[None], self._kv_heads)[0].mean(axis=1)
    if not self._count:
      filters = jnp.zeros_like(filters)
    covariance = self._products / max(self._count - 1, 1)
    return self._mean, covariance, np.asarray(filters), self._lengths
