"""Programs that make experiments are called as they want to be called."""

import json
import re
import shlex

import pytest
import rich.console

from kvjax.experiments.papers import execution, programs
from kvjax.experiments.papers.data_model import Experiment, Program
from kvjax.experiments.papers.registry import EXPERIMENTS

FIRST = Program(
  "first", "nowhere", ["--x={folder}/y"], {"model": "model", "essay": "text"}
)
SECOND = Program("second", "elsewhere", takes={"data": "data"}, needs=("data",))
THIRD = Program(
  "third",
  "wherever",
  ["--tau={tau}"],
  paper=["--length=4096"],
  small=["--samples=6"],
  unless=("essay", "data"),
)
OWN = Experiment(
  *("E9.9", "A paper", "nothing", "A model", "LongBench", "needles", 1),
  (FIRST, SECOND, THIRD),
  ("Ours is best.",),
)


def called(monkeypatch, codes):
  """Calls are noted, and come to these codes."""
  lines = []

  def run(module, arguments):
    lines.append([module, *arguments])
    return codes.pop(0), ""

  monkeypatch.setattr(execution.children, "run", run)
  return lines


def test_the_users_flags_are_passed_on_under_their_names_there(
  tmp_path, monkeypatch
):
  lines = called(monkeypatch, [0, 0])
  console = rich.console.Console(width=200, record=True)
  given = {"model": "dir", "essay": "a.txt", "data": "b.zip", "seed": "3"}
  execution.call(OWN, "dir", given, tmp_path, console)
  first = [f"--output={tmp_path}/first", f"--x={tmp_path}/y", "--model=dir"]
  second = [f"--output={tmp_path}/second", "--data=b.zip"]
  assert lines == [
    ["kvjax.experiments.nowhere", *first, "--text=a.txt"],
    ["kvjax.experiments.elsewhere", *second],
  ]
  text = (tmp_path / "paper.md").read_text()
  assert "dir. The paper ran A model and used LongBench; numbers may " in text
  assert "python -m kvjax.experiments.elsewhere --output=" in text
  assert "The paper: Ours is best." in text


def test_what_needs_a_flag_or_its_absence_is_left_out(tmp_path, monkeypatch):
  lines = called(monkeypatch, [0, 0])
  quiet = rich.console.Console(quiet=True)
  execution.call(OWN, "ref", {}, tmp_path, quiet)
  modules = [line[0] for line in lines]
  assert modules == ["kvjax.experiments.nowhere", "kvjax.experiments.wherever"]
  assert (
    "ref on generated data: not the paper's model; its numbers are not"
    in (tmp_path / "paper.md").read_text()
  )


@pytest.mark.parametrize(
  ("given", "flags"),
  [
    ({}, ["--tau=0.95", "--samples=6"]),
    ({"model": "Llama-3.1-8B"}, ["--tau=0.95", "--length=4096"]),
    ({"model": "Qwen2.5-14B"}, ["--tau=0.9", "--length=4096"]),
  ],
)
def test_a_model_of_the_users_brings_the_papers_scale(tmp_path, given, flags):
  assert programs.command(THIRD, tmp_path, given)[2:] == flags


def test_a_model_is_of_a_kind_by_its_config_or_else_its_name(tmp_path):
  folder = tmp_path / "qwen-and-others"
  llama, own = folder / "Llama-3.1-8B", folder / "my-own"
  hub = folder / "models--Qwen--Qwen2.5-7B" / "snapshots" / "0a1b2c"
  for directory in (llama, own, hub):
    directory.mkdir(parents=True)
  assert programs.tau_of(str(llama)) == 0.95
  assert programs.tau_of(str(hub)) == 0.9
  for kind, tau in (("qwen2", 0.9), ("llama", 0.95)):
    (own / "config.json").write_text(json.dumps({"model_type": kind}))
    assert programs.tau_of(str(own)) == tau


@pytest.mark.parametrize("name", ["E3.6", "E3.7"])
def test_words_reach_all_programs_that_draw_samples(tmp_path, name):
  lines = commands(name, tmp_path, words="wonderwords")
  *_, calibration, evaluation = lines
  assert modules([calibration, evaluation]) == ["calibrate", "evaluate"]
  assert "--words=wonderwords" in calibration
  assert "--words=wonderwords" in evaluation


def commands(name, tmp_path, **given):
  chosen = programs.chosen(EXPERIMENTS[name].programs, given)
  return [programs.command(program, tmp_path, given) for program in chosen]


def modules(lines):
  return [line[0].rpartition(".")[2] for line in lines]


def test_documents_are_those_of_longbench_if_they_are_given(tmp_path):
  given = {"model": "Qwen2.5", "data": "b.zip", "tau": "0.8"}
  zero_shot = commands("E3.6", tmp_path, **given)
  assert modules(zero_shot) == ["calibrate", "evaluate"]
  assert any(flag.endswith("qa_1,qa_2") for flag in zero_shot[0])
  assert "--benchmark=longbench" in zero_shot[1]
  assert [f for f in zero_shot[1] if "--tau" in f] == ["--tau=0.8"]
  trials = commands("E3.6", tmp_path, trials="True", seed="3", **given)[-1]
  assert trials[:4] == [
    "kvjax.experiments.trials",
    f"--output={tmp_path}/trials",
    "--trials=20",
    "--",
  ]
  assert "--data=b.zip" in trials[4:]
  assert "--seed=3" not in trials
  tuned = commands("E3.7", tmp_path, **given)
  assert modules(tuned) == ["finetune", "calibrate", "evaluate"]
  assert "--data=b.zip" in tuned[0]
  assert {"--benchmark=longbench", f"--model={tmp_path}/tuned"} < {*tuned[2]}
  assert not any("reports" in flag for line in tuned for flag in line)


def test_documents_are_reports_otherwise(tmp_path):
  tasks = commands("E3.6", tmp_path)[1:]
  assert all("--model=reference" in line for line in tasks)
  expected = ["generate_documents", "calibrate", "evaluate"]
  assert modules(commands("E3.6", tmp_path)) == expected
  tuned = commands("E3.7", tmp_path)
  assert modules(tuned) == ["generate_documents", "finetune", *expected[1:]]
  (curves,) = commands("E3.5", tmp_path, tasks="vt,cwe")
  assert "--tasks=vt,cwe" in curves
  assert "--length=4096" not in curves


def test_a_program_that_fails_ends_it_all(tmp_path, monkeypatch):
  lines = called(monkeypatch, [5, 0])
  with pytest.raises(SystemExit, match="5"):
    execution.call(
      OWN, "ref", {"data": "x"}, tmp_path, rich.console.Console(quiet=True)
    )
  assert len(lines) == 1
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_programs_know_the_flags_that_they_are_called_with(
  run_binary, tmp_path
):
  every = [p for e in EXPERIMENTS.values() for p in e.programs]
  for module in {program.module for program in every}:
    told = run_binary(f"kvjax.experiments.{module}", "--help")
    known = set(re.findall(r"^  --(?:\[no\])?(\w+)", told.stdout, re.MULTILINE))
    for program in every:
      given = dict.fromkeys(program.takes, "1")
      if program.module == module:
        for flag in programs.command(program, tmp_path, given)[1:]:
          if flag == "--":
            break  # The rest are flags of evaluate, as those of E3.6.
          assert flag[2:].partition("=")[0] in known, (module, flag)


@pytest.mark.parametrize(
  ("name", "of"),
  [
    ("E3.5", ["calibrate"]),
    # The others read what these write.
    ("E3.6", ["calibrate"]),
    ("E3.7", []),
    ("E4.6", []),
  ],
)
def test_a_dry_run_says_which_programs_would_run_and_what_they_cost(
  name, of, tmp_path, monkeypatch
):
  ran = called(monkeypatch, [0] * len(of))
  experiment = EXPERIMENTS[name]
  # Commands are longer than this, and have no breaks.
  console = rich.console.Console(width=60, record=True)
  execution.foresee_call(experiment, {"length": "64"}, tmp_path, console)
  text = console.export_text()
  assert f"about {experiment.minutes} minutes on two cores" in text
  told = re.findall(r"It would run python -m (.*\S)", text)
  assert len(told) == len(programs.chosen(experiment.programs, {}))
  assert [line[0] for line in ran] == [f"kvjax.experiments.{m}" for m in of]
  for line in ran:
    assert line[-1] == "--dry_run"
    assert shlex.join(line[:-1]) in told
  assert not list(tmp_path.iterdir())


def test_flags_of_the_user_replace_those_of_the_experiment(tmp_path):
  given = {"model": "mine", "length": "64", "tau": "0.8"}
  (curves,) = EXPERIMENTS["E3.5"].programs
  flags = programs.command(curves, tmp_path, given)
  for name, value in given.items():
    assert [f for f in flags if f.startswith(f"--{name}=")] == [
      f"--{name}={value}"
    ]
