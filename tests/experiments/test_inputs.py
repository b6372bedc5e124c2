"""What tables call a model, and what programs need of one."""

import dataclasses
import json
import pathlib
import types

import pytest

from kvjax import InputError, InputWarning
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.inputs import run_inputs
from kvjax.models import catalog


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
  more = f"{token * 2 // 2 - token * 2 // 4} bytes more per cached token of"
  with pytest.warns(InputWarning, match=f"groups of 2 devices .* {more}"):
    mesh = run_inputs._split(parse_mesh("model:4"))
  assert dict(mesh.shape) == {"data": 1, "model": 2, "group": 2}
  whole = parse_mesh("data:2,model:2")
  assert run_inputs._split(whole) is whole
