"""LongBench's files, in every layout that they are published in."""

import gzip
import json
import zipfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.longbench import reader
from kvjax.models.tokenizer import Tokenizer

# No prompt of these tests is longer than any limit of tokens.
TOKENIZER = Tokenizer(
  tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, "?")), {}
)


def rows(name):
  return [
    {
      "input": f"question {number}",
      "context": f"context {number} of {name}\u2028",
      "answers": [f"answer {number}", "else"],
      "length": 10,
      "dataset": name,
      "language": "en",
      "all_classes": None,
      "_id": str(number),
    }
    for number in range(3)
  ]


def lines(name):
  texts = [json.dumps(row, ensure_ascii=False) for row in rows(name)]
  return "\n".join(texts) + "\n"


def as_lines(folder, name):
  folder.joinpath("data").mkdir(exist_ok=True)
  folder.joinpath("data", f"{name}.jsonl").write_text(lines(name), "utf-8")


def as_json(folder, name):
  folder.joinpath(f"{name}.json").write_text(json.dumps(rows(name), indent=1))


def as_zip(folder, name):
  with zipfile.ZipFile(folder / "data.zip", "a") as archive:
    archive.writestr(f"data/{name}.jsonl", lines(name))
    archive.writestr(f"__MACOSX/data/._{name}.jsonl", b"\x00")


def as_parquet(folder, name):
  """As the hub has it, in two shards."""
  folder.joinpath(name).mkdir()
  for shard, part in enumerate((rows(name)[:2], rows(name)[2:])):
    path = folder / name / f"test-{shard:05}-of-00002.parquet"
    pq.write_table(pa.Table.from_pylist(part), path)


def as_zipped_parquet(folder, name):
  path = folder / f"{name}.parquet"
  pq.write_table(pa.Table.from_pylist(rows(name)), path)
  with zipfile.ZipFile(folder / "data.zip", "a") as archive:
    archive.write(path, f"{name}/test-00000-of-00001.parquet")
  path.unlink()


def as_compressed_lines(folder, name):
  folder.joinpath(f"{name}.jsonl.gz").write_bytes(
    gzip.compress(lines(name).encode())
  )


def as_csv(folder, name):
  table = datasets.Dataset.from_list(rows(name))
  table.to_csv(folder / f"{name}.csv", index=False)


def as_converted_parquet(folder, name):
  """As the hub's refs/convert/parquet has it."""
  folder.joinpath(name, "test").mkdir(parents=True)
  path = folder / name / "test" / "0000.parquet"
  pq.write_table(pa.Table.from_pylist(rows(name)), path)


def as_saved(folder, name):
  found = datasets.Dataset.from_list(rows(name))
  datasets.DatasetDict({"test": found}).save_to_disk(
    folder / name, num_proc=None
  )


def as_cache(folder, name):
  """As `load_dataset` leaves it, with the result of some later `map`."""
  cache = folder / "THUDM___long_bench" / name / "1.0.0" / "0a1b"
  cache.mkdir(parents=True)
  cache.joinpath("dataset_info.json").write_text("{}")
  table = pa.Table.from_pylist(rows(name))
  for file in ("long_bench-test.arrow", "cache-0123.arrow"):
    with pa.ipc.new_stream(cache / file, table.schema) as writer:
      writer.write_table(table)


@pytest.mark.parametrize(
  "layout",
  [
    as_lines,
    as_json,
    as_zip,
    as_zipped_parquet,
    as_compressed_lines,
    as_csv,
    as_parquet,
    as_converted_parquet,
    as_saved,
    as_cache,
  ],
)
def test_every_layout_gives_the_same_samples(layout, tmp_path):
  for name in ("hotpotqa", "lcc", "qasper_e"):
    layout(tmp_path, name)
  found = reader.samples(tmp_path, ["lcc", "hotpotqa"], 3500, TOKENIZER)
  assert [part.task for part in found] == ["lcc", "hotpotqa"]
  for part, samples in found.items():
    assert [sample.answers for sample in samples] == [
      (f"answer {number}", "else") for number in range(3)
    ]
    for number, sample in enumerate(samples):
      assert f"context {number} of {part.task}\u2028" in sample.context
  asked = [sample.question for sample in found["hotpotqa", 3500]]
  assert asked == [f"Question: question {number}\n" for number in range(3)]


@pytest.mark.parametrize(
  ("layout", "path"),
  [
    (as_lines, "data/lcc.jsonl"),
    (as_zip, "data.zip"),
    (as_saved, "lcc"),
    (as_parquet, "lcc/test-00000-of-00002.parquet"),
  ],
)
def test_a_path_may_be_the_file_itself(layout, path, tmp_path):
  layout(tmp_path, "lcc")
  found = reader.samples(tmp_path / path, ["lcc"], 3500, TOKENIZER, count=2)
  assert len(found["lcc", 3500]) == 2


def test_kvpress_has_built_the_prompts_already(tmp_path):
  built = {
    "context": "examples",
    "question": "Question: who?\n",
    "answer_prefix": "Type:",
    "answers": ["Food"],
    "all_classes": ["Color", "Food"],
    "length": 10,
    "task": "trec",
    "max_new_tokens": 84,
  }
  tmp_path.joinpath("trec").mkdir()
  path = tmp_path / "trec" / "test-00000-of-00001.parquet"
  pq.write_table(pa.Table.from_pylist([built]), path)
  drawn = reader.samples(tmp_path, ["trec"], 3500, TOKENIZER)
  ((sample,),) = drawn.values()
  assert sample.context == "examples"
  assert sample.question == "Question: who?\n"
  assert sample.answer_prefix == "Type:"
  assert sample.max_new_tokens == 84
  assert sample.chat
  assert sample.metadata["all_classes"] == ("Color", "Food")
  assert reader.provenance(drawn)["prompts"] == ("0 official, 1 of kvpress")


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(InputError, match=r"no file or folder .*nowhere"):
    reader.samples(tmp_path / "nowhere", ["lcc"], 3500, TOKENIZER)
  with pytest.raises(InputError, match="holds no set of LongBench"):
    reader.samples(tmp_path, ["lcc"], 3500, TOKENIZER)
  as_lines(tmp_path, "lcc")
  as_lines(tmp_path, "trec_e")
  with pytest.raises(InputError, match="has no lsht; it holds lcc, trec_e"):
    reader.samples(tmp_path, ["lcc", "lsht"], 3500, TOKENIZER)
  with pytest.raises(InputError, match="no task 'lccc'"):
    reader.samples(tmp_path, ["lccc"], 3500, TOKENIZER)
  with pytest.raises(InputError, match="Name a task"):
    reader.samples(tmp_path, [], 3500, TOKENIZER)


@pytest.mark.parametrize("other", [as_zip, as_parquet, as_cache])
def test_a_set_in_two_places_is_refused(other, tmp_path):
  as_lines(tmp_path, "lcc")
  other(tmp_path, "lcc")
  with pytest.raises(InputError, match=r"holds lcc more than once, in .*jsonl"):
    reader.samples(tmp_path, ["lcc"], 3500, TOKENIZER)
  found = reader.samples(tmp_path / "data", ["lcc"], 3500, TOKENIZER)
  assert len(found["lcc", 3500]) == 3


def test_a_folder_of_another_sets_name_does_not_confuse(tmp_path):
  folder = tmp_path / "lcc"
  folder.mkdir()
  as_lines(folder, "hotpotqa")
  as_saved(folder, "qasper")
  for name in ("hotpotqa", "qasper"):
    found = reader.samples(folder, [name], 3500, TOKENIZER)
    assert f"0 of {name}" in found[name, 3500][0].context


GOOD = {"context": "c", "input": "i", "answers": ["a"], "all_classes": ["a"]}


@pytest.mark.parametrize(
  ("bad", "complaint"),
  [
    ('{"context": ', "is not valid JSON"),
    ("\xff", "is not valid JSON"),
    ("[]", "must hold a JSON object"),
    (GOOD | {"context": 5}, "needs a text under 'context'"),
    (GOOD | {"input": None}, "needs a text under 'input'"),
    (GOOD | {"answers": []}, "needs a list of texts under 'answers'"),
    (GOOD | {"answers": [5]}, "has under 'answers' what is no text"),
    (GOOD | {"all_classes": None}, "needs a list of texts under 'all_classes'"),
  ],
)
def test_a_malformed_line_is_named(bad, complaint, tmp_path):
  text = bad if isinstance(bad, str) else json.dumps(bad)
  path = tmp_path / "trec.jsonl"
  path.write_text(f"{json.dumps(GOOD)}\n{text}\n", "latin-1")
  with pytest.raises(
    InputError, match=rf"^Line 2 of .*trec\.jsonl {complaint}"
  ):
    reader.samples(path, ["trec"], 3500, TOKENIZER)
  # What is not asked for is not read.
  reader.samples(path, ["trec"], 3500, TOKENIZER, count=1)


def test_a_row_of_longbench_e_needs_a_length(tmp_path):
  (tmp_path / "lcc_e.jsonl").write_text(json.dumps(GOOD))
  with pytest.raises(InputError, match=r"Line 1 .*whole number under 'length'"):
    reader.samples(tmp_path, ["lcc_e"], 3500, TOKENIZER)


@pytest.mark.parametrize(
  ("name", "content", "complaint"),
  [
    ("data.zip", b"PK no zip", "is no zip file"),
    ("lcc.jsonl", b"", "has no rows"),
    ("lcc.parquet", b"PAR1 cut", "is no parquet file, or is cut short"),
    ("lcc.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00", "is no arrow file"),
  ],
)
def test_a_broken_file_is_named(name, content, complaint, tmp_path):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=rf"{name} {complaint}"):
    reader.samples(tmp_path, ["lcc"], 3500, TOKENIZER)
