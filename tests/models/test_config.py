"""Every field of a config.json is used or refused."""

import pytest

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig

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
    ({"tie_word_embeddings": "false"}, "must be true or false"),
    ({"logit_softcapping": 30.0}, "'logit_softcapping', which is not"),
    (
      {"model_type": "mistral", "max_position_embeddings": 8192},
      "sliding-window attention",
    ),
    ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
    (
      {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True},
      "sliding-window attention",
    ),
    (
      {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2},
      "sliding-window attention",
    ),
    (
      {
        "model_type": "mistral",
        "sliding_window": None,
        "attention_bias": True,
      },
      "'attention_bias', which is not supported for mistral",
    ),
    ({"model_type": "qwen2", "mlp_bias": True}, "'mlp_bias'"),
    ({"use_mrope": True}, "'use_mrope'"),
    ({"rope_scaling": "linear"}, "must be an object"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
    ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "a number above 0"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "a number above 0"),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
      "'beta_fast', which rope type 'linear' does not use",
    ),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "the smaller"),
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


@pytest.mark.parametrize(
  ("changes", "context"),
  [
    ({}, 128),
    ({"rope_scaling": LLAMA3}, 128),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 256),
    (
      {
        "rope_scaling": {
          "type": "yarn",
          "factor": 4.0,
          "original_max_position_embeddings": 32,
        }
      },
      128,
    ),
    ({"model_type": "mistral", "sliding_window": None}, 128),
    (
      {
        "model_type": "qwen2",
        "sliding_window": 64,
        "use_sliding_window": False,
        "max_window_layers": 1,
      },
      128,
    ),
  ],
)
def test_read_and_written_back(changes, context):
  config = DecoderConfig.from_hf(FIELDS | changes)
  assert config.geometry.max_positions == context
  assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
  ("model_type", "absent", "null"),
  [
    ("llama", (64, 16), (64, 16)),
    ("mistral", (8, 16), (64, 16)),
    ("qwen2", (32, 16), (64, 16)),
    ("qwen3", (32, 128), (64, 16)),
  ],
)
def test_sizes_that_no_field_names_are_those_of_transformers(
  model_type, absent, null
):
  """As the classes of transformers 5.2 had them."""
  fields = FIELDS | {
    "model_type": model_type,
    "hidden_size": 1024,
    "num_attention_heads": 64,
    "sliding_window": None,
  }
  del fields["num_key_value_heads"]
  nulls = {"num_key_value_heads": None, "head_dim": None}
  for given, expected in ((fields, absent), (fields | nulls, null)):
    config = DecoderConfig.from_hf(given)
    assert (config.num_kv_heads, config.head_dim) == expected
