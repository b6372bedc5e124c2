"""Flags, models and signals of any kind get one sentence, or no traceback."""

import gc
import os
import pathlib
import re
import signal
import sys
import time
import types

import pytest
from absl import app, flags
from odd_files import ODD, refused, replace

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.experiments import cli, exits
from kvjax.experiments.inputs import run_inputs


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "'' does not fit"),
    (",", "'' does not fit"),
    ("data", "'data' does not fit"),
    ("data:", "'data:' does not fit"),
    ("data:-1", "'data:-1' does not fit"),
    ("data:²", "'data:²' does not fit"),
    ("data:٢", "does not fit"),
    ("data: 2", "'data: 2' does not fit"),
    ("data:2:2", "'data:2:2' does not fit"),
    (f"data:{'9' * 5000}", "does not fit"),
    ("data:999999999", "needs 999999999 devices; there are 4"),
    ("data:2,data:2", "'data' twice"),
    ("model:2,model:2", "'model' twice"),
    ("data:1,model:2,data:1", "'data' twice"),
  ],
  ids=range(14),
)
def test_meshes_that_are_none(text, said):
  refused(lambda: parse_mesh(text), said)


def test_prefixes_without_end():
  for name in ("pyramid/" * 5000 + "keydiff", "ada/" * 3 + "snapkv"):
    with pytest.raises(InputError, match="times before a method"):
      kvjax.get_method(name)


@pytest.fixture
def program(monkeypatch):
  """Runs a function as a program, with what absl has parsed."""

  def run(main, values=None):
    given = flags.FlagValues()
    flags.DEFINE_string("output", "results", "", flag_values=given)
    flags.DEFINE_string("model", None, "", flag_values=given)
    flags.DEFINE_integer("seed", 0, "", flag_values=given)
    given(["program", *(values or [])])
    with monkeypatch.context() as patched:
      patched.setattr(cli.flags, "FLAGS", given)
      patched.setattr(cli, "_cache_programs", lambda: None)
      no_plugins = types.SimpleNamespace(value=None)
      patched.setattr(cli.plugin_inputs, "PLUGINS", no_plugins)
      patched.setattr(exits.os, "_exit", sys.exit)
      patched.setattr(
        app, "run", lambda guarded, flags_parser: guarded(["program"])
      )
      cli.run(main)

  return run


@pytest.mark.parametrize(
  ("value", "said"),
  [
    ("--output=", "--output is empty; give it a value, or leave it out."),
    ("--output=  ", "--output is empty; give it a value, or leave it out."),
    ("--model=", "--model is empty; give it a value, or leave it out."),
    ("--seed=2147483648", "--seed is 2147483648; the largest number is 21474"),
    (f"--seed={'9' * 4000}", "9; the largest number is 2147483647."),
    ("--output=gs://bucket/runs", "gs://bucket/runs is an address; give a"),
    ("--model=memory://bucket/none", "is nothing at memory://bucket/none."),
  ],
  ids=range(7),
)
def test_values_that_no_flag_can_have(program, capsys, value, said):
  with pytest.raises(SystemExit) as stopped:
    program(lambda: pytest.fail("the program has begun"), [value])
  assert stopped.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert said in line
  assert len(line) < 400


def test_a_program_reads_a_copy_of_what_is_at_an_address(
  program, tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text("{}")
  given = []
  address = f"file://{tmp_path}/model"
  program(lambda: given.append(flags.FLAGS.model), [f"--model={address}"])
  (path,) = map(pathlib.Path, given)
  assert path.is_relative_to(tmp_path / "cache")
  assert path.name == "model"
  assert (path / "config.json").read_text() == "{}"


def test_what_the_system_refuses_is_a_sentence(program, tmp_path, capsys):
  for path, said in (
    (tmp_path / "none" / "a", "none/a cannot be used: No such file or dir"),
    ("x" * 9999, "x cannot be used: File name too long."),
  ):
    with pytest.raises(SystemExit) as stopped:
      program(lambda path=path: os.stat(path))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert len(line) < 400


def test_a_kernel_that_does_not_compile_is_a_sentence(program, capsys):
  def main():
    raise RuntimeError("Mosaic failed to compile: kvjax/kernels/select/tpu.py")

  with pytest.raises(SystemExit) as stopped:
    program(main)
  assert stopped.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "; --kernels=select:xla runs XLA's program instead" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_garbage_is_collected_is_not_lost(
  program, capsys, number
):
  def collected(phase, info):
    if phase == "start" and not sent:
      sent.append(number)
      os.kill(os.getpid(), number)
      time.sleep(0)  # it is raised here, and dropped by Python

  def main():
    for _ in range(500):
      gc.collect(0)
      time.sleep(0.01)

  sent = []
  handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
  gc.callbacks.append(collected)
  try:
    with pytest.raises(SystemExit) as stopped:
      program(main)
  finally:
    gc.callbacks.remove(collected)
    signal.signal(signal.SIGTERM, handlers[0])
    signal.signal(signal.SIGINT, handlers[1])
  assert stopped.value.code == 128 + number
  assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_program_without_a_traceback(program, capsys, number):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  done = []

  def main():
    try:
      os.kill(os.getpid(), number)
    finally:
      done.append("what was begun is finished")

  try:
    with pytest.raises(SystemExit) as stopped:
      program(main)
    # Another one, of somebody impatient, ends it at once.
    assert signal.getsignal(number) == signal.SIG_DFL
  finally:
    for sort, handler in zip(
      (signal.SIGTERM, signal.SIGINT), before, strict=True
    ):
      signal.signal(sort, handler)
  assert stopped.value.code == 128 + number
  assert capsys.readouterr().err == "Stopped.\n"
  assert done


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_is_something_else(
  program, monkeypatch, capsys, tmp_path, kind
):
  path = replace(tmp_path / "model", kind)
  values = {"MODEL": str(path), "_KERNELS": "auto", "_MESH": None}
  values |= {"_DTYPE": None, "_KERNELS_TABLE": None}
  for name, value in values.items():
    monkeypatch.setattr(run_inputs, name, types.SimpleNamespace(value=value))
  said = r"has no config\.json|is not a GGUF file|cannot be read"

  def main():
    run_inputs.model_name()
    with run_inputs.loaded():
      pytest.fail("the model has been loaded")

  with pytest.raises(SystemExit) as stopped:
    program(main)
  assert stopped.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert re.search(said, line)


@pytest.mark.parametrize(
  ("name", "arguments", "said"),
  [
    (
      "train_reference",
      ["--output=new", "--stages="],
      "--stages is empty; nam",
    ),
    ("train_reference", ["--output="], "--output is empty"),
    ("generate_documents", ["--output="], "--output is empty"),
    ("generate_documents", ["--output=/dev/null"], "/dev/null is no folder"),
    ("show_kept", ["--output=/dev/null"], "no regular file"),
    ("compare", ["--mesh=data:2,data:2", "--output=new"], "'data' twice"),
    ("compare", ["--mesh=data:2", "--batch=3"], "no multiple of 2, the size"),
    ("compare", ["--output=new", "--model=loop"], "loop has no config.json"),
    ("compare", ["--seed=99999999999", "--output=new"], "--seed is 9999999999"),
    (
      "evaluate",
      [f"--length={'9' * 5000}"],
      "--length takes numbers of tokens",
    ),
    ("benchmark_compile", ["--layers=x"], "--layers takes numbers of layers"),
    ("benchmark_compile", ["--methods="], "--methods is empty"),
    ("benchmark_peers", ["--methods="], "--methods is empty"),
    ("compare", ["--flagfile=/dev/zero"], "a pipe or a device; give a"),
    ("compare", ["-flagfile", "/dev/zero"], "a pipe or a device; give a"),
    ("compare", ["--flagfile=/proc/self/mem"], "The --flagfile cannot be read"),
    ("compare", ["--flagfile=/proc"], "flagfile"),
    ("compare", ["--text=/dev/zero", "--question=a"], "a pipe or a device; g"),
    ("compare", ["--tasks=", "--output=new"], "Name a task; the tasks are"),
    ("compare", ["--retention=0.5+", "--output=new"], "--retention takes numb"),
    ("compare", ["--kernels=x\x1b[2J", "--output=new"], "'x\\x1b[2J' does not"),
    ("evaluate", ["--benchmark=ruler", "--tasks="], "Name a task; the tasks"),
    ("evaluate", ["--data=/dev/zero", "--output=new"], "holds no samples of R"),
    ("show_kept", ["--methods=", "--output=new/a.html"], "nothing to compare"),
    (
      "finetune",
      ["--documents=docs", "--samples=1"],
      "are documents of each s",
    ),
    ("train_gate", ["--documents=docs", "--tasks=qasper"], "those of --data"),
  ],
)
def test_programs_refuse_in_one_sentence(
  refusal, tiny_directory, tmp_path, tmp_path_factory, name, arguments, said
):
  if "--model=loop" in arguments:
    loop = tmp_path_factory.mktemp("model") / "loop"
    loop.symlink_to(loop.name)
    arguments = [a.replace("=loop", f"={loop}") for a in arguments]
  elif name in ("compare", "evaluate", "show_kept"):
    arguments = [*arguments, f"--model={tiny_directory}"]
  arguments = [a.replace("=new", f"={tmp_path}/new") for a in arguments]
  assert said in refusal(f"kvjax.experiments.{name}", *arguments)
  assert not list(tmp_path.iterdir())
