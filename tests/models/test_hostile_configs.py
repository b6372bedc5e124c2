"""Fields of config.json of any value get one sentence, and in bounded time."""

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
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400

# Fields, values that none of them can have, and words of the sentence.
WRONG = [
  (
    "vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads max_position_embeddings head_dim",
    ("", "8", -1, 0, 8.0, NAN, HUGE, 10**5000, 2**31, True, [], {}),
    r"for '{name}', which must be",
  ),
  ("num_hidden_layers", (10**9, 10_001), "must be at most 10000"),
  (
    "rms_norm_eps",
    (None, "1e-6", -1e-6, NAN, INFINITE, -INFINITE, HUGE, 1.5, True, [], {}),
    "for 'rms_norm_eps', which must be",
  ),
  (
    "tie_word_embeddings attention_bias mlp_bias use_sliding_window",
    ("", "false", 0, 1, 0.0, [], {}),
    "for '{name}', which must be true or false",
  ),
  (
    "layer_types",
    ("full_attention", 1, True, {}, [1, 2], [None, None], [["a"], ["b"]]),
    "for 'layer_types', which must be a list of names",
  ),
  ("layer_types", (["full_attention"] * 3,), "3 layer_types for 2 layers"),
  (
    "sliding_window max_window_layers",
    ("", "64", -1, 1.5, NAN, True, [], {}),
    "for '{name}', which must be a whole number or null",
  ),
  ("hidden_act", (None, 1, [], {}, ["silu"]), "only 'silu' is supported"),
  ("rope_scaling rope_parameters", ("", 1, True, [], [1]), "be an object"),
  (
    "rope_theta",
    ("", "x", -1, 0, NAN, INFINITE, HUGE, True, [], {}, 1e-320),
    "for the rope field 'rope_theta', which must be a number above 0",
  ),
  ("model_type", (None, "", "gpt2", 1, [], {}), "which is not supported"),
  (
    "quantization_config quantization",
    ("gptq", 4, True, [1], {"bits": 4}),
    "describes quantized weights",
  ),
]

SCALINGS = {
  "linear": {"factor": 2.0},
  "dynamic": {"factor": 2.0},
  "llama3": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
  },
  "yarn": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1},
}


def refused(fields, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    DecoderConfig.from_hf(FIELDS | fields)
  assert "\n" not in str(caught.value)
  assert len(str(caught.value)) < 300


CASES = [
  (name, value, sentence.replace("{name}", name))
  for names, values, sentence in WRONG
  for name in names.split()
  for value in values
]


@pytest.mark.parametrize(
  ("name", "value", "sentence"),
  CASES,
  ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CASES)],
)
def test_a_field_of_a_wrong_value(name, value, sentence):
  refused({name: value}, sentence)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(
  "value", ["", "2", -1.0, 0, NAN, INFINITE, HUGE, True, [], {}, 1e-320]
)
def test_a_scaling_of_a_wrong_value(kind, value):
  for name in SCALINGS[kind]:
    scaling = {"rope_type": kind} | SCALINGS[kind] | {name: value}
    refused({"rope_scaling": scaling}, f"the rope field '{name}'")


def test_scalings_that_divide_by_zero():
  yarn = {"rope_type": "yarn", "factor": 2.0}
  for theta in (1, 1.0, 0.5):
    fields = {"rope_scaling": yarn, "rope_theta": theta}
    refused(fields, "which rope type 'yarn' needs above 1")
  dynamic = {"rope_type": "dynamic", "factor": 2.0}
  fields = {"rope_scaling": dynamic, "head_dim": 2}
  refused(fields, "heads of 2 dimensions; rope type 'dynamic' needs 4")
