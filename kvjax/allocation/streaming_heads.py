"""DuoAttention: some heads keep everything, others stream."""

import dataclasses
import io
import math
import warnings

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax import files
from kvjax.activations import Activations
from kvjax.addresses import local
from kvjax.allocation.base import Allocation, Chooser, LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.options.bounds import check_least, check_share
from kvjax.options.budgets import Budget


@dataclasses.dataclass(frozen=True)
class StreamingHeads(Allocation):
  """Lets retrieval heads keep everything, and streaming heads a few tokens.

  As many heads of the model stream as the budget requires, those with the
  lowest gates first, whatever their layer; ties prefer the lower layer, then
  the lower head. Where the budget is less than what a streaming head keeps, all
  heads keep the budget.

  Source: Xiao et al., arXiv 2410.10819, Section 3.

  Attributes:
    pattern: file of the gates, one line per layer with a number per KV head,
      as the authors publish them (full_attention_heads.tsv); empty for equal
      gates, so that the heads of the lowest layers stream.
    keep: number of tokens that a streaming head keeps.
    share: share of the heads that stream, whatever the budget is; 0 for as many
      as the budget requires.
    gates: the gates in the file, set by the constructor. What is compiled for
      a value never has those of another time.
  """

  ragged = True
  # Layers have different numbers of streaming heads.
  spreads_layers = True
  # The gates of a layer are part of its evaluation.
  votes = True

  pattern: str = ""
  keep: int = 384
  share: float = 0.0
  gates: tuple[tuple[float, ...], ...] = dataclasses.field(
    init=False, repr=False, metadata={"option": False}
  )

  def __post_init__(self) -> None:
    check_least(self, keep=1)
    check_share(self, "share")
    gates = read_pattern(self.pattern).tolist() if self.pattern else []
    object.__setattr__(self, "gates", tuple(map(tuple, gates)))

  @property
  def named_files(self) -> tuple[str, ...]:
    """The pattern, if one is given."""
    return (self.pattern,) if self.pattern else ()

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other layers or KV heads than the pattern.

    Raises:
      InputError: they differ, or a layer has a window.
    """
    if not self.gates:
      return
    gates = np.array(self.gates)
    found = {(spec.compressible, spec.kv_heads) for spec in geometry.layers}
    if found != {(True, gates.shape[1])} or len(gates) != geometry.num_layers:
      raise InputError(
        f"{self.pattern} is of another model: it has gates for {len(gates)} "
        f"layers with {gates.shape[1]} KV heads, and this model has "
        f"{geometry.num_layers} layers with "
        f"{' or '.join(str(heads) for _, heads in sorted(found))}, all of "
        "which must attend to the whole context."
      )

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Mean number of tokens of the heads of each layer, rounded up."""
    heads = np.array(sizes.heads, np.int32)[:, None]
    return -(-self.totals(budget, lengths, sizes) // heads)

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that all heads of a row keep together in each layer."""
    by_row = [self._totals(budget, int(n), sizes) for n in lengths]
    return np.stack(by_row, axis=1).astype(np.int32)

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> tuple[Int[Array, " K"], PyTree[Array]]:
    """Finds the order in which the heads of a layer stream; 0 is the first."""
    kv_heads = cache.positions.shape[1]
    order = jnp.arange(kv_heads, dtype=jnp.int32)
    if self.gates:
      gates = np.array(self.gates)
      # Query heads that store keys of their own have the gate of their group.
      gates = np.repeat(gates, kv_heads // gates.shape[1], axis=1)
      ranks = gates.argsort(axis=1, kind="stable").argsort(axis=1)
      order = jnp.asarray(ranks.astype(np.int32))[layer]
    return order, method.evaluate(layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: tuple[Int[Array, " K"], PyTree[Array]],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects everything, or in streaming heads what the method selects."""
    order, of_method = scores
    assert budget.total is not None
    kv_heads = len(order)
    length = cache.lengths[:, 0]
    missing = kv_heads * length - budget.total
    # Each streaming head lacks as many; if all stream, they share the total.
    lacks = jnp.maximum(length - self.keep, 1)
    streaming = jnp.minimum(-(-missing // lacks), kv_heads)
    left = budget.total - (kv_heads - streaming) * length
    kept = left // jnp.maximum(streaming, 1)
    streams = order[None] < streaming[:, None]
    counts = jnp.where(streams, kept[:, None], length[:, None])
    own = dataclasses.replace(budget, counts=counts, total=None)
    return method.select(of_method, cache, own)

  def token_scores(
    self,
    method: Chooser,
    scores: tuple[Int[Array, " K"], PyTree[Array]],
    cache: LayerCache,
  ) -> Float[Array, "B K T"] | None:
    """Returns those of the method."""
    return method.token_scores(scores[1], cache)

  def check_protected(
    self,
    protected: Bool[np.ndarray, " n"],
    budget: Budget,
    sizes: Sizes,
    *,
    repeated: bool = False,
  ) -> None:
    """Refuses a row that protects more tokens than a streaming head keeps.

    Raises:
      InputError: they are too many.
    """
    del repeated, sizes
    length = len(protected)
    most = self._streamed(budget, length)
    if (self.share or budget.num_kept(length) < length) and (
      protected.sum() > most
    ):
      raise InputError(
        f"{protected.sum()} tokens of a prompt are protected and a streaming "
        f"head keeps {most}; protect fewer or give a larger budget."
      )

  def _streamed(self, budget: Budget, length: int) -> int:
    """Number of tokens that a streaming head keeps of a row."""
    kept = length if self.share else budget.num_kept(length)
    return min(self.keep, kept, length)

  def _totals(
    self, budget: Budget, length: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    heads = np.array(sizes.heads)
    streamed = self._streamed(budget, length)
    lacks = length - streamed
    if not lacks:
      return heads * length
    if self.share:
      count = round(heads.sum() * self.share)
    else:
      missing = int(heads.sum()) * (length - budget.num_kept(length))
      count = math.ceil(missing / lacks)
    return heads * length - self._streaming(count, sizes) * lacks

  def _streaming(self, count: int, sizes: Sizes) -> Int[np.ndarray, " L"]:
    """Number of heads of each layer among the `count` lowest gates."""
    owners = np.repeat(np.arange(sizes.layers), sizes.heads)
    if self.gates:
      gates = np.array(self.gates)
      gates = np.repeat(gates, sizes.heads[0] // gates.shape[1], axis=1)
      owners = owners[gates.argsort(axis=None, kind="stable")]
    return np.bincount(owners[:count], minlength=sizes.layers)


def read_pattern(path: str) -> Float[np.ndarray, "L K"]:
  """Reads gates, clipped to 0 and 1 as by the authors.

  Raises:
    InputError: the file cannot be read, or has no such numbers.
  """
  text = files.read_text(local(path))
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # That there are no numbers.
      gates = np.loadtxt(io.StringIO(text), ndmin=2)
  except ValueError:
    gates = np.zeros((0, 0))
  if not gates.size or not np.isfinite(gates).all():
    raise InputError(
      f"{path} must have a line for each layer with a number for each KV head, "
      "as full_attention_heads.tsv of DuoAttention has."
    )
  return np.clip(gates, 0.0, 1.0)
