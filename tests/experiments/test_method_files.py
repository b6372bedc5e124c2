"""Files that options of methods name, replaced by others at the same paths."""

import json
import shutil

import pytest
import safetensors.numpy
from made_up_gates import write_fast_kvzip, write_kvzap
from made_up_statistics import made_up_statistics
from memory_store import empty_store

import kvjax
from kvjax import addresses
from kvjax.experiments.run.candidates import candidates

SIZES = (32, 2, 2)


def gate(folder):
  write_kvzap(folder / "gate", *SIZES)
  return folder / "gate", folder / "gate" / "model.safetensors"


def config(folder):
  return gate(folder)[0], folder / "gate" / "config.json"


def fast(folder):
  (folder / "fast").mkdir()
  file = folder / "fast" / "gate.pt"
  write_fast_kvzip(file, *SIZES)
  return folder / "fast", file


def queries(folder):
  file = folder / "queries.safetensors"
  shutil.copy(made_up_statistics(4, 2, 8, 2), file)
  return file, file


def pattern(folder):
  file = folder / "pattern.tsv"
  file.write_text("0.1\t0.9\n0.4\t0.2\n")
  return file, file


def change(file):
  """Writes something else, where it was, in as many bytes."""
  if file.suffix == ".pt":
    write_fast_kvzip(file, *SIZES, seed=1)
  elif file.suffix == ".safetensors":
    arrays = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({k: -v for k, v in arrays.items()}, file)
  else:
    text = file.read_text().replace("0.1\t", "0.3\t")
    file.write_text(text.replace("4.57", "4.58"))


def options(name):
  return candidates([name], [kvjax.Retention(0.5)])[1].options


@pytest.mark.parametrize(
  ("name", "write"),
  [
    ("kvzap:gate={}", gate),
    ("kvzap:gate={}", config),
    ("ada/kvzap:level=head:gate={}", gate),
    ("fast_kvzip:gate={}", fast),
    ("expected_attention:statistics={}", queries),
    ("triattention:statistics={}", queries),
    ("rerotate/qfilters:filters={}", queries),
    ("duoattention:pattern={}", pattern),
  ],
)
def test_answers_with_another_file_are_others(name, write, tmp_path):
  path, file = write(tmp_path)
  before = file.read_bytes()
  first = options(name.format(path))
  # What programs write beside it is nothing that a method reads.
  (tmp_path / "run.json").write_text("{}")
  (file.parent / "summary.json").write_text("{}")
  assert options(name.format(path)) == first
  change(file)
  assert len(file.read_bytes()) == len(before)
  assert options(name.format(path)) != first
  file.write_bytes(before)
  assert options(name.format(path)) == first


def test_no_file_is_named_where_none_is():
  for name in ("keydiff", "qfilters", "duoattention", "snapkv"):
    assert " of " not in options(name)


def test_evictions_while_decoding_name_their_files_too(tmp_path):
  path, file = gate(tmp_path)

  def found():
    later = kvjax.get_plan(
      f"kvzap:level=head:gate={path}", 64, schedule=kvjax.Schedule(every=16)
    )
    half = kvjax.Retention(0.5)
    return candidates(["keydiff"], [half], decoding=later)[1].options

  first = found()
  change(file)
  assert found() != first


def test_answers_with_another_file_at_an_address_are_others(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  store = empty_store(monkeypatch)
  path, file = gate(tmp_path)

  def found():
    # Programs fetch once.
    addresses._fetched.cache_clear()
    store.put(str(path), "/bucket/", recursive=True)
    return options("kvzap:gate=memory://bucket/gate")

  first = found()
  # As another host has it.
  digest = first.rpartition(" of ")[2]
  assert options(f"kvzap:gate={path}").endswith(f" of {digest}")
  change(file)
  assert found() != first
  addresses._fetched.cache_clear()


@pytest.mark.slow
def test_a_table_has_the_answers_with_one_file(
  run_binary, tiny_directory, tmp_path
):
  path, file = gate(tmp_path)
  folder = tmp_path / "out"

  def run(samples):
    done = run_binary(
      "kvjax.experiments.compare",
      *(f"--model={tiny_directory}", "--length=256", "--tasks=niah_single_1"),
      *(f"--samples={samples}", "--retention=0.5", f"--output={folder}"),
      *(f"--methods=kvzap:gate={path}", "--batch=2"),
    )
    assert done.returncode == 0, done.stderr
    _, row = json.loads((folder / "summary.json").read_text())["rows"]
    return done.stdout, row

  said, first = run(2)
  assert "4 answers in" in said
  assert "0 answers in" in run(2)[0]
  change(file)
  said, second = run(1)
  # Of the full cache, there are two from before.
  assert "1 answer in" in said
  assert second["options"] != first["options"]
  assert (first["samples"], second["samples"]) == (2, 1)
