"""Gemma 3 of DeepMind's package `gemma` (`gm`)."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from kvjax.errors import InputError
from kvjax.models.adapters.assembly import assemble
from kvjax.models.adapters.parameters import Parameters, Stored, stack
from kvjax.models.config import DecoderConfig
from kvjax.models.layer_fields import FULL, SLIDING
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

_TOP = {
  "embed_tokens.embedding": "embedder/input_embedding",
  "norm.scale": "final_norm/scale",
}
_LAYER = {
  "input_layernorm.scale": "pre_attention_norm/scale",
  "post_attention_layernorm.scale": "post_attention_norm/scale",
  "pre_feedforward_layernorm.scale": "pre_ffw_norm/scale",
  "post_feedforward_layernorm.scale": "post_ffw_norm/scale",
  "self_attn.q_norm.scale": "attn/_query_norm/scale",
  "self_attn.k_norm.scale": "attn/_key_norm/scale",
  "self_attn.o_proj.kernel": "attn/attn_vec_einsum/w",
  "mlp.down_proj.kernel": "mlp/linear",
}
# gm states no context: that of the models without and with scaled RoPE.
_CONTEXT, _SCALED_CONTEXT = 32_768, 131_072


def from_gemma(
  model: Any,
  params: PyTree,
  *,
  dtype: DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of a Gemma 3 of gm.

  Embedding and final norm are shared; the parameters of the layers are stacked,
  which copies them. A vision encoder is left out.

  Written against gemma 4.0.1, which is not imported.

  Args:
    model: a `gm.nn.Gemma3_270M`, say; only its `config` is read.
    params: its parameters, as `gm.ckpts.load_params` returns them.
    dtype: dtype of the weights; by default theirs.
    mesh: as for `kvjax.models.load`.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: the model is no Gemma 3, or parameters are missing, unknown, or
      of other sizes than its config says.
  """
  found = Parameters(params, "gemma")
  config = _config(model.config)
  features_last = model.config.transpose_gating_einsum

  def in_layer(name: str, layer: int) -> Stored:
    """A parameter of a layer; projections are [E, N, D]."""
    start = f"layer_{layer}/"
    if name in _LAYER:
      return found[start + _LAYER[name]]
    _, projection, _ = name.split(".")
    if projection in ("gate_proj", "up_proj"):
      number = ("gate_proj", "up_proj").index(projection)
      gating = found[f"{start}mlp/gating_einsum"][number]
      return gating.T if features_last else gating
    number = ("q_proj", "k_proj", "v_proj").index(projection)
    if f"{start}attn/qkv_einsum/w" in found:
      heads = found[f"{start}attn/qkv_einsum/w"][number]
    elif number == 0:
      heads = found[f"{start}attn/q_einsum/w"]
    else:
      heads = found[f"{start}attn/kv_einsum/w"][number - 1]
    return heads.swapaxes(0, 1)

  def find(name: str, layers: Sequence[int]) -> Stored:
    if not layers:
      return found[_TOP[name]]
    return stack([in_layer(name, layer) for layer in layers])

  lm = assemble(config, find, dtype, mesh, tokenizer)
  for start in ("vision_encoder/", "embedder/mm_"):
    found.skip(start)
  found.refuse_rest()
  return lm


def _config(own: Any) -> DecoderConfig:
  """Translates the config.

  Raises:
    InputError: it is that of another model than Gemma 3.
  """
  wanted = own.use_qk_norm and own.use_post_attn_norm and own.use_post_ffw_norm
  if not wanted or own.attn_logits_soft_cap or own.local_scale_factor != 1:
    raise InputError(
      "Of the package gemma, kvjax reads Gemma 3, which normalizes queries and "
      "keys and has no softcap of attention; this config is another's."
    )
  factor = own.global_scale_factor
  scaling = None if factor == 1 else {"rope_type": "linear", "factor": factor}
  return DecoderConfig.from_hf(
    {
      "model_type": "gemma3_text",
      "vocab_size": own.num_embed,
      "hidden_size": own.embed_dim,
      "intermediate_size": own.hidden_dim,
      "num_hidden_layers": len(own.attention_types),
      "num_attention_heads": own.num_heads,
      "num_key_value_heads": own.num_kv_heads,
      "head_dim": own.head_dim,
      "max_position_embeddings": _SCALED_CONTEXT if scaling else _CONTEXT,
      "rms_norm_eps": 1e-6,
      "query_pre_attn_scalar": own.query_pre_attn_scalar() ** -2,
      "final_logit_softcapping": own.final_logit_softcap,
      "sliding_window": own.sliding_window_size,
      "layer_types": [
        FULL if kind.name == "GLOBAL" else SLIDING
        for kind in own.attention_types
      ],
      "rope_theta": own.global_base_frequency,
      "rope_local_base_freq": own.local_base_frequency,
      "rope_scaling": scaling,
      "tie_word_embeddings": True,
    }
  )
