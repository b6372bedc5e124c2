"""The config.json of Llama-3.1-8B, as far as sizes go."""

FIELDS = dict(
  model_type="llama",
  vocab_size=128256,
  hidden_size=4096,
  intermediate_size=14336,
  num_hidden_layers=32,
  num_attention_heads=32,
  num_key_value_heads=8,
  head_dim=128,
  rope_theta=5e5,
  rms_norm_eps=1e-5,
  max_position_embeddings=131072,
)
