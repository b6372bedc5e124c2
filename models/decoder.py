"""The decoder: one for all families, as its config describes it."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.sharding import gather_residual
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.layouts import row_major
from kvjax.model import Attend
from kvjax.models.config import DecoderConfig
from kvjax.models.experts import SparseMlp
from kvjax.models.one_row import Projection, multiplied
from kvjax.models.rope import Rope, Tables
from kvjax.models.structure import GATES, LayerKind, NormStyle
from kvjax.models.token_chunks import map_tokens, update_tokens


class Norm(nnx.Module):
  """An RMS or layer norm, computed in float32.

  nnx.RMSNorm does not support bfloat16 under strict dtype promotion.
  """

  def __init__(
    self, width: int, style: NormStyle, epsilon: float, dtype: Any
  ) -> None:
    self.style, self.epsilon = style, epsilon
    self.scale = nnx.Param(jnp.full((width,), 1.0 - style.offset, dtype))

  def __call__(self, x: Float[Array, "*B W"]) -> Float[Array, "*B W"]:
    """Normalizes the last axis."""
    wide = x.astype(jnp.float32)
    if self.style.centered:
      wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean_square + self.epsilon)
    # Strict rank promotion does not broadcast a vector.
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    if self.style.wide:
      scale = scale.astype(jnp.float32) + self.style.offset
      return (wide * scale).astype(x.dtype)
    # Round before scaling, as in transformers: in bfloat16 the order matters.
    return wide.astype(x.dtype) * scale


def _linear(
  inputs: int, outputs: int, bias: bool, dtype: Any, rngs: nnx.Rngs
) -> Projection:
  return Projection(
    inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs
  )


def get_kernel(projection: nnx.Linear | nnx.LoRA) -> Float[Array, "*L I O"]:
  """Returns the matrix W of a projection, or W + A B with an adapter."""
  if isinstance(projection, nnx.Linear):
    return projection.kernel[...]
  base = get_base(projection).kernel[...]
  update = projection.lora_a[...] @ projection.lora_b[...]
  # Adapters are float32: one rounding, of the sum.
  return (base.astype(jnp.float32) + update).astype(base.dtype)


def get_base(projection: nnx.Linear | nnx.LoRA) -> nnx.Linear:
  """Returns a projection without its adapter, if it has one."""
  if isinstance(projection, nnx.Linear):
    return projection
  assert isinstance(projection.base_module, nnx.Linear)
  return projection.base_module


def join_heads(x: Float[Array, "B N S D"]) -> Float[Array, "B S Q"]:
  """Concatenates the heads of every token."""
  batch, heads, length, dim = x.shape
  return jnp.swapaxes(x, 1, 2).reshape(batch, length, heads * dim)


class Attention(nnx.Module):
  """The projections of attention; the caller computes the attention itself."""

  def __init__(
    self, config: DecoderConfig, rope: Rope | None, dtype: Any, rngs: nnx.Rngs
  ) -> None:
    self.config, self.rope = config, rope
    width = config.hidden_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    bias = config.qkv_bias
    self.q_proj = _linear(width, query_width, bias, dtype, rngs)
    self.k_proj = _linear(width, kv_width, bias, dtype, rngs)
    self.v_proj = _linear(width, kv_width, bias, dtype, rngs)
    self.o_proj = _linear(query_width, width, config.output_bias, dtype, rngs)
    style = config.style
    if style.qk_norm:
      widths = (query_width, kv_width)
      if style.qk_norm == "head":
        widths = (config.head_dim, config.head_dim)
      norm = functools.partial(
        Norm, style=style.norm, epsilon=config.rms_norm_eps, dtype=dtype
      )
      self.q_norm, self.k_norm = map(norm, widths)
    if style.sinks:
      self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype))

  def activations(
    self,
    x: Float[Array, "B S E"],
    positions: Int[Array, "B S"],
    tables: Tables | None,
  ) -> Activations:
    """Computes the projections of a block from the layer's input.

    Args:
      x: the input, normalized if the layer has a norm before its attention.
      positions: positions of the tokens.
      tables: cosines and sines of the layer's rotary embedding; None if it has
        none.
    """
    projected = map_tokens(self._project, x, tables)
    return Activations(
      **projected,
      positions=positions,
      inputs=gather_residual(x),
      output_projection=get_kernel(self.o_proj).reshape(
        self.config.num_heads, self.config.head_dim, self.config.hidden_size
      ),
      sinks=self.sinks[...].astype(jnp.float32)
      if self.config.style.sinks
      else None,
    )

  def _project(
    self, x: Float[Array, "B S E"], tables: Tables | None
  ) -> dict[str, Float[Array, "B H S D"]]:
    """Computes the projections, with and without rotation."""
    x = gather_residual(x)
    queries, keys = self._normalized(self.q_proj(x), self.k_proj(x))
    rotated = [queries, keys]
    if self.rope is not None:
      assert tables is not None
      rotated = [self.rope.rotate(y, tables) for y in rotated]
    return {
      "queries": rotated[0],
      "keys": rotated[1],
      "values": self._heads(self.v_proj(x)),
      "queries_unrotated": queries,
      "keys_unrotated": keys,
    }

  def _normalized(
    self, queries: Float[Array, "B S Q"], keys: Float[Array, "B S W"]
  ) -> tuple[Float[Array, "B N S D"], Float[Array, "B K S D"]]:
    """Splits queries and keys into heads, with their norms."""
    kind = self.config.style.qk_norm
    if kind == "all":
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    queries, keys = self._heads(queries), self._heads(keys)
    if kind == "head":
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    return queries, keys

  def _heads(self, x: Float[Array, "B S W"]) -> Float[Array, "B H S D"]:
    batch, length, _ = x.shape
    # With a layout set, XLA for tpu7x would copy weights for a lone row, too.
    if length == 1 < batch:
      x = row_major(x)
    split = x.reshape(batch, length, -1, self.config.head_dim)
    return jnp.swapaxes(split, 1, 2)


class Mlp(nnx.Module):
  """A gated MLP."""

  def __init__(self, config: DecoderConfig, dtype: Any, rngs: nnx.Rngs) -> None:
    width, inner = config.hidden_size, config.intermediate_size
    bias = config.mlp_bias
    self.gate = config.style.gate
    self.gate_proj = _linear(width, inner, bias, dtype, rngs)
    self.up_proj = _linear(width, inner, bias, dtype, rngs)
    self.down_proj = _linear(inner, width, bias, dtype, rngs)

  def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Transforms every token independently."""
    return self.down_proj(GATES[self.gate](self.gate_proj(x), self.up_proj(x)))


class Layer(nnx.Module):
  """Attention and MLP, with norms and residual connections.

  Its norms have the names that the family's checkpoints have, see `Norms`.
  """

  def __init__(
    self, config: DecoderConfig, kind: LayerKind, dtype: Any, rngs: nnx.Rngs
  ) -> None:
    self.config, self.kind = config, kind
    style = config.style
    for name in style.norms:
      if name is not None:
        norm = Norm(config.hidden_size, style.norm, config.rms_norm_eps, dtype)
        setattr(self, name, norm)
    rope = None if kind.rope is None else config.ropes[kind.rope]
    self.self_attn = Attention(config, rope, dtype, rngs)
    self.mlp: Mlp | SparseMlp
    if kind.sparse:
      assert config.experts is not None
      self.mlp = SparseMlp(
        config.experts, config.hidden_size, style.gate, dtype, rngs
      )
    else:
      self.mlp = Mlp(config, dtype, rngs)

  def __call__(
    self,
    x: Float[Array, "B S E"],
    positions: Int[Array, "B S"],
    tables: Mapping[str, Tables],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs the layer; also returns the state that `attend` returned.

    Args:
      x: the residual.
      positions: positions of the tokens.
      tables: cosines and sines, by the names in `LayerKind.rope`.
      attend: the attention.
    """
    norms = self.config.style.norms
    inputs = self._norm(norms.before_attention, x)
    own = None if self.kind.rope is None else tables[self.kind.rope]
    block = self.self_attn.activations(inputs, positions, own)
    attended, state = attend(block)
    rest = x, inputs, join_heads(attended)
    if self.kind.sparse and target_platform() != "tpu":
      # More tokens fill more of the blocks of rows that share an expert.
      return self._after_attention(*rest), state
    return update_tokens(self._after_attention, *rest), state

  def _after_attention(
    self,
    x: Float[Array, "B S E"],
    inputs: Float[Array, "B S E"],
    attended: Float[Array, "B S Q"],
  ) -> Float[Array, "B S E"]:
    """Computes what follows the attention, every token by itself.

    Args:
      x: the residual.
      inputs: the input of the attention, and of a parallel MLP.
      attended: output of the attention, all heads.
    """
    norms, scale = self.config.style.norms, self.config.residual_scale
    branch = self._norm(norms.after_attention, self.self_attn.o_proj(attended))
    x = x + _scaled(branch, scale)
    if not self.config.style.parallel:
      inputs = self._norm(norms.before_mlp, x)
    branch = self._norm(norms.after_mlp, self.mlp(gather_residual(inputs)))
    return x + _scaled(branch, scale)

  def _norm(
    self, name: str | None, x: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """Applies a norm if the layer has it."""
    if name is None:
      return x
    norm: Norm = getattr(self, name)
    return norm(x)


class Decoder(nnx.Module):
  """A decoder-only transformer; parameter names are those of Hugging Face.

  `layers` has a `Layer` for every kind of layer, whose parameters have a
  leading axis of the layers of that kind.
  """

  def __init__(
    self, config: DecoderConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs
  ) -> None:
    """Builds the decoder with random weights.

    Args:
      config: sizes and options.
      dtype: dtype of the weights and of the computation; norms, RoPE and logits
        are computed in float32.
      rngs: source of the random weights.
    """

    def stack(number: int, kind: LayerKind) -> Layer:
      def layer(rngs: nnx.Rngs) -> Layer:
        return Layer(config, kind, dtype, rngs)

      count = len(config.layers_of(number))
      stacked: Layer = nnx.vmap(layer)(rngs.split(count))
      return stacked

    self.config = config
    self.embed_tokens = nnx.Embed(
      config.vocab_size,
      config.hidden_size,
      dtype=dtype,
      param_dtype=dtype,
      rngs=rngs,
    )
    # Stacks, so that a loop over the layers compiles one layer.
    self.layers: nnx.List[Layer] = nnx.List(
      [stack(number, kind) for number, kind in enumerate(config.kinds)]
    )
    self.norm = Norm(
      config.hidden_size, config.style.norm, config.rms_norm_eps, dtype
    )
    if not config.tie_embeddings:
      self.lm_head = _linear(
        config.hidden_size, config.vocab_size, False, dtype, rngs
      )

  def embed(
    self, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S E"], dict[str, Tables]]:
    """Embeds tokens; also returns the RoPE tables that layers share."""
    embedded = self.embed_tokens(tokens)
    # Gemma rounds the factor, too.
    scale = jnp.asarray(self.config.embedding_scale, embedded.dtype)
    tables = {
      name: rope.tables(positions) for name, rope in self.config.ropes.items()
    }
    return embedded * scale, tables

  def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
    """Computes next-token logits in float32."""
    logits = self._products(hidden) * self.config.logit_scale
    cap = self.config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

  def _products(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
    """Multiplies by the output matrix."""
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if not self.config.tie_embeddings:
      kernel = self.lm_head.kernel[...]
      return multiplied(lambda rows: product(rows, kernel), hidden)
    embedding = self.embed_tokens.embedding[...]
    if target_platform() == "gpu":
      return multiplied(lambda rows: product(rows, embedding.T), hidden)
    if hidden.size == hidden.shape[-1]:
      # A CPU multiplies one vector by the rows of a matrix six times as fast as
      # by the columns of its transpose.
      logits = product(embedding, hidden.reshape(-1))
      return logits.reshape(*hidden.shape[:-1], -1)
    return product(hidden, embedding.T)


def _scaled(x: Float[Array, "*B W"], factor: float) -> Float[Array, "*B W"]:
  """Multiplies in float32, as a factor may have more digits than `x`."""
  if factor == 1.0:
    return x
  return (x.astype(jnp.float32) * factor).astype(x.dtype)
