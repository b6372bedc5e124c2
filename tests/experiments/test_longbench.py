"""LongBench: its prompts, what is cut out of them, samples and averages."""

import dataclasses
import json
import zlib

import pytest
import tokenizers

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.longbench import reader
from kvjax.experiments.benchmarks.longbench.averages import averages
from kvjax.experiments.benchmarks.longbench.sets import LONGBENCH_E, NAMES, SETS
from kvjax.experiments.benchmarks.longbench.templates import (
  PROMPTS,
  PromptTexts,
  fill,
  truncate,
)
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.results import Part
from kvjax.models.tokenizer import Tokenizer

# CRC-32 of the official prompts with {context} and {input}, as they stand in
# dataset2prompt.json.
OFFICIAL = {
  "narrativeqa": 2183897829,
  "qasper": 1908023095,
  "multifieldqa_en": 2802128653,
  "multifieldqa_zh": 3226503812,
  "hotpotqa": 1135239967,
  "2wikimqa": 1135239967,
  "musique": 1135239967,
  "dureader": 999363152,
  "gov_report": 3346792220,
  "qmsum": 113283601,
  "multi_news": 3616531832,
  "vcsum": 774360849,
  "trec": 479310260,
  "triviaqa": 440319165,
  "samsum": 909394230,
  "lsht": 519411619,
  "passage_count": 2101669861,
  "passage_retrieval_en": 1043504867,
  "passage_retrieval_zh": 254167149,
  "lcc": 1135223504,
  "repobench-p": 2693605551,
}

ANSWERS = {
  "classification": "Color",
  "count": "7",
  "retrieval": "Paragraph 12",
  "retrieval_zh": "段落12",
  "qa_f1_zh": "北京清华大学",
  "rouge_zh": "我来到北京清华大学",
  "code_sim": "return self.cache",
}


def by_bytes(normalizer_model=None):
  """A tokenizer with a token for each byte of UTF-8."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {letter: number for number, letter in enumerate(letters)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  if normalizer_model is not None:
    backend.normalizer = normalizer_model
  return Tokenizer(backend, {})


BYTES = by_bytes()


def row(name, **fields):
  """A row as the hub has it."""
  metric = SETS[name.removesuffix("_e")].metric
  return {
    "input": "What is it?",
    "context": f"The text of {name}.",
    "answers": ["wrong", ANSWERS.get(metric, "the right answer")],
    "length": 5000,
    "dataset": name,
    "language": "en",
    "all_classes": ["Color", "Food"] if metric == "classification" else None,
    "_id": "0",
  } | fields


def write(folder, name, rows):
  lines = [json.dumps(each, ensure_ascii=False) for each in rows]
  (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def test_the_sets_are_the_published_ones():
  assert [len(SETS), len(LONGBENCH_E), len(set(NAMES))] == [21, 13, 34]
  assert {SETS[name].language for name in LONGBENCH_E} == {"English"}
  assert [
    sum(each.language == language for each in SETS.values())
    for language in ("English", "Chinese")
  ] == [16, 5]
  assert {name for name in SETS if SETS[name].examples} == set(
    "trec triviaqa samsum lsht lcc repobench-p".split()
  )
  # The table of its README, and dataset2maxlen.json.
  metrics, budgets = {}, {}
  for name, each in SETS.items():
    metrics.setdefault(each.metric, []).append(name)
    budgets.setdefault(each.max_new_tokens, []).append(name)
  assert {metric: " ".join(names) for metric, names in metrics.items()} == {
    "qa_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique "
    "triviaqa",
    "qa_f1_zh": "multifieldqa_zh",
    "rouge": "gov_report qmsum multi_news samsum",
    "rouge_zh": "dureader vcsum",
    "classification": "trec lsht",
    "count": "passage_count",
    "retrieval": "passage_retrieval_en",
    "retrieval_zh": "passage_retrieval_zh",
    "code_sim": "lcc repobench-p",
  }
  assert {budget: " ".join(names) for budget, names in budgets.items()} == {
    32: "hotpotqa 2wikimqa musique triviaqa passage_count "
    "passage_retrieval_en passage_retrieval_zh",
    64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
    128: "narrativeqa qasper dureader samsum",
    512: "gov_report qmsum multi_news vcsum",
  }


@pytest.mark.parametrize("name", SETS)
def test_the_parts_together_are_the_official_prompt(name):
  # The label that such inputs end with is filled in from them.
  filled = fill(name, "{context}", "{input}").full
  assert zlib.crc32(filled.encode()) == OFFICIAL[name]
  assert PROMPTS.keys() == OFFICIAL.keys()


@pytest.mark.parametrize(
  ("name", "text", "question", "prefix"),
  [
    ("hotpotqa", "Who?", "Question: Who?\n", "Answer:"),
    ("trec", "Question: Who?\nType:", "Question: Who?\n", "Type:"),
    ("samsum", "Summary: no.\nSummary: ", "Summary: no.\n", "Summary: "),
    # Without the label at its end, the input is asked as it is.
    ("triviaqa", "Answer: is it?", "Answer: is it?", ""),
    ("lsht", "新闻\n类别：", "新闻\n类别：", ""),
    ("lcc", "", "", "Next line of code:\n"),
    ("repobench-p", "import {x}\n", "import {x}\n", "Next line of code:\n"),
  ],
)
def test_the_question_is_apart_from_the_context(name, text, question, prefix):
  prompt = fill(name, "some {braces}\n", text)
  assert prompt[1:] == (question, prefix)
  assert "some {braces}\n" in prompt.context


@pytest.mark.parametrize(
  "prompt",
  [
    PromptTexts(
      "A long context, with 10 words or so.", "Question?\n", "Answer:"
    ),
    PromptTexts("Short.", "def a_question(that): is_very_long()\n", "Next:\n"),
    PromptTexts("请基于给定的文章", "回答下述问题。", ""),
    PromptTexts("All of it is context and nothing else", "", ""),
  ],
)
def test_the_middle_of_the_whole_prompt_is_cut_out(prompt):
  whole = prompt.full.encode()
  for limit in range(2 * len(prompt.answer_prefix) + 2, len(whole)):
    found = truncate(prompt, limit, BYTES)
    half = limit // 2
    # LongBench's rule, where each byte is a token.
    assert found.full == "".join(
      text.decode(errors="replace") for text in (whole[:half], whole[-half:])
    )
    assert found.answer_prefix == prompt.answer_prefix
    if len((prompt.question + prompt.answer_prefix).encode()) <= half:
      assert found.question == prompt.question
    if len(prompt.context.encode()) <= half:
      assert found.context == prompt.context
  assert truncate(prompt, len(whole), BYTES) == prompt


def test_the_question_is_whole_where_the_tokenizer_normalizes():
  context = "A context of ASCII, again and again."
  prompt = PromptTexts(context, "Which cafe\u0301?\n", "A:")
  composing = by_bytes(tokenizers.normalizers.NFC())
  # Composed, question and answer have 15 bytes; 5 of the last 20 are left.
  found = truncate(prompt, 40, composing)
  assert found == (context[:20] + context[-5:], *prompt[1:])


def test_a_limit_below_the_start_of_the_answer_is_refused():
  prompt = PromptTexts("context", "question", "The answer is: ")
  with pytest.raises(InputError, match="limit of 28 tokens is too short"):
    truncate(prompt, 28, BYTES)


def test_what_is_said_as_it_stands_scores_100_on_every_set(tmp_path):
  for name in NAMES:
    write(tmp_path, name, [row(name)])
  drawn = reader.samples(tmp_path, NAMES, 3500, BYTES)
  assert [part.task for part in drawn] == [
    name if name in SETS else f"{name}_4-8k" for name in NAMES
  ]
  for part, samples in drawn.items():
    (sample,) = samples
    assert sample.task == part.task
    score = registry.score(sample, sample.answers[1])["score"]
    assert round(100 * score, 2) == 100, part
    name = part.task.removesuffix("_e_4-8k")
    assert sample.max_new_tokens == SETS[name].max_new_tokens
    assert sample.chat is not SETS[name].examples


def test_samples_are_the_first_rows_truncated(tmp_path):
  rows = [row("qasper", context=f"{n} " * 500 * n) for n in range(5)]
  write(tmp_path, "qasper", rows)
  drawn = reader.samples(tmp_path, ["qasper"], 1600, BYTES, count=3)
  ((part, samples),) = drawn.items()
  assert part == Part("qasper", 1600)
  assert [s.metadata["truncated"] for s in samples] == [False, True, True]
  assert all("Article: " in sample.context for sample in samples)
  assert {
    len(BYTES.encode(s.context + s.question + s.answer_prefix))
    for s in samples[1:]
  } == {1600}
  assert reader.provenance(drawn) == {
    "prompts": "3 official, 0 of kvpress",
    "truncated": "2 of 3 prompts, in the middle",
  }


def test_samples_are_scored_with_official_faults_on_demand(tmp_path):
  for name in ("trec", "multi_news", "qasper"):
    write(tmp_path, name, [row(name, answers=["a kind of b"])])
  names = ["trec", "multi_news", "qasper"]
  drawn = reader.samples(tmp_path, names, 3500, BYTES)
  strict = reader.strictly_official(drawn)
  (trec,), (news,), (paper,) = strict.values()
  assert paper == drawn[Part("qasper", 3500)][0]
  assert paper.scored_by == ("words",)
  assert trec.scored_by == ("words", "all_classes")
  assert (
    dataclasses.replace(news, metric="rouge")
    == (drawn[Part("multi_news", 3500)][0])
  )
  said = " ".join(["b", *(f"word{number}" for number in range(1000))])
  plain = registry.score(dataclasses.replace(news, metric="rouge"), said)
  assert plain["score"] > registry.score(news, said)["score"] == 0
  classes = {"all_classes": ["a kind", "of", "a kind of b"]}
  trec = dataclasses.replace(trec, metadata={**trec.metadata, **classes})
  assert registry.score(trec, "a kind of b") == {"score": 1 / 2}
  # Of a blank the package makes a word of no letters.
  blank = dataclasses.replace(news, answers=("a. ",))
  assert registry.score(blank, " ")["score"] > 0


def test_starts_of_answers_stand_in_the_users_turn_as_in_the_official_code(
  tmp_path,
):
  write(tmp_path, "qasper", [row("qasper")])
  drawn = reader.samples(tmp_path, ["qasper"], 3500, BYTES)
  ((after,),) = drawn.values()
  ((before,),) = reader.officially_ordered(drawn).values()
  assert after.answer_prefix == "Answer:"
  assert (before.question, before.answer_prefix) == (
    f"{after.question}Answer:",
    "",
  )
  assert before.context == after.context
  kvpress = dataclasses.replace(
    after, metadata={**after.metadata, "layout": "kvpress"}
  )
  part = Part("qasper", 3500)
  assert reader.officially_ordered({part: [kvpress]}) == {part: [kvpress]}


def test_the_first_line_is_what_counts_after_examples(tmp_path):
  for name in ("trec", "narrativeqa"):
    write(tmp_path, name, [row(name, answers=["Color"])])
  drawn = reader.samples(tmp_path, ["trec", "narrativeqa"], 3500, BYTES)
  (trec,), (story,) = drawn.values()
  assert registry.score(trec, "Color\nFood") == {"score": 1}
  assert registry.score(story, "Color\nFood") == {"score": pytest.approx(2 / 3)}


def test_longbench_e_is_parted_by_length(tmp_path):
  lengths = [8000, 3999, 4000, 100, 7999, 9000]
  rows = [row("qasper_e", length=length) for length in lengths]
  write(tmp_path, "qasper_e", rows)

  def drawn(**options):
    found = reader.samples(tmp_path, ["qasper_e"], 3500, BYTES, **options)
    return {
      part.task: [sample.metadata["words"] for sample in samples]
      for part, samples in found.items()
    }

  assert drawn() == {
    "qasper_e_0-4k": [3999, 100],
    "qasper_e_4-8k": [4000, 7999],
    "qasper_e_8k+": [8000, 9000],
  }
  assert drawn(count=1) == {
    "qasper_e_0-4k": [3999],
    "qasper_e_4-8k": [4000],
    "qasper_e_8k+": [8000],
  }


def test_the_official_averages_are_those_of_the_published_table():
  # GPT-3.5-Turbo-16k in LongBench's README, in the order of the sets.
  published = """
    23.6 43.3 52.3 61.2 51.6 37.7 26.9 28.7 29.5 23.4 26.7 16.0 68.0 91.4 41.7
    29.2 4.5 71.0 77.5 54.7 53.6
  """
  scores = dict(zip(SETS, map(float, published.split()), strict=True))
  found = averages(scores)
  assert found["English, mean of the categories"] == pytest.approx(44, abs=0.05)
  assert found["Chinese, mean of the categories"] == pytest.approx(
    44.5, abs=0.06
  )
  assert found["English, few-shot"] == pytest.approx(67.1, abs=0.1)
  assert found["Chinese, code"] == pytest.approx(54.1, abs=0.1)
  # By hand: the 14 English sets come to 591.6 and the two of code to 108.3.
  assert found["16 English and code sets, plain mean"] == pytest.approx(
    699.9 / 16
  )
  assert not any("LongBench-E" in label for label in found)


def test_averages_say_what_they_lack():
  found = averages({"lcc": 40, "trec": 60, "samsum": 30, "qasper_e_8k+": 10})
  assert found == {
    "English, few-shot (2 of 3 sets)": 45,
    "English, code (1 of 2 sets)": 40,
    "English, mean of the categories (3 of 16 sets)": 42.5,
    "16 English and code sets, plain mean (3 of 16 sets)": pytest.approx(
      130 / 3
    ),
    "LongBench-E 8k+, plain mean (1 of 13 sets)": 10,
  }
