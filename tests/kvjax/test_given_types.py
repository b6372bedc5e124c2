"""Values of a wrong type or size: refused in one sentence, or harmless."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.sampling import SamplingInputs, sample
from kvjax.errors import InputError
from kvjax.methods.key_norm import KeyL2Norm
from kvjax.testing import TinyModel

MODEL = TinyModel()
PARAMS = MODEL.init()
PROMPTS = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
CACHE, LOGITS = kvjax.prefill(
  MODEL, PARAMS, PROMPTS, kvjax.get_plan("keydiff", kvjax.Tokens(3))
)
QUEST = kvjax.get_retrieval("quest")


def continued(decoding, logits=LOGITS, seeds=None):
  return kvjax.generate(MODEL, PARAMS, CACHE, logits, decoding, seeds=seeds)


DRAWN = kvjax.Decoding(2, sampling=kvjax.Sampling(temperature=1.0))
REFUSED = {
  "a_stop_id_of_64_bits": (
    lambda: kvjax.Decoding(2, stop_ids=[2**40]),
    "stop_ids must be token ids, .* 1099511627776 is not one",
  ),
  "more_tokens_than_32_bits_count": (
    lambda: kvjax.Decoding(2**63),
    "max_new_tokens must be below 2147483648; 9223372036854775808 is not",
  ),
  "as_many_tokens_as_32_bits_count": (
    lambda: continued(kvjax.Decoding(2**31 - 1)),
    "has 2147483651 tokens; this model's context is 4096",
  ),
  "a_length_beyond_32_bits": (
    lambda: kvjax.Prompts(np.ones((1, 10), np.int32), np.array([2**32 + 3])),
    r"between 1 and the 10 tokens .* they are \[4294967299\]",
  ),
  "a_seed_that_is_none": (
    lambda: continued(DRAWN, seeds=[None, 1]),
    r"whole numbers of 32 bits; \[None, 1\] are not",
  ),
  "logits_of_another_model": (
    lambda: continued(DRAWN, LOGITS[:, :5]),
    "logits are of 5 tokens and the model has 64",
  ),
  "a_name_for_a_retrieval": (
    lambda: kvjax.SparseAttention("quest", kvjax.Tokens(8)),
    r"not 'quest' and Tokens\(count=8\)",
  ),
  "no_budget": (
    lambda: kvjax.SparseAttention(QUEST, None),
    "the number or the share of the keys .* and None",
  ),
  "a_threshold_for_keys": (
    lambda: kvjax.SparseAttention(QUEST, kvjax.Threshold(0.5)),
    r"and Threshold\(least=0.5",
  ),
  "a_layer_for_layers": (
    lambda: type(QUEST)(dense_layers=1),
    r"dense_layers is a list of layers, as in \(0, 1\), not 1",
  ),
  "half_a_layer": (
    lambda: KeyL2Norm(skip_layers=(0.5,)),
    "skip_layers are numbers of layers, .* 0.5 is not one",
  ),
  "half_a_token_of_a_window": (
    lambda: kvjax.methods.SnapKV(window=2.5),
    "window must be a whole number of 32 bits; 2.5 is not",
  ),
  "a_seed_of_64_bits": (
    lambda: kvjax.methods.Random(seed=2**40),
    "seed must be a whole number of 32 bits; 1099511627776 is not",
  ),
  "a_text_for_a_page": (
    lambda: type(QUEST)(page="16"),
    "page must be a whole number of 32 bits; '16' is not",
  ),
  "a_text_for_a_share": (
    lambda: kvjax.methods.KeyDiff(recent_frac="0.5"),
    "recent_frac must be a number; '0.5' is not",
  ),
  "a_text_for_an_option_that_is_true": (
    lambda: kvjax.methods.H2O(normalize="false"),
    "normalize must be True or False; 'false' is not",
  ),
  "a_name_for_a_method": (
    lambda: kvjax.methods.Chunked("keydiff", 3),
    "Chunked uses a kvjax.methods.Method, .*; 'keydiff' is not one",
  ),
  "no_method_to_use": (
    lambda: kvjax.methods.Think(None),
    "Think uses a kvjax.methods.Method, .*; None is not one",
  ),
  "an_array_without_dimensions_for_layers": (
    lambda: KeyL2Norm(skip_layers=np.array(1)),
    r"skip_layers is a list of layers, as in \(0, 1\), not array\(1\)",
  ),
  "a_row_longer_than_its_padding": (
    lambda: kvjax.Prompts.of([[1] * 40], padded=16),
    "up to 40 tokens cannot be padded to 16; give padded=40 or more",
  ),
  "no_padding_at_all": (
    lambda: kvjax.Prompts.of([[1]], padded=0),
    "up to 1 tokens cannot be padded to 0; give padded=1 or more",
  ),
  "no_caches": (
    lambda: kvjax.generate(MODEL, PARAMS, [], PROMPTS, kvjax.Decoding(2)),
    "nothing to continue; give at least one cache",
  ),
  "more_room_than_32_bits_count": (
    lambda: kvjax.reserve(CACHE, 2**31),
    "tokens to reserve must be below 2147483648; 2147483648 is not",
  ),
  "evictions_further_apart_than_32_bits_count": (
    lambda: kvjax.Schedule(every=2**31),
    "every must be below 2147483648; 2147483648 is not",
  ),
  "a_window_of_a_threshold_beyond_32_bits": (
    lambda: kvjax.Threshold(0.5, window=2**70),
    "window of a threshold must be below 2147483648; 11805916207174113034",
  ),
  "half_a_token_of_room": (
    lambda: kvjax.reserve(CACHE, 2.5),
    "tokens to reserve must be a whole number, 0 or more; 2.5 is not",
  ),
  "less_than_no_room": (
    lambda: kvjax.reserve(CACHE, -1),
    "tokens to reserve must be a whole number, 0 or more; -1 is not",
  ),
  "a_text_for_a_count": (
    lambda: kvjax.unstack(CACHE, "2"),
    "number of caches must be a whole number, 1 or more; '2' is not",
  ),
  "a_cache_for_caches": (
    lambda: kvjax.stack(CACHE),
    r"given as a list of kvjax.Cache, .* not as .*Cache\(",
  ),
  "a_generator_for_caches": (
    lambda: kvjax.group_caches(cache for cache in [CACHE]),
    "given as a list of kvjax.Cache, .* not as <generator",
  ),
  "numbers_for_caches": (
    lambda: kvjax.group_caches([1, 2]),
    r"given as a list of kvjax.Cache, .* not as \[1, 2\]",
  ),
  "a_number_for_a_prefix": (
    lambda: kvjax.register_prefix(5, kvjax.methods.Around),
    "has lower-case letters, .* 5 does not fit",
  ),
  "a_class_of_something_else_before_methods": (
    lambda: kvjax.register_prefix("mine", dict),
    "is a class of .*Around or of .*Allocation; .*dict.* is not",
  ),
  "a_method_for_its_class_before_methods": (
    lambda: kvjax.register_prefix("mine", kvjax.get_method("rerotate/tova")),
    r"is a class of .*; Rerotated\(.* is not",
  ),
  "no_cache_to_join": (
    lambda: kvjax.stack([]),
    "There is no cache to join; give one or more",
  ),
  "a_text_for_padding_of_groups": (
    lambda: kvjax.group_caches([CACHE], padding_nbytes="a"),
    "padding_nbytes must be a whole number, 0 or more; 'a' is not",
  ),
  "less_than_no_padding_of_groups": (
    lambda: kvjax.group_caches([CACHE], -1),
    "padding_nbytes must be a whole number, 0 or more; -1 is not",
  ),
  "nothing_for_budgets": (
    lambda: kvjax.PerLayer(None),
    "budget per layer is a list of budgets, .* not None",
  ),
  "a_text_for_budgets": (
    lambda: kvjax.PerLayer("0.5"),
    "budget per layer is a list of budgets, .* not '0.5'",
  ),
  "a_text_for_true": (
    lambda: kvjax.get_plan("keydiff", 0.5, per_query_head="false"),
    "per_query_head of a plan is True or False; 'false' is neither",
  ),
  "no_prompts_at_all": (
    lambda: kvjax.Prompts.of(None),
    r"rows of token ids, as in \[\[5, 7\], \[9\]\]; None is no row",
  ),
  "a_text_for_a_padding": (
    lambda: kvjax.Prompts.of([[1]], padded="8"),
    "padded must be a whole number, 0 or more; '8' is not",
  ),
  "one_mask_for_all_rows": (
    lambda: kvjax.Prompts.of([[1, 2]], protected=[True, False]),
    r"as many values as each row has tokens, \[2\]",
  ),
  "no_mask": (
    lambda: kvjax.Prompts.of([[1, 2]], protected=5),
    r"as many values as each row has tokens, \[2\]",
  ),
  "a_mask_of_words": (
    lambda: kvjax.Prompts.of([[1, 2]], protected=[["yes", "no"]]),
    r"protected is true or false for every token; \[\['yes', 'no'\]\]",
  ),
  "a_text_for_a_request": (
    lambda: kvjax.Prompts.of([[1, 2]], repeat_request="Repeat it."),
    "prompt is a kvjax.RepeatRequest, .*; 'Repeat it.' is not",
  ),
  "a_text_for_tokens_of_a_request": (
    lambda: kvjax.RepeatRequest(first="Repeat it."),
    r"first of a request .* as in \(11, 12\), not 'Repeat it.'",
  ),
  "a_token_for_tokens_of_a_request": (
    lambda: kvjax.RepeatRequest(suffix=7),
    r"suffix of a request .* as in \(11, 12\), not 7",
  ),
  "a_token_of_a_request_that_no_model_embeds": (
    lambda: kvjax.RepeatRequest(later=[3, -5]),
    r"later of a request .* as in \(11, 12\), not \[3, -5\]",
  ),
  "a_token_of_a_request_that_this_model_does_not_embed": (
    lambda: kvjax.prefill(
      MODEL,
      PARAMS,
      kvjax.Prompts.of(
        [[1, 2]], repeat_request=kvjax.RepeatRequest(later=(64,))
      ),
      kvjax.get_plan("kvzip", 0.5),
    ),
    "There is no token 64: this model embeds 64",
  ),
  "a_text_for_a_row": (lambda: PROMPTS.row("0"), "no row '0' of prompts"),
  "fewer_copies_than_none": (
    lambda: PROMPTS.repeat(-1),
    "number of copies must be a whole number, 1 or more; -1 is not",
  ),
  "a_layer_beyond_the_last": (
    lambda: CACHE.layer(2),
    "There is no layer 2 of this cache; the layers are 0 to 1",
  ),
  "less_than_no_width": (
    lambda: kvjax.decoding_nbytes(MODEL, CACHE, -1, DRAWN),
    "width must be a whole number, 0 or more; -1 is not",
  ),
  "a_number_for_decoding": (
    lambda: kvjax.decoding_nbytes(MODEL, CACHE, 0, 3),
    r"kvjax.Decoding\(max_new_tokens=64\); 3 is not one",
  ),
  "a_share_above_1_in_a_name": (
    lambda: kvjax.get_plan("ctkvr/keydiff@1.5", kvjax.Tokens(8)),
    "at most 1; 1.5 is not",
  ),
  "no_budget_in_a_name": (
    lambda: kvjax.get_plan("ctkvr/keydiff@x", kvjax.Tokens(8)),
    "is written as compactor@0.5 or keydiff@256, not 'keydiff@x'",
  ),
  "a_retrieval_where_one_evicts": (
    lambda: kvjax.get_plan("pyramid/ctkvr", kvjax.Tokens(8)),
    "ctkvr retrieves keys, .* evicts them, as in ctkvr/keydiff@0.5",
  ),
  "a_retrieval_with_a_budget_where_one_evicts": (
    lambda: kvjax.get_plan("pyramid/quest@0.5", kvjax.Tokens(8)),
    "quest retrieves keys, .* evicts them, as in ctkvr/keydiff@0.5",
  ),
  "a_method_for_its_name": (
    lambda: kvjax.get_method(QUEST),
    "get_method takes a name such as 'keydiff', not Quest",
  ),
  "no_name_of_a_retrieval": (
    lambda: kvjax.get_retrieval(None),
    "get_retrieval takes a name such as 'quest', not None",
  ),
  "what_evicts_where_one_retrieves": (
    lambda: kvjax.get_retrieval("snapkv.kvpress:window=3"),
    "snapkv.kvpress evicts tokens, .* retrieves keys, such as quest",
  ),
  "nothing_twice_before_a_method": (
    lambda: kvjax.get_method("//keydiff"),
    "There is no '' to put before a method; there are pyramid, ",
  ),
  "what_is_unknown_twice_before_a_method": (
    lambda: kvjax.get_method("adda/adda/keydiff"),
    r"There is no 'adda' to put before a method \(did you mean ada\?",
  ),
  "a_sign_of_budgets_in_a_path": (
    lambda: kvjax.get_plan("ada/qfilters:filters=a@b/c.f", kvjax.Tokens(8)),
    "a@b/c.f cannot be read",
  ),
}


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_says_what_is_wrong(case):
  make, said = REFUSED[case]
  with pytest.raises(InputError, match=said) as raised:
    make()
  assert str(raised.value).count(". ") == 0


@pytest.mark.usefixtures("untyped")
def test_lists_of_layers_are_hashable_methods():
  assert hash(type(QUEST)(dense_layers=[0, 1])) == hash(QUEST)
  for given in ([0, 1], np.array([0, 1])):
    layers = KeyL2Norm(skip_layers=given).skip_layers
    assert layers == (0, 1)
    # Others cannot be saved.
    assert {*map(type, layers)} == {int}


def test_the_hottest_temperature_draws_without_a_warning():
  hot = kvjax.Sampling(temperature=1e300)
  tokens = continued(kvjax.Decoding(20, sampling=hot)).tokens
  # Any token is as likely as any other.
  assert len(set(np.asarray(tokens).ravel().tolist())) > 20
  # But for those that are ruled out.
  masked = jnp.where(jnp.arange(64)[None] < 2, LOGITS, -jnp.inf)
  inputs = SamplingInputs.of(hot)
  zeros = jnp.zeros(2, jnp.int32)
  drawn = {
    int(token)
    for place in range(30)
    for token in sample(masked, inputs, zeros, zeros + place)
  }
  assert drawn == {0, 1}


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["np", "jnp"])
def test_numbers_of_arrays_are_hashable_options(array):
  drawn = kvjax.Sampling(1.0, top_k=array(5))
  given = kvjax.Decoding(array(3), sampling=drawn)
  same = kvjax.Decoding(3, sampling=kvjax.Sampling(1.0, top_k=5))
  assert (hash(given), given) == (hash(same), same)


@pytest.mark.usefixtures("untyped")
def test_requests_of_lists_are_those_of_tuples():
  request = kvjax.RepeatRequest(first=[1, 2], suffix=np.array([7]))
  assert request == kvjax.RepeatRequest(first=(1, 2), suffix=(7,))
  assert hash(request) == hash(kvjax.RepeatRequest(first=(1, 2), suffix=(7,)))


@pytest.mark.usefixtures("untyped")
def test_the_widest_block_does_not_hide_a_prompt_that_is_too_long():
  """A block and what is kept are more than 32 bits count."""
  plan = kvjax.get_plan(
    "streaming:rerotate=true",
    kvjax.Tokens(5),
    schedule=kvjax.Schedule(block=2**31 - 1),
  )
  prompts = kvjax.Prompts.of([[1] * 5000])
  with pytest.raises(InputError, match=r"has 5000 tokens; .* context is"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)


@pytest.mark.usefixtures("untyped")
def test_room_is_counted_in_whole_numbers_of_any_kind():
  larger = kvjax.reserve(CACHE, np.uint8(250))
  assert larger.layer(0).capacity == CACHE.layer(0).capacity + 250


def test_logits_of_the_model_are_taken():
  assert continued(DRAWN, jnp.zeros((2, 64))).tokens.shape == (2, 2)


def test_an_annotation_may_be_known_to_type_checkers_only():
  @dataclasses.dataclass(frozen=True)
  class Own(kvjax.methods.KeyDiff):
    table: "OnlyForTypeCheckers | None" = None  # noqa: F821
    share: float = 0.5

  assert Own(table=3, share=0.25).table == 3
