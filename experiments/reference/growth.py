"""Makes a trained decoder deeper without changing what it computes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from kvjax.models.decoder import Decoder, Layer


def deepened(decoder: Decoder, layers: int, seed: int) -> Decoder:
  """The decoder with more layers, whose outputs are at first zero.

  A new layer follows each of the first layers: gathering what precedes a token
  happens there, and longer copies need more of it. Zeros in the projections
  back to the residual stream leave every logit as it was.

  Args:
    decoder: the trained decoder.
    layers: how many layers the result has; at most twice as many.
    seed: of the new layers' other weights.

  Raises:
    ValueError: it has more layers already, or less than half as many.
  """
  depth = decoder.config.num_layers
  extra = layers - depth
  if not 0 <= extra <= depth:
    raise ValueError(f"A decoder of {depth} layers cannot get {layers}.")
  config = dataclasses.replace(decoder.config, num_layers=layers)
  grown = Decoder(config, rngs=nnx.Rngs(seed))
  grown.embed_tokens, grown.norm = decoder.embed_tokens, decoder.norm
  if not config.tie_embeddings:
    grown.lm_head = decoder.lm_head
  _silence(grown.layers)
  # Old layers in pairs with new ones, which stand behind all old ones.
  pairs = [(old, depth + old) for old in range(extra)]
  paired = [layer for pair in pairs for layer in pair]
  order = jnp.asarray([*paired, *range(extra, depth)])

  def merge(old: Array, new: Array) -> Array:
    return jnp.concatenate([old, new[:extra]])[order]

  stacks = nnx.state(decoder.layers), nnx.state(grown.layers)
  nnx.update(grown.layers, jax.tree.map(merge, *stacks))
  return grown


def _silence(layers: Layer) -> None:
  """Sets what layers add to the residual stream to zero."""
  for projection in (layers.self_attn.o_proj, layers.mlp.down_proj):
    projection.kernel[...] = jnp.zeros_like(projection.kernel[...])
