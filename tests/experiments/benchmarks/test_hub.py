"""Data sets of the hub: found in the user's cache, or refused in a sentence."""

import json
import os
import subprocess
import sys
import types

import huggingface_hub.constants
import pytest

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.ruler import published
from kvjax.experiments.run.digests import data_name
from kvjax.experiments.run.results import Part

REVISION = "0123456789abcdef0123456789abcdef01234567"
ROW = {
  "context": "The number is 7.",
  "question": "Which?",
  "answer_prefix": "It is",
  "answer": ["7"],
  "task": "niah_single_1",
  "max_new_tokens": 8,
}


@pytest.fixture
def cache(monkeypatch, tmp_path):
  """The hub's cache of a user without a network."""
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
  hub._download.cache_clear()
  yield tmp_path
  hub._download.cache_clear()


def keep(cache, owner, name):
  """As the hub's library leaves a data set."""
  folder = cache / f"datasets--{owner}--{name}"
  (folder / "refs").mkdir(parents=True)
  (folder / "refs" / "main").write_text(REVISION)
  files = folder / "snapshots" / REVISION / "4096"
  files.mkdir(parents=True)
  (files / "test.jsonl").write_text(json.dumps(ROW))
  return files.parent


def test_a_set_in_the_cache_is_read_without_a_network(cache):
  kept = keep(cache, "someone", "ruler")
  path = hub.resolve("someone/ruler")
  assert path == kept
  found = published.load(path)
  assert list(found) == [Part("niah_single_1", 4096)]
  assert found["niah_single_1", 4096][0].answers == ("7",)
  assert data_name(path) == "someone/ruler (revision 0123456789ab)"


def test_a_revision_may_follow_the_name(cache):
  kept = keep(cache, "someone", "ruler")
  (kept.parents[1] / "refs" / "main").rename(kept.parents[1] / "refs" / "v2")
  for revision in ("v2", REVISION):
    path = hub.resolve(f"someone/ruler@{revision}")
    assert path == kept
    assert data_name(path) == "someone/ruler (revision 0123456789ab)"
  with pytest.raises(InputError, match="someone/ruler, and the Hugging Face"):
    hub.resolve("someone/ruler")


def test_what_is_on_disk_goes_before_the_hub(cache, monkeypatch, tmp_path):
  keep(cache, "someone", "ruler")
  folder = tmp_path / "work"
  (folder / "someone" / "ruler").mkdir(parents=True)
  monkeypatch.chdir(folder)
  assert not hub.resolve("someone/ruler").is_absolute()
  assert hub.name_of(hub.resolve("someone/ruler")) is None


@pytest.mark.parametrize(
  "name",
  ["nothing", "/no/where", "a/b/c", "no/x.y/", "a/b@", "a/b@/c", "a@b/c"],
)
def test_what_no_set_can_be_called_is_a_path(cache, name):
  with pytest.raises(InputError) as caught:
    hub.resolve(name)
  assert str(caught.value) == f"There is no file or folder {name}."


def test_a_hub_that_cannot_be_reached_gets_one_sentence(cache):
  with pytest.raises(InputError) as caught:
    hub.resolve("someone/else")
  assert str(caught.value) == (
    "There is no file or folder someone/else, and the Hugging Face hub cannot "
    "be reached for a data set of that name."
  )


def test_a_fresh_process_reads_a_set_in_the_cache(tmp_path):
  """Where nothing has yet loaded the modules of the hub's library."""
  kept = keep(tmp_path, "someone", "ruler")
  program = (
    "from kvjax.experiments.benchmarks import hub\n"
    "print(hub.resolve('someone/ruler'))\n"
  )
  offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | offline,
    capture_output=True,
    text=True,
  )
  assert done.stdout.strip() == str(kept), done.stderr


@pytest.mark.parametrize(
  ("name", "error", "said"),
  [
    ("someone/squad", "RepositoryNotFoundError", "of that name."),
    ("someone/squad@v2", "RevisionNotFoundError", "of that name and revision."),
  ],
)
def test_a_set_that_the_hub_does_not_have_gets_one_sentence(
  name, error, said, cache, monkeypatch
):
  asked = {}

  def refuse(name, **rest):
    asked[name] = rest
    response = types.SimpleNamespace(headers={}, request=None)
    raise getattr(huggingface_hub.errors, error)("no", response=response)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
  with pytest.raises(InputError) as caught:
    hub.resolve(name, "*validation*")
  assert str(caught.value) == (
    f"There is no file or folder {name}, and the Hugging Face hub gives no "
    f"data set {said}"
  )
  revision = name.partition("@")[2] or None
  assert asked["someone/squad"]["revision"] == revision
  assert asked["someone/squad"]["repo_type"] == "dataset"
  assert "*validation*.parquet" in asked["someone/squad"]["allow_patterns"]
