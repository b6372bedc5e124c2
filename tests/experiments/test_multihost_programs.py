"""Two hosts run programs as one does, on meshes and without."""

import json
import os
import signal
import time

import numpy as np
import pytest
from made_up_gates import write_kvzap
from safetensors.numpy import load_file
from two_hosts import start

WORDS = "the file has been read and so have others near a cellar door".split()
# Of both hosts, of each host, and none.
MESHES = ("data:4", "data:2,model:2", "model:2", pytest.param("", id="no mesh"))
NEEDLES = ("--length=320", "--tasks=niah_single_1", "--samples=4")
RULER = ("--benchmark=ruler", *NEEDLES)
PLANS = {
  "whole model": (*RULER, "--methods=kvzip,simlayerkv", "--retention=0.5"),
  "retrieval": (*RULER, "--methods=ctkvr", "--budget=64"),
  "evicting": (*RULER, "--methods=keydiff", "--budget=64", "--every=4"),
  "two methods": (
    *(*RULER, "--methods=snapkv", "--retention=0.5", "--every=4"),
    "--decoding=keydiff@64",
  ),
  "threshold": (*RULER, "--methods=kvzap:gate=GATE", "--threshold=-1,1"),
}


# The contexts' likelihoods lie within 1 %, so that a fit to them amplifies the
# rounding of what was measured a hundred times.
FITTED = ("alpha", "beta")


def close(ours, theirs, rel=1e-4):
  """Whether JSON is equal up to the rounding of sums in another order."""
  if isinstance(theirs, dict):
    return ours.keys() == theirs.keys() and all(
      close(ours[key], theirs[key], 1e-3 if key in FITTED else rel)
      for key in theirs
    )
  if isinstance(theirs, list):
    return len(ours) == len(theirs) and all(map(close, ours, theirs))
  if isinstance(theirs, float):
    return ours == pytest.approx(theirs, rel=rel, abs=1e-4)
  return ours == theirs


def read(path):
  """Reads a record, or a record in each line."""
  text = path.read_text()
  if path.suffix == ".json":
    return json.loads(text)
  return [json.loads(line) for line in text.splitlines()]


def answers(output):
  """Answers without sizes, as devices have whole pages of packed layers."""
  (path,) = output.glob("**/samples.jsonl")
  lines = read(path)
  found = {
    tuple(line[name] for name in ("task", "sample", "method", "budget")): {
      name: value for name, value in line.items() if "bytes" not in name
    }
    for line in lines
  }
  assert len(found) == len(lines)
  return found


@pytest.fixture
def run_both(run_binary, tiny_directory, tmp_path, port):
  """Runs a program on one host and on two; returns the folders of both."""

  def run(program, *given, mesh, batched=True):
    given = (*given, f"--model={tiny_directory}")
    if batched:
      # Without a mesh, hosts take turns in batches.
      batch = 4 if ":4" in mesh or "," in mesh else 1
      given = (*given, f"--batch={batch}")
    one, two = tmp_path / "one", tmp_path / "two"
    flags = [f"--mesh={mesh}"] if mesh else []
    both = [
      start(*given, *flags, host=h, port=port, output=two, program=program)
      for h in range(2)
    ]
    try:
      ended = [process.communicate(timeout=600) for process in both]
    finally:
      for process in both:
        process.kill()
    assert [process.returncode for process in both] == [0, 0], ended
    # The first one alone prints.
    assert [bool(output) for output, _ in ended] == [True, False]
    alone = run_binary(
      f"kvjax.experiments.{program}", f"--output={one}", *given
    )
    assert alone.returncode == 0, alone.stderr
    return one, two

  return run


@pytest.mark.parametrize("mesh", MESHES)
def test_two_hosts_compare_as_one(run_both, mesh):
  plans = ("--methods=full,keydiff,ada/snapkv", "--retention=0.5")
  one, two = run_both("compare", *NEEDLES, *plans, mesh=mesh)
  assert answers(two) == answers(one)
  assert len(answers(one)) == 12
  names = {path.name for path in one.iterdir()}
  assert {path.name for path in two.iterdir()} == names


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,model:2", ""])
@pytest.mark.parametrize("plans", PLANS)
def test_two_hosts_evaluate_all_kinds_of_plans_as_one(
  run_both, tmp_path, plans, mesh
):
  gate = write_kvzap(tmp_path / "gate", 32, 2, 2, score_range=[-99, 99])
  given = [flag.replace("GATE", gate) for flag in PLANS[plans]]
  one, two = run_both("evaluate", *given, mesh=mesh)
  assert answers(two) == answers(one)
  assert len(answers(one)) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:4", "model:2"])
def test_two_hosts_evaluate_as_one_on_other_meshes(run_both, mesh):
  plans = ("--methods=full,keydiff,ada/snapkv,quest", "--retention=0.5")
  one, two = run_both("evaluate", *RULER, *plans, mesh=mesh)
  assert answers(two) == answers(one)
  (summary,) = two.glob("*/summary.json")
  device = json.loads(summary.read_text())["device"]
  # Each host has a mesh of its own if both of its devices suffice.
  devices = 2 if mesh == "model:2" else 4
  assert f"{devices} x CPU" in device


@pytest.mark.parametrize("mesh", MESHES)
def test_two_hosts_calibrate_as_one(run_both, mesh):
  one, two = run_both(
    *("calibrate", *NEEDLES, "--methods=keydiff,snapkv"),
    *("--retention=0.3,0.6", "--others=1", "--held_out=1"),
    mesh=mesh,
  )
  written = sorted(path.name for path in one.glob("records/*"))
  assert len(written) == 2
  for name in (
    *("triples.jsonl", "others.jsonl", "held_out.jsonl"),
    *(f"records/{name}" for name in written),
  ):
    if mesh:
      assert close(read(two / name), read(one / name))
    else:
      assert (two / name).read_text() == (one / name).read_text()


# What each program is told besides, and the file of its lines.
OF_PROGRAMS = {
  "compare": (("--methods=full,keydiff", "--retention=0.5"), "samples.jsonl"),
  "calibrate": (
    ("--methods=keydiff", "--retention=0.3,0.6", "--others=1", "--held_out=1"),
    "triples.jsonl",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", OF_PROGRAMS)
def test_a_run_that_has_lost_a_host_ends_as_that_of_one(
  run_binary, tiny_directory, tmp_path, port, program
):
  flags, file = OF_PROGRAMS[program]
  needles = ("--length=320", "--tasks=niah_single_1", "--samples=24")
  given = (f"--model={tiny_directory}", "--batch=1", *needles, *flags)
  one, two = tmp_path / "one", tmp_path / "two"

  def start_both():
    return [
      start(*given, host=h, port=port, output=two, program=program)
      for h in range(2)
    ]

  both = start_both()
  while not (two / file).is_file():
    time.sleep(0.01)
    assert both[0].poll() is None, both[0].communicate()
  os.kill(both[1].pid, signal.SIGKILL)
  _, said = both[0].communicate(timeout=300)
  both[1].communicate()
  assert both[0].returncode == 143, said
  before = read(two / file)
  both = start_both()
  ended = [process.communicate(timeout=300) for process in both]
  assert [process.returncode for process in both] == [0, 0], ended
  after = read(two / file)
  assert after[: len(before)] == before
  alone = run_binary(f"kvjax.experiments.{program}", f"--output={one}", *given)
  assert alone.returncode == 0, alone.stderr
  assert 0 < len(before) < len(after)
  if program == "compare":
    assert answers(two) == answers(one)
  else:
    assert after == read(one / file)


@pytest.fixture
def texts(tmp_path):
  """Documents of words that the tiny model knows."""
  folder = tmp_path / "texts"
  folder.mkdir()
  for number in range(3):
    words = np.random.default_rng(number).choice(WORDS, 200)
    (folder / f"{number}.txt").write_text(" ".join(words))
  return f"--documents={folder}"


@pytest.mark.parametrize("mesh", ["model:4", "data:2,model:2", ""])
def test_two_hosts_train_a_gate_as_one(run_both, texts, mesh):
  one, two = run_both(
    *("train_gate", texts, "--length=60", "--samples=5", "--kind=linear"),
    mesh=mesh,
    batched=False,
  )
  ours, theirs = (load_file(path / "model.safetensors") for path in (two, one))
  assert ours.keys() == theirs.keys()
  for name, array in theirs.items():
    # Without a mesh, each text is replayed by a host as it is by one alone.
    off = 1e-5 if mesh else 0
    np.testing.assert_allclose(ours[name], array, rtol=0, atol=off)
  ours, theirs = (read(path / "validation.json") for path in (two, one))
  assert close(ours["r2"], theirs["r2"])
  assert {path.name for path in two.iterdir()} == {
    path.name for path in one.iterdir()
  }


@pytest.mark.parametrize("mesh", ["model:4", "data:2,model:2", ""])
def test_two_hosts_measure_queries_as_one(run_both, texts, mesh):
  one, two = run_both(
    "calibrate_queries", texts, "--length=60", mesh=mesh, batched=False
  )
  ours, theirs = load_file(two), load_file(one)
  assert ours.keys() == theirs.keys()
  for name, array in theirs.items():
    np.testing.assert_allclose(ours[name], array, rtol=0, atol=3e-5)


@pytest.mark.slow
def test_two_hosts_run_trials_as_one(run_both):
  plans = ("--methods=full,keydiff", "--retention=0.5", "--samples=2")
  one, two = run_both("trials", "--trials=2", "--", *RULER, *plans, mesh="")
  for trial in ("seed_0", "seed_1"):
    assert answers(two / trial) == answers(one / trial)
    assert len(answers(one / trial)) == 4
  for name in ("trials.json", "trials.md"):
    assert (two / name).read_text() == (one / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,model:2", ""])
def test_two_hosts_measure_recall_as_one(run_both, mesh):
  one, two = run_both(
    *("retrieval_recall", *NEEDLES, "--methods=flat,ctkvr:probes=1"),
    *("--budget=20", "--steps=2"),
    mesh=mesh,
  )
  ours, theirs = (read(path / "summary.json") for path in (two, one))
  device = theirs.pop("device")
  # Without a mesh, each has measured two of the four prompts.
  alike = f"4 x {device} on 2 hosts" if mesh else f"2 hosts with {device}"
  assert ours.pop("device") == alike
  assert close(ours, theirs)
  flat, ctkvr = theirs["rows"]
  assert flat["recall"] == 1.0 > ctkvr["recall"] > 0


@pytest.mark.slow
def test_two_hosts_reproduce_experiments_as_one(run_both):
  """One that compares methods, and one that looks into the model."""
  ids = ("E1.4", "E2.8")
  flags = ("--length=320", "--samples=2", "--tasks=niah_single_2")
  one, two = run_both("reproduce", *ids, *flags, mesh="")
  assert answers(two) == answers(one)
  # Each host has answered one of the two contexts with every method.
  assert len(answers(one)) == 6
  for name in ids:
    ours, theirs = (
      read(path / name / "tiny" / "paper.json") for path in (two, one)
    )
    assert close(ours, theirs)
  names = {path.relative_to(one) for path in one.rglob("*")}
  assert {path.relative_to(two) for path in two.rglob("*")} == names


@pytest.mark.slow
def test_what_hosts_cannot_reproduce_is_refused_once(
  tiny_directory, tmp_path, port
):
  for given, sentence in (
    (["E3.6"], "E3.6 runs other programs, which would need the devices"),
    (["E2.8", "--mesh=data:4"], "E2.8 measures on one host's devices; leave"),
  ):
    both = [
      start(
        *(*given, f"--model={tiny_directory}"),
        **{"host": h, "port": port, "output": tmp_path, "program": "reproduce"},
      )
      for h in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [2, 2], said
    assert sentence in said[0]
    assert sentence not in said[1]


def test_flags_of_hosts_go_before_those_of_trials(refusal, tmp_path):
  told = refusal(
    *("kvjax.experiments.trials", f"--output={tmp_path}"), "--", "--multihost"
  )
  assert "--multihost does not go after --: the trials and this program" in told
