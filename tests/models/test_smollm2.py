"""SmolLM2-135M-Instruct, which is fetched at the first run of these tests.

What transformers, the parts of the model's published tokenizer and llama.cpp
answer is in tests/golden/smollm2.
"""

import json
import pathlib

import numpy as np
import pytest
from fetching import located

import kvjax
from kvjax.models.pretrained import load

NAME = "smollm2-135m-instruct"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())
LLAMACPP = json.loads((GOLDEN / "llamacpp.json").read_text())
STRIDE = 16
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def lm():
  return load(located(NAME))


def test_odd_texts_have_the_ids_of_the_models_own_tokenizer(lm):
  for sample in TEXTS["samples"]:
    assert lm.tokenizer.encode(sample["text"]) == sample["ids"]
    assert lm.tokenizer.decode(sample["ids"]) == sample["decoded"]
    assert "".join(lm.tokenizer.pieces(sample["text"])) == sample["text"]


def test_texts_have_the_ids_of_llamacpp(lm):
  assert len(LLAMACPP["samples"]) > len(TEXTS["samples"])
  for sample in LLAMACPP["samples"]:
    assert lm.tokenizer.encode(sample["text"]) == sample["ids"]


def test_its_chat_and_its_special_tokens(lm):
  chat, special = TEXTS["chat"], TEXTS["special"]
  assert "".join(lm.tokenizer.split_chat(chat["question"])) == chat["rendered"]
  assert lm.tokenizer.bos_id == special["bos_id"]
  assert lm.tokenizer.eos_ids == (special["eos_id"],)
  assert lm.tokenizer.pad_id == special["pad_id"]
  assert lm.tokenizer.vocab_size == lm.config.vocab_size == 49152


def test_logits_and_answers_equal_those_of_transformers(lm):
  golden = dict(np.load(GOLDEN / "logits.npz"))
  ids = lm.tokenizer.encode(TEXTS["chat"]["rendered"])
  assert ids == golden["ids"][0].tolist()
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
