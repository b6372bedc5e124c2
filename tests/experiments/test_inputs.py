"""What tables call a model, and what programs need of one."""

import dataclasses
import json
import pathlib
import types
from unittest import mock

import pytest

from kvjax import InputError, InputWarning
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.inputs import run_inputs
from kvjax.models import catalog
from kvjax.models.config import DecoderConfig
from kvjax.models.sources import DecoderSource


@pytest.mark.parametrize(
  ("directory", "name"),
  [
    ("hub/models--org--Some-8B-it/snapshots/0e9e39f2", "org/Some-8B-it"),
    ("hub/models--org--Some--8B/snapshots/0e9e39f2", "org/Some--8B"),
    ("hub/models--gpt2/snapshots/0e9e39f2", "gpt2"),
    ("models/Some-8B-it", "Some-8B-it"),
    ("own/snapshots/step-7", "step-7"),
  ],
)
def test_a_model_of_the_hubs_cache_has_its_own_name(
  monkeypatch, directory, name
):
  place = pathlib.Path("/some/where") / directory
  monkeypatch.setattr(run_inputs, "model_directory", lambda: place)
  assert run_inputs.model_name() == name


def test_a_model_by_name_is_where_it_was_fetched_to(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(catalog, "fetch", lambda source, folder: None)
  name = "smollm2-135m-instruct"
  assert name in catalog.NAMED
  folder = tmp_path / "kvjax" / "models" / name
  monkeypatch.setattr(run_inputs, "MODEL", types.SimpleNamespace(value=name))
  assert run_inputs.model_directory() == folder
  assert run_inputs.model_name() == name


def test_what_works_on_text_needs_a_tokenizer(tiny):
  mute = dataclasses.replace(tiny, tokenizer=None)
  with pytest.raises(InputError, match="no tokenizer, which texts need"):
    run_inputs.check_lengths(mute, [64])


def test_copies_of_kv_heads_are_warned_of_in_bytes(monkeypatch):
  """Of two heads on four devices; a cached token has each of them twice."""
  golden = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
  folder = golden / "qwen25"
  monkeypatch.setattr(
    run_inputs, "MODEL", types.SimpleNamespace(value=str(folder))
  )
  monkeypatch.setattr(run_inputs, "dtype", lambda: "bfloat16")
  fields = json.loads((folder / "config.json").read_text())
  assert fields["num_key_value_heads"] == 2
  width = fields["hidden_size"] // fields["num_attention_heads"]
  token = 2 * fields["num_hidden_layers"] * width * 2
  # What computes them is twice there, too: two matrices of a layer, and biases.
  weights = 2 * fields["num_hidden_layers"] * (fields["hidden_size"] + 1)
  weights *= 2 * width * 2
  assert fields["vocab_size"] % 4 == fields["intermediate_size"] % 4 == 0
  with pytest.warns(InputWarning) as warned:
    mesh = run_inputs._split(parse_mesh("model:4"))
  assert [str(each.message) for each in warned] == [
    "The 4 devices of the axis 'model' of --mesh cannot share out 2 KV heads "
    "evenly: some have the same, so that each takes "
    f"{weights // 2 - weights // 4:,} bytes of weights more, and "
    f"{token * 2 // 2 - token * 2 // 4} per cached token where the cache "
    "cannot be in pages, as when it evicts while decoding."
  ]
  assert dict(mesh.shape) == {"data": 1, "model": 2, "group": 2}
  whole = parse_mesh("data:2,model:2")
  assert run_inputs._split(whole) is whole


# Of a model with 6 query heads of 4 numbers, an MLP of 8, and 2 layers.
KV, QUERY, MLP = 2 * 2 * 6 * 2 * 4, 2 * 2 * 6 * 6 * 4, 2 * 3 * 6 * 8
TOKEN = 2 * 2 * 2 * 4 * 2


@pytest.mark.parametrize(
  ("mesh", "names", "more"),
  [
    ("model:2", "a vocabulary of 15", f"{2 * 6 * 15 // 2} bytes of weights"),
    (
      "context:2,model:2",
      "a vocabulary of 15",
      f"{2 * 6 * 15 // 2} bytes of weights",
    ),
    (
      "model:3",
      "2 KV heads and the MLP",
      f"{2 * 2 * (KV + MLP) // 3} bytes of weights more, and "
      f"{round(TOKEN * 2 / 3)} per cached token",
    ),
    (
      "model:4",
      "2 KV heads and 6 query heads and a vocabulary of 15",
      f"{(KV + QUERY) // 2 + 2 * (90 - 90 // 4)} bytes of weights more, and "
      f"{TOKEN // 4} per cached token",
    ),
  ],
)
def test_copies_of_weights_are_warned_of_in_bytes(
  monkeypatch, mesh, names, more
):
  config = DecoderConfig.from_hf(
    {
      "model_type": "llama",
      **{"vocab_size": 15, "hidden_size": 6, "intermediate_size": 8},
      **{"num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 4},
      **{"num_key_value_heads": 2, "tie_word_embeddings": True},
      **{"rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    }
  )
  source = mock.Mock(spec=DecoderSource, config=config)
  monkeypatch.setattr(run_inputs, "MODEL", types.SimpleNamespace(value=""))
  monkeypatch.setattr(run_inputs, "find", lambda name: source)
  monkeypatch.setattr(run_inputs, "dtype", lambda: "bfloat16")
  with pytest.warns(InputWarning) as warned:
    run_inputs._split(parse_mesh(mesh))
  (message,) = [str(each.message) for each in warned]
  assert f"cannot share out {names} evenly" in message
  assert f"takes {more}" in message
  assert ("per cached token" in message) == ("per cached token" in more)
