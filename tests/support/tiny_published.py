"""A decoder whose programs compile in no time, as a published model."""

from kvjax.experiments.compilation.published import Published

TINY = Published(
  "tiny",
  {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
  },
)
