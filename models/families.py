"""The model types that load, and what each fixes whatever its config says."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.models.structure import Norms, NormStyle, Style

_WIDE = NormStyle(wide=True)
_GEMMA = Style(
  norm=NormStyle(wide=True, offset=1.0),
  norms=Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
  ),
  qk_norm="head",
  gate="gelu",
)
# Queries and keys are normalized, and what the branches add; their inputs are
# not.
_OLMO = Style(
  norm=_WIDE,
  norms=Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
  ),
  qk_norm="all",
)
_COHERE = Style(
  norm=NormStyle(centered=True, wide=True),
  norms=Norms(before_mlp=None),
  parallel=True,
)


@dataclasses.dataclass(frozen=True)
class Family:
  """What a model type fixes.

  Attributes:
    architecture: the class that `transformers` would load.
    models: the models of the type, for people.
    style: structure of the layers.
    absent: what `transformers` takes for fields that config.json lacks.
    scaling: the scaling of RoPE that `transformers` takes if config.json has
      none.
    attention_bias: biases of the attention's projections: as the "field" says,
      "never", "always", or of queries, keys and values alone ("qkv").
    mlp_bias: whether the field is read.
    windows: which layers have a window: "never", "all" if there is a window,
      "enabled" if `use_sliding_window` is set besides, "late" if it is and the
      layer is not below `max_window_layers`; or a number P: all but every P-th
      layer.
    layer_types: whether a field of this name may say otherwise.
    rope: rotary embeddings: the "same" in all layers, "local" ones in layers
      with a window, "unscaled" ones there, "windowed" layers alone, or as
      "listed" in `no_rope_layers`.
    activation: value of the field of the activation.
    activation_field: name of that field.
    epsilon: name of the field of the norms' epsilon.
    interleaved: whether RoPE rotates neighboring channels.
    rope_names: other names of kinds of RoPE.
    partial: whether RoPE may rotate a part of each head.
    scaled_positions: whether `max_position_embeddings` is the context with the
      scaling of RoPE.
    fused: whether the projections of one input are stored as one tensor.
    stacked_experts: whether the experts of a layer are stored as one tensor.
    router: name of the router.
    fixed: fields that may be there if they have this value.
    multipliers: the fields of constant factors that are read.
  """

  architecture: str
  models: str
  style: Style = Style()
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  scaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  attention_bias: Literal["field", "never", "always", "qkv"] = "field"
  mlp_bias: bool = False
  windows: Literal["never", "all", "enabled", "late"] | int = "never"
  layer_types: bool = False
  rope: Literal["same", "local", "unscaled", "windowed", "listed"] = "same"
  activation: str = "silu"
  activation_field: str = "hidden_act"
  epsilon: str = "rms_norm_eps"
  interleaved: bool = False
  rope_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  partial: bool = False
  scaled_positions: bool = False
  fused: bool = False
  stacked_experts: bool = False
  router: str = "mlp.router"
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  multipliers: tuple[str, ...] = ()

  @property
  def activations(self) -> tuple[str, ...]:
    """Names of the activation in files."""
    same = {"silu": ("silu", "swish")}
    return same.get(self.activation, (self.activation,))


_QWEN_ABSENT = {
  "num_key_value_heads": 32,
  "sliding_window": 4096,
  "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM", "Llama 2 to 3.3, Yi, SmolLM2", mlp_bias=True
  ),
  "mistral": Family(
    "MistralForCausalLM",
    "Mistral, Nemo",
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
    # The class has none, whatever the field says.
    attention_bias="never",
    windows="all",
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    "Qwen1.5 to 2.5",
    absent=_QWEN_ABSENT,
    attention_bias="qkv",
    windows="late",
    layer_types=True,
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    "Qwen3",
    Style(qk_norm="head"),
    absent=_QWEN_ABSENT | {"head_dim": 128},
    windows="late",
    layer_types=True,
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    "Qwen3 with experts",
    Style(qk_norm="head"),
    absent={
      "num_key_value_heads": 4,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 768,
      "sliding_window": 4096,
    },
    windows="enabled",
    router="mlp.gate",
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    "Gemma 3",
    _GEMMA,
    absent={
      "vocab_size": 262_208,
      "hidden_size": 2304,
      "intermediate_size": 9216,
      "num_hidden_layers": 26,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "max_position_embeddings": 131_072,
      "query_pre_attn_scalar": 256,
      "sliding_window": 4096,
      "rope_theta": 1e6,
      "rope_local_base_freq": 1e4,
      "tie_word_embeddings": True,
    },
    windows=6,
    layer_types=True,
    rope="local",
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    scaled_positions=True,
    multipliers=("query_pre_attn_scalar", "final_logit_softcapping"),
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    "gpt-oss",
    Style(norm=_WIDE, gate="clipped", sinks=True),
    absent={
      "num_key_value_heads": 8,
      "head_dim": 64,
      "sliding_window": 128,
      "num_local_experts": 128,
      "num_experts_per_tok": 4,
      "rms_norm_eps": 1e-5,
      "rope_theta": 150_000.0,
    },
    scaling={
      "rope_type": "yarn",
      "factor": 32.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "truncate": False,
      "original_max_position_embeddings": 4096,
    },
    attention_bias="always",
    windows=2,
    layer_types=True,
    stacked_experts=True,
    fixed={"swiglu_limit": 7.0},
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    absent={
      "num_key_value_heads": 4,
      "rope_theta": 2e6,
      "tie_word_embeddings": True,
      "no_rope_layer_interval": 4,
    },
    mlp_bias=True,
    windows="enabled",
    layer_types=True,
    rope="listed",
  ),
  "phi3": Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-4",
    absent={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    attention_bias="never",
    windows="all",
    rope_names={"su": "longrope", "yarn": "longrope"},
    partial=True,
    fused=True,
  ),
  "olmo2": Family(
    "Olmo2ForCausalLM", "OLMo 2", _OLMO, absent={"rms_norm_eps": 1e-5}
  ),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    "OLMo 3",
    _OLMO,
    absent={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    windows=4,
    layer_types=True,
    rope="unscaled",
  ),
  "granite": Family(
    "GraniteForCausalLM",
    "Granite 3",
    absent=dict.fromkeys(
      (
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "attention_multiplier",
      ),
      1.0,
    ),
    mlp_bias=True,
    multipliers=(
      "embedding_multiplier",
      "logits_scaling",
      "residual_multiplier",
      "attention_multiplier",
    ),
  ),
  "cohere2": Family(
    "Cohere2ForCausalLM",
    "Command R7B",
    _COHERE,
    absent={
      "logit_scale": 0.0625,
      "sliding_window": 4096,
      "tie_word_embeddings": True,
      "layer_norm_eps": 1e-5,
    },
    windows=4,
    layer_types=True,
    rope="windowed",
    epsilon="layer_norm_eps",
    interleaved=True,
    fixed={
      "layer_switch": 4,
      "order_of_interleaved_layers": "local_attn_first",
      "position_embedding_type": "rope_gptj",
      "rotary_pct": 1.0,
      "use_embedding_sharing": True,
      "use_gated_activation": True,
      "use_parallel_block": True,
    },
    multipliers=("logit_scale",),
  ),
}
