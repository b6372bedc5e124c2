"""What a token takes to decode from caches of several sizes."""

import pytest

import kvjax
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.timing import (
  decode_timing,
  eviction_timing,
  kernel_timing,
)
from kvjax.experiments.timing.decode_timing import Decoded
from kvjax.experiments.timing.kernel_timing import Bandwidth
from kvjax.experiments.timing.random_models import random_llama
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes

SMALL = {
  "hidden_size": 8,
  "intermediate_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 1,
  "num_key_value_heads": 1,
  "vocab_size": 100,
  "max_position_embeddings": 64,
}
FULL, KEYDIFF, FLAT = candidates(["keydiff", "flat"], [kvjax.Retention(0.25)])


@pytest.mark.slow
def test_every_cache_decodes_and_says_what_it_reads(tiny, monkeypatch):
  monkeypatch.setattr(kernel_timing, "READ", 4096)
  contexts = kvjax.Prompts.of([[5] * 200, [6, 7] * 100])
  bandwidth, found = decode_timing.measure(
    tiny, [FULL, KEYDIFF, FLAT], contexts, tokens=3, rounds=2
  )
  assert bandwidth.nbytes == 4096
  assert [one.candidate for one in found] == [FULL, KEYDIFF, FLAT]
  assert all(len(one.seconds) == 2 for one in found)
  assert [one.read_tokens for one in found[:2]] == [200, 50]
  assert 50 < found[2].read_tokens < 200
  full, keydiff, flat = (one.cache_bytes for one in found)
  assert flat >= full > 3 * keydiff
  # 150 tokens fewer of two rows: keys and values of all layers and KV heads.
  geometry = tiny.config.geometry
  layer = geometry.layers[0]
  heads = geometry.num_layers * layer.kv_heads
  spared = 150 * 2 * heads * 2 * layer.key_dim * 4
  assert found[0].least_bytes - found[1].least_bytes == spared


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_but_an_embedding(tied):
  _, model, params = random_llama(**SMALL, tie_word_embeddings=tied)
  # Four projections of attention, three of the MLP, two norms; the last norm
  # and the output matrix.
  wanted = 2 * (4 * 8 * 8 + 3 * 8 * 16 + 2 * 8) + 8 + 8 * 100
  lm = Pretrained(model, params)
  assert decode_timing.weight_bytes(lm) == 4 * wanted


def test_a_step_reads_the_experts_that_a_token_needs():
  _, model, params = random_llama(
    **SMALL,
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=1,
    moe_intermediate_size=24,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
  )
  lm = Pretrained(model, params)
  # Three experts of two layers, each of three matrices, are idle.
  idle = 3 * 2 * 3 * 8 * 24
  assert decode_timing.weight_bytes(lm) == tree_bytes(params) - 4 * idle


def test_steps_are_compared_with_the_first_and_with_the_bandwidth():
  found = [
    Decoded(FULL, 8 * 2**20, 100.0, 600.0, [0.5, 0.2, 0.1]),
    Decoded(KEYDIFF, 2 * 2**20, 25.0, 300.0, [0.05] * 3),
  ]
  # 6,000 bytes a second.
  table = decode_timing.table(Bandwidth(600, [0.1] * 3), found, rows=4)
  assert table.lines == [
    ("full", "1", "2.00", "100", "200.00", "20", "1.00", "50.0"),
    ("keydiff", "0.25", "0.50", "25", "50.00", "80", "4.00", "100.0"),
  ]


def test_what_evicts_by_default_can_and_has_the_seed_that_is_given():
  for name in (*eviction_timing.METHODS, "random"):
    later = eviction_timing.plan_of(name, 64, 16, 3).decoding
    assert later.budget == kvjax.Tokens(64)
    assert later.schedule.every == 16
  assert later.method.seed == 3
  assert eviction_timing.plan_of("random:seed=5", 64, 16, 3) == (
    eviction_timing.plan_of("random:seed=5", 64, 16, 0)
  )


@pytest.mark.slow
def test_evictions_are_timed_that_evict(tiny, monkeypatch):
  monkeypatch.setattr(eviction_timing, "_ANSWER", 15)
  contexts = kvjax.Prompts.of([[5] * 60, [6, 7] * 40])
  methods = ["keydiff", "rkv:window=4", "tova"]
  plans = {name: eviction_timing.plan_of(name, 32, 8, 0) for name in methods}
  decoded = []

  def generate(model, params, cache, *arguments):
    evicts = cache.plan is not None and not cache.plan.keeps_prompts
    decoded.append((int(cache.lengths[0].max()), evicts))
    return run(model, params, cache, *arguments)

  run = kvjax.generate
  monkeypatch.setattr(kvjax, "generate", generate)
  steps, found = eviction_timing.measure(
    tiny, plans, contexts, schedule=(32, 8), rounds=2
  )
  # Once to compile, and twice: without a method, and with each. All answers of
  # 16 tokens end with 40 slots.
  assert decoded == 3 * [(24, False), *3 * [(32, True)]]
  assert [one.method for one in found] == methods
  # Of the 40 tokens of every row, layer and head.
  assert [one.kept for one in found] == [32] * 3
  assert all(len(one.seconds) == len(steps) == 2 for one in found)
  assert all(len(one.decoding) == 2 for one in found)


def test_evictions_are_compared_with_the_steps_between_them():
  # 50 ms after 100 steps of 10 ms. In the second round, all is slower.
  steps, decoding = [0.01, 0.02, 0.01], [0.0108, 0.0214, 0.0105]
  seconds = [0.9, 0.04, 0.05]
  found = [eviction_timing.Evicted("keydiff", 1024.0, seconds, decoding)]
  table = eviction_timing.table(steps, found, every=100)
  assert table.lines == [("keydiff", "1,024", "50.0", "5.0", "7.0")]


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--retention=0.5", "--budget=64"], "--retention and --budget do not go"),
    (["--every=8", "--retention=0.5"], "--every and --retention do not go"),
    (["--every=8", "--budget=64"], "--every and --budget do not go together"),
    (["--every=8", "--length=64"], "--every and --length do not go together"),
    (["--every=8", "--tokens=8"], "--every and --tokens do not go together"),
    (["--target=64"], "--target is for --every."),
    (["--methods="], "--methods is empty; keydiff,flat would be two."),
  ],
)
def test_flags_that_nothing_would_read_are_refused(
  refusal, tmp_path, arguments, sentence
):
  told = refusal(
    "kvjax.experiments.benchmark_decode",
    *("--model=no-such-model", f"--output={tmp_path}", *arguments),
  )
  assert told.startswith(sentence)


def test_a_method_without_a_target_is_refused_before_the_model_is_loaded(
  refusal,
):
  told = refusal(
    "kvjax.experiments.benchmark_decode",
    *("--every=8", "--methods=keydiff,lagkv", "--model=no-such-model"),
  )
  assert "mode=kvpress, which keeps exactly so many" in told


def test_what_the_context_has_no_room_for_is_refused(refusal):
  told = refusal("kvjax.experiments.benchmark_decode", "--tokens=600")
  assert told == (
    "--length=3584 and --tokens=600 come to 4184 tokens; the context of this "
    "model is 4096.\n"
  )
