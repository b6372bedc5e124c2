"""RULER's published layouts, read back as what they were written from."""

import dataclasses
import gzip
import json
import pathlib
import shutil

import datasets
import pytest

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.benchmarks.ruler import published as ruler_files
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks.question_answering import Corpus, Question

LENGTH = 2048


def count(text):
  return len(text.split())


@pytest.fixture(scope="module")
def samples():
  """One sample of every task; the documents of both corpora are the same."""
  documents = tuple(f"Town {name} lies at sea." for name in "ABCDE")
  asked = (Question("Where lies Town A?", ("at sea", "sea"), (0,)),)
  corpus = Corpus(documents, asked)
  texts = dataclasses.replace(
    generator.Texts.read(),
    corpora={generator.SQUAD: corpus, generator.HOTPOTQA: corpus},
  )
  found = generator.samples(generator.TASKS, [LENGTH], 1, 0, count, texts)
  return {part.task: drawn[0] for part, drawn in found.items()}


def prompt(sample):
  return sample.context + sample.question + sample.answer_prefix


def old(sample, number=0):
  """The four fields of RULER's older output."""
  return {
    "index": number,
    "input": prompt(sample),
    "outputs": list(sample.answers),
    "length": LENGTH,
  }


def new(sample, number=0):
  """With the answer prefix apart."""
  return old(sample, number) | {
    "input": sample.context + sample.question,
    "answer_prefix": sample.answer_prefix,
    "length_w_model_temp": LENGTH,
    "token_position_answer": 7,
  }


def published(sample):
  """The columns of kvpress's tables."""
  return {
    "context": sample.context,
    "question": sample.question,
    "answer_prefix": sample.answer_prefix,
    "answer": list(sample.answers),
    "task": sample.task,
    "max_new_tokens": sample.max_new_tokens,
  }


def write(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_kvpress(sample):
  """The blank before the prefix ends the question there."""
  return dataclasses.replace(
    sample,
    question=sample.question + " ",
    answer_prefix=sample.answer_prefix.removeprefix(" "),
  )


def core(sample):
  """What a file holds of a sample."""
  return dataclasses.replace(sample, metadata={"length": LENGTH})


@pytest.mark.parametrize("place", ["{}/validation.jsonl", "{}.jsonl"])
def test_old_output_is_split_as_kvpress_splits_it(samples, place, tmp_path):
  for task, sample in samples.items():
    write(tmp_path / "2048" / place.format(task), [old(sample)])
  found = ruler_files.load(tmp_path)
  assert list(found) == [Part(task, LENGTH) for task in generator.TASKS]
  for part, (sample,) in found.items():
    assert sample == core(as_kvpress(samples[part.task]))
    assert prompt(sample) == prompt(samples[part.task])
    said = ", ".join(sample.answers)
    assert registry.score(sample, said) == {"score": 1.0}


def test_new_output_gives_the_samples_that_were_written(samples, tmp_path):
  for task, sample in samples.items():
    folder = tmp_path / "synthetic" / "2048"
    write(folder / "data" / task / "validation.jsonl", [new(sample)])
    write(folder / "pred" / f"{task}.jsonl", [{"pred": "no sample"}])
  found = ruler_files.load(tmp_path)
  assert found == {
    Part(task, LENGTH): [core(sample)] for task, sample in samples.items()
  }


def zipped(folder):
  """A zip beside the folder, with its name."""
  return pathlib.Path(shutil.make_archive(str(folder), "zip", folder))


@pytest.mark.parametrize("inside", [True, False])
def test_a_zip_gives_the_samples_of_its_folder(samples, inside, tmp_path):
  """The zip has a folder for the length, or its name is the length."""
  folder = tmp_path / ("data" if inside else "2048")
  lengths = folder / "2048" if inside else folder
  for task, sample in samples.items():
    write(lengths / task / "validation.jsonl", [new(sample)])
    write(folder / "pred" / f"{task}.jsonl", [{"pred": "no sample"}])
  assert ruler_files.load(zipped(folder)) == ruler_files.load(folder)
  rows = [published(sample) for sample in samples.values()]
  (tmp_path / "tables" / "2048").mkdir(parents=True)
  datasets.Dataset.from_list(rows).to_parquet(
    str(tmp_path / "tables/2048/test-00000-of-00001.parquet")
  )
  assert ruler_files.load(zipped(tmp_path / "tables")) == {
    Part(task, LENGTH): [core(sample)] for task, sample in samples.items()
  }


def test_compressed_lines_and_csv_give_the_samples_that_were_written(
  samples, tmp_path
):
  wanted = {
    Part(task, LENGTH): [core(sample)] for task, sample in samples.items()
  }
  (tmp_path / "lines" / "2048").mkdir(parents=True)
  for task, sample in samples.items():
    path = tmp_path / "lines" / "2048" / f"{task}.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(new(sample)).encode()))
  assert ruler_files.load(tmp_path / "lines") == wanted
  (tmp_path / "table" / "2048").mkdir(parents=True)
  table = datasets.Dataset.from_list(
    [published(sample) for sample in samples.values()]
  )
  # Lists are printed as NumPy prints them.
  table.to_csv(str(tmp_path / "table" / "2048" / "test.csv"), index=False)
  assert ruler_files.load(tmp_path / "table") == wanted


def test_a_row_without_a_task_is_named(samples, tmp_path):
  row = published(samples["vt"])
  bare = {name: value for name, value in row.items() if name != "task"}
  write(tmp_path / "4096" / "mine.jsonl", [row, bare])
  with pytest.raises(
    InputError, match=r"^Line 2 of \S+mine\.jsonl lacks 'task', and neither"
  ):
    ruler_files.load(tmp_path)
  write(tmp_path / "4096" / "mine.jsonl", [{"text": "of another kind"}])
  with pytest.raises(
    InputError, match=r"^Line 1 of \S+mine\.jsonl lacks 'task"
  ):
    ruler_files.load(tmp_path)


def test_tables_of_kvpress_give_the_samples_that_were_written(
  samples, tmp_path
):
  rows = [published(sample) for sample in samples.values()]
  table = datasets.Dataset.from_list(rows)
  (tmp_path / "2048").mkdir()
  table.to_parquet(str(tmp_path / "2048/test-00000-of-00001.parquet"))
  table.save_to_disk(str(tmp_path / "saved" / "2048"))
  write(tmp_path / "lines" / "2048" / "all.jsonl", rows)
  expected = {
    Part(task, LENGTH): [core(sample)] for task, sample in samples.items()
  }
  assert ruler_files.load(tmp_path / "2048") == expected
  assert ruler_files.load(tmp_path / "saved") == expected
  assert ruler_files.load(tmp_path / "lines/2048/all.jsonl") == expected


def test_json_that_is_called_after_a_task_holds_its_rows(samples, tmp_path):
  (tmp_path / "2048").mkdir()
  rows = [old(samples["vt"], number) for number in range(2)]
  (tmp_path / "2048" / "vt.json").write_text(json.dumps(rows, indent=1))
  (tmp_path / "2048" / "summary.json").write_text('{"vt": 1.0}')
  found = ruler_files.load(tmp_path)
  assert list(found) == [Part("vt", LENGTH)]
  assert found["vt", LENGTH] == [core(as_kvpress(samples["vt"]))] * 2


def test_only_what_is_asked_for_is_read(samples, tmp_path):
  names = ("fwe", "vt")
  for length in (1024, 2048, 10_000):
    for task in names:
      rows = [old(samples[task], number) for number in range(5)]
      write(tmp_path / str(length) / f"{task}.jsonl", rows)
  found = ruler_files.load(tmp_path, ["vt"], [10_000, 1024], 2)
  assert list(found) == [Part("vt", 1024), Part("vt", 10_000)]
  assert [len(drawn) for drawn in found.values()] == [2, 2]
  assert len(ruler_files.load(tmp_path, ["fwe"])[Part("fwe", 2048)]) == 5
  assert list(ruler_files.load(tmp_path / "2048")) == [
    Part("vt", 2048),
    Part("fwe", 2048),
  ]
  with pytest.raises(InputError, match="holds no cwe of 1024 tokens"):
    ruler_files.load(tmp_path, ["vt", "cwe"], [1024])
  with pytest.raises(InputError, match="holds no vt of 512 tokens"):
    ruler_files.load(tmp_path, ["vt"], [512, 1024])
  with (tmp_path / "1024" / "vt.jsonl").open("a") as file:
    file.write("damaged")
  assert ruler_files.load(tmp_path, ["fwe"], [1024])
  assert ruler_files.load(tmp_path, ["vt"], [1024], 4)


@pytest.mark.parametrize("answers", ["['a', 'b']", ["a", "b"]])
@pytest.mark.parametrize("name", ["answer", "answers"])
def test_references_come_as_lists_or_as_their_text(
  samples, answers, name, tmp_path
):
  row = published(samples["vt"]) | {name: answers}
  if name == "answers":
    del row["answer"]
  write(tmp_path / "4096" / "vt.jsonl", [row])
  ((sample,),) = ruler_files.load(tmp_path).values()
  assert sample.answers == ("a", "b")


def damaged(field, value):
  def damage(row):
    return {**row, field: value}

  return damage


@pytest.mark.parametrize(
  ("damage", "wrong"),
  [
    (damaged("input", "Who?"), r"line 2 of \S+vt.jsonl holds under 'input' no"),
    (damaged("input", "Question: Find all variables"), "'answer_prefix' nor"),
    (damaged("input", 3), "needs a text under 'input'"),
    (damaged("outputs", []), "needs a list of texts under 'outputs'"),
    (damaged("task", "maths"), "is of 'maths', which is no task of RULER"),
    (lambda row: [row], "must hold a JSON object"),
  ],
)
def test_malformed_rows_are_named(samples, damage, wrong, tmp_path):
  row = old(samples["vt"])
  write(tmp_path / "4096" / "vt.jsonl", [row, damage(row)])
  with pytest.raises(InputError, match=f"(?i){wrong}"):
    ruler_files.load(tmp_path)


def test_places_without_samples_are_refused(samples, tmp_path):
  with pytest.raises(InputError, match="There is no file or folder"):
    ruler_files.load(tmp_path / "none")
  with pytest.raises(InputError, match="holds no samples of RULER"):
    ruler_files.load(tmp_path)
  row = old(samples["vt"])
  write(tmp_path / "short" / "vt.jsonl", [row])
  with pytest.raises(InputError, match="move it into one, such as 4096"):
    ruler_files.load(tmp_path / "short")
  write(tmp_path / "4096" / "vt.jsonl", [])
  with pytest.raises(InputError, match="holds no samples; of those asked"):
    ruler_files.load(tmp_path / "4096")
  write(tmp_path / "4096" / "vt.jsonl", [row])
  write(tmp_path / "4096" / "vt" / "validation.jsonl", [row])
  with pytest.raises(InputError, match="holds vt of 4096 tokens twice"):
    ruler_files.load(tmp_path / "4096", number=1)
  (tmp_path / "8192").mkdir()
  (tmp_path / "8192" / "test.parquet").write_text("no table")
  with pytest.raises(InputError, match=r"test\.parquet is no parquet file"):
    ruler_files.load(tmp_path / "8192")
