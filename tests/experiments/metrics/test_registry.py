"""Metrics by name, as a run uses them."""

import sys

import pytest
import tokenizers

from kvjax.errors import InputError
from kvjax.experiments.metrics import passkey, registry
from kvjax.experiments.metrics.libraries import library
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.tokenizer import Tokenizer

KEY = "0123456789" * 6 + "0123"


def sample(metric, answers, **metadata):
  return Sample("", "", "", tuple(answers), "", 1, metadata, metric)


@pytest.mark.parametrize("metric", registry.METRICS)
@pytest.mark.parametrize("prediction", ["", " \n "])
def test_nothing_said_scores_nothing(metric, prediction):
  asked = sample(metric, ["5"], all_classes=["5"], needle="5")
  assert set(registry.score(asked, prediction).values()) == {0}


def test_the_package_rouge_would_find_a_blank():
  assert registry.score(sample("rouge", ["a. "]), " ") == {"score": 0}


def test_the_best_reference_counts():
  asked = sample("qa_f1", ["Lisbon", "Paris", "Paris Texas"])
  assert registry.score(asked, "Paris") == {"score": 1}


def test_of_examples_the_first_line_counts():
  said = "\nColor\nQuestion: what?\nType: Food"
  classes = ["Color", "Food"]
  cut = sample(
    "classification", ["Color"], all_classes=classes, first_line=True
  )
  whole = sample("classification", ["Color"], all_classes=classes)
  assert registry.score(cut, said) == {"score": 1}
  assert registry.score(whole, said) == {"score": 0.5}
  dialogue = sample("rouge", ["they met"], first_line=True)
  assert registry.score(dialogue, "they met\nmore and more")[
    "score"
  ] == pytest.approx(1, abs=1e-7)


def test_ruler_metrics():
  assert registry.score(sample("string_match_all", "ab"), "A!") == {
    "score": 0.5
  }
  assert registry.score(sample("string_match_part", "ab"), "A!") == {"score": 1}


@pytest.mark.parametrize(
  ("prediction", "exact", "partial"),
  [
    (f"It is {KEY}.", 1, 1),
    # Punctuation is no part of the normal form, but breaks a piece in two.
    (f"{KEY[:32]}-{KEY[32:]}", 1, 0.5),
    (KEY[:-1], 0, 63 / 64),
    # difflib's heuristic would take every frequent digit for junk.
    (f"{'9' * 200}{KEY[:16]}x{KEY[20:52]}", 0, 0.5),
    ("sorry", 0, 0),
  ],
)
def test_passkey(prediction, exact, partial):
  scores = registry.score(sample("passkey", [KEY]), prediction)
  assert scores == {"score": exact, "partial": pytest.approx(partial)}


def by_pieces(pattern):
  """A tokenizer whose tokens are what matches."""
  words = ["The", " pass", " is", "is", " ", "012", " 012", "34", "<s>"]
  numbers = {word: number for number, word in enumerate(words)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "<s>"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(pattern), "isolated"
  )
  return Tokenizer(backend, {})


@pytest.mark.parametrize(
  ("pattern", "prompt", "token"),
  [
    # Digits are grouped as after the prompt, and the blank is a token.
    (r"\d{1,3}| ?[a-zA-Z]+| ", "The pass is", "012"),
    (r"\d{1,3}| ?[a-zA-Z]+| ", "The pass is ", "012"),
    # The blank is a part of the key's token, or else it has been said.
    (r" ?\d{1,3}| ?[a-zA-Z]+| ", "The pass is", " 012"),
    (r" ?\d{1,3}| ?[a-zA-Z]+| ", "The pass is ", "012"),
  ],
)
def test_the_first_token_of_a_key_is_what_a_reply_would_say(
  pattern, prompt, token
):
  tokenizer = by_pieces(pattern)
  (expected,) = tokenizer.encode(token)
  assert passkey.first_key_token(tokenizer, prompt, "01234") == expected
  blank, *_ = tokenizer.encode(" ")
  for said in ([expected], [blank, expected, expected]):
    assert passkey.first_nonblank_token(tokenizer, said) == expected
  assert passkey.first_nonblank_token(tokenizer, [blank]) is None


def test_code_has_both_scores_of_fuzzywuzzy():
  asked = sample("code_sim", ["a" * 200])
  scores = registry.score(asked, "b" + "a" * 200)
  assert scores == {"score": 1.0, "difflib": 0.0}
  assert registry.score(asked, " ") == {"score": 0.0, "difflib": 0.0}


def test_needles_are_found_and_overlap():
  needle = "The magic number of Paris is 1234567."
  asked = sample("needle", ["1234567"], needle=needle)
  assert registry.score(asked, needle) == {"score": 1, "rouge_1": 1}
  # 1 word of 1 and of 7.
  assert registry.score(asked, "1234567") == {
    "score": 1,
    "rouge_1": pytest.approx(0.25),
  }
  assert registry.score(asked, "Paris") == {
    "score": 0,
    "rouge_1": pytest.approx(0.25),
  }


def test_a_missing_library_is_named_before_anything_runs(monkeypatch):
  registry.check(registry.METRICS)
  library.cache_clear()
  monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
  registry.check(["qa_f1", "rouge"])
  with pytest.raises(
    InputError, match=r"needs rapidfuzz, .*pip install 'kvjax\[data\]'"
  ):
    registry.check(["qa_f1", "code_sim"])


@pytest.mark.parametrize("module", ["huggingface_hub", "datasets"])
def test_what_kvjax_requires_is_not_of_an_extra(monkeypatch, module):
  monkeypatch.setitem(sys.modules, module, None)
  library.cache_clear()
  with pytest.raises(InputError, match="`pip install 'kvjax'`"):
    library(module)
