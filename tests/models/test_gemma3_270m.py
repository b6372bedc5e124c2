"""Gemma 3 270M, which is fetched at the first run of these tests.

What transformers and SentencePiece answer is in tests/golden/gemma3_270m.
"""

import json
import pathlib

import numpy as np
import pytest
from fetching import located

import kvjax
from kvjax.models.pretrained import load

NAME = "gemma3-270m"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gemma3_270m"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())
STRIDE = 256
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lm():
  return load(located(NAME))


def test_odd_texts_have_the_ids_of_sentencepiece(lm):
  for sample in TEXTS["samples"]:
    assert lm.tokenizer.encode(sample["text"]) == sample["ids"]
    assert "".join(lm.tokenizer.pieces(sample["text"])) == sample["text"]


def test_it_is_a_base_model_with_windows(lm):
  assert lm.tokenizer.split_chat("text") == ("<bos>text", "\n")
  assert lm.tokenizer.vocab_size == lm.config.vocab_size == 262_144
  # The end of a turn, too: the file names it, as its maker's settings do.
  assert (lm.tokenizer.bos_id, lm.tokenizer.eos_ids) == (2, (1, 106))
  windows = [layer.window for layer in lm.model.geometry.layers]
  assert windows == ([512] * 5 + [None]) * 3


def test_logits_and_answers_equal_those_of_transformers(lm):
  golden = dict(np.load(GOLDEN / "logits.npz"))
  ids = golden["ids"][0].tolist()
  # A row that ends at each of the positions whose logits are stored.
  count = len(golden["logits"])
  prompts = kvjax.Prompts.of([ids[: len(ids) - n] for n in range(count)][::-1])
  plan = kvjax.Plan(kvjax.get_method("full"), kvjax.Retention(1.0))
  cache, logits = kvjax.prefill(lm.model, lm.params, prompts, plan)
  assert np.abs(logits[:, ::STRIDE] - golden["logits"]).max() < TOLERANCE
  assert np.abs(logits.max(axis=-1) - golden["highest"]).max() < TOLERANCE
  decoding = kvjax.Decoding(golden["generated"].size)
  answers = kvjax.generate(lm.model, lm.params, cache, logits, decoding)
  np.testing.assert_array_equal(answers.tokens[-1], golden["generated"])
