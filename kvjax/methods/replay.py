"""Scores of a prompt's tokens by a replay of the prompt."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.heads import by_kv_head
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.struct import static, struct

Weight = Literal["attention", "output", "gradient"]
# KVzip+ divides by the norm of this.
Divisor = Literal["input", "residual"]

# Logits per query head in memory at once.
_LOGITS = 2**17


@struct
class ReplayedChunk:
  """What a layer computes while a chunk of C tokens is replayed in R tokens.

  Attributes:
    queries: rotated queries of the replay.
    positions: their positions, after the prompt; -1 for padding.
    lse: log-sum-exp of each query's logits of the chunk's keys and of the
      replay's own, causally.
    keys: rotated keys of the chunk, from the prompt.
    values: their values.
    valid: slots of the chunk that have a token.
    first_keys: keys of the first tokens of the prompt, F of them.
    start: position of the chunk in each row.
    prefix: number of tokens of the chat template that each row begins with.
    inputs: the layer's normalized input of the replay.
    residual: the same before the norm.
    output_projection: W_O of each query head.
    gradients: |g_t|, norms of the gradient of Phi, the sum of the squared
      hidden states after the last layer, with respect to what the layer's
      attention adds to the residual.
    sinks: learned logits of attention sinks, if the layer has them.
    attention: scale and softcap of the layer.
  """

  queries: Float[Array, "B N R D"]
  positions: Int[Array, "B R"]
  lse: Float[Array, "B N R"]
  keys: Float[Array, "B K C D"]
  values: Float[Array, "B K C Dv"]
  valid: Bool[Array, "B C"]
  first_keys: Float[Array, "B K F D"]
  start: Int[Array, " B"]
  prefix: Int[Array, " B"]
  inputs: Float[Array, "B R E"] | None = None
  residual: Float[Array, "B R E"] | None = None
  output_projection: Float[Array, "N Dv E"] | None = None
  gradients: Float[Array, "B R"] | None = None
  sinks: Float[Array, " N"] | None = None
  attention: AttentionOptions = static(default=PLAIN)


@dataclasses.dataclass(frozen=True)
class Replay:
  """How a prompt is replayed, and how its tokens are scored then.

  The prompt is cut into chunks. For each, the model is asked to repeat it
  (`kvjax.RepeatRequest`) and reads the chunk again, with the keys and
  values of the whole prompt in its cache. With A(t, u) the softmax of query t
  over the sinks, the chunk and the replay itself, the score of token u is

    max_t A(t, u)                  by attention,
    max_t A(t, u) |v_u O| / |x_t|  by output; see `divisor`,
    max_t A(t, u) |v_u O| |g_t|    by gradient; see `ReplayedChunk`.

  Methods with equal replays share one. The passes are shared in any case, but
  gradients have passes of their own, forward and backward.

  Source: Kim et al., arXiv 2505.23416 (KVzip), Section 3; by output: KVzip+ of
  arXiv 2601.07891; by gradient: KVgrad of openreview.net/forum?id=cg1wTCJjjk.

  Attributes:
    chunk: C, tokens of a chunk; the last one may be shorter.
    overlap: tokens before a chunk that its request ends with.
    sinks: number of first tokens that every softmax includes; 0 for those of
      the chat template.
    weight: what attention is multiplied by.
    divisor: x_t: the layer's normalized "input", as in the authors' code, or
      the "residual" before the norm, which the paper may mean.
    of_text: t is a token of the repeated text, not of the request before it, as
      for the targets of arXiv 2601.07891 (KVzap).
  """

  chunk: int = 2000
  overlap: int = 8
  sinks: int = 0
  weight: Weight = "attention"
  divisor: Divisor = "input"
  of_text: bool = False

  @property
  def activations(self) -> frozenset[str]:
    """Optional activations of the replay that the score depends on."""
    if self.weight == "attention":
      return frozenset()
    names = {"output_projection"}
    if self.weight == "output" and self.divisor == "input":
      names.add("inputs")
    return frozenset(names)

  def score(self, seen: ReplayedChunk) -> Float[Array, "B N C"]:
    """Scores the tokens of a chunk, for every query head, in float32."""
    lse = self._with_sinks(seen)
    # What divides a weight adds its logarithm to that of the denominator.
    if self.weight == "output":
      divisor = seen.inputs if self.divisor == "input" else seen.residual
      assert divisor is not None
      norms = jnp.linalg.norm(divisor.astype(jnp.float32), axis=-1)
      lse = lse + jnp.log(norms)[:, None]
    elif self.weight == "gradient":
      assert seen.gradients is not None
      lse = lse - jnp.log(seen.gradients)[:, None]
    if self.of_text:
      length = lse.shape[2]
      index = jnp.arange(length, dtype=jnp.int32)[None, None]
      lse = jnp.where(index >= length - seen.keys.shape[2], lse, jnp.inf)
    scores = jnp.exp(_largest(seen, lse))
    if self.weight != "attention":
      scores = scores * _output_norms(seen)
    return jnp.where(seen.valid[:, None], scores, 0.0)

  def _with_sinks(self, seen: ReplayedChunk) -> Float[Array, "B N R"]:
    """The log-sum-exp over the sinks as well."""
    lse = seen.lse
    if seen.sinks is not None:
      lse = jnp.logaddexp(lse, seen.sinks.astype(jnp.float32)[None, :, None])
    kept = seen.prefix if not self.sinks else self.sinks
    # Tokens of the chunk itself are no sinks: they count once.
    kept = jnp.minimum(kept, seen.start)
    count = seen.first_keys.shape[2]
    is_sink = jnp.arange(count, dtype=jnp.int32)[None] < kept[:, None]
    queries = by_kv_head(seen.queries, seen.keys.shape[1])
    logits = _logits(seen, queries, seen.first_keys)
    logits = jnp.where(is_sink[:, None, None, None], logits, -jnp.inf)
    of_sinks = jax.nn.logsumexp(logits, axis=-1)
    return jnp.logaddexp(lse, of_sinks.reshape(lse.shape))


def _logits(
  seen: ReplayedChunk,
  queries: Float[Array, "B K G Q D"],
  keys: Float[Array, "B K C D"],
) -> Float[Array, "B K G Q C"]:
  """Float32 logits of keys, scaled and capped as in the layer."""
  logits = jnp.einsum(
    "bkgqd,bkcd->bkgqc", queries, keys, preferred_element_type=jnp.float32
  )
  options = seen.attention
  return options.cap(logits * options.scale_of(queries.shape[-1]))


def _largest(
  seen: ReplayedChunk, lse: Float[Array, "B N R"]
) -> Float[Array, "B N C"]:
  """Largest log weight that any query gives each key; -inf without queries."""
  batch, heads, length, _ = seen.queries.shape
  kv_heads, width = seen.keys.shape[1:3]
  size = min(length, max(1, _LOGITS // width))
  count = -(-length // size)
  real = seen.positions[:, None] >= 0

  def grouped(
    x: Float[Array, "B N R *D"], fill: float
  ) -> Float[Array, "B K G Q *D"]:
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, count * size - length)
    return by_kv_head(jnp.pad(x, padding, constant_values=fill), kv_heads)

  tiles = (
    grouped(seen.queries, 0.0),
    # Padding gives no weight, whatever its query is.
    grouped(jnp.where(real, lse, jnp.inf), jnp.inf),
  )

  def visit(
    largest: Float[Array, "B K G C"], index: Int[Array, ""]
  ) -> tuple[Float[Array, "B K G C"], None]:
    queries, lse = (
      jax.lax.dynamic_slice_in_dim(x, index * size, size, 3) for x in tiles
    )
    lse = lse[..., None]
    logits = _logits(seen, queries, seen.keys) - lse
    logits = jnp.where(lse < jnp.inf, logits, -jnp.inf)
    return jnp.maximum(largest, jnp.max(logits, axis=3)), None

  shape = (batch, kv_heads, heads // kv_heads, width)
  none = jnp.full(shape, -jnp.inf, jnp.float32)
  largest, _ = jax.lax.scan(visit, none, jnp.arange(count, dtype=jnp.int32))
  return largest.reshape(batch, heads, width)


def _output_norms(seen: ReplayedChunk) -> Float[Array, "B N C"]:
  """Norms |v O_j| of what the values add to the residual, per query head."""
  assert seen.output_projection is not None
  kv_heads, width = seen.keys.shape[1:3]
  of_heads = seen.output_projection.astype(jnp.float32)
  # |v O|^2 = v (O O^T) v, with a matrix no larger than a head is wide.
  gram = jnp.einsum("nde,nfe->ndf", of_heads, of_heads)
  gram = gram.reshape(kv_heads, -1, *gram.shape[1:])
  values = seen.values.astype(jnp.float32)
  values = jnp.where(seen.valid[:, None, :, None], values, 0.0)
  mapped = jnp.einsum("bkcd,kgdf->bkgcf", values, gram)
  squares = jnp.einsum("bkgcf,bkcf->bkgc", mapped, values)
  norms = jnp.sqrt(jnp.maximum(squares, 0.0))
  return norms.reshape(values.shape[0], -1, width)
