"""Every field of a config.json is used, refused, named or without effect."""

import math
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from config_fields import DYNAMIC, FIELDS, LLAMA3, LONG, PHI3, YARN

from kvjax.errors import InputError, InputWarning
from kvjax.models.config import DecoderConfig
from kvjax.models.rope_kinds import FREQUENCIES


@pytest.mark.parametrize(
  ("changes", "context"),
  [
    ({}, 128),
    ({"rope_scaling": LLAMA3}, 128),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 256),
    ({"rope_scaling": {"rope_type": "default", "factor": 1.0}}, 128),
    ({"ffn_dim_multiplier": 1.3}, 128),
    ({"attn_temperature_tuning": False, "num_kv_shared_layers": 0}, 128),
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
    *(
      (
        {
          "model_type": kind,
          "sliding_window": 64,
          "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": local,
          },
        },
        128,
      )
      for kind in ("gemma3_text", "olmo3")
      for local in (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 3e4},
      )
    ),
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


INERT = {
  "_attn_implementation": "sdpa",
  "_flash_attn_2_enabled": True,
  "_name_or_path": "/home/ann/model",
  "architectures": ["LlamaForCausalLM"],
  "attention_dropout": 0.1,
  "decoder_start_token_id": 3,
  "dtype": "bfloat16",
  "id2label": {"0": "no", "1": "yes"},
  "is_decoder": True,
  "local_files_only": True,
  "max_length": 20,
  "metadata": {"format": "pt"},
  "model_max_length": 4096,
  "num_labels": 2,
  "pretraining_tp": 2,
  "problem_type": "single_label_classification",
  "repetition_penalty": 1.1,
  "resid_pdrop": 0.1,
  "softmax_in_fp32": True,
  "task_specific_params": {"summary": {"num_beams": 4}},
  "temperature": 0.6,
  "tokenizer_class": "LlamaTokenizer",
  "torch_dtype": "float16",
  "transformers.js_config": {"dtype": "q4"},
  "unk_token_id": 0,
  "unsloth_fixed": True,
  "unsloth_version": "2025.9.1",
  "use_flash_attn": True,
  "version": "1.0",
}
NEUTRAL = {
  "attn_logit_softcapping": None,
  "attention_multiplier": 1.0,
  "attention_type": "full_attention",
  "bias": False,
  "block_sparse": False,
  "causal": True,
  "differential_attention": False,
  "embedding_multiplier": 1,
  "hidden_activation": "silu",
  "is_causal": 1,
  "learned_positions": False,
  "local_attention": 0,
  "mlp_activation": "silu",
  "mlp_gelu": False,
  "non_causal": False,
  "non_causal_layers": [],
  "nope_layers": [],
  "gated_mlp": True,
  "rope_pct": 1.0,
  "rope_ratio": 1.0,
  "rope_type": "default",
  "use_rotary_emb": True,
  "aux_loss_scale": 0.1,
  "mlp_only_layers": [],
  "never_heard_of": None,
  "num_experts": 0,
  "partial_rotary_factor": 1.0,
  "position_embedding_type": "rope",
  "pruned_heads": {},
  "quantization_config": None,
  "sliding_window": 4096,
  "softmax_off_by_one": False,
  "use_causal_mask": None,
  "use_never_heard_of": False,
  "use_qk_norm": False,
}


@pytest.mark.parametrize("fields", [INERT, NEUTRAL])
def test_what_cannot_change_a_result_is_passed_over(fields):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    config = DecoderConfig.from_hf(FIELDS | fields)
  assert config == DecoderConfig.from_hf(FIELDS)


def test_all_that_is_wrong_is_said_at_once():
  wrong = {
    "hidden_act": "gelu",
    "vocab_size": 0,
    "rope_scaling": {"type": "linear", "factor": -1, "beta_fast": 2},
    "quantization_config": {"bits": 4},
    "final_logit_softcapping": 30.0,
  }
  with pytest.raises(InputError) as caught:
    DecoderConfig.from_hf(FIELDS | INERT | wrong | {"never_heard_of": 1})
  assert str(caught.value) == (
    "config.json has -1 for the rope field 'factor', which must be a number "
    "above 0, and no huge one; it has the rope field 'beta_fast', which rope "
    "type 'linear' does not use; it has 0 for 'vocab_size', which must be a "
    "whole number of 1 or more; it has hidden_act 'gelu'; only 'silu' is "
    "supported; it describes quantized weights; load the unquantized model; it "
    "has 30.0 for 'final_logit_softcapping', which is not supported for llama."
  )


def test_what_is_not_known_is_named_in_one_warning():
  fields = FIELDS | INERT | {"zeal": 3, "flavor": {"sweet": True}}
  with pytest.warns(InputWarning) as said:
    config = DecoderConfig.from_hf(fields)
  (warning,) = said
  assert str(warning.message) == (
    "config.json has fields that kvjax does not know and passes over: flavor, "
    "zeal."
  )
  assert config == DecoderConfig.from_hf(FIELDS)


@pytest.mark.parametrize(
  "spelling",
  [
    {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    {"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_theta": 5e5},
    {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    {
      "rope_parameters": {
        name: value
        for name, value in LLAMA3.items()
        if name != "original_max_position_embeddings"
      },
      "rope_theta": 500000,
      "original_max_position_embeddings": 64,
    },
  ],
)
def test_every_spelling_of_a_rotary_embedding_is_the_same(spelling):
  config = DecoderConfig.from_hf(FIELDS | spelling)
  assert config.rope.kind == "llama3"
  assert config.rope.theta == 5e5
  assert config.rope.original_context == 64
  same = {"rope_scaling": LLAMA3, "rope_theta": 5e5}
  assert config == DecoderConfig.from_hf(FIELDS | same)


@pytest.mark.parametrize(
  ("scaling", "neutral"),
  [
    (YARN, {"attn_factor": 1.0}),
    (YARN, {"attn_factor": 1}),
    (DYNAMIC, {"original_max_position_embeddings": 128}),
  ],
)
def test_rope_fields_that_change_nothing(scaling, neutral):
  config = DecoderConfig.from_hf(FIELDS | {"rope_scaling": scaling | neutral})
  assert config == DecoderConfig.from_hf(FIELDS | {"rope_scaling": scaling})


def test_a_factor_that_transformers_passes_over_is_passed_over():
  scaling = YARN | {"attn_factor": 0.8782488562869419}
  with pytest.warns(InputWarning, match=r"0\.8782488562869419 for the rope"):
    config = DecoderConfig.from_hf(FIELDS | {"rope_scaling": scaling})
  assert config == DecoderConfig.from_hf(FIELDS | {"rope_scaling": YARN})
  # Theirs is 0.1 ln(factor) + 1.
  _, scale = FREQUENCIES["yarn"](config.rope, jnp.zeros((), jnp.int32))
  assert scale == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
  "changes",
  [
    {"model_type": "mistral", "sliding_window": 128},
    {
      "model_type": "qwen2",
      "use_sliding_window": True,
      "sliding_window": 64,
      "max_window_layers": 2,
    },
    {
      "model_type": "qwen3",
      "use_sliding_window": True,
      "sliding_window": 64,
      "layer_types": ["full_attention"] * 2,
    },
  ],
)
def test_a_window_that_hides_nothing_is_none(changes):
  config = DecoderConfig.from_hf(FIELDS | changes)
  assert config.geometry.layers[0].window is None


@pytest.mark.parametrize(
  ("changes", "windows"),
  [
    ({"model_type": "mistral"}, [4096] * 6),
    ({"model_type": "mistral", "sliding_window": 64}, [64] * 6),
    ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 6),
    (
      {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 4,
      },
      [None] * 4 + [64] * 2,
    ),
    (
      {
        "model_type": "qwen3_moe",
        "use_sliding_window": True,
        "sliding_window": 64,
      },
      [64] * 6,
    ),
    ({"model_type": "gemma3_text", "sliding_window": 64}, [64] * 5 + [None]),
    ({"model_type": "gpt_oss"}, [128, None] * 3),
    ({"model_type": "olmo3", "sliding_window": 64}, [64] * 3 + [None, 64, 64]),
    (
      {
        "model_type": "cohere2",
        "layer_types": ["full_attention"] + ["sliding_attention"] * 5,
      },
      [None] + [4096] * 5,
    ),
    ({"model_type": "smollm3", "sliding_window": 64}, [None] * 6),
  ],
)
def test_windows_are_where_the_family_has_them(changes, windows):
  fields = FIELDS | {"num_hidden_layers": 6, "max_position_embeddings": 8192}
  config = DecoderConfig.from_hf(fields | changes)
  assert [spec.window for spec in config.geometry.layers] == windows
  parallel = changes.get("model_type") == "cohere2"
  assert {spec.parallel for spec in config.geometry.layers} == {parallel}
  assert DecoderConfig.from_hf(config.to_hf()) == config


def test_layers_with_a_window_have_their_own_positions():
  """No scaling there, but in global layers: of Gemma 3 and OLMo 3."""
  linear = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
  gemma, olmo = (
    DecoderConfig.from_hf(FIELDS | linear | {"model_type": kind})
    for kind in ("gemma3_text", "olmo3")
  )
  assert (gemma.rope.kind, gemma.rope.theta) == ("linear", 1e6)
  assert (gemma.local_rope.kind, gemma.local_rope.theta) == ("default", 1e4)
  assert (olmo.rope.kind, olmo.rope.theta) == ("linear", 1e4)
  assert (olmo.local_rope.kind, olmo.local_rope.theta) == ("default", 1e4)
  # Gemma's context is the scaled one.
  assert (gemma.geometry.max_positions, olmo.geometry.max_positions) == (
    128,
    8 * 128,
  )


@pytest.mark.parametrize(
  "nothing",
  [
    {},
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"original_max_position_embeddings": 2048},
  ],
  ids=str,
)
def test_gpt_oss_is_scaled_where_nothing_is_said(nothing):
  """The numbers are those of transformers 5.2."""
  fields = FIELDS | {"model_type": "gpt_oss", "head_dim": 16} | nothing
  config = DecoderConfig.from_hf(fields)
  found, scale = FREQUENCIES["yarn"](config.rope, jnp.zeros((), jnp.int32))
  expected = [1.0, 2.25418e-1, 5.0813273e-2, 6.7949593e-3, 4.5648392e-4]
  expected += [1.8188337e-5, 4.0999785e-6, 9.2420896e-7]
  np.testing.assert_allclose(found[0], expected, rtol=1e-6)
  assert scale == pytest.approx(1.3465735902799727)


@pytest.mark.parametrize("plain", [{"rope_type": "default"}, None])
def test_gpt_oss_is_not_scaled_where_that_is_said(plain):
  fields = FIELDS | {"model_type": "gpt_oss", "rope_parameters": plain}
  config = DecoderConfig.from_hf(fields)
  assert config.rope.kind == "default"
  # Other readers scale where nothing is said, too.
  assert config.to_hf()["rope_scaling"] == {"rope_type": "default"}
  assert DecoderConfig.from_hf(config.to_hf()) == config


def test_longrope_takes_the_long_divisors_from_the_first_token_beyond():
  config = DecoderConfig.from_hf(FIELDS | PHI3 | {"rope_scaling": LONG})
  places = jnp.asarray([range(62, 64), range(63, 65)], jnp.int32)
  cos, _ = config.rope.tables(places)
  scale = (1 + math.log(2) / math.log(64)) ** 0.5
  slow = 1e4 ** (-np.arange(8) / 8)
  for row, (divisor, position) in enumerate(((1, 63), (2, 64))):
    expected = scale * np.cos(position * slow / divisor)
    np.testing.assert_allclose(cos[row, 1], expected, atol=1e-5)
