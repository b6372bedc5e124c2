"""How the layers of a decoder are put together."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Maps the gate and the value of a gated MLP to its inner activations.
Gate = Callable[[Float[Array, "*B F"], Float[Array, "*B F"]], Array]


def _silu(
  gate: Float[Array, "*B F"], up: Float[Array, "*B F"]
) -> Float[Array, "*B F"]:
  return jax.nn.silu(gate) * up


def _gelu(
  gate: Float[Array, "*B F"], up: Float[Array, "*B F"]
) -> Float[Array, "*B F"]:
  return jax.nn.gelu(gate, approximate=True) * up


def _clipped(
  gate: Float[Array, "*B F"], up: Float[Array, "*B F"]
) -> Float[Array, "*B F"]:
  """The gate of gpt-oss: both sides are clipped, and `up` is shifted by 1."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)


GATES: dict[str, Gate] = {"silu": _silu, "gelu": _gelu, "clipped": _clipped}


@dataclasses.dataclass(frozen=True)
class NormStyle:
  """A norm, computed in float32.

  Attributes:
    centered: whether the mean is removed (layer norm), not only the scale.
    wide: whether the weight multiplies before the result is rounded to the
      dtype of the activations; in bfloat16 the order matters.
    offset: is added to the weight.
  """

  centered: bool = False
  wide: bool = False
  offset: float = 0.0


class Norms(NamedTuple):
  """Names of a layer's norms in checkpoints; None where there is none.

  A norm before a branch normalizes its input, one after it its output, before
  that is added to the residual.
  """

  before_attention: str | None = "input_layernorm"
  after_attention: str | None = None
  before_mlp: str | None = "post_attention_layernorm"
  after_mlp: str | None = None


@dataclasses.dataclass(frozen=True)
class Style:
  """The structure that the layers of a family share.

  Attributes:
    norm: kind of all norms.
    norms: norms of a layer.
    parallel: whether attention and MLP read the same normalized input.
    qk_norm: whether queries and keys are normalized before RoPE: each "head",
      or "all" heads together.
    gate: gate of the MLP, one of `GATES`.
    sinks: whether every head has a logit in the softmax's denominator.
  """

  norm: NormStyle = NormStyle()
  norms: Norms = Norms()
  parallel: bool = False
  qk_norm: Literal["head", "all"] | None = None
  gate: str = "silu"
  sinks: bool = False


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What differs between the layers of one model.

  Attributes:
    window: number of most recent tokens that a query sees, including itself;
      None for all.
    rope: the rotary embedding: "global" for `DecoderConfig.rope`, "local" for
      `DecoderConfig.local_rope`, None for none (NoPE).
    sparse: whether the MLP consists of experts.
  """

  window: int | None = None
  rope: Literal["global", "local"] | None = "global"
  sparse: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
  """The experts of a sparse MLP.

  Attributes:
    count: number of experts of a layer.
    per_token: number of experts that compute a token.
    width: width F of an expert.
    normalized: whether the weights of a token's experts are scaled to a sum of
      1; otherwise they are shares of the softmax over all experts.
    bias: whether router and projections have a bias.
  """

  count: int
  per_token: int
  width: int
  normalized: bool
  bias: bool = False

  @property
  def most_alone(self) -> int:
    """Most tokens whose experts are computed token by token, on CPUs and TPUs.

    More tokens share so many experts that reading each one once is as fast.
    """
    return self.count // (2 * self.per_token)
