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

# Configurations as the Hub's checkpoints state them, but for the numbers.
FAMILIES = {
  "llama3": dict(
    **_LLAMA,
    rope_theta=5e5,
    max_position_embeddings=64,
  ),
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
    **_LLAMA,
    num_key_value_heads=1,
    rope_theta=5e6,
    max_position_embeddings=128,
  ),
  "llama_biases": dict(
    **_LLAMA,
    attention_bias=True,
    mlp_bias=True,
    rope_theta=1e4,
    max_position_embeddings=128,
  ),
}
