"""What a config.json asks for that is refused, in one sentence."""

import pytest
from config_fields import DYNAMIC, FIELDS, LLAMA3, LONG, PHI3, YARN

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"model_type": "gpt2"}, "'gpt2', which is not supported"),
    ({"model_type": []}, "which is not supported"),
    ({"vocab_size": None}, "lacks the field 'vocab_size'"),
    ({"hidden_size": "64"}, "'64' for 'hidden_size'"),
    ({"num_hidden_layers": 0}, "0 for 'num_hidden_layers'"),
    ({"num_key_value_heads": 3}, "4 query heads for 3 KV heads"),
    ({"head_dim": 15}, "need an even number"),
    ({"hidden_act": "gelu"}, "only 'silu' is supported"),
    ({"quantization_config": {"bits": 4}}, "load the unquantized model"),
    ({"rms_norm_eps": None}, "must be a number"),
    ({"rms_norm_eps": -1e-6}, "must be a number of 0 or more"),
    ({"rms_norm_eps": float("nan")}, "must be a number of 0 or more"),
    ({"rms_norm_eps": float("inf")}, "must be a number of 0 or more"),
    ({"rms_norm_eps": 10**400}, r"10+ \.\.\. 0+ for 'rms_norm_eps'"),
    ({"hidden_size": 2**31}, "'hidden_size', which must be at most 2147483647"),
    ({"vocab_size": 10**5000}, "thousands of digits for 'vocab_size'"),
    ({"num_hidden_layers": 10**6}, "which must be at most 10000"),
    ({"hidden_act": ["silu"]}, "only 'silu' is supported"),
    ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'; only 'silu'"),
    ({"hidden_activation": 0}, "hidden_activation 0; only 'silu'"),
    ({"layer_types": "full_attention"}, "'layer_types', which must be a list"),
    ({"layer_types": [1, 1]}, "'layer_types', which must be a list of names"),
    (
      {"layer_types": ["linear_attention"]},
      "linear attention, as 'linear_attention' in",
    ),
    ({"sliding_window": "64"}, "'sliding_window', which must be a whole"),
    ({"quantization": {"bits": 4}}, "load the unquantized model"),
    ({"embedding_multiplier": 12.0}, "'embedding_multiplier', which is not"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor', which is not"),
    ({"num_local_experts": 8}, "'num_local_experts', which is not supported"),
    ({"is_causal": False}, "'is_causal', which is not supported for llama"),
    ({"is_causal": 0}, "0 for 'is_causal'"),
    ({"causal": False}, "False for 'causal', which is not supported for llama"),
    ({"use_causal_mask": False}, "'use_causal_mask'"),
    ({"non_causal": True}, "'non_causal'"),
    ({"not_causal": True}, "'not_causal'"),
    ({"disable_causal_mask": True}, "'disable_causal_mask'"),
    ({"mlp_activation": "gelu"}, "'gelu' for 'mlp_activation', which is not"),
    (
      {"model_type": "gemma3_text", "mlp_activation": "silu"},
      "'silu' for 'mlp_activation', which is not supported for gemma3_text",
    ),
    ({"attention_type": "local"}, "'local' for 'attention_type', which is not"),
    ({"attn_type": "block_sparse"}, "'block_sparse' for 'attn_type'"),
    ({"local_attention": 64}, "64 for 'local_attention', which is not"),
    ({"block_sparse": True}, "'block_sparse', which is not supported"),
    ({"differential_attention": True}, "'differential_attention'"),
    ({"learned_positions": True}, "'learned_positions'"),
    ({"softmax_off_by_one": True}, "'softmax_off_by_one'"),
    ({"nope_layers": [0, 1]}, r"\[0, 1\] for 'nope_layers'"),
    ({"mlp_gelu": True}, "'mlp_gelu', which is not supported for llama"),
    ({"rope_pct": 0.25}, "'rope_pct', which is not supported for llama"),
    ({"rope_type": "linear"}, "'rope_type', which is not supported for llama"),
    ({"attention_sinks": 4}, "'attention_sinks', which is not supported"),
    ({"tie_word_embeddings": "false"}, "must be true or false"),
    ({"logit_softcapping": 30.0}, "'logit_softcapping', which is not"),
    (
      {"sliding_window": 64, "use_sliding_window": True},
      "sliding-window attention, which its model type does not have",
    ),
    (
      {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2},
      "sliding-window attention in other layers than llama has it",
    ),
    (
      {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2},
      "type 'sliding_attention', but no sliding_window",
    ),
    (
      {"model_type": "mistral", "layer_types": ["full_attention"] * 2}
      | {"sliding_window": 64},
      "sliding-window attention in other layers than mistral has it",
    ),
    (
      {"model_type": "smollm3", "no_rope_layers": [1]},
      "'no_rope_layers', which must be a list of 2 numbers",
    ),
    (
      {"model_type": "qwen3_moe", "mlp_only_layers": "all"},
      "'mlp_only_layers', which must be a list of numbers",
    ),
    (
      {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
      "5 experts per token where there are 4",
    ),
    ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "'swiglu_limit', which"),
    (
      {"model_type": "gpt_oss", "quantization_config": {"quant_method": "x"}},
      "load the unquantized model",
    ),
    (
      {"model_type": "gemma3_text", "use_bidirectional_attention": True},
      "'use_bidirectional_attention', which is not supported",
    ),
    (
      {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
      "'attn_logit_softcapping', which is not supported",
    ),
    (
      {"model_type": "granite", "residual_multiplier": 0},
      "0 for 'residual_multiplier', which must be a number above 0",
    ),
    ({"model_type": "cohere2", "use_qk_norm": True}, "'use_qk_norm', which"),
    (PHI3 | {"partial_rotary_factor": 0.45}, "rotates 7 of 16 dimensions"),
    (
      PHI3 | {"rope_scaling": LONG | {"short_factor": [1.0] * 7}},
      "has 7 numbers for the rope field 'short_factor', where a head has 8",
    ),
    (
      PHI3 | {"rope_scaling": LONG | {"long_factor": [1.0, "2"]}},
      "'long_factor', which must be a list of numbers above 0",
    ),
    # What a model is, beside its model type, is said by its name.
    (
      {"model_type": "deepseek_v3", "kv_lora_rank": 512},
      r"multi-head latent attention \(MLA\), as 'kv_lora_rank' says",
    ),
    (
      {"model_type": "qwen3_next", "linear_conv_kernel_dim": 4},
      "asks for linear attention, as 'linear_conv_kernel_dim' says",
    ),
    ({"model_type": "jamba", "mamba_d_state": 16}, r"state-space layers \(Mam"),
    (
      {"model_type": "minimax", "layer_types": ["linear_attention"]},
      "asks for linear attention, as 'linear_attention' in 'layer_types' says",
    ),
    (
      {"model_type": "minimax_m1", "attn_type_list": [0, 1]},
      "asks for linear attention, as 'attn_type_list' says",
    ),
    (
      {"model_type": "phi4mm", "audio_processor": {"name": "cascades"}},
      "asks for an audio tower, as 'audio_processor' says",
    ),
    (
      {
        "text_config": FIELDS,
        "vision_config": {"depth": 4},
        "quantization_config": {"quant_method": "fp8"},
      },
      "describes quantized weights",
    ),
    (
      {"text_config": FIELDS, "audio_config": {"num_mel_bins": 128}},
      "asks for an audio tower, as 'audio_config' says",
    ),
    (
      {
        "model_type": "some_vl",
        "text_config": FIELDS | {"model_type": "x", "q_lora_rank": 64},
        "vision_config": {"depth": 4},
      },
      r"multi-head latent attention \(MLA\), as 'text_config.q_lora_rank' says",
    ),
    (
      {"model_type": "some_lm", "text_config": {"kv_lora_rank": 512}},
      r"multi-head latent attention \(MLA\), as 'text_config.kv_lora_rank' sa",
    ),
    (
      {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"audio_config": {"num_mel_bins": 128}},
      },
      "asks for an audio tower, as 'thinker_config.audio_config' says",
    ),
    (
      {"model_type": "mistral", "sliding_window": None, "attention_bias": True},
      "'attention_bias', which is not supported for mistral",
    ),
    ({"model_type": "qwen2", "mlp_bias": True}, "'mlp_bias'"),
    ({"use_mrope": True}, "'use_mrope'"),
    ({"attn_logit_cap": 30.0}, "'attn_logit_cap'"),
    ({"query_key_norm": True}, "'query_key_norm'"),
    ({"num_kv_shared_layers": 4}, "'num_kv_shared_layers'"),
    ({"attn_temperature_tuning": True}, "'attn_temperature_tuning'"),
    ({"use_cross_layer_kv_sharing": True}, "'use_cross_layer_kv_sharing'"),
    ({"index_topk": 2048}, "'index_topk'"),
    ({"rope_scaling": "linear"}, "must be an object"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
    ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "a number above 0"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "a number above 0"),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
      "'beta_fast', which rope type 'linear' does not use",
    ),
    ({"rope_scaling": {"type": "linear", "factor": 1e40}}, "no huge one"),
    ({"rope_scaling": {"type": "linear", "factor": 1e29}}, "is too much"),
    (
      {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64.5}},
      "'original_max_position_embeddings', which must be a whole number",
    ),
    ({"rope_theta": float("inf")}, "a number above 0"),
    ({"rope_theta": 10**400}, "a number above 0"),
    (
      {"rope_scaling": YARN | {"attn_factor": "1"}},
      "'1' for the rope field 'attn_factor', which must be a number",
    ),
    (
      {"rope_scaling": DYNAMIC | {"original_max_position_embeddings": 64}},
      "has 64 for the rope field 'original_max_position_embeddings', which rope"
      " type 'dynamic' does not use; only 128, max_position_embeddings",
    ),
    (
      {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
      "has 64 for the rope field 'original_max_position_embeddings' and 32 for "
      "the field outside, which must agree",
    ),
    (
      {"model_type": "phi3", "rope_scaling": LONG}
      | {"original_max_position_embeddings": 64}
      | {"rope_parameters": {"original_max_position_embeddings": 32}},
      "has 32 for the rope field 'original_max_position_embeddings' and 64 for",
    ),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "the smaller"),
    ({"rope_scaling": YARN | {"attention_factor": 1e29}}, "no huge one"),
    ({"rope_scaling": YARN | {"mscale": 1e29}}, "no huge one"),
    (
      {"rope_scaling": DYNAMIC, "rope_parameters": DYNAMIC | {"factor": 5.0}},
      "for 'factor' in rope_scaling and 5.0 in rope_parameters, which must agr",
    ),
    (
      {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default"},
      },
      "'linear' for 'rope_type' in rope_scaling and 'default' in",
    ),
    ({"rope_theta": 0}, "a number above 0"),
    (
      {"rope_parameters": {"partial_rotary_factor": 0.5}},
      "a part of each head",
    ),
  ],
)
def test_refused(changes, said):
  with pytest.raises(InputError, match=said):
    DecoderConfig.from_hf(FIELDS | changes)
