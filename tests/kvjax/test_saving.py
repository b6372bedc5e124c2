"""Saved caches come back bit by bit, or are refused in one sentence."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_caches import (
  GEOMETRY,
  LAYER_CACHE,
  MODEL,
  QUESTIONS,
  ROWS,
  answers,
  assert_same_bits,
  load,
  prefilled,
  save,
)

import kvjax
from kvjax import files
from kvjax.cache.cache import Cache
from kvjax.cache.packed import PackedLayer
from kvjax.cache.sharding import parse_mesh
from kvjax.checkpoint import saving
from kvjax.checkpoint.description import LAYOUT
from kvjax.errors import InputError
from kvjax.testing import TinyModel, kept_positions, poison_cache


@pytest.fixture(scope="module")
def cache():
  return poison_cache(prefilled())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_comes_back_bit_by_bit(dtype, tmp_path):
  model = TinyModel(GEOMETRY, dtype=dtype)
  cache = poison_cache(prefilled(model))
  assert len({layer.capacity for layer in cache.layers}) > 1
  assert any(bool(jnp.any(jnp.isnan(layer.keys))) for layer in cache.layers)
  assert {layer.keys.dtype for layer in cache.layers} == {jnp.dtype(dtype)}
  save(cache, tmp_path / "new" / "cache", model=model)
  again = load(str(tmp_path / "new" / "cache"), model=model)
  assert_same_bits(again, cache)
  assert answers(again, model) == answers(cache, model)


@pytest.mark.slow
def test_heads_of_unequal_length_come_back(tmp_path):
  cache = poison_cache(prefilled(method="ada/keydiff"))
  assert {type(layer) for layer in cache.layers} == {PackedLayer}
  assert np.ptp(cache.lengths, axis=-1).max() > 0
  save(cache, tmp_path)
  again = load(tmp_path)
  assert_same_bits(again, cache)
  assert answers(again) == answers(cache)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "budget"),
  [
    ("h2o", kvjax.Tokens(15)),
    ("lagkv:sinks=2:lag=6:skip_layers=1", kvjax.Retention(0.5)),
  ],
)
def test_a_cache_goes_on_evicting_as_it_would_have(method, budget, tmp_path):
  """By the same plan, and around the same protected tokens."""
  plan = kvjax.Plan(
    kvjax.get_method(method), budget, schedule=kvjax.Schedule(every=1)
  )
  protected = [[i in (9, 16) for i in range(len(row))] for row in ROWS]
  prompts = kvjax.Prompts.of(ROWS, protected=protected)
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, plan)
  cache = kvjax.reserve(cache, 60)
  save(cache, tmp_path)
  again = load(tmp_path)
  assert again.plan == plan
  assert again.protected is not None
  assert_same_bits(again, cache)

  def go_on(cache):
    decoding = kvjax.Decoding(20, sampling=kvjax.Sampling(50.0))
    return kvjax.generate(
      MODEL, MODEL.init(), cache, QUESTIONS, decoding, keep=True
    )

  said, expected = go_on(again), go_on(cache)
  assert said.rows() == expected.rows()
  ours = said.cache
  assert_same_bits(ours, expected.cache)
  for row in range(4):
    for heads in kept_positions(ours, row):
      for kept in heads:
        assert {9, 16} <= set(kept)
  seen = int(ours.next_positions[0])
  assert int(ours.lengths[0, 0, 0]) < seen - 20


def test_the_directory_says_what_it_holds(cache, tmp_path):
  save(cache, tmp_path, made_by="pyramidkv, 15 tokens")
  said = json.loads((tmp_path / "cache.json").read_text())
  assert said["layout"] == LAYOUT
  assert said["made_by"] == "pyramidkv, 15 tokens"
  geometry = json.loads(json.dumps(dataclasses.asdict(GEOMETRY)))
  for layer in geometry["layers"]:
    del layer["parallel"]  # Caches do not depend on it.
  assert said["model"] == {"id": "tiny", **geometry}
  assert (tmp_path / said["arrays"]).is_dir()
  stacks = said["cache"]["fields"]["stacks"]
  assert [stack["class"] for stack in stacks] == [LAYER_CACHE] * 2
  keys = [stack["fields"]["keys"] for stack in stacks]
  assert [k["shape"] for k in keys] == [
    [1, 4, 2, layer.capacity, 8] for layer in cache.layers
  ]
  assert {k["dtype"] for k in keys} == {"float32"}


@pytest.mark.parametrize("saved_on", [None, "data:2,model:2"])
@pytest.mark.parametrize("loaded_on", [None, "data:2,model:2", "data:4"])
def test_four_devices(saved_on, loaded_on, tmp_path):
  def on(mesh, run):
    if mesh is None:
      return run()
    with jax.set_mesh(parse_mesh(mesh)):
      return run()

  cache = on(saved_on, prefilled)
  assert len(cache.stacks[0].keys.sharding.device_set) == (4 if saved_on else 1)
  on(saved_on, lambda: save(cache, tmp_path))
  again = on(loaded_on, lambda: load(tmp_path))
  assert_same_bits(again, cache)
  shards = {None: (4, 2), "data:2,model:2": (2, 1), "data:4": (1, 2)}
  for stack in again.stacks:
    shape = stack.keys.addressable_shards[0].data.shape
    assert shape[:3] == (1, *shards[loaded_on])
  assert on(loaded_on, lambda: answers(again)) == answers(prefilled())


def test_heads_of_large_arrays_are_stored_apart(tmp_path):
  """A mebibyte of each; their positions, which take less, are not."""
  model = TinyModel(kvjax.Geometry.uniform(4, 2, 2, 32, 4096))
  prompts = kvjax.Prompts.of([[1] * 2048, [2] * 2048])
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  save(cache, tmp_path, model=model)
  (folder,) = tmp_path.glob("arrays-*")
  stored = files.orbax().metadata(folder).metadata
  chunks = {
    name: each.storage_metadata.chunk_shape for name, each in stored.items()
  }
  (stack,) = cache.stacks
  assert stack.keys.shape == (4, 2, 2, 2048, 32)
  assert chunks["cache.stacks.0.keys"] == (4, 1, 1, 2048, 32)
  assert chunks["cache.stacks.0.values"] == (4, 1, 1, 2048, 32)
  assert chunks["cache.stacks.0.positions"] == stack.positions.shape
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    assert_same_bits(load(tmp_path, model=model), cache)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"model_id": "other"}, "its id is 'tiny', not 'other'"),
    *(
      ({"model": TinyModel(kvjax.Geometry.uniform(*sizes))}, said)
      for sizes, said in (
        ((6, 4, 2, 8, 512), "its number of layers is 2, not 6"),
        ((2, 6, 2, 8, 512), "its heads of layer 0 is 4, not 6"),
        ((2, 4, 4, 8, 512), "its kv_heads of layer 0 is 2, not 4"),
        ((2, 4, 2, 6, 512), "its key_dim of layer 0 is 8, not 6"),
        ((2, 4, 2, 8, 6), "its max_positions is 512, not 6"),
      )
    ),
  ],
)
def test_the_cache_of_another_model_is_refused(cache, tmp_path, options, said):
  save(cache, tmp_path)
  with pytest.raises(InputError, match=said):
    load(tmp_path, **options)


def test_a_cache_of_other_layers_than_the_models_is_not_saved(cache, tmp_path):
  fewer = Cache(cache.stacks[:1], cache.next_positions, None, (0,))
  with pytest.raises(InputError, match="has 1 layers"):
    save(fewer, tmp_path)


@pytest.mark.parametrize("layout", [2, 4])
def test_another_layout_is_refused(cache, tmp_path, monkeypatch, layout):
  with monkeypatch.context() as patch:
    patch.setattr(saving, "LAYOUT", layout)
    save(cache, tmp_path)
  said = rf"saved in layout {layout}; this version of kvjax reads layout 3\.$"
  with pytest.raises(InputError, match=said):
    load(tmp_path)


def test_what_is_no_cache_is_refused(tmp_path):
  with pytest.raises(InputError, match=r"There is no .*/nowhere"):
    load(tmp_path / "nowhere")
  with pytest.raises(InputError, match=r"has no cache\.json"):
    load(tmp_path)
  (tmp_path / "file").write_text("")
  with pytest.raises(InputError, match=r"has no cache\.json"):
    load(tmp_path / "file")
  for text in ("", "[]", "{", '{"layout": 3}', '{"layout": 3, "model": 3}'):
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(InputError, match="damaged or incomplete"):
      load(tmp_path)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_harmed_file_is_noticed(cache, tmp_path, harm):
  save(cache, tmp_path)
  for path in [p for p in sorted(tmp_path.rglob("*")) if p.is_file()]:
    content = path.read_bytes()
    if harm == "cut" and not content:
      continue
    if harm == "remove":
      path.unlink()
    elif harm == "cut":
      path.write_bytes(content[: len(content) // 2])
    else:
      middle = len(content) // 2
      changed = bytes([content[middle] ^ 16]) if content else b"?"
      path.write_bytes(content[:middle] + changed + content[middle + 1 :])
    said = "has no cache" if not (tmp_path / "cache.json").exists() else "dama"
    with pytest.raises(InputError, match=f"{said}.*\\.$"):
      load(tmp_path)
    path.write_bytes(content)
  assert_same_bits(load(tmp_path), cache)


def test_a_changed_description_is_noticed(cache, tmp_path):
  save(cache, tmp_path)
  path = tmp_path / "cache.json"
  text = path.read_text()
  said = json.loads(text)
  shape = said["cache"]["fields"]["stacks"][0]["fields"]["keys"]["shape"]
  shape[3] += 1
  for changed in (
    json.dumps(said),
    text.replace(f'"{LAYER_CACHE}"', '"Unheard"'),
    text.replace('"keys"', '"locks"'),
    text.replace('"float32"', '"float16"'),
    text.replace('"float32"', '"float33"'),
    text.replace('"Cache"', f'"{LAYER_CACHE}"'),
  ):
    assert changed != text
    path.write_text(changed)
    with pytest.raises(InputError, match="damaged or incomplete"):
      load(tmp_path)


def test_what_is_there_is_replaced_only_when_asked(cache, tmp_path):
  other = prefilled(method="keydiff")
  save(cache, tmp_path)
  with pytest.raises(InputError, match="overwrite=True"):
    save(other, tmp_path)
  assert_same_bits(load(tmp_path), cache)
  save(other, tmp_path, overwrite=True)
  assert_same_bits(load(tmp_path), other)
  assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_left_alone(cache, tmp_path, overwrite):
  note = tmp_path / "note.txt"
  note.write_text("mine")
  with pytest.raises(InputError, match="something other than a saved cache"):
    save(cache, tmp_path, overwrite=overwrite)
  assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
  with pytest.raises(InputError, match="is a file"):
    save(cache, note, overwrite=overwrite)
  assert note.read_text() == "mine"


def test_a_save_that_fails_leaves_what_was_there(cache, tmp_path, monkeypatch):
  def interrupted(*_):
    raise KeyboardInterrupt

  for place, name in (
    (files.orbax(), "save"),
    (saving.pathlib.Path, "replace"),
  ):
    with monkeypatch.context() as patch:
      patch.setattr(place, name, interrupted)
      with pytest.raises(KeyboardInterrupt):
        save(cache, tmp_path / name)
      assert not list((tmp_path / name).iterdir())
    save(cache, tmp_path / name)
    with monkeypatch.context() as patch:
      patch.setattr(place, name, interrupted)
      with pytest.raises(KeyboardInterrupt):
        save(prefilled(method="keydiff"), tmp_path / name, overwrite=True)
    assert_same_bits(load(tmp_path / name), cache)


KILLED = """
import os, pathlib, sys
import jax.numpy as jnp
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.checkpoint.saving import save_cache
from kvjax.testing import TinyModel

x = jnp.ones((2, 1, 2, 9, 8))
ones = jnp.ones((2, 1, 2, 9), jnp.int32)
stack = LayerCache(x, x, ones, jnp.asarray([9, 9]))
cache = Cache((stack,), jnp.asarray([9]), None, (0, 0))
if sys.argv[2] == "arrays":
  os.rename = os.replace = lambda *_, **__: os._exit(9)
else:
  pathlib.Path.replace = lambda *_: os._exit(9)
save_cache(
  cache, sys.argv[1], model=TinyModel(), model_id="", overwrite=True
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("at", "before"),
  [
    ("arrays", True),
    ("description", False),
    pytest.param("arrays", False, marks=pytest.mark.slow),
    pytest.param("description", True, marks=pytest.mark.slow),
  ],
)
def test_a_killed_save_is_no_cache(cache, tmp_path, at, before):
  """Killed before orbax or we move what was written into its place."""
  if before:
    save(cache, tmp_path)
  killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), at])
  assert killed.returncode == 9
  remains = [p.name for p in tmp_path.iterdir() if p.name != "cache.json"]
  assert len(remains) > before
  if before:
    assert_same_bits(load(tmp_path), cache)
  else:
    with pytest.raises(InputError, match=r"has no cache\.json"):
      load(tmp_path)
  save(cache, tmp_path, overwrite=before)
  assert_same_bits(load(tmp_path), cache)
  assert len(list(tmp_path.iterdir())) == 2
