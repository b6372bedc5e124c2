"""Classes of what is saved, by their names in files."""

import dataclasses
import json
import zlib

import jax
import jax.numpy as jnp
import pytest
from saved_caches import MODEL, ROWS, assert_same_bits, load, prefilled, save

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.checkpoint import trees as saved_trees
from kvjax.errors import InputError
from kvjax.methods import HeadwiseMethod
from kvjax.registry.registry import METHODS, RETRIEVALS, recipe_of
from kvjax.struct import STRUCTS, class_name, make, replace, static, struct
from kvjax.testing import poison_cache


@pytest.fixture(scope="module")
def cache():
  return poison_cache(prefilled())


@struct
class Pair(LayerCache):
  """A kind of layer that is another package's."""

  inner: LayerCache | None = None
  extra: jax.Array | None = None
  nothing: jax.Array | None = None
  size: int = static(default=3)


def test_any_layer_is_stored_field_by_field(cache, tmp_path, monkeypatch):
  first, second = cache.stacks
  batch, kv_heads, slots = first.positions.shape[1:]
  queries = jnp.full((batch, 4, 3, 8), jnp.nan, jnp.bfloat16)
  places = jnp.full((batch, 3), -1, jnp.int32)
  remembering = replace(
    first,
    remembered=jnp.ones((1, batch, kv_heads, slots)),
    window=jax.tree.map(lambda x: x[None], ObservationWindow(queries, places)),
  )
  fields = {field.name: None for field in dataclasses.fields(Pair)}
  own = {f.name: getattr(second, f.name) for f in dataclasses.fields(second)}
  own |= {"inner": second.shrink(0), "extra": jnp.zeros((1, 2, 0), jnp.int32)}
  pair = make(Pair, fields | own | {"size": 7})
  mixed = dataclasses.replace(cache, stacks=(remembering, pair))
  save(mixed, tmp_path)
  again = load(tmp_path)
  assert_same_bits(again, mixed)
  assert again.stacks[1].size == 7
  monkeypatch.delitem(STRUCTS, class_name(Pair))
  with pytest.raises(InputError, match=r"holds a .*:Pair, which is not known"):
    load(tmp_path)


def test_files_that_name_modules_are_read(cache, tmp_path):
  """Those of earlier versions do, and their classes may have moved since."""
  save(cache, tmp_path)
  path = tmp_path / "cache.json"
  said = json.loads(path.read_text())
  del said["checksum"]
  stacks = said["cache"]["fields"]["stacks"]
  said["cache"]["class"] = "kvjax.cache.cache:Cache"
  stacks[0]["class"] = "kvjax.cache.layers:LayerCache"
  stacks[1]["class"] = "kvjax.moved.since:LayerCache"
  said["checksum"] = zlib.crc32(json.dumps(said).encode())
  path.write_text(json.dumps(said))
  assert_same_bits(load(tmp_path), cache)


def test_the_classes_of_kvjax_have_names_of_their_own():
  """Names in files have no module, so that classes may move."""
  made = [recipe_of(made).method for made in METHODS.all_made()]
  made += RETRIEVALS.all_made()
  known = {*STRUCTS.values(), *saved_trees._PARTS, *map(type, made)}
  own = [cls for cls in known if cls.__module__.startswith("kvjax.")]
  assert len({cls.__qualname__ for cls in own}) == len(own) > 60
  with pytest.raises(TypeError, match=r"kvjax\.prompts has a struct Prompts"):
    struct(type("Prompts", (), {"__module__": "kvjax.elsewhere"}))


@dataclasses.dataclass(frozen=True)
class Newest(HeadwiseMethod):
  """A method that has no name."""

  def score_head(self, head):
    return head.positions.astype("float32")


def test_a_method_without_a_name_is_refused(tmp_path, monkeypatch):
  plan = kvjax.Plan(Newest(), kvjax.Tokens(9), schedule=kvjax.Schedule(every=1))
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), kvjax.Prompts.of(ROWS), plan)
  with pytest.raises(InputError, match="A value of class Newest cannot be"):
    save(cache, tmp_path)
  assert not list(tmp_path.iterdir())
  monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
  kvjax.register("newest", Newest)
  save(cache, tmp_path)
  assert_same_bits(load(tmp_path), cache)


def test_a_method_with_other_fields_is_refused():
  fields = {"anchor": "mean_raw", "power": 2}
  saved = {"class": "KeyDiff", "fields": fields}
  with pytest.raises(InputError, match="a KeyDiff with other fields than are"):
    saved_trees.restore(saved, {})
