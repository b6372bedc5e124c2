"""A cache goes with the model that made it."""

import dataclasses

import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.model import LayerSpec
from kvjax.testing import TinyModel

SPEC = LayerSpec(4, 2, 8)
QUESTIONS = kvjax.Prompts.of([[5, 6]])


def model_of(**fields):
  specs = dataclasses.replace(SPEC, **fields), LayerSpec(4, 2, 8, weights=1)
  return TinyModel(kvjax.Geometry(specs, 64))


def made_by(model):
  prompts = kvjax.Prompts.of([list(range(20))])
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(9))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  return cache


@pytest.mark.parametrize(
  ("made", "asked", "said"),
  [
    ({}, {"kv_heads": 4}, "2 KV heads .* and 4 KV heads"),
    ({}, {"key_dim": 4}, "widths 8 and 8 .* widths 4 and"),
    ({"window": 6}, {"window": 24}, "a window of 6, .* a window of 24,"),
    ({"window": 24}, {"window": 6}, "a window of 24, .* a window of 6,"),
    ({"window": 6}, {}, "a window of 6, in the cache"),
  ],
  ids=["heads", "widths", "a wider window", "a narrower window", "no window"],
)
def test_another_model_neither_answers_from_it_nor_saves_it(
  made, asked, said, tmp_path
):
  cache, other = made_by(model_of(**made)), model_of(**asked)
  sentence = f"Layer 0 has .*{said}.*; use the model that made it"
  with pytest.raises(InputError, match=sentence):
    kvjax.generate(other, other.init(), cache, QUESTIONS, kvjax.Decoding(3))
  folder = tmp_path / "cache"
  with pytest.raises(InputError, match=sentence):
    kvjax.save_cache(cache, folder, model=other, model_id="tiny")
  assert not folder.exists()
