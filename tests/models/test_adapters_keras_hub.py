"""Models of Keras Hub run by their own functions."""

import types

import jax
import numpy as np
import pytest
from adapted import TOLERANCE, rows_of

import kvjax
import kvjax.testing
from kvjax.errors import InputError
from kvjax.models.adapters import from_keras_hub


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_keras_hub_runs_by_its_own_functions(tied):
  keras_hub = pytest.importorskip("keras_hub")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    backbone = keras_hub.models.LlamaBackbone(
      vocabulary_size=80,
      num_layers=3,
      num_query_heads=4,
      hidden_dim=32,
      intermediate_dim=48,
      num_key_value_heads=2,
      rope_frequency_adjustment_factor=8.0,
      rope_low_freq_factor=1.0,
      rope_high_freq_factor=4.0,
      rope_pretraining_sequence_length=48,
      tie_word_embeddings=tied,
    )
    draw = np.random.default_rng(0)
    for weight in backbone.weights:
      weight.assign(draw.normal(size=weight.shape) * 0.3)
    rows = rows_of(80)
    model, params = from_keras_hub(backbone, max_positions=128)
    plan = kvjax.get_plan("full", kvjax.Retention(1.0))
    prompts = kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    decoding = kvjax.Decoding(8)
    answers = kvjax.generate(model, params, cache, logits, decoding).rows()
    for row, ids in enumerate(rows):
      tokens = np.array([ids + answers[row]])
      hidden = backbone(
        {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
      )
      expected = backbone.token_embedding(hidden, reverse=True)[0]
      expected = expected[len(ids) - 1 : -1]
      np.testing.assert_allclose(logits[row], expected[0], atol=TOLERANCE)
      assert answers[row] == np.argmax(expected, axis=-1).tolist()
    # Methods that rotate keys, and those that read everything else.
    for name in ("rerotate/keydiff", "expected_attention", "criticalkv"):
      plan = kvjax.get_plan(name, kvjax.Tokens(9))
      cache, _ = kvjax.prefill(model, params, prompts, plan)
      assert kvjax.testing.kept_positions(cache, 0)


def keras_llama(**changes):
  """A small Llama of Keras Hub."""
  keras_hub = pytest.importorskip("keras_hub")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    return keras_hub.models.LlamaBackbone(
      vocabulary_size=80,
      num_layers=2,
      num_query_heads=4,
      hidden_dim=32,
      intermediate_dim=48,
      num_key_value_heads=2,
      **changes,
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("after", [False, True])
def test_frozen_models_of_keras_hub_run(after):
  """Frozen before the adapter reads the weights, or after it."""
  backbone, rows = keras_llama(), rows_of(80)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    expected = [
      backbone.token_embedding(
        backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}),
        reverse=True,
      )[0, -1]
      for tokens in (np.array([row]) for row in rows)
    ]
    backbone.trainable = after
    model, params = from_keras_hub(backbone, 128)
    backbone.trainable = False
    assert not backbone.trainable_variables
    plan = kvjax.get_plan("full", kvjax.Retention(1.0))
    logits = kvjax.prefill(model, params, kvjax.Prompts.of(rows), plan)[1]
  np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      lambda backbone: backbone.enable_lora(2),
      "has adapters of LoRA, which kvjax does not read; save its",
    ),
    (
      lambda backbone: backbone.quantize("int8"),
      "is quantized to int8, which kvjax does not read; give a model in",
    ),
  ],
  ids=["lora", "quantized"],
)
def test_changed_layers_of_keras_hub_are_refused(change, sentence):
  backbone = keras_llama()
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    change(backbone)
  with pytest.raises(InputError, match=sentence):
    from_keras_hub(backbone, 128)


def test_other_models_of_keras_hub_are_refused():
  with pytest.raises(InputError, match="this is a SimpleNamespace"):
    from_keras_hub(types.SimpleNamespace(), 128)


def test_another_backend_of_keras_is_refused():
  class Layer:
    """Any layer: all parts are layers, whose weights are no arrays of JAX."""

    variables = (types.SimpleNamespace(value=np.ones(3)),)
    lora_enabled, quantization_mode = False, None

    def __getattr__(self, name):
      return self

  class LlamaBackbone:
    num_query_heads, num_key_value_heads, hidden_dim, num_layers = 4, 2, 32, 1
    transformer_layers = (Layer(),)

  with pytest.raises(InputError, match="set KERAS_BACKEND=jax before Keras"):
    from_keras_hub(LlamaBackbone(), 128)
