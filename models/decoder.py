"""The decoder of Llama 3.x, Qwen2.5, Qwen3, Mistral and Yi."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.model import Attend
from kvjax.models.config import DecoderConfig
from kvjax.models.rope import rotate

# Cosines and sines of the rotary embedding.
Tables = tuple[Float[Array, "B S R"], Float[Array, "B S R"]]


class RMSNorm(nnx.Module):
  """RMS norm, computed in float32.

  nnx.RMSNorm does not support bfloat16 under strict dtype promotion.
  """

  def __init__(self, width: int, epsilon: float, dtype: Any) -> None:
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones((width,), dtype))

  def __call__(self, x: Float[Array, "*B W"]) -> Float[Array, "*B W"]:
    """Normalizes the last axis."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean_square + self.epsilon)
    # Strict rank promotion does not broadcast a vector.
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    # Round before scaling, as in transformers: in bfloat16 the order matters.
    return wide.astype(x.dtype) * scale


def _linear(
  inputs: int, outputs: int, bias: bool, dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear:
  return nnx.Linear(
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


class Attention(nnx.Module):
  """The projections of attention; the caller computes the attention itself."""

  def __init__(self, config: DecoderConfig, dtype: Any, rngs: nnx.Rngs) -> None:
    self.config = config
    width = config.hidden_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    bias = config.qkv_bias
    self.q_proj = _linear(width, query_width, bias, dtype, rngs)
    self.k_proj = _linear(width, kv_width, bias, dtype, rngs)
    self.v_proj = _linear(width, kv_width, bias, dtype, rngs)
    self.o_proj = _linear(query_width, width, config.output_bias, dtype, rngs)
    if config.qk_norm:
      self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
      self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

  def activations(
    self, x: Float[Array, "B S E"], positions: Int[Array, "B S"], rope: Tables
  ) -> Activations:
    """Computes the projections of a block from its normalized input."""
    queries = self._heads(self.q_proj(x))
    keys = self._heads(self.k_proj(x))
    if self.config.qk_norm:
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    return Activations(
      queries=rotate(queries, *rope),
      keys=rotate(keys, *rope),
      values=self._heads(self.v_proj(x)),
      positions=positions,
      keys_unrotated=keys,
      queries_unrotated=queries,
      inputs=x,
      output_projection=get_kernel(self.o_proj).reshape(
        self.config.num_heads, self.config.head_dim, self.config.hidden_size
      ),
    )

  def output(self, x: Float[Array, "B N S D"]) -> Float[Array, "B S E"]:
    """Concatenates the heads and applies the output projection."""
    batch, heads, length, dim = x.shape
    joined = jnp.swapaxes(x, 1, 2).reshape(batch, length, heads * dim)
    return self.o_proj(joined)

  def _heads(self, x: Float[Array, "B S W"]) -> Float[Array, "B H S D"]:
    batch, length, _ = x.shape
    split = x.reshape(batch, length, -1, self.config.head_dim)
    return jnp.swapaxes(split, 1, 2)


class Mlp(nnx.Module):
  """The SwiGLU MLP."""

  def __init__(self, config: DecoderConfig, dtype: Any, rngs: nnx.Rngs) -> None:
    width, inner = config.hidden_size, config.intermediate_size
    bias = config.mlp_bias
    self.gate_proj = _linear(width, inner, bias, dtype, rngs)
    self.up_proj = _linear(width, inner, bias, dtype, rngs)
    self.down_proj = _linear(inner, width, bias, dtype, rngs)

  def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Transforms every token independently."""
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
  """Attention and MLP, each with a pre-norm and a residual connection."""

  def __init__(self, config: DecoderConfig, dtype: Any, rngs: nnx.Rngs) -> None:
    width = config.hidden_size
    self.input_layernorm = RMSNorm(width, config.rms_norm_eps, dtype)
    self.self_attn = Attention(config, dtype, rngs)
    self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps, dtype)
    self.mlp = Mlp(config, dtype, rngs)

  def __call__(
    self,
    x: Float[Array, "B S E"],
    positions: Int[Array, "B S"],
    rope: Tables,
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs the layer; also returns the state that `attend` returned."""
    block = self.self_attn.activations(self.input_layernorm(x), positions, rope)
    attended, state = attend(block)
    x = x + self.self_attn.output(attended)
    return x + self.mlp(self.post_attention_layernorm(x)), state


class Decoder(nnx.Module):
  """A decoder-only transformer; parameter names are those of Hugging Face.

  `layers` is one `Layer` whose parameters have a leading axis of L layers.
  """

  def __init__(
    self,
    config: DecoderConfig,
    *,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ) -> None:
    """Builds the decoder with random weights.

    Args:
      config: sizes and options.
      dtype: dtype of the weights and of the computation; norms, RoPE and logits
        are computed in float32.
      rngs: source of the random weights.
    """

    def layer(rngs: nnx.Rngs) -> Layer:
      return Layer(config, dtype, rngs)

    self.config = config
    self.embed_tokens = nnx.Embed(
      config.vocab_size,
      config.hidden_size,
      dtype=dtype,
      param_dtype=dtype,
      rngs=rngs,
    )
    # One stack, so that a loop over the layers compiles one layer.
    self.layers: Layer = nnx.vmap(layer)(rngs.split(config.num_layers))
    self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
    if not config.tie_embeddings:
      self.lm_head = _linear(
        config.hidden_size, config.vocab_size, False, dtype, rngs
      )

  def embed(
    self, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S E"], Tables]:
    """Embeds tokens; also returns the RoPE tables that all layers share."""
    return self.embed_tokens(tokens), self.config.rope.tables(positions)

  def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
    """Computes next-token logits in float32."""
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if not self.config.tie_embeddings:
      return product(hidden, self.lm_head.kernel[...])
    embedding = self.embed_tokens.embedding[...]
    if hidden.size == hidden.shape[-1]:
      # A CPU multiplies one vector by the rows of a matrix six times as fast as
      # by the columns of its transpose.
      logits = product(embedding, hidden.reshape(-1))
      return logits.reshape(*hidden.shape[:-1], -1)
    return product(hidden, embedding.T)
