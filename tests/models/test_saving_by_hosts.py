"""Two hosts save weights and caches, which one host reads."""

import pathlib

import jax
import numpy as np
import pytest
from two_hosts import call

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models.pretrained import load, save

MODEL = (
  pathlib.Path(__file__).parents[1] / "golden" / "transformers" / "llama31"
)
ROWS = [[5, 6, 7, 8] * 8, [9, 10, 11] * 5]


def compressed(lm):
  plan = kvjax.get_plan("keydiff", kvjax.Retention(0.5))
  prompts = kvjax.Prompts.of(ROWS)
  return kvjax.prefill(lm.model, lm.params, prompts, plan)[0]


def refusal(save_it, *arguments, **options):
  try:
    save_it(*arguments, **options)
  except InputError as error:
    return str(error)
  return None


def save_on_host(folder):
  """Runs on each of two hosts; returns what is refused."""
  place = pathlib.Path(folder)
  mesh = parse_mesh("data:2,model:2")
  lm = load(MODEL, "float32", mesh)
  tiny = {"model": lm.model, "model_id": "tiny"}
  refused = {}
  with jax.set_mesh(mesh):
    save(lm, place / "there" / ".." / "spread", format="orbax")
    refused["weights"] = refusal(save, lm, place / "file", format="orbax")
    cache = compressed(lm)
    kvjax.save_cache(cache, place / "cache", **tiny)
    refused["cache"] = refusal(kvjax.save_cache, cache, place / "file", **tiny)
    again = kvjax.load_cache(place / "cache", **tiny)
    for one, other in zip(
      *map(jax.tree.leaves, kvjax.hosts.read((cache, again))), strict=True
    ):
      np.testing.assert_array_equal(one, other)
  own = load(MODEL, "float32")
  save(own, place / "own", format="orbax")
  refused["own"] = refusal(
    kvjax.save_cache, compressed(own), place / "other", **tiny
  )
  return refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp("saved")
  (folder / "there").mkdir()
  (folder / "file").touch()
  return folder, call(save_on_host, str(folder))


@pytest.mark.parametrize("name", ["spread", "own"])
def test_weights_are_those_that_were_loaded(saved, name):
  folder, _ = saved
  read, expected = load(folder / name, "float32"), load(MODEL, "float32")
  for one, other in zip(
    *map(jax.tree.leaves, (read.params, expected.params)), strict=True
  ):
    np.testing.assert_array_equal(one, other)
  assert read.config == expected.config


def test_a_cache_is_that_of_one_device(saved):
  folder, _ = saved
  lm = load(MODEL, "float32")
  read = kvjax.load_cache(folder / "cache", model=lm.model, model_id="tiny")
  expected = compressed(lm)
  assert jax.tree.structure(read) == jax.tree.structure(expected)
  for one, other in zip(*map(jax.tree.leaves, (read, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_hosts_do_not_wait_for_one_that_cannot_write(saved):
  folder, (first, second) = saved
  file = folder / "file"
  assert first["weights"].startswith(f"The model cannot be written to {file}")
  assert second["weights"] is None
  assert first["cache"] == f"{file} is a file; give a directory."
  assert second["cache"] == f"The first host cannot save the cache to {file}."
  assert file.stat().st_size == 0


def test_a_cache_of_a_host_of_its_own_is_refused(saved):
  folder, refused = saved
  for each in refused:
    assert each["own"].startswith("Of a program on several hosts, only caches")
  assert not (folder / "other").exists()


def test_nothing_else_is_left(saved):
  folder, _ = saved
  names = {path.name for path in folder.iterdir()}
  assert names == {"there", "file", "spread", "own", "cache"}
  assert len(list((folder / "cache").iterdir())) == 2
