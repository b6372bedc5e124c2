"""Fields of config.json that tests change."""

FIELDS = {
  "model_type": "llama",
  "vocab_size": 96,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
}
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"model_type": "phi3", "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
