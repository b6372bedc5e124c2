"""Files of any contents get one sentence; runs resume or refuse."""

import dataclasses
import json

import pytest
from made_runs import make_answer
from odd_files import ODD, UNDECODED, UNREAD, refused, replace

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.benchmarks import essays, hub
from kvjax.experiments.benchmarks.longbench import finder
from kvjax.experiments.benchmarks.ruler import corpora, published, word_lists
from kvjax.experiments.finetuning import documents, tuner
from kvjax.experiments.reference import curriculum, trainer
from kvjax.experiments.reference.progress import Progress
from kvjax.experiments.report import kvpress, run_files
from kvjax.experiments.report.means import TIMED
from kvjax.experiments.run import side_by_side, summaries, typed_records
from kvjax.experiments.run.claiming import claim
from kvjax.experiments.run.model_digest import digest
from kvjax.experiments.run.processes import Process, Processes
from kvjax.experiments.run.results import Answer, Results, Settings
from kvjax.testing import TinyModel

SETTINGS = Settings("tiny", "abc", "float32", 0)

ANSWER = make_answer(task="niah_single_2")

FIELDS = dataclasses.asdict(SETTINGS) | dataclasses.asdict(ANSWER)

LINE = json.dumps(FIELDS) + "\n"

PROCESS = Process("CPU, 2 cores", {"jax": "1.2"}, {"total": 10.0})

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400

# Of every type that JSON has.
VALUES = (None, "x", -1, 0, 1.5, NAN, INFINITE, HUGE, True, [], {}, [[]], [1])


@pytest.mark.parametrize("kind", ODD)
def test_records_that_are_something_else(tmp_path, kind):
  sentence = ODD[kind][1]
  run = replace(tmp_path / "run.json", kind)
  refused(lambda: claim(run, {"a": 1}), sentence)
  refused(lambda: trainer._read_claim(run), sentence)
  replace(tmp_path / "processes.json", kind)
  refused(lambda: Processes(tmp_path, "CPU", 0.0), sentence)
  path = replace(tmp_path / "c.json", kind)
  said = sentence if kind in UNDECODED else "is no JSON|is no calibration"
  refused(lambda: kvjax.Calibration.load(path, model_id="tiny"), said)
  (tmp_path / "samples.jsonl").write_text(LINE)
  path = replace(tmp_path / "summary.json", kind)
  said = sentence if kind in UNDECODED else "is not a run's summary"
  refused(lambda: run_files.read(tmp_path), said)
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

  def state():
    # Without the time of access: the file is read.
    now = path.lstat()
    return now.st_ino, now.st_mode, now.st_size, now.st_mtime_ns

  before = state()
  refused(lambda: Results(tmp_path, SETTINGS), said.get(kind, sentence))
  assert state() == before
  replace(tmp_path / "log.jsonl", kind)
  log = object.__new__(tuner.Tuner)
  log._log_path = tmp_path / "log.jsonl"
  log.state = Progress(None, None)
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
  assert list(results.records.values()) == [ANSWER]
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
    refused(lambda: run_files._answers(path), "Line 1 of .* is no answer")


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
    refused(lambda: Processes(tmp_path, "CPU", 0.0), "is not what a run writes")


@pytest.fixture
def summary():
  (row,) = summaries.summarize([ANSWER])
  about = dataclasses.asdict(PROCESS) | {"decoding": "greedy", "about": {}}
  return dataclasses.asdict(SETTINGS) | about | {"rows": [row]}


def read_run(folder, content):
  (folder / "samples.jsonl").write_text(LINE)
  (folder / "summary.json").write_text(json.dumps(content))
  record = run_files.read(folder)
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


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("value", ["x", True, [1.0], HUGE], ids=range(4))
def test_numbers_of_rows_are_numbers(tmp_path, summary, name, value):
  (row,) = summary["rows"]
  content = summary | {"rows": [row | {name: value}]}
  refused(lambda: read_run(tmp_path, content), f"is not a run's.*'{name}' is")


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
  log.state = Progress(None, None)
  refused(log._drop_log_lines, "Line 2 of .* is not what a run writes; remove")
  assert line in log._log_path.read_text()


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
  if kind in ("memory", "4 TiB", "Latin-1"):
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
  (file,) = finder.find(tmp_path, ["hotpotqa"])["hotpotqa"]
  refused(lambda: next(file.rows()), "a pipe or a device")
  path = tmp_path / "4096"
  path.mkdir()
  (tmp_path / f"hotpotqa.{suffix}").rename(path / f"validation.{suffix}")
  refused(lambda: published.load(path), "a pipe or a device")
  replace(tmp_path / "data.zip", kind)
  refused(lambda: finder.find(tmp_path, ["qasper"]), "a pipe or a device")


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
