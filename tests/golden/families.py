"""The model families of `make_transformers.py`, at toy sizes."""

VOCABULARY = 80
PAD_ID = 0

SIZES = dict(
  vocab_size=VOCABULARY,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  rms_norm_eps=1e-3,  # Large enough for a wrong one to show.
  bos_token_id=1,
  eos_token_id=2,
)
_LLAMA3_ROPE = dict(
  rope_type="llama3",
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  # With head_dim 16 and theta 5e5 one frequency falls in each of the three
  # bands: kept, interpolated smoothly, divided by the factor.
  original_max_position_embeddings=48,
)
_LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"])
_QWEN2 = dict(
  model_type="qwen2",
  architectures=["Qwen2ForCausalLM"],
  rope_theta=1e6,
  use_sliding_window=False,
  sliding_window=None,
)

WINDOW = 12
GPT_OSS = dict(
  model_type="gpt_oss",
  architectures=["GptOssForCausalLM"],
  num_hidden_layers=4,
  intermediate_size=32,
  head_dim=16,
  hidden_act="silu",
  num_local_experts=4,
  num_experts_per_tok=2,
  experts_per_token=2,
  swiglu_limit=7.0,
  attention_bias=True,
  rope_theta=150000,
  rope_scaling=dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    # Wide enough apart for a ramp with dimensions between its ends.
    beta_fast=1.5,
    beta_slow=0.1,
    truncate=False,
  ),
  initial_context_length=32,
  sliding_window=WINDOW,
  max_position_embeddings=128,
)
_QWEN3_MOE = dict(
  model_type="qwen3_moe",
  architectures=["Qwen3MoeForCausalLM"],
  head_dim=16,
  rope_theta=1e6,
  num_experts=6,
  num_experts_per_tok=2,
  moe_intermediate_size=16,
  use_sliding_window=False,
  sliding_window=None,
  max_position_embeddings=128,
)
_PHI3 = dict(
  model_type="phi3",
  architectures=["Phi3ForCausalLM"],
  num_attention_heads=2,
  num_key_value_heads=1,
  pad_token_id=PAD_ID,
  rope_theta=1e4,
)

# Configurations as the Hub's checkpoints state them, but for the numbers.
FAMILIES = {
  "llama3": dict(**_LLAMA, rope_theta=5e5, max_position_embeddings=64),
  "llama31": dict(
    **_LLAMA,
    head_dim=16,
    rope_theta=5e5,
    rope_scaling=_LLAMA3_ROPE,
    max_position_embeddings=384,
  ),
  "llama32": dict(
    **_LLAMA,
    head_dim=16,
    rope_theta=5e5,
    rope_scaling=_LLAMA3_ROPE | dict(factor=32.0),
    max_position_embeddings=384,
    tie_word_embeddings=True,
  ),
  "llama_linear": dict(
    **_LLAMA,
    rope_theta=1e4,
    rope_scaling=dict(type="linear", factor=4.0),
    max_position_embeddings=32,
  ),
  "llama_dynamic": dict(
    **_LLAMA,
    head_dim=16,
    rope_theta=1e4,
    rope_scaling=dict(type="dynamic", factor=2.0),
    max_position_embeddings=32,
  ),
  "llama_yarn": dict(
    **_LLAMA,
    head_dim=16,
    rope_theta=1e4,
    rope_scaling=dict(
      rope_type="yarn",
      factor=4.0,
      original_max_position_embeddings=32,
      # Wide enough apart for a ramp with dimensions between its ends.
      beta_fast=1.5,
      beta_slow=0.5,
      attention_factor=1.2,
    ),
    max_position_embeddings=128,
  ),
  "qwen25": dict(**_QWEN2, max_position_embeddings=128),
  "qwen25_tied": dict(
    **_QWEN2, max_position_embeddings=128, tie_word_embeddings=True
  ),
  "qwen25_yarn": dict(
    **_QWEN2,
    # As in Qwen2.5's model card: max_position_embeddings stays the original.
    rope_scaling=dict(
      type="yarn", factor=4.0, original_max_position_embeddings=32
    ),
    max_position_embeddings=32,
  ),
  "qwen3": dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    head_dim=16,
    rope_theta=1e6,
    use_sliding_window=False,
    sliding_window=None,
    max_position_embeddings=128,
  ),
  "mistral": dict(
    model_type="mistral",
    architectures=["MistralForCausalLM"],
    head_dim=16,
    rope_theta=1e6,
    sliding_window=None,
    max_position_embeddings=128,
  ),
  "yi": dict(
    **_LLAMA, num_key_value_heads=1, rope_theta=5e6, max_position_embeddings=128
  ),
  "llama_biases": dict(
    **_LLAMA,
    attention_bias=True,
    mlp_bias=True,
    rope_theta=1e4,
    max_position_embeddings=128,
  ),
  "mistral_window": dict(
    model_type="mistral",
    architectures=["MistralForCausalLM"],
    head_dim=16,
    rope_theta=1e4,
    sliding_window=WINDOW,
    max_position_embeddings=128,
  ),
  "qwen3_window": dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    head_dim=16,
    rope_theta=1e6,
    use_sliding_window=True,
    sliding_window=WINDOW,
    max_window_layers=1,
    max_position_embeddings=128,
  ),
  "gemma3": dict(
    model_type="gemma3_text",
    architectures=["Gemma3ForCausalLM"],
    num_hidden_layers=7,
    head_dim=16,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=24,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_scaling=dict(rope_type="linear", factor=8.0),
    sliding_window=WINDOW,
    # Every third layer is global, in place of every sixth.
    sliding_window_pattern=3,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    tie_word_embeddings=True,
    max_position_embeddings=128,
  ),
  "gpt_oss": GPT_OSS,
  # Its experts are stored in four bits.
  "gpt_oss_mxfp4": GPT_OSS
  | dict(
    num_hidden_layers=2,
    quantization_config=dict(
      quant_method="mxfp4",
      modules_to_not_convert=["model.layers.*.self_attn", "lm_head"],
    ),
  ),
  "qwen3_moe": dict(
    **_QWEN3_MOE,
    num_hidden_layers=3,
    mlp_only_layers=[1],
    norm_topk_prob=True,
    decoder_sparse_step=1,
  ),
  "qwen3_moe_shares": dict(
    **_QWEN3_MOE, norm_topk_prob=False, decoder_sparse_step=2
  ),
  "smollm3": dict(
    model_type="smollm3",
    architectures=["SmolLM3ForCausalLM"],
    num_hidden_layers=4,
    pad_token_id=PAD_ID,
    no_rope_layer_interval=4,
    rope_theta=5e6,
    use_sliding_window=False,
    sliding_window=None,
    tie_word_embeddings=True,
    max_position_embeddings=128,
  ),
  "phi3": dict(
    **_PHI3,
    partial_rotary_factor=0.75,
    rope_scaling=dict(
      type="longrope",
      short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
      long_factor=[1.0, 1.5, 2.0, 3.0, 3.5, 4.0],
    ),
    original_max_position_embeddings=64,
    sliding_window=None,
    tie_word_embeddings=True,
    max_position_embeddings=256,
  ),
  "phi3_window": dict(
    **_PHI3,
    rope_scaling=None,
    original_max_position_embeddings=128,
    sliding_window=WINDOW,
    max_position_embeddings=128,
  ),
  "olmo2": dict(
    model_type="olmo2",
    architectures=["Olmo2ForCausalLM"],
    rope_theta=5e5,
    max_position_embeddings=128,
  ),
  "olmo3": dict(
    model_type="olmo3",
    architectures=["Olmo3ForCausalLM"],
    num_hidden_layers=4,
    rope_theta=5e5,
    sliding_window=WINDOW,
    max_position_embeddings=128,
  ),
  "granite": dict(
    model_type="granite",
    architectures=["GraniteForCausalLM"],
    rope_theta=1e4,
    embedding_multiplier=6.0,
    logits_scaling=4.0,
    residual_multiplier=0.22,
    attention_multiplier=0.5,
    tie_word_embeddings=True,
    max_position_embeddings=128,
  ),
  "cohere2": dict(
    model_type="cohere2",
    architectures=["Cohere2ForCausalLM"],
    num_hidden_layers=4,
    rms_norm_eps=None,
    layer_norm_eps=1e-3,
    logit_scale=0.25,
    rope_theta=5e4,
    sliding_window=WINDOW,
    tie_word_embeddings=True,
    max_position_embeddings=128,
  ),
  # Heads of 256 channels, as all Gemma 3 models have them: wider than the
  # hidden states.
  "gemma3_wide": dict(
    model_type="gemma3_text",
    architectures=["Gemma3ForCausalLM"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_scaling=None,
    sliding_window=WINDOW,
    # The second layer is global.
    sliding_window_pattern=2,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    tie_word_embeddings=True,
    max_position_embeddings=128,
  ),
}
