"""Rows of any contents get one sentence, in bounded time and memory."""

import gzip
import json
import os
import zipfile

import pytest
from odd_files import refused

from kvjax.experiments.benchmarks import row_files
from kvjax.experiments.benchmarks.longbench import reader
from kvjax.experiments.benchmarks.math import problems
from kvjax.experiments.benchmarks.row_files import RowFile
from kvjax.experiments.benchmarks.ruler import corpora, published, word_lists
from kvjax.experiments.reference import vocabulary
from kvjax.models.tokenizer import Tokenizer

ROW = {
  "task": "vt",
  "context": "c",
  "question": "q",
  "answer_prefix": "a",
  "answer": ["x"],
  "max_new_tokens": 5,
}
HEAD = "task,context,question,answer_prefix,answer,max_new_tokens\n"
TOKENIZER = Tokenizer(vocabulary.build(), {})
HUGE, LONG = 10**4000, f"[0x{'f' * 5000}]"
NUMBERS = (None, "5", 5.0, True, -1, 0, 2**31, HUGE, [], {})


def sample(folder, **fields):
  """Writes a sample of RULER."""
  path = folder / "4096"
  path.mkdir(exist_ok=True)
  (path / "rows.jsonl").write_text(json.dumps(ROW | fields) + "\n")
  return path


@pytest.mark.parametrize("value", NUMBERS, ids=range(len(NUMBERS)))
def test_answers_of_no_length(tmp_path, value):
  path = sample(tmp_path, max_new_tokens=value)
  refused(lambda: published.load(path), "number under 'max_new_tokens', from 1")
  file = tmp_path / "rows.jsonl"
  row = ROW | {"answer": "5", "max_new_tokens": value}
  file.write_text(json.dumps(row) + "\n")
  refused(lambda: problems.read(file, 1), "under 'max_new_tokens', from 1 to")
  row = ROW | {"answers": ["x"], "max_new_tokens": value, "length": 5}
  file = tmp_path / "qasper.jsonl"
  file.write_text(json.dumps(row) + "\n")
  refused(
    lambda: reader.samples(tmp_path, ["qasper"], 100, TOKENIZER),
    "under 'max_new_tokens', from 1 to",
  )


@pytest.mark.parametrize("value", [v for v in NUMBERS if type(v) is not int])
def test_documents_of_no_length(tmp_path, value):
  row = {"context": "c", "input": "i", "answers": ["x"], "length": value}
  (tmp_path / "qasper_e.jsonl").write_text(json.dumps(row) + "\n")
  refused(
    lambda: reader.samples(tmp_path, ["qasper_e"], 100, TOKENIZER),
    "needs a whole number under 'length', from 0 to",
  )


@pytest.mark.parametrize(
  "number", ["9" * 5000, "-1", "0", "1e3", "٥", "5 ", "", "4294967296"]
)
def test_numbers_that_no_table_prints(tmp_path, number):
  path = tmp_path / "4096"
  path.mkdir()
  (path / "rows.csv").write_text(f"{HEAD}vt,c,q,a,x,{number}\n")
  refused(lambda: published.load(path), "Row 1 .* under 'max_new_tokens', fr")


@pytest.mark.parametrize("answer", ["", " \n", [""], ["x", ""], "[]", "['']"])
def test_answers_that_every_text_holds(tmp_path, answer):
  path = sample(tmp_path, answer=answer)
  refused(lambda: published.load(path), "has no answer under 'answer'")


@pytest.mark.parametrize("text", [LONG, f"{{{LONG}: 1}}", "[" * 5000 + "]"])
def test_texts_that_print_no_list_remain_texts(tmp_path, text):
  path = sample(tmp_path, answer=text)
  ((drawn,),) = published.load(path).values()
  assert drawn.answers == (text,)


LAYOUTS = ("rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz", "data.zip")


@pytest.mark.parametrize("name", LAYOUTS)
def test_lines_without_end(tmp_path, monkeypatch, name):
  """Files of zeros, and small ones that unpack to such."""
  monkeypatch.setattr(row_files, "_LONGEST_LINE", 1000)
  path, member = tmp_path / name, ""
  if name.endswith(".gz"):
    path.write_bytes(gzip.compress(bytes(2**20)))
  elif name.endswith(".zip"):
    member = "rows.jsonl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
      archive.writestr(member, bytes(2**20))
  else:
    path.touch()
    os.truncate(path, 2**42)
  refused(
    lambda: next(RowFile(path, member).rows()), "line of .* has more than 1,000"
  )


def test_a_later_line_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(row_files, "_LONGEST_LINE", 1000)
  path = tmp_path / "rows.jsonl"
  path.write_text(f"{json.dumps(ROW)}\n")
  os.truncate(path, 2**42)
  rows = RowFile(path).rows()
  assert next(rows).fields == ROW
  refused(lambda: next(rows), "A line of .* has more than 1,000 bytes")


@pytest.mark.parametrize("begin", ["[", "\n \n["])
def test_an_array_without_end(tmp_path, monkeypatch, begin):
  monkeypatch.setattr(row_files, "_MOST_BYTES", 1000)
  path = tmp_path / "rows.json"
  path.write_text(begin)
  os.truncate(path, 2**42)
  refused(lambda: next(RowFile(path).rows()), "more than 1,000 bytes; give one")


@pytest.mark.parametrize(
  ("place", "value", "said"),
  [("flag", 1, "is encrypted"), ("method", 99, "compression method is not")],
)
def test_members_that_cannot_be_unpacked(tmp_path, place, value, said):
  path = tmp_path / "data.zip"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("rows.jsonl", json.dumps(ROW))
  content = bytearray(path.read_bytes())
  entry = content.index(b"PK\1\2")
  for begin in (6, entry + 8):
    content[begin + 2 * (place == "method")] = value
  path.write_bytes(content)
  refused(lambda: next(RowFile(path, "rows.jsonl").rows()), f"read: .*{said}")


PARAGRAPH = {
  "context": "c",
  "qas": [{"question": "q", "answers": [{"text": "a"}]}],
}
NESTED = {"data": [{"title": "t", "paragraphs": [PARAGRAPH]}]}
SQUAD = {
  "list": [],
  "nothing": {"data": None},
  "letters": {"data": "abc"},
  "title": {"data": [{"title": [], "paragraphs": [PARAGRAPH]}]},
  "questions": {
    "data": [{"title": "t", "paragraphs": [PARAGRAPH | {"qas": {"a": 1}}]}]
  },
  "answers": {
    "data": [
      {
        "title": "t",
        "paragraphs": [
          PARAGRAPH | {"qas": [{"question": "q", "answers": "abc"}]}
        ],
      }
    ]
  },
  "empty": {
    "data": [
      {
        "title": "t",
        "paragraphs": [
          PARAGRAPH | {"qas": [{"question": "q", "answers": [{"text": " "}]}]}
        ],
      }
    ]
  },
}


@pytest.mark.parametrize("kind", SQUAD)
def test_articles_that_are_none(tmp_path, kind):
  path = tmp_path / "dev.json"
  path.write_text(json.dumps(NESTED))
  assert corpora.squad(path).documents == ("c",)
  path.write_text(json.dumps(SQUAD[kind]))
  refused(lambda: corpora.squad(path), "is not as in|needs|has an empty answer")


ENTRY = {"question": "q", "answer": "a", "context": [["t", ["s"]]]}


@pytest.mark.parametrize(
  "fields",
  [
    {"context": [[5, ["s"]]]},
    {"context": [["t", "letters"]]},
    {"context": [["t", [1]]]},
    {"context": [["t", None]]},
    {"context": [["t", ["s"], 1]]},
    {"context": []},
    {"context": "ab"},
    {"answer": 1},
    {"answer": ""},
    {"answer": []},
    {"question": None},
  ],
  ids=str,
)
def test_questions_that_are_none(tmp_path, fields):
  path = tmp_path / "dev.json"
  path.write_text(json.dumps([ENTRY]))
  assert corpora.hotpotqa(path).documents == ("t\ns",)
  path.write_text(json.dumps([ENTRY | fields]))
  refused(lambda: corpora.hotpotqa(path), "is not as in|needs|an empty answer")


@pytest.mark.parametrize("word", [["a"], {"a": 1}, 5, None, True])
def test_words_that_are_none(tmp_path, word):
  path = tmp_path / "words.json"
  words = {str(n): f"w{n}" for n in range(50)}
  path.write_text(json.dumps(words))
  assert len(word_lists.read(str(path))) == 50
  path.write_text(json.dumps(words | {"9": word}))
  refused(lambda: word_lists.read(str(path)), "a JSON object of words only")
