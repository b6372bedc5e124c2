"""LongBench's metrics: against the libraries it uses, and by hand."""

import difflib
import random
import sys
import tempfile
import threading

import pytest
import rouge as rouge_package

from kvjax.experiments.metrics import chinese
from kvjax.experiments.metrics.longbench import (
  classification,
  classification_official,
  code_sim,
  code_sim_difflib,
  count,
  qa_f1,
  qa_f1_zh,
  retrieval,
  retrieval_zh,
)
from kvjax.experiments.metrics.rouge import (
  rouge_1,
  rouge_l,
  rouge_l_official,
  rouge_l_zh,
  rouge_l_zh_official,
)

REPORT = (
  "The agency spent $3.5 million in 2019. It plans to spend more. "
  "Officials said that the plan is sound, but that it is late."
)
SUMMARY = (
  "In 2019 the agency spent millions. The plan is late, officials said. "
  "It is sound."
)


def others(count):
  """Words that no other text has."""
  return [f"word{number}" for number in range(count)]


def by_package(prediction, reference):
  """As LongBench calls it: any exception scores 0."""
  try:
    scores = rouge_package.Rouge().get_scores([prediction], [reference])
  except ValueError:
    return 0.0
  return scores[0]["rouge-l"]["f"]


@pytest.mark.parametrize(
  ("prediction", "reference"),
  [
    ("the cat sat on the mat", "the mat the cat"),
    (SUMMARY, REPORT),
    (REPORT, SUMMARY),
    ("a b c. a c b. ", "c b a.  . b"),
    ("Case Matters", "case matters"),
    ("no common word", "nothing shared here"),
    ("...", REPORT),
    (" ", "a. "),
  ],
)
def test_rouge_l_is_the_packages(prediction, reference):
  expected = by_package(prediction, reference)
  assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_rouge_l_is_the_packages_on_drawn_texts():
  rng = random.Random(0)
  pieces = ["a", "b", "c", "The", " the", " ", ". ", ".", " a ", " b ", "\n"]
  for _ in range(300):
    one, other = (
      "".join(rng.choices(pieces, k=rng.randrange(1, 25))) for _ in range(2)
    )
    expected = by_package(one, other)
    assert rouge_l(one, other) == pytest.approx(expected, abs=1e-12)


def test_the_two_rouges_differ():
  # By hand: "the cat" is common; of sets of 5 and 3 words for the package,
  # 2 * (2/5) * (2/3) / (2/5 + 2/3) = 1/2.
  assert rouge_l("the cat sat on the mat", "the mat the cat") == pytest.approx(
    0.5, abs=1e-7
  )
  # Of 3 stemmed words and 6, all 3 are common: 2 * 1 * 0.5 / 1.5.
  assert rouge_1("the cats sat", "The cat sat on the mat.") == pytest.approx(
    2 / 3
  )


def test_long_texts_without_a_full_stop_are_scored():
  said = [f"word{number}" for number in range(1100)]
  one, other = " ".join(said), " ".join(said[:100])
  with pytest.raises(RecursionError):
    by_package(one, other)
  # 100 words of 1,100 and of 100 are common.
  assert rouge_l(one, other) == pytest.approx(1 / 6, abs=1e-6)


def officially(prediction, reference):
  """What LongBench's `eval.py` has of the package, under its own two callers.

  A thread has a stack of its own, on which it makes three calls: one more.
  """
  found = []

  def rouge_score():
    try:
      found.append(by_package(prediction, reference))
    except RecursionError:
      found.append(0.0)

  thread = threading.Thread(target=rouge_score)
  limit = sys.getrecursionlimit()
  # `by_package` is another.
  sys.setrecursionlimit(1002)
  try:
    thread.start()
    thread.join()
  finally:
    sys.setrecursionlimit(limit)
  return found[0]


@pytest.mark.parametrize(
  ("prediction", "reference", "score"),
  [
    # 989 words are passed one by one, then one is the same: 990 steps. It is
    # 1 of 990 words and of 1.
    (["b", *others(989)], ["b"], 2 / 991),
    (["b", *others(990)], ["b"], 0),
    # The same where the reference is the longer one.
    (["b"], ["b", *others(989)], 2 / 991),
    (["b"], ["b", *others(990)], 0),
    # A full stop parts what would be too long: it is 2 of 991 words and of 2.
    (["b", *others(600), ".", "c", *others(989)[600:]], ["b", "c"], 4 / 993),
  ],
)
def test_long_sentences_score_nothing_officially(prediction, reference, score):
  said, wanted = " ".join(prediction), " ".join(reference)
  assert rouge_l_official(said, wanted) == pytest.approx(score, abs=1e-6)
  assert officially(said, wanted) == pytest.approx(score, abs=1e-6)
  assert rouge_l(said, wanted) > 0


def test_words_that_are_the_same_are_one_step():
  def score(count):
    text = " ".join(others(count))
    return rouge_l_official(text, text)

  assert score(990) == pytest.approx(1)
  assert score(991) == 0


def test_long_sentences_of_chinese_words_score_nothing_officially():
  # 2 words, as a set, and 1; after 988 steps the last is one too many.
  assert rouge_l_zh_official("好" + " 人" * 988, "好") == pytest.approx(2 / 3)
  assert rouge_l_zh_official("好" + " 人" * 989, "好") == 0
  assert rouge_l_zh("好" + " 人" * 989, "好") == pytest.approx(2 / 3)


def test_chinese_words_are_jiebas_and_nothing_is_said_or_written(
  monkeypatch, capfd, caplog, tmp_path
):
  chinese._segmenter.cache_clear()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  # The example of jieba's own manual.
  found = chinese.words("我来到北京清华大学")
  assert found == ["我", "来到", "北京", "清华大学"]
  assert capfd.readouterr() == ("", "")
  assert not caplog.records
  assert not list(tmp_path.iterdir())


def test_rouge_of_chinese_words():
  # Here 北京大学 is one word.
  assert rouge_l_zh("我来到北京大学", "我来到北京天安门") == pytest.approx(
    by_package("我 来到 北京大学", "我 来到 北京 天安门"), abs=1e-12
  )
  assert rouge_l_zh("我来到北京", "我来到北京") == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize(
  ("prediction", "reference", "score"),
  [
    ("The Eiffel Tower!", "eiffel tower", 1),
    # 1 word of 3 and of 2 is common.
    ("in Paris, France", "paris texas", 0.4),
    # Each word counts as often as it occurs: 2 of 3 and of 2.
    ("no no yes", "no no", 0.8),
    ("an atheist", "a theist", 0),
    ("the", "the", 0),
  ],
)
def test_f1_of_words(prediction, reference, score):
  assert qa_f1(prediction, reference) == pytest.approx(score)


@pytest.mark.parametrize(
  ("prediction", "reference", "score"),
  [
    ("我来到北京清华大学。", "“我 来到 北京 清华大学”", 1),
    # 来到, 北京 of 3 and of 3 words.
    ("我来到北京", "他来到北京！", 2 / 3),
    ("GPT发布", "gpt 发布", 1),
    ("。", "，", 0),
  ],
)
def test_f1_of_chinese_words(prediction, reference, score):
  assert qa_f1_zh(prediction, reference) == pytest.approx(score)


@pytest.mark.parametrize(
  ("prediction", "reference", "score"),
  [
    ("Type: Color", "Color", 1),
    ("Color or Food", "Color", 0.5),
    ("Food", "Color", 0),
    # "Term" is part of the reference and not held against it.
    ("Equivalent term, Term", "Equivalent term", 1),
    # LongBench's loop would drop one of the two and give 1/2.
    ("term Equivalent Equivalent term", "Equivalent term", 1),
    # The other way round, they all are held against it.
    ("Equivalent term", "term", 1 / 3),
    ("color", "Color", 0),
  ],
)
def test_classification(prediction, reference, score):
  classes = ["Color", "Food", "term", "Equivalent", "Equivalent term"]
  assert classification(prediction, reference, classes) == score


@pytest.mark.parametrize(
  ("prediction", "score"),
  [
    # "term" is dropped, and "Equivalent", which follows it, passed over.
    ("Equivalent term", 1 / 2),
    # A name that stays is passed over in place of one that goes.
    ("Food: Equivalent term", 1 / 2),
    ("term, Food", 0),
  ],
)
def test_classification_passes_over_names_officially(prediction, score):
  classes = ["term", "Food", "Equivalent", "Equivalent term"]
  found = classification_official(prediction, "Equivalent term", classes)
  assert found == score


def test_numbers():
  assert count("There are 5 paragraphs", "5") == 1
  assert count("5, or 7, or 5, or 15", "5") == 0.5
  assert count("many", "5") == 0
  assert retrieval("Paragraph 3 or 30", "Paragraph 30") == 0.5
  assert retrieval("30", "30") == 0
  assert retrieval_zh("段落12", "段落12") == 1
  assert retrieval_zh("段落1", "段落12") == 0


@pytest.mark.parametrize(
  ("prediction", "line", "reference"),
  [
    ("\n\nreturn x\nreturn y", "return x", "return y"),
    ("```python\n# a comment\n// another\n  x = 1", "  x = 1", "x = 1"),
    ("for i in range(10):", "for i in range(10):", "for j in range(n):"),
  ],
)
def test_code_is_compared_by_its_first_line(prediction, line, reference):
  # Both find the longest matching blocks in these; no text is 200 long.
  ratio = difflib.SequenceMatcher(None, line, reference).ratio()
  assert code_sim(prediction, reference) == round(100 * ratio) / 100
  assert code_sim_difflib(prediction, reference) == round(100 * ratio) / 100


def test_code_similarity_by_hand():
  # 2 * 4 common characters of 5 + 8: 61.5 %, in whole percent.
  assert code_sim("abcd!", "abcd1234") == 0.62
  assert code_sim("# only a comment", "x") == 0
  # difflib begins with "ab", the longest block; "a", "a" and "b" are more.
  assert code_sim("aaab", "abab") == 0.75
  assert code_sim_difflib("aaab", "abab") == 0.5
  # Frequent characters of a long line are junk.
  assert code_sim("b" + "a" * 200, "a" * 200) == 1
  assert code_sim_difflib("b" + "a" * 200, "a" * 200) == 0
