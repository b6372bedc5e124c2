"""RULER's tasks: an oracle that reads the prompt, and how long prompts are."""

import collections
import dataclasses
import json
import random
import re

import pytest
import scipy.special

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.base import Request
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import (
  common_words,
  fitting,
  frequent_words,
  niah,
  prose,
  suite,
  variable_tracking,
  words,
)


def count(text):
  """Tokens of a tokenizer that every text is the sum of its parts for."""
  return len(re.findall(r"\w+|[^\w\s]|\n", text))


def tokens(sample):
  texts = (sample.context, sample.question, sample.answer_prefix)
  return sum(map(count, texts)) + sample.max_new_tokens


# What the questions of this SQuAD and HotpotQA are about.
COUNTRIES = [
  f"{adjective}{noun}".capitalize()
  for adjective, noun in zip(words.ADJECTIVES, words.NOUNS, strict=False)
]


def paragraph(country):
  rest = "It has rivers, lakes and woods. " * (2 + len(country) % 3)
  capital = f"The capital of {country} is {country[::-1]}."
  return f"{country} is a country. {rest}{capital}"


def squad():
  """Twenty articles of ten paragraphs, each asked about and one in vain."""
  articles = []
  for start in range(0, 200, 10):
    paragraphs = []
    for country in COUNTRIES[start : start + 10]:
      answers = [{"text": country[::-1], "answer_start": 0}] * 2
      asked = {"question": f"Capital of {country}?", "answers": answers}
      vain = {"question": "Whose?", "answers": [], "is_impossible": True}
      paragraphs.append({"context": paragraph(country), "qas": [vain, asked]})
    articles.append({"title": f"Article {start}", "paragraphs": paragraphs})
  return {"version": "v2.0", "data": articles}


def hotpotqa():
  """Questions with ten documents each, the next question's among them."""
  return [
    {
      "question": f"Capital of {COUNTRIES[start]}?",
      "answer": COUNTRIES[start][::-1],
      "context": [
        [country, re.split("(?<=country[.])", paragraph(country))]
        for country in COUNTRIES[start : start + 10]
      ],
    }
    for start in range(190)
  ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpora")
  (folder / "squad.json").write_text(json.dumps(squad()))
  (folder / "hotpot.json").write_text(json.dumps(hotpotqa()))
  return generator.Texts.read(
    squad=folder / "squad.json", hotpotqa=folder / "hotpot.json"
  )


def draw(task, texts, number=0, seed=0, length=1500):
  return generator.draw(task, number, seed, length, count, texts)


def answer(sample):
  """What the texts of a prompt say, read without knowing the answers."""
  readers = {
    "niah": _needles,
    "vt": _variables,
    "cwe": _common,
    "fwe": _frequent,
    "qa": _documents,
  }
  found = readers[sample.task.split("_")[0]](sample.context, sample.question)
  assert sorted(found) == sorted(set(sample.answers))
  return " ".join(found)


def _needles(context, question):
  (query,) = re.findall(r"for (.+) mentioned", question)
  found = dict.fromkeys(query.replace(" and ", " ").split(", "), ())
  for key, value in re.findall(r"for (\S+) is: ([0-9a-f-]+)\.", context):
    if key in found:
      found[key] += (value,)
  return [value for values in found.values() for value in values]


def _variables(context, question):
  holders = re.findall(r"value (\d+)", question)
  for copy, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
    if source in holders:
      holders.append(copy)
  return holders[1:]


def _common(context, question):
  listed = re.findall(r"\d+\. (\S+)", context.split("often.\n")[-1])
  ((_, tenth), (_, eleventh)) = collections.Counter(listed).most_common(11)[-2:]
  assert tenth > eleventh
  return [word for word, _ in collections.Counter(listed).most_common(10)]


def coded(context):
  (listed,) = re.findall(r"coded words\. (.+)\n$", context)
  return collections.Counter(listed.split())


def _frequent(context, question):
  counts = coded(context)
  del counts["..."]
  (_, third), (_, fourth) = counts.most_common(4)[-2:]
  assert third > fourth
  return [word for word, _ in counts.most_common(3)]


def _documents(context, question):
  (country,) = re.findall(r"Capital of (\w+)\?$", question)
  return re.findall(rf"The capital of {country} is (\w+)\.", context)


@pytest.mark.parametrize("task", generator.TASKS)
@pytest.mark.parametrize("length", [1500, 4200])
def test_an_oracle_that_reads_the_prompt_answers_everything(
  task, length, texts
):
  for number in range(3):
    sample = draw(task, texts, number, length=length)
    assert registry.score(sample, answer(sample)) == {"score": 1.0}
    assert all(text in sample.context for text in sample.answers)
    assert registry.score(sample, "") == {"score": 0.0}


def test_what_is_asked_for_stands_in_the_context_as_often_as_it_should(texts):
  value = draw("niah_multivalue", texts)
  (key,) = value.metadata["keys"]
  assert value.context.count(f" for {key} is: ") == 4
  for number, length in enumerate([1500, 4200]):
    single = draw("niah_single_2", texts, number, length=length)
    assert single.context.count(single.answers[0]) == 1
    chain = draw("vt", texts, number, length=length)
    assert all(chain.context.count(f"VAR {n} = ") == 1 for n in chain.answers)
    for task in ("qa_1", "qa_2"):
      asked = draw(task, texts, number, length=length)
      (name,) = re.findall(r"of (\w+)\?", asked.question)
      assert asked.context.count(paragraph(name)) == 1


def test_common_words_stand_ten_times_as_often_as_others(texts):
  for length, common, other in [(1500, 6, 1), (4095, 6, 1), (4096, 30, 3)]:
    sample = draw("cwe", texts, length=length)
    listed = re.findall(r"\d+\. (\S+)", sample.context.split("often.\n")[-1])
    counts = collections.Counter(listed)
    assert {counts[word] for word in sample.answers} == {common}
    assert set(counts.values()) == {common, other}


def test_frequent_words_follow_the_law_of_zipf(texts):
  sample = draw("fwe", texts, length=4200)
  counts = coded(sample.context)
  ranked = [count for _, count in counts.most_common()]
  assert counts["..."] == ranked[0]
  share = 1 / scipy.special.zeta(2.0)
  number = round(ranked[0] / share)
  expected = [int((number + 1) * share / rank**2) for rank in range(1, 5)]
  assert ranked[:4] == pytest.approx(expected, abs=1)


def test_related_paragraphs_come_before_others(texts):
  sample = draw("qa_1", texts, number=3, length=400)
  found = set(re.findall(r"\n(\w+) is a country", sample.context))
  assert COUNTRIES[3] in found
  assert 2 < len(found) < 10
  assert found <= set(COUNTRIES[:10])
  assert draw("qa_2", texts, number=3, length=1500).metadata["documents"] > 10


def test_there_are_no_more_documents_than_the_corpus_has(texts):
  sample = draw("qa_1", texts, length=50_000)
  assert sample.context.count("\n\nDocument ") == 200
  assert registry.score(sample, answer(sample)) == {"score": 1.0}


# RULER's wording (`scripts/data/synthetic/constants.py`).
OFFICIAL = {
  "vt": "Memorize and track the chain(s) of variable assignment hidden in the "
  "following text.\n\n{}\nQuestion: Find all variables that are assigned the "
  "value {} in the text above. Answer: According to the chain(s) of variable "
  "assignment in the text above, 5 variables are assigned the value {}, they "
  "are: ",
  "cwe": "Below is a numbered list of words. In these words, some appear more "
  "often than others. Memorize the ones that appear most often.\n{}\nQuestion: "
  "What are the 10 most common words in the above list? Answer: The top 10 "
  "words that appear most often in the list are:",
  "fwe": "Read the following coded text and track the frequency of each coded "
  "word. Find the three most frequently appeared coded words. {}\nQuestion: Do "
  "not provide any explanation. Please ignore the dots '....'. What are the "
  "three most frequently appeared words in the above coded text? Answer: "
  "According to the coded text above, the three most frequently appeared words "
  "are:",
  "qa_1": "Answer the question based on the given documents. Only give me the "
  "answer and do not output any other words.\n\nThe following are given "
  "documents.\n\nDocument 1:\n{}\n\nAnswer the question based on the given "
  "documents. Only give me the answer and do not output any other words.\n\n"
  "Question: {} Answer:",
}


@pytest.mark.parametrize("task", OFFICIAL)
def test_the_wording_is_the_one_of_ruler(task, texts):
  sample = draw(task, texts)
  prompt = sample.context + sample.question + sample.answer_prefix
  pattern = re.escape(OFFICIAL[task]).replace(r"\{\}", "(?s:.+?)")
  if task == "vt":
    pattern = rf"{pattern} (?:[A-Z]{{3}} ?){{5}}\n\n{pattern}"
  if task == "cwe":
    listed = " ".join(rf"{number}\. \S+" for number in range(1, 11))
    pattern = rf"{pattern} {listed}\n{pattern}"
  assert re.fullmatch(pattern, prompt)
  assert sample.answer_prefix.startswith(" ")


# What the largest unit of a task is; of essays a word with what follows it.
UNITS = dict.fromkeys(generator.TASKS, 4) | {
  "niah_single_1": count(niah.NOISE) + 1,
  "niah_multikey_2": 18,
  "niah_multikey_3": 35,
  "vt": count(niah.NOISE) + 1,
  "cwe": 9,
  "fwe": 12,
  "qa_1": count(paragraph("xx")) + 5,
  "qa_2": count(paragraph("xx")) + 6,
}


@pytest.mark.parametrize("task", generator.TASKS)
@pytest.mark.parametrize("length", [1500, 4096, 5000])
def test_a_prompt_fills_its_length_up_to_one_unit(task, length, texts):
  sample = draw(task, texts, length=length)
  assert 0 <= length - tokens(sample) < UNITS[task]
  assert sample.metadata["length"] == length


@pytest.mark.parametrize("task", generator.TASKS)
def test_equal_seeds_give_equal_samples_and_others_do_not(task, texts):
  lengths = [1600, 1500]
  found = generator.samples([task], lengths, 2, 7, count, texts)
  assert list(found) == [Part(task, 1500), Part(task, 1600)]
  for part, (first, second) in found.items():
    assert first == draw(task, texts, 0, seed=7, length=part.length)
    assert second == draw(task, texts, 1, seed=7, length=part.length)
    assert first.context != second.context
    assert first != draw(task, texts, 0, seed=8, length=part.length)
  if task in suite.TASKS:
    assert first == suite.draw(task, 0, 7, 1600, count)


OWN_DOCUMENTS = {"qa_1": 1, "qa_2": 10}


def test_lengths_that_are_too_short_are_refused_with_those_that_are_not(texts):
  with pytest.raises(InputError, match="100 tokens is too short") as refused:
    generator.samples(generator.TASKS, [100], 3, 0, count, texts)
  needed = dict(re.findall(r"(\w+) (\d+)", str(refused.value).split(":")[1]))
  assert tuple(needed) == generator.TASKS
  for task, least in needed.items():
    found = generator.samples([task], [int(least)], 3, 0, count, texts)
    (drawn,) = found.values()
    assert max(map(tokens, drawn)) == int(least)
    assert all(registry.score(s, answer(s))["score"] == 1.0 for s in drawn)
    assert drawn[0].metadata.get("documents") == OWN_DOCUMENTS.get(task)


def test_frequent_words_stand_out_at_every_length(texts):
  with pytest.raises(fitting.TooShortError) as refused:
    draw("fwe", texts, length=100)
  for length in range(refused.value.least, 334, 3):
    sample = draw("fwe", texts, length=length)
    assert registry.score(sample, answer(sample)) == {"score": 1.0}


def test_tasks_without_their_file_are_left_out_with_a_line_each(texts):
  own = generator.Texts.read()
  chosen = generator.choose(["qa_1", "vt", "cwe", "vt"], own)
  assert chosen.tasks == ("vt", "cwe")
  assert chosen.notes == [
    "qa_1 is left out: give SQuAD's dev-v2.0.json by --squad=FILE."
  ]
  assert list(chosen.data) == ["words"]
  everything = generator.choose(generator.TASKS, texts)
  assert everything.tasks == generator.TASKS
  assert everything.notes == []
  assert list(everything.data) == ["essay", "words", "qa_1", "qa_2"]
  with pytest.raises(InputError, match="qa_2 cannot be asked: give Hotpot"):
    generator.choose(["qa_2"], own)
  with pytest.raises(InputError, match=r"no task 'vtt' \(did you mean vt"):
    generator.choose(["vtt"], own)
  with pytest.raises(InputError, match="Name a task"):
    generator.choose([], own)


def test_only_the_texts_that_samples_are_made_of_are_recorded(texts, tiny):
  def recorded(*tasks):
    return BENCHMARKS["ruler"].draw(
      tiny, Request(tasks=tasks, lengths=[400], samples=1, texts=lambda: texts)
    )

  assert recorded("niah_single_1").data == {}
  # A digest of a run has the same texts with and without --squad=FILE.
  assert recorded("niah_single_2").data == {"essay": prose.SOURCE}
  assert list(recorded("qa_1").data) == ["qa_1"]


def test_what_is_left_out_is_named(texts):
  few = dataclasses.replace(texts, words=texts.words[:600])
  found = generator.samples(["vt", "cwe"], [1500, 9000], 1, 0, count, few)
  assert list(found) == [("vt", 1500), ("cwe", 1500), ("vt", 9000)]
  left_out = generator.missing(["vt", "cwe", "qa_1"], [1500, 9000], found)
  assert left_out == ["cwe at 9000 tokens", "qa_1"]


def test_more_questions_than_the_file_has_are_refused(texts):
  with pytest.raises(InputError, match="qa_2 has 190 questions"):
    draw("qa_2", texts, number=190)


def test_essay_and_words_of_the_user_are_used_and_named(tmp_path):
  (tmp_path / "essay.txt").write_text("Zebras graze at noon. " * 50)
  (tmp_path / "words.txt").write_text(
    "\n".join(f"zw{number}" for number in range(1000))
  )
  texts = generator.Texts.read(
    essay=tmp_path / "essay.txt", words=str(tmp_path / "words.txt")
  )
  assert "Zebras graze at noon." in draw("niah_single_2", texts).context
  common = draw("cwe", texts)
  assert all(word.startswith("zw") for word in common.answers)
  named = "(essay|words).txt \\(sha256 [0-9a-f]{12}\\)"
  assert all(re.fullmatch(named, texts.origins[n]) for n in ("essay", "words"))
  with pytest.raises(InputError, match="more than 1000 words to fill 20000"):
    draw("cwe", texts, length=20_000)


def test_the_example_of_variables_is_whole_where_tokens_are_short():
  def characters(text):
    return len(text)

  sample = variable_tracking.sample(random.Random(0), 5000, characters)
  example, prompt = sample.context.split("\n\nMemorize")
  assert example.count(niah.NOISE) == 5
  assert prompt.count(niah.NOISE) > 5


def test_words_built_in_are_words():
  pool = common_words.built_in_words()
  assert len(pool) > 2000
  assert all(re.fullmatch("[a-z]+", word) for word in pool)
  assert {*words.NOUNS, *words.ADJECTIVES} < set(pool)


def test_the_third_frequent_word_stands_out_from_the_least_length_on():
  for number in range(53, 2000):
    fourth, fifth = (frequent_words.occurrences(number, r) for r in (4, 5))
    assert fourth > fifth
  assert frequent_words.occurrences(52, 4) == frequent_words.occurrences(52, 5)
