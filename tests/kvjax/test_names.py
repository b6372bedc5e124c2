"""What messages call methods: as users write them."""

import dataclasses

import pytest

import kvjax
from kvjax.allocation import Uniform
from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods import Critical, KeyDiff, Rerotated, Tova
from kvjax.registry.names import get_recipe
from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.registry.wrappers import WRAPPERS

BLOCKS = kvjax.Schedule(block=8)


@dataclasses.dataclass(frozen=True)
class Own(KeyDiff):
  """A method without a name."""


@pytest.mark.parametrize(
  "name", [n for n in METHODS if METHODS[n].make.__module__[:5] == "kvjax"]
)
def test_every_method_goes_by_its_name(name):
  recipe = get_recipe(name)
  assert name_of(recipe.method, recipe.allocation) == name


def test_every_retrieval_method_goes_by_its_name():
  for name, entry in RETRIEVALS.items():
    assert name_of(entry.make()) == name


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_every_prefix_goes_by_its_name(prefix):
  recipe = get_recipe(f"{prefix}/tova")
  assert name_of(recipe.method, recipe.allocation) == f"{prefix}/tova"


@pytest.mark.parametrize(
  ("name", "called"),
  [
    ("finch:chunk=5", "finch"),
    ("adakv:alpha=0.1:window=8", "adakv"),
    ("pyramid/ada/think/keydiff.paper", "pyramid/ada/think/keydiff"),
    ("rerotate/critical/tova", "rerotate/critical/tova"),
    ("chunkkv.kvpress", "chunkkv.kvpress"),
    ("lagkv.local", "lagkv"),
  ],
)
def test_names_have_no_options(name, called):
  recipe = get_recipe(name)
  assert name_of(recipe.method, recipe.allocation) == called


def test_a_class_without_a_name_goes_by_its_own():
  assert name_of(Own()) == "Own"
  assert name_of(Rerotated(Own())) == "rerotate/Own"
  assert name_of(Critical(Tova())) == "critical/tova"
  assert name_of(KeyDiff(), Uniform()) == "keydiff by Uniform"


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("finch", "finch cannot evict block by block"),
    ("leverage", "leverage cannot evict block by block"),
    ("noncausal", "noncausal cannot evict block by block"),
    ("criticalkv", "criticalkv cannot evict block by block"),
    ("chunkkv.kvpress", "chunkkv.kvpress cannot evict block by block"),
    ("think/tova", "think/tova cannot evict block by block"),
    ("adakv", "adakv cannot spread a budget block by block"),
    ("ada/keydiff", "ada/keydiff cannot spread a budget block by block"),
    ("lagkv.local", "lagkv keeps a share of every partition"),
    ("critical/finch", "final before the budget is known; finch gives none"),
    ("chunkkv.kvpress/finch", "of their tokens; finch gives no scores"),
  ],
)
def test_messages_name_what_was_written(name, said):
  with pytest.raises(InputError, match=said):
    kvjax.get_plan(name, kvjax.Tokens(9), schedule=BLOCKS)


def test_plans_that_cannot_be_combined_name_what_was_written():
  later = kvjax.get_plan(
    "tova", kvjax.Tokens(9), schedule=kvjax.Schedule(every=1)
  )
  with pytest.raises(
    InputError, match=r"^tova cannot .*the heads of adakv keep"
  ):
    kvjax.get_plan("adakv", kvjax.Tokens(9), decoding=later)
  with pytest.raises(
    InputError, match=r"^tova cannot .* keydiff kept of the prompt: it evicts "
  ):
    kvjax.get_plan("keydiff", kvjax.Tokens(9), decoding=later)
  for alike in ("tova", "full", "streaming", "chunkkv"):
    kvjax.get_plan(alike, kvjax.Tokens(9), decoding=later)
  kvjax.get_plan("keydiff", 1.0, decoding=later)
  layers = kvjax.PerLayer((kvjax.Tokens(9), kvjax.Tokens(8)))
  with pytest.raises(InputError, match=r"^pyramidkv cannot have a budget for"):
    kvjax.get_plan("pyramidkv", layers)
  with pytest.raises(InputError, match=r"^think/tova drops channels"):
    kvjax.get_plan("think/tova", kvjax.Tokens(9), kv_dtype="int8")
