"""Two hosts save weights and caches, which one host reads."""

import contextlib
import pathlib
import time

import jax
import numpy as np
import pytest
from two_hosts import call

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.checkpoint import saving
from kvjax.errors import InputError
from kvjax.models import saving as model_saving
from kvjax.models.pretrained import load
from kvjax.models.saving import FORMATS, save

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


@contextlib.contextmanager
def at_last(module, name, act):
  """Does something before what the first host does when arrays are written."""
  original = getattr(module, name)

  def instead(*arguments):
    act()
    return original(*arguments)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, name, instead)
    yield


def wait():
  time.sleep(2)


def fail():
  raise OSError(28, "No space left on device")


def save_on_host(folder):
  """Runs on each of two hosts; returns what is refused."""
  place = pathlib.Path(folder)
  mesh = parse_mesh("data:2,model:2")
  lm = load(MODEL, "float32", mesh)
  tiny = {"model": lm.model, "model_id": "tiny"}
  refused = {}
  with jax.set_mesh(mesh):
    spread = place / "there" / ".." / "spread"
    with at_last(model_saving, "_describe", wait):
      save(lm, spread, format="orbax")
    equal(load(spread, "float32", mesh).params, lm.params)
    cache = compressed(lm)
    with at_last(saving, "_describe", wait):
      kvjax.save_cache(cache, place / "cache", **tiny)
    equal(kvjax.load_cache(place / "cache", **tiny), cache)
    # Only the other host has the folder.
    for host in range(2):
      there = jax.process_index() != host
      path = place / ("cache" if there else "nowhere")
      refused[f"not on {host}"] = refusal(kvjax.load_cache, path, **tiny)
    for format in FORMATS:
      refused[format] = refusal(save, lm, place / "file", format=format)
      with at_last(model_saving, "_describe", fail):
        late = place / f"late_{format}"
        refused[f"late {format}"] = refusal(save, lm, late, format=format)
    refused["cache"] = refusal(kvjax.save_cache, cache, place / "file", **tiny)
    with at_last(saving, "_describe", fail):
      refused["late cache"] = refusal(
        kvjax.save_cache, cache, place / "late_cache", **tiny
      )
  own = load(MODEL, "float32")
  save(own, place / "own", format="orbax")
  refused["own"] = refusal(
    kvjax.save_cache, compressed(own), place / "other", **tiny
  )
  return refused


def equal(one, other):
  for x, y in zip(
    *map(jax.tree.leaves, kvjax.hosts.read((one, other))), strict=True
  ):
    np.testing.assert_array_equal(x, y)


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


@pytest.mark.parametrize("what", [*FORMATS, "cache"])
def test_all_hosts_hear_that_the_first_one_cannot_write(saved, what):
  folder, (first, second) = saved
  thing = "cache" if what == "cache" else "model"
  unwritten = f"The {thing} cannot be written to {folder}"
  elsewhere = "the first host cannot write there."
  in_file = f"{unwritten}/file: File exists."
  if what == "cache":
    in_file = f"{folder}/file is a file; give a directory."
  assert first[what] == in_file
  assert second[what] == f"{unwritten}/file: {elsewhere}"
  late = f"{unwritten}/late_{what}: "
  assert first[f"late {what}"] == f"{late}No space left on device."
  assert second[f"late {what}"] == late + elsewhere
  assert (folder / "file").stat().st_size == 0
  assert not list((folder / f"late_{what}").iterdir())


def test_a_cache_of_a_host_of_its_own_is_refused(saved):
  folder, refused = saved
  for each in refused:
    assert each["own"].startswith("Of a program on several hosts, only caches")
  assert not (folder / "other").exists()


@pytest.mark.parametrize("host", range(2))
def test_no_host_waits_for_one_that_cannot_read(saved, host):
  folder, refused = saved
  own, other = (refused[each][f"not on {host}"] for each in (host, 1 - host))
  assert own.startswith(f"There is no {folder}/nowhere; give a directory")
  assert other == f"On host {host}: {own}"


def test_nothing_else_is_left(saved):
  folder, _ = saved
  names = {path.name for path in folder.iterdir()}
  late = {f"late_{what}" for what in (*FORMATS, "cache")}
  assert names == {"there", "file", "spread", "own", "cache", *late}
  assert len(list((folder / "cache").iterdir())) == 2
