"""Files and flags of any contents get one sentence; runs resume or refuse."""

import dataclasses
import gc
import json
import os
import re
import resource
import signal
import time
import types

import jax
import numpy as np
import pytest
from absl import app, flags

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.checkpoint import saving
from kvjax.errors import InputError
from kvjax.experiments import (
  cli,
  inputs,
  side_by_side,
  summaries,
  typed_records,
)
from kvjax.experiments.benchmarks import (
  corpora,
  essays,
  hub,
  longbench_files,
  ruler_files,
  word_lists,
)
from kvjax.experiments.finetuning import documents, tuner
from kvjax.experiments.processes import Process, Processes
from kvjax.experiments.reference import curriculum, trainer
from kvjax.experiments.reference.checkpoints import Checkpoints, Progress
from kvjax.experiments.reporting import kvpress, records
from kvjax.experiments.results import Answer, Results, Settings, digest
from kvjax.testing import TinyModel

SETTINGS = Settings("tiny", "abc", "float32", 0)
ANSWER = Answer(
  task="niah_single_2",
  length=320,
  sample=0,
  asked="0",
  method="keydiff",
  options="KeyDiff()",
  budget="0.5",
  retention=0.5,
  context_tokens=100,
  kept_tokens=50.0,
  read_tokens=50.0,
  cache_bytes=1000,
  host_bytes=0,
  question="What is it?",
  answer_prefix=" It is",
  answers=["1234567"],
  prediction="1234567.",
  first_token=7,
  depth=None,
  turn=None,
  scores={"score": 100.0},
)
FIELDS = dataclasses.asdict(SETTINGS) | dataclasses.asdict(ANSWER)
LINE = json.dumps(FIELDS) + "\n"
PROCESS = Process("CPU, 2 cores", {"jax": "1.2"}, {"total": 10.0})
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400
# Of every type that JSON has.
VALUES = (None, "x", -1, 0, 1.5, NAN, INFINITE, HUGE, True, [], {}, [[]], [1])


def refused(read, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    read()
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


# What stands in the place of a file, and what is said if text should be there.
ODD = {
  "a folder": (lambda path: path.mkdir(), "Is a directory"),
  "a loop": (lambda path: path.symlink_to(path.name), "Too many levels"),
  "no target": (lambda path: path.symlink_to("/no/such"), "No such file"),
  "a pipe": (os.mkfifo, "is a pipe or a device; give a regular file"),
  "zeros": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
  "memory": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read"),
  "4 TiB": (
    lambda path: (path.touch(), os.truncate(path, 2**42)),
    "at most 2,147,483,648 are read at once",
  ),
  "Latin-1": (lambda path: path.write_bytes(b'{"\xe9": 1}\n'), "UTF-8"),
  "nothing": (lambda path: path.touch(), "not valid JSON"),
  "NULs": (lambda path: path.write_bytes(bytes(9) + b"\n"), "not valid JSON"),
  "a mark": (
    lambda path: path.write_bytes(b"\xef\xbb\xbf{}"),
    "not valid JSON",
  ),
  "depth": (lambda path: path.write_text("[" * 10**5 + "\n"), "too deeply"),
  "digits": (lambda path: path.write_text(f"{'9' * 5000}\n"), "4300 digits"),
  "half": (lambda path: path.write_text('"\\ud800"\n'), "surrogates not"),
  "a list": (lambda path: path.write_text("[]\n"), "must hold a JSON object"),
  "a number": (lambda path: path.write_text("1\n"), "must hold a JSON object"),
}
UNREAD = list(ODD)[:7]
UNDECODED = list(ODD)[:8]


def replace(path, kind):
  path.unlink(missing_ok=True)
  ODD[kind][0](path)
  return path


@pytest.mark.parametrize("kind", ODD)
def test_records_that_are_something_else(tmp_path, kind):
  sentence = ODD[kind][1]
  run = replace(tmp_path / "run.json", kind)
  refused(lambda: tuner._claim(run, {"a": 1}), sentence)
  refused(lambda: trainer._read_claim(run), sentence)
  replace(tmp_path / "processes.json", kind)
  refused(lambda: Processes(tmp_path), sentence)
  path = replace(tmp_path / "c.json", kind)
  said = sentence if kind in UNDECODED else "is no JSON|is no calibration"
  refused(lambda: kvjax.Calibration.load(path, model_id="tiny"), said)
  (tmp_path / "samples.jsonl").write_text(LINE)
  path = replace(tmp_path / "summary.json", kind)
  said = sentence if kind in UNDECODED else "is not a run's summary"
  refused(lambda: records.read(tmp_path), said)
  model = TinyModel()
  path = replace(tmp_path / "cache.json", kind)
  refused(
    lambda: kvjax.load_cache(tmp_path, model=model, model_id="tiny"),
    "damaged or incomplete|is no saved cache",
  )
  refused(
    lambda: kvjax.load_cache(path, model=model, model_id="tiny"),
    "There is no|is no saved cache",
  )


@pytest.mark.parametrize("kind", [*UNREAD, "depth", "digits", "half", "NULs"])
def test_lines_that_are_something_else(tmp_path, kind):
  path = replace(tmp_path / "samples.jsonl", kind)
  said = {"a folder": "cannot be written", "no target": "cannot be written"}
  said |= {"a loop": "cannot be written", "memory": "cannot be written"}
  sentence = ODD[kind][1] if kind in UNREAD else "Line 1 of .* is no answer"
  before = path.lstat()
  refused(lambda: Results(tmp_path, SETTINGS), said.get(kind, sentence))
  assert path.lstat() == before
  replace(tmp_path / "log.jsonl", kind)
  log = object.__new__(tuner.Tuner)
  log._log_path = tmp_path / "log.jsonl"
  log.state = Progress.fresh(None, None)
  sentence = (
    ODD[kind][1] if kind in UNREAD else "Line 1 of .* is not what a run"
  )
  refused(log._drop_log_lines, sentence)


@pytest.mark.parametrize(
  "rest",
  [
    b"my notes",
    b'{"a": 1}',
    b"\0\0\0",
    b"\xff",
    LINE.replace('"tiny"', '"huge"').encode()[:-1],
    LINE.replace('"tiny"', '"huge"').encode()[:12],
    LINE.encode("utf-16"),
  ],
  ids=range(7),
)
@pytest.mark.parametrize("before", [b"", LINE.encode()], ids=["alone", "after"])
def test_a_last_line_of_somebody_else_is_not_lost(tmp_path, rest, before):
  path = tmp_path / "samples.jsonl"
  path.write_bytes(before + rest)
  said = "The last line of .* has no line break|is no answer"
  refused(lambda: Results(tmp_path, SETTINGS), said)
  assert path.read_bytes() == before + rest


@pytest.mark.parametrize("cut", [1, 2, 40, 200, len(LINE) - 1])
def test_a_last_line_of_ours_is_written_anew(tmp_path, cut):
  path = tmp_path / "samples.jsonl"
  path.write_text(LINE + LINE.replace('"asked": "0"', '"asked": "1"')[:-cut])
  results = Results(tmp_path, SETTINGS)
  assert list(results.answers.values()) == [ANSWER]
  results.add([dataclasses.replace(ANSWER, asked="2")])
  asked = [json.loads(line)["asked"] for line in path.read_text().splitlines()]
  assert asked == ["0", "2"]


def wrong_values(kind):
  """Names and values that no record of this kind has."""
  hints = typed_records.get_type_hints(kind)
  return [
    (field.name, value)
    for field in dataclasses.fields(kind)
    for value in VALUES
    if not typed_records.fits(value, hints[field.name])
  ]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Answer)])
def test_answers_of_wrong_values(tmp_path, name):
  path = tmp_path / "samples.jsonl"
  values = [value for field, value in wrong_values(Answer) if field == name]
  assert len(values) >= 8
  for value in values:
    path.write_text(json.dumps(FIELDS | {name: value}) + "\n")
    refused(lambda: Results(tmp_path, SETTINGS), "Line 1 of .* is no answer")
    refused(lambda: records._answers(path), "Line 1 of .* is not an answer")


@pytest.mark.parametrize("value", [{}, {"other": 1.0}, {"score": "1"}])
def test_answers_without_a_score(tmp_path, value):
  line = json.dumps(FIELDS | {"scores": value})
  (tmp_path / "samples.jsonl").write_text(f"{line}\n")
  refused(lambda: Results(tmp_path, SETTINGS), "Line 1 of .* is no answer")


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_processes_of_wrong_values(tmp_path, number):
  value = VALUES[number]
  path = tmp_path / "processes.json"
  fields = dataclasses.asdict(PROCESS)
  contents = [{"processes": [value]}, {"processes": value}]
  contents += [
    {"processes": [fields | {name: value}]}
    for name in fields
    if (name, value) in wrong_values(Process)
  ]
  contents += [{"processes": [fields | {"versions": {"jax": value}}]}]
  if not isinstance(value, int | float) or value in (HUGE, INFINITE):
    contents += [{"processes": [fields | {"seconds": {"total": value}}]}]
  for content in contents:
    if content in ({"processes": []},) or value == "x":
      continue
    path.write_text(json.dumps(content))
    refused(lambda: Processes(tmp_path), "is not what a run writes")


@pytest.fixture
def summary():
  (row,) = summaries.summarize([ANSWER])
  about = dataclasses.asdict(PROCESS) | {"decoding": "greedy", "about": {}}
  return dataclasses.asdict(SETTINGS) | about | {"rows": [row]}


def read_run(folder, content):
  (folder / "samples.jsonl").write_text(LINE)
  (folder / "summary.json").write_text(json.dumps(content))
  record = records.read(folder)
  return [kvpress_folder.files for kvpress_folder in kvpress.folders(record)]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_summaries_of_wrong_values(tmp_path, summary, number):
  """A value is refused, or it does no harm."""
  assert read_run(tmp_path, summary)
  value, count = VALUES[number], 0
  (row,) = summary["rows"]
  contents = [summary | {name: value} for name in summary]
  contents += [summary | {"rows": [row | {name: value}]} for name in row]
  contents += [
    summary | {"rows": [row | {"interval": [value, value]}]},
    *(summary | {name: {"a": value}} for name in ("data", "versions", "about")),
    summary | {"rows": [row | {"scores": {"a": value}}]},
  ]
  for content in contents:
    try:
      read_run(tmp_path, content)
    except InputError as error:
      assert "is not a run's summary" in str(error)  # noqa: PT017
      count += 1
  assert count >= 20


@pytest.mark.parametrize(
  "content",
  [
    {},
    {"seed": 0},
    {"stages": []},
    {"seed": "0", "stages": []},
    {"seed": 0, "stages": None},
    {"seed": 0, "stages": [1]},
    {"seed": 0, "stages": [{}]},
    {"seed": 0, "stages": [{"name": 1, "layers": 1}]},
    {"seed": 0, "stages": [{"name": "a", "layers": "1"}]},
  ],
  ids=str,
)
def test_claims_of_wrong_values(tmp_path, content):
  path = tmp_path / "run.json"
  path.write_text(json.dumps(content))
  refused(
    lambda: trainer._check_claim(path, 0, curriculum.STAGES, 1),
    "is not what a run writes",
  )
  assert json.loads(path.read_text()) == content


@pytest.mark.parametrize(
  "line", ["x", "1", "[]", "{}", '{"steps": "1"}', '{"steps": null}']
)
def test_lines_of_a_log_that_no_run_writes(tmp_path, line):
  log = object.__new__(tuner.Tuner)
  log._log_path = tmp_path / "log.jsonl"
  log._log_path.write_text(f'{{"steps": 0}}\n{line}\n')
  log.state = Progress.fresh(None, None)
  refused(log._drop_log_lines, "Line 2 of .* is not what a run writes; remove")
  assert line in log._log_path.read_text()


def limited(size):
  """A file that may not grow stands for a disk that is full."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_a_claim_that_can_be_resumed(tmp_path):
  path = tmp_path / "run.json"
  free = limited(5)
  try:
    refused(lambda: tuner._claim(path, {"a": 1}), "run.json cannot be written")
  finally:
    free()
  assert not list(tmp_path.iterdir())
  tuner._claim(path, {"a": 1})
  free = limited(5)
  try:
    refused(lambda: tuner._claim(path, {"a": 1}), "run.json cannot be written")
  finally:
    free()
  tuner._claim(path, {"a": 1})


# What orbax raises if a disk is full; its own threads make noise of it.
FULL = [
  OSError(28, "No space left on device"),
  ValueError(
    'RESOURCE_EXHAUSTED: Error opening "zarr3" driver: Failed writing: "/a/b": '
    "Failed to write 95 bytes to file 19: No space left on device "
    "[source locations='a.cc:1']"
  ),
]


def fail(error):
  def save(*args, **kwargs):
    raise error

  return save


@pytest.mark.parametrize("error", FULL, ids=["OSError", "ValueError"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch, error):
  state = Progress.fresh({"a": np.zeros(9)}, {"a": np.zeros(9)})
  one = state.advanced(state.params, state.moments, 3)
  two = one.advanced({"a": np.ones(9)}, state.moments, 3)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(one)
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints._checkpointer, "save", fail(error))
    refused(
      lambda: checkpoints.save(two),
      f"{tmp_path}: No space left on device; the one before is kept, and the",
    )
  assert checkpoints.latest(state).total == 1
  checkpoints.save(two)
  latest = Checkpoints(tmp_path).latest(state)
  assert latest.total == 2
  assert jax.tree.leaves(latest.params)[0].all()
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints._checkpointer, "load", fail(error))
    refused(lambda: checkpoints.latest(state), f"{tmp_path}/512 is damaged; re")


@pytest.mark.parametrize("error", FULL, ids=["OSError", "ValueError"])
def test_a_full_disk_leaves_no_cache(tmp_path, monkeypatch, error):
  model = TinyModel()
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
  prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  monkeypatch.setattr(saving.ocp, "save", fail(error))
  refused(
    lambda: kvjax.save_cache(cache, tmp_path, model=model, model_id="a"),
    f"cannot be written to {tmp_path}: No space left on device",
  )
  assert not list(tmp_path.iterdir())


TEXTS = {
  "a.txt": [
    lambda path: side_by_side.read_text(path),
    lambda path: essays.read(path),
    lambda path: word_lists.read(str(path)),
  ],
  "a.json": [
    lambda path: essays.read(path),
    lambda path: word_lists.read(str(path)),
    lambda path: corpora.squad(path),
    lambda path: corpora.hotpotqa(path),
  ],
}


@pytest.mark.parametrize("kind", UNDECODED)
def test_texts_that_are_something_else(tmp_path, kind):
  for name, readers in TEXTS.items():
    path = replace(tmp_path / name, kind)
    for read in readers:
      said = "Is a directory|holds no" if kind == "a folder" else ODD[kind][1]
      refused(lambda read=read, path=path: read(path), said)
  if kind not in ("a folder", "a loop", "no target", "a pipe", "zeros"):
    refused(lambda: documents.read(tmp_path), ODD[kind][1])
  else:
    # They are no files, and are passed over.
    refused(lambda: documents.read(tmp_path), "holds no text")
    assert digest(tmp_path) == digest(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["a pipe", "zeros"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_tables_that_are_endless(tmp_path, kind, suffix):
  path = replace(tmp_path / f"validation.{suffix}", kind)
  refused(lambda: corpora.squad(tmp_path), "a pipe or a device")
  path.rename(tmp_path / f"hotpotqa.{suffix}")
  (file,) = longbench_files.find(tmp_path, ["hotpotqa"])["hotpotqa"]
  refused(lambda: next(file.rows()), "a pipe or a device")
  path = tmp_path / "4096"
  path.mkdir()
  (tmp_path / f"hotpotqa.{suffix}").rename(path / f"validation.{suffix}")
  refused(lambda: ruler_files.load(path), "a pipe or a device")
  replace(tmp_path / "data.zip", kind)
  refused(
    lambda: longbench_files.find(tmp_path, ["qasper"]), "a pipe or a device"
  )


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000])
def test_names_that_are_too_long(tmp_path, name):
  path = tmp_path / name
  said = "no folder|no file or folder|cannot be read|too long|There is no"
  for read in (
    lambda: hub.resolve(name),
    lambda: documents.read(path),
    lambda: essays.read(path),
    lambda: side_by_side.read_text(path),
    lambda: word_lists.read(str(path)),
    lambda: Results(path, SETTINGS),
    lambda: kvjax.load_cache(path, model=TinyModel(), model_id="a"),
    lambda: kvjax.Calibration.load(path, model_id="a"),
  ):
    refused(read, said)


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
  ],
  ids=range(5),
)
def test_values_that_no_flag_can_have(program, capsys, value, said):
  with pytest.raises(SystemExit) as stopped:
    program(lambda: pytest.fail("the program has begun"), [value])
  assert stopped.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert said in line
  assert len(line) < 400


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
  assert stopped.value.code == 130
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
  assert stopped.value.code == 130
  assert capsys.readouterr().err == "Stopped.\n"
  assert done


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_is_something_else(
  program, monkeypatch, capsys, tmp_path, kind
):
  path = replace(tmp_path / "model", kind)
  values = {"MODEL": str(path), "_KERNELS": "auto", "_MESH": None}
  for name, value in (values | {"_DTYPE": None}).items():
    monkeypatch.setattr(inputs, name, types.SimpleNamespace(value=value))
  said = r"has no config\.json|is not a GGUF file|cannot be read"

  def main():
    inputs.model_name()
    with inputs.loaded():
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
    ("make_reports", ["--output="], "--output is empty"),
    ("make_reports", ["--output=/dev/null"], "/dev/null is no folder"),
    ("show_kept", ["--output=/dev/null"], "no regular file"),
    ("compare", ["--mesh=data:2,data:2", "--output=new"], "'data' twice"),
    ("compare", ["--output=new", "--model=loop"], "loop has no config.json"),
    ("compare", ["--seed=99999999999", "--output=new"], "--seed is 9999999999"),
    (
      "evaluate",
      [f"--length={'9' * 5000}"],
      "--length takes numbers of tokens",
    ),
    ("benchmark_compile", ["--layers=x"], "--layers takes numbers of layers"),
    ("benchmark_compile", ["--methods="], "--methods is empty"),
  ],
)
def test_programs_refuse_in_one_sentence(
  run_binary, tiny_directory, tmp_path, tmp_path_factory, name, arguments, said
):
  if "--model=loop" in arguments:
    loop = tmp_path_factory.mktemp("model") / "loop"
    loop.symlink_to(loop.name)
    arguments = [a.replace("=loop", f"={loop}") for a in arguments]
  elif name in ("compare", "show_kept"):
    arguments = [*arguments, f"--model={tiny_directory}"]
  arguments = [a.replace("=new", f"={tmp_path}/new") for a in arguments]
  done = run_binary(f"kvjax.experiments.{name}", *arguments)
  assert done.returncode == 2, done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert said in done.stderr
  assert not list(tmp_path.iterdir())
