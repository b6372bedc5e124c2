"""Makes a trained decoder deeper without changing what it computes."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

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
  extra = layers - len(decoder.layers)
  if not 0 <= extra <= len(decoder.layers):
    raise ValueError(
      f"A decoder of {len(decoder.layers)} layers cannot get {layers}."
    )
  config = dataclasses.replace(decoder.config, num_layers=layers)
  grown = Decoder(config, rngs=nnx.Rngs(seed))
  grown.embed_tokens, grown.norm = decoder.embed_tokens, decoder.norm
  if not config.tie_embeddings:
    grown.lm_head = decoder.lm_head
  new = [_silent(layer) for layer in grown.layers][:extra]
  old = list(decoder.layers)
  pairs = [layer for pair in zip(old, new, strict=False) for layer in pair]
  grown.layers = nnx.List([*pairs, *old[extra:]])
  return grown


def _silent(layer: Layer) -> Layer:
  for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
    projection.kernel[...] = jnp.zeros_like(projection.kernel[...])
  return layer
