"""Qwen3 of jax-ml/bonsai."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.adapters.assembly import assemble
from kvjax.models.adapters.parameters import Parameters, Stored, stack
from kvjax.models.config import DecoderConfig
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

# bonsai rotates by this base, whatever the field `rope_theta` of its config is.
_THETA = 1_000_000
_TOP = {
  "embed_tokens.embedding": "embedder/embedding",
  "norm.scale": "final_norm/scale",
  "lm_head.kernel": "lm_head/kernel",
}


def from_bonsai(
  model: nnx.Module,
  *,
  max_positions: int = 40_960,
  dtype: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of a Qwen3 of bonsai.

  Embedding, output matrix and final norm are shared; those of the layers are
  stacked, which copies them.

  Written against commit 12bb742 of bonsai (`bonsai.models.qwen3`), whose
  projections have kernels [E, N, D] and [N, D, E]; it is not imported.

  Args:
    model: a `Qwen3`.
    max_positions: context in tokens, which bonsai does not state.
    dtype: dtype of the weights; by default theirs.
    mesh: as for `kvjax.models.load`.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: parameters are missing, unknown, or of other sizes than the
      model's config says.
  """
  own: Any = model
  params = Parameters(nnx.state(model, nnx.Param), "bonsai")
  # Tied weights are stored twice.
  output = params[_TOP["lm_head.kernel"]]
  embedding = params[_TOP["embed_tokens.embedding"]]
  tied = output.shape == embedding.shape[::-1] and bool(
    jnp.array_equal(output, embedding.T)
  )
  config = _config(own.config, params, max_positions, tied)

  def find(name: str, layers: Sequence[int]) -> Stored:
    if not layers:
      return params[_TOP[name]]
    path = name.replace("self_attn", "attn").replace(".", "/")
    return stack([params[f"layers/{layer}/{path}"] for layer in layers])

  lm = assemble(config, find, dtype, mesh, tokenizer)
  params.refuse_rest()
  return lm


def _config(
  own: Any, params: Parameters, max_positions: int, tied: bool
) -> DecoderConfig:
  return DecoderConfig.from_hf(
    {
      "model_type": "qwen3",
      "vocab_size": own.vocab_size,
      "hidden_size": own.emb_dim,
      "intermediate_size": own.mlp_dim,
      "num_hidden_layers": own.num_layers,
      "num_attention_heads": own.num_heads,
      "num_key_value_heads": own.num_kv_heads,
      "head_dim": own.head_dim,
      "max_position_embeddings": max_positions,
      "rms_norm_eps": own.norm_eps,
      "rope_theta": _THETA,
      "tie_word_embeddings": tied,
    }
  )
