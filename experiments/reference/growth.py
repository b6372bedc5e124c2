"""Deepens a trained decoder without changing its outputs."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from kvjax.models.decoder import Decoder, Mlp


def deepened(decoder: Decoder, layers: int, seed: int) -> Decoder:
  """Adds layers whose outputs are initially zero.

  A new layer follows each of the first layers. These gather the preceding
  tokens, and longer copies need more of that. Zeros in the projections to the
  residual stream leave all logits unchanged.

  Args:
    decoder: the trained decoder.
    layers: number of layers of the result, at most twice as many.
    seed: seed of the new layers' other weights.

  Raises:
    ValueError: the decoder has more layers, or less than half as many.
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
  # A plain Llama has one kind of layer.
  (old,), (new,) = decoder.layers, grown.layers
  assert isinstance(new.mlp, Mlp)
  for projection in (new.self_attn.o_proj, new.mlp.down_proj):
    projection.kernel[...] = jnp.zeros_like(projection.kernel[...])
  # Pair old layers with new ones, which are stacked after all old ones.
  pairs = [(layer, depth + layer) for layer in range(extra)]
  paired = [layer for pair in pairs for layer in pair]
  order = jnp.asarray([*paired, *range(extra, depth)])

  def merge(before: Array, added: Array) -> Array:
    return jnp.concatenate([before, added[:extra]])[order]

  nnx.update(new, jax.tree.map(merge, nnx.state(old), nnx.state(new)))
  return grown
