"""Methods and budgets as the command line names them."""

import functools
import re

import pytest
from absl.testing import flagsaver

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.inputs import method_inputs
from kvjax.experiments.run.candidates import (
  DEFAULT,
  candidates,
  parse_budgets,
  parse_thresholds,
)
from kvjax.registry.names import split_budget
from kvjax.registry.registry import METHODS

LATER = kvjax.get_plan(
  "keydiff", kvjax.Tokens(64), schedule=kvjax.Schedule(every=16)
)


def test_a_comparison_has_all_methods_by_default():
  assert len(candidates(DEFAULT, [kvjax.Retention(0.5)])) == len(DEFAULT)
  # Gates need files, FINCH the question; TriAttention is for decoding.
  without = {*METHODS} - {name.partition(":")[0] for name in DEFAULT}
  assert without == {"finch", "kvzap", "fast_kvzip", "triattention"}


def test_all_names_that_cannot_be_read_are_told():
  names = ["keydif", "random", "snapkv:windo=8", "zzz"]
  with pytest.raises(InputError) as raised:
    candidates(names, [kvjax.Retention(0.5)])
  said = str(raised.value)
  assert re.findall(r"no (\w+ '\w+')", said) == [
    *("method 'keydif'", "option 'windo'", "method 'zzz'")
  ]


def test_numbers_joined_by_plus_signs_are_those_of_layers():
  half, quarter = kvjax.Retention(0.5), kvjax.Retention(0.25)
  assert parse_budgets(["0.5", "0.5+0.25"], None) == [
    half,
    kvjax.PerLayer([half, quarter]),
  ]
  (budget,) = parse_budgets([], ["512+64"])
  assert budget == kvjax.PerLayer([kvjax.Tokens(512), kvjax.Tokens(64)])
  assert str(budget) == "512+64 tokens"


@pytest.mark.parametrize(
  ("shares", "tokens", "said"),
  [
    (
      ["0.5+"],
      None,
      "--retention takes numbers such as 0.5,0.25; '' is not one.",
    ),
    (
      ["50%"],
      None,
      "--retention takes numbers such as 0.5,0.25; '50%' is not one",
    ),
    ([], ["0.5"], "--budget counts tokens (did you mean --retention=0.5?)."),
    (
      [],
      ["1e3"],
      "--budget takes whole numbers such as 256,64; '1e3' is not one",
    ),
  ],
)
def test_what_is_no_number_is_refused(shares, tokens, said):
  with pytest.raises(InputError, match=re.escape(said)):
    parse_budgets(shares, tokens)


def test_thresholds_are_scores():
  budgets = parse_thresholds(["0.1", "0.5"])
  assert budgets == [kvjax.Threshold(0.1), kvjax.Threshold(0.5)]
  chosen = candidates(["kvzip", "kvzip.kvpress"], budgets)
  assert [c.budget for c in chosen[2::2]] == ["threshold 0.5"] * 2
  assert "rounded" not in chosen[-1].options
  for wrong, match in (("much", "takes scores such as -4,-6"), ("nan", "nan")):
    with pytest.raises(InputError, match=match):
      parse_thresholds([wrong])
  with pytest.raises(InputError, match="--methods has keydiff: keydiff cannot"):
    candidates(["keydiff"], budgets)


def test_a_budget_per_layer_retains_its_mean():
  budget = kvjax.PerLayer([kvjax.Retention(0.5), kvjax.Tokens(10)])
  chosen = candidates(["snapkv"], [budget])[1]
  assert chosen.budget == "0.5+10 tokens"
  assert chosen.retention(100) == pytest.approx(0.3)


def test_records_say_how_a_retention_was_rounded():
  names = ["keydiff", "keydiff.kvpress"]
  _, up, down = candidates(names, [kvjax.Retention(0.5)])
  assert down.options == f"{up.options}, rounded as kvpress"


def test_a_seed_reaches_what_is_wrapped():
  names = ["chunked/random", "random", "random:seed=3"]
  budgets = [kvjax.Retention(0.5)]
  chosen = candidates(names, budgets, seed=7)
  for candidate, seed in zip(chosen[1:], (7, 7, 3), strict=True):
    assert f"seed={seed}" in str(candidate.plan.method)


def test_a_method_that_drops_channels_is_not_the_full_cache():
  names = ["keydiff", "think:share=0.4/full", "think/keydiff"]
  chosen = candidates(names, [kvjax.Retention(1.0), kvjax.Retention(0.5)])
  assert [(c.method, c.budget) for c in chosen if c.budget == "1"] == [
    (name, "1") for name in ("full", "think:share=0.4/full", "think/keydiff")
  ]


def test_records_say_what_evicts_while_decoding():
  """Also where nothing is evicted from the prompt."""
  chosen = candidates(["compactor"], [kvjax.Retention(1.0)], decoding=LATER)
  assert [c.method for c in chosen] == ["full", "compactor"]
  assert chosen[1].plan.decoding == LATER
  assert chosen[1].options.endswith(
    f", then {LATER.label} at 64 tokens, every 16 while decoding"
  )


def test_the_baseline_alone_evicts_nothing_while_decoding():
  with pytest.raises(InputError, match="full is the baseline, which evicts"):
    candidates(["full"], [kvjax.Retention(0.5)], decoding=LATER)


def test_the_flags_name_another_method_while_decoding(parsed):
  with flagsaver.as_parsed(
    methods="snapkv", retention="0.5", every="16", decoding="keydiff@64"
  ):
    method_inputs.check_flags()
    assert method_inputs.chosen()[1].plan.decoding == LATER
    words = method_inputs._schedule_words()
    assert words == "every 16 while decoding by keydiff@64"


@pytest.mark.parametrize(
  ("methods", "decoding", "seeds"),
  [
    ("random", "random@64", (7, 7)),
    ("random:seed=2", "random@64", (2, 7)),
    ("random", "random:seed=3@64", (7, 3)),
  ],
)
def test_what_evicts_while_decoding_has_a_seed_of_its_own(
  parsed, methods, decoding, seeds
):
  with flagsaver.as_parsed(
    methods=methods, retention="0.5", every="16", decoding=decoding, seed="7"
  ):
    plan = method_inputs.chosen()[1].plan
  assert (plan.method.seed, plan.decoding.method.seed) == seeds


@pytest.mark.parametrize("heads", ["kv", "query"])
def test_all_methods_whose_heads_keep_as_many_may_come_first(parsed, heads):
  with flagsaver.as_parsed(
    every="16", decoding="keydiff@64", retention="0.5", heads=heads
  ):
    names = {c.method for c in method_inputs.chosen()}
  assert {"compactor", "chunkkv", "pyramidkv"} <= names
  assert "adakv" not in names


@pytest.mark.parametrize("when", [{"every": "16"}, {"block": "64"}])
def test_by_default_methods_are_those_that_may_evict_then(parsed, when):
  with flagsaver.as_parsed(retention="0.5", **when):
    names = {c.method for c in method_inputs.chosen()}
    schedule = method_inputs.schedule()
  for name in DEFAULT:
    plan = functools.partial(
      kvjax.get_plan, name, kvjax.Tokens(64), schedule=schedule
    )
    if name in names:
      plan()
    else:
      with pytest.raises(InputError):
        plan()
  assert {"full", "keydiff", "snapkv"} <= names
  assert "lagkv:lag=32:retention_of=row" not in names


def test_others_may_join_those_of_the_default(parsed):
  with flagsaver.as_parsed(
    retention="0.5",
    block="64",
    methods="default,keydiff:anchor=median_unit,keydiff",
  ):
    names = [c.method for c in method_inputs.chosen()]
  with flagsaver.as_parsed(retention="0.5", block="64"):
    default = [c.method for c in method_inputs.chosen()]
  assert names == [*default, "keydiff:anchor=median_unit"]


def test_a_method_that_is_named_is_refused_where_it_may_not_evict(parsed):
  with (
    flagsaver.as_parsed(methods="kvzip", retention="0.5", every="16"),
    pytest.raises(InputError, match="--methods has kvzip: "),
  ):
    method_inputs.chosen()


def test_blocks_and_shared_prompts_are_refused_before_a_model_is_loaded(parsed):
  with flagsaver.as_parsed(block="64", mesh="data:2,model:2"):
    method_inputs.check_flags()
  with (
    flagsaver.as_parsed(block="64", mesh="data:2,context:3"),
    pytest.raises(InputError, match="or give the 3 devices of 'context' to 'd"),
  ):
    method_inputs.check_flags()


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ({"decoding": "keydiff@64"}, "give --every for when"),
    (
      {"decoding": "keydiff@64", "every": "1", "block": "8"},
      "--decoding and --block do not go together",
    ),
  ],
)
def test_decoding_needs_every_and_no_blocks(parsed, given, said):
  with flagsaver.as_parsed(**given), pytest.raises(InputError, match=said):
    method_inputs.check_flags()


def test_a_budget_follows_a_name():
  assert split_budget("ctkvr@0.5") == ("ctkvr", kvjax.Retention(0.5))
  with pytest.raises(InputError, match=r"compactor@0\.5 or keydiff@256"):
    split_budget("keydiff")


def test_the_full_cache_comes_first_and_once():
  budgets = [kvjax.Retention(1.0), kvjax.Retention(0.5), kvjax.Tokens(8)]
  found = candidates(["keydiff", "full", "tova", "keydiff"], budgets)
  assert [(c.method, c.budget) for c in found] == [
    ("full", "1"),
    ("keydiff", "0.5"),
    ("keydiff", "8 tokens"),
    ("tova", "0.5"),
    ("tova", "8 tokens"),
  ]
  without = candidates(["tova"], [kvjax.Retention(0.5)])
  assert [c.method for c in without] == ["full", "tova"]
  assert [c.retention(16) for c in found[1:3]] == [0.5, 0.5]
  rounded = candidates(["tova"], budgets, kv_dtype="int8")
  assert [(c.method, c.budget) for c in rounded] == [
    ("full", "1"),
    ("tova", "1"),
    ("tova", "0.5"),
    ("tova", "8 tokens"),
  ]
  with pytest.raises(InputError, match="nothing to compare"):
    candidates([], budgets)


def test_lookups_are_candidates_too():
  budgets = [kvjax.Retention(0.5), kvjax.Tokens(8), kvjax.Retention(1.0)]
  found = candidates(["ctkvr", "ctkvr.512", "flat/keydiff@0.5"], budgets)[1:]
  assert [(c.method, c.budget) for c in found] == [
    ("ctkvr", "0.5"),
    ("ctkvr", "8 tokens"),
    ("ctkvr.512", "512 tokens"),
    ("flat/keydiff@0.5", "0.5"),
    ("flat/keydiff@0.5", "8 tokens"),
  ]
  assert found[1].retention(16) == 0.5
  assert len({c.options for c in found}) == 3
  with pytest.raises(InputError, match="--methods has ctkvr: ctkvr indexes"):
    candidates(["ctkvr"], budgets, kvjax.Schedule(block=8))
