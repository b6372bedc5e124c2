"""Plans: what weights, caches and programs take, by shapes and by compiling."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from plans_here import HALF, USE, here, planned, silent
from tiny_published import TINY

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.compilation import engine_programs
from kvjax.experiments.compilation.published import LLAMA
from kvjax.experiments.planning import (
  batches,
  bounds,
  compiling,
  search_picture,
  searching,
  slices,
  tables,
)
from kvjax.experiments.planning import sizes as sizes_module
from kvjax.experiments.planning.compiling import Needs, Sent
from kvjax.experiments.planning.sizes import sizes


def deep(method):
  """A method whose prefill keeps the arrays of all layers, and many layers."""
  fields = dict(TINY.fields) | {"num_hidden_layers": 24}
  plan = kvjax.get_plan(method, kvjax.Retention(0.5))
  model = dataclasses.replace(TINY, fields=fields)
  return dataclasses.replace(USE, name=method, plan=plan, model=model)


@pytest.fixture
def for_this_machine(monkeypatch):
  """Programs are compiled for CPUs, which TPUs' kernels are not for."""

  def within(chip):
    return jax.set_mesh(chip.mesh)

  for module in (engine_programs, sizes_module):
    monkeypatch.setattr(module, "compiling_for", within)


@pytest.mark.parametrize("rows", [1, 2])
def test_sizes_are_what_devices_hold(rows, for_this_machine):
  """Of a real prefill: its cache with room for the answer, and the weights."""
  chip = here(rows)
  with jax.set_mesh(chip.mesh):
    model, shapes = TINY.shapes(chip.mesh, TINY.layers)
    params = jax.tree.map(
      lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes
    )
    prompts = kvjax.Prompts(
      np.zeros((USE.rows, USE.tokens), np.int32), np.full(USE.rows, USE.tokens)
    )
    cache, _ = kvjax.prefill(model, params, prompts, HALF)
    cache = kvjax.reserve(cache, USE.answer)

  def held_by_one(tree):
    shards = (x.addressable_shards[0].data for x in jax.tree.leaves(tree))
    return sum(shard.nbytes for shard in shards)

  held = [*map(held_by_one, (params, cache.stacks))]
  found = sizes(USE, chip)
  assert found.weights == held[0]
  # Besides, a cache counts the tokens of its rows.
  assert held[1] <= found.cache < held[1] + 100
  # Four devices along "model" are two for each of two KV heads, and share out
  # the slots of what was kept.
  projections = TINY.layers * 2 * 64 * 8 * 2
  norms = (2 * TINY.layers + 1) * 64 * 2
  copies = 0
  if rows == 1:
    copies = (projections + held_by_one([x.tail for x in cache.stacks])) / 2
  assert copies <= found.copies < copies + norms


@pytest.mark.parametrize(
  ("use", "rel"),
  [
    pytest.param(USE, 0.05, id="keydiff"),
    pytest.param(deep("kvzip"), 0.01, marks=pytest.mark.slow, id="kvzip"),
  ],
)
def test_a_few_layers_tell_what_the_whole_model_takes(
  use, rel, for_this_machine
):
  """Compiled for this machine: four devices for two KV heads."""
  chip = here()
  whole = compiling.compile_use(use, chip, silent)
  assert whole.fits
  assert whole.most > whole.sizes.weights + whole.sizes.cache
  # Too little memory, and the first layers stand for all.
  small = dataclasses.replace(chip, hbm_bytes=1000)
  shallow = compiling.compile_use(use, small, silent)
  assert not shallow.fits
  assert shallow.most == pytest.approx(whole.most, rel=rel)
  assert shallow.decode.sent == whole.decode.sent


@pytest.fixture
def refusing(monkeypatch):
  """Lets the compiler refuse more than some layers, or rows."""

  def refuse(layers, rows=10**9):
    lower = compiling.lower_prefill

    def within(use, depth, chip):
      if depth > layers or use.rows > rows:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much HBM")
      return lower(use, depth, chip)

    monkeypatch.setattr(compiling, "lower_prefill", within)

  return refuse


def test_what_the_compiler_refuses_does_not_fit(refusing, for_this_machine):
  """Whatever a few layers seem to say."""
  refusing(layers=4)
  found = compiling.compile_use(USE, here(), silent)
  assert found.most <= found.chip.hbm_bytes
  assert not found.fits
  said = tables.verdict(found, slices.find_slice("v5e-8"))
  assert said.startswith("It does not fit on v5e-8: the compiler refuses it")


def test_a_batch_too_large_for_a_few_layers_does_not_fit(
  refusing, for_this_machine
):
  refusing(layers=1)
  with pytest.raises(compiling.TooLargeError, match="even 2 of 6 layers take"):
    compiling.compile_use(USE, here(), silent)


@pytest.mark.slow
def test_a_search_goes_on_after_what_does_not_fit(refusing, small_slices):
  refusing(layers=6, rows=3)
  found = searching.search(USE, "v5e", silent)
  assert found.most.fits
  assert found.most.use.rows == min(found.batches) <= 3
  four = dataclasses.replace(USE, rows=4)
  assert searching.search(four, "v5e", silent) is None


@pytest.mark.parametrize(
  ("kinds", "hbm", "depths"),
  [
    (1, 10**11, [(32,), (8, 16), (2, 4)]),
    (1, 10**9, [(8, 16), (2, 4)]),
    # A budget for each layer: each would be compiled.
    (32, 10**11, [(2, 4)]),
  ],
)
def test_loops_are_compiled_whole_and_many_kinds_of_layers_are_not(
  kinds, hbm, depths
):
  use = dataclasses.replace(USE, model=LLAMA)
  taken = planned(1).sizes._replace(weights=2 * 10**9, kinds=kinds)
  chip = dataclasses.replace(here(), hbm_bytes=hbm)
  assert compiling._depths(use, chip, taken) == depths


def test_a_line_goes_through_two_depths():
  two = Needs(10, 100, {"all-reduce": Sent(5, 50)})
  four = Needs(14, 140, {"all-reduce": Sent(9, 90), "all-gather": Sent(2, 8)})
  assert compiling.extrapolate((2, 4), (two, four), 10) == Needs(
    26, 260, {"all-reduce": Sent(21, 210), "all-gather": Sent(8, 32)}
  )


@pytest.mark.parametrize("rows", [1, 2])
def test_decoding_is_compiled_beyond_tokens_whose_experts_are_read_alone(
  rows, for_this_machine
):
  """Two tokens of a device, if three of twelve experts compute each."""
  chip = here(rows)
  assert compiling.decode_beyond(USE, chip, silent) is None
  fields = dict(TINY.fields) | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  }
  sparse = dataclasses.replace(TINY, fields=fields)
  use = dataclasses.replace(USE, model=sparse)
  larger = dataclasses.replace(use, rows=3 * rows)
  found = compiling.decode_beyond(use, chip, silent)
  whole = compiling.compile_use(larger, chip, silent)
  assert found == (3 * rows, whole.decode)
  assert compiling.decode_beyond(larger, chip, silent) is None


def test_a_step_takes_as_long_as_the_slowest_of_three():
  four = slices.find_slice("v5e-4")
  bound = bounds.step_bound(planned(1), four)
  received = 2 * 4_000 * 3 / 4 + 1_000 * 3 / 4
  expected = (3_000 / 10**9, 2e6 / 10**12, received / 200e9)
  assert bound == pytest.approx(expected)
  assert bound.seconds == bound.memory
  # Of a scattered sum, three parts as large as the result; of what is passed
  # on, all of it.
  parts = {
    "reduce-scatter": Sent(1, 1_000),
    "collective-permute": Sent(1, 1_000),
  }
  plan = planned(1)
  scattered = dataclasses.replace(
    plan, decode=dataclasses.replace(plan.decode, sent=parts)
  )
  links = bounds.step_bound(scattered, four).links
  assert links == pytest.approx((3 * 1_000 + 1_000) / 200e9)
  # What is retrieved is less than what is stored.
  retrieving = bounds.step_bound(planned(1, retrieves=True), four)
  assert retrieving.memory == pytest.approx(1_000 / 10**9)


def test_a_plan_is_a_table_and_a_sentence():
  four = slices.find_slice("v5e-4")
  mib = 2**20
  one = planned(1, (400 * mib, 100 * mib), 1000 * mib, 200 * mib)
  text = tables.to_markdown(one, four, batches.Batches(3, 40))
  rows = [line.split(" | ") for line in text.splitlines()]
  cells = {row[0].strip("| "): row[1:] for row in rows}
  assert cells["weights"] == ["200", "200 |"]
  assert cells["together"] == ["600", "300 |"]
  assert cells["% of HBM"] == ["60.0", "30.0 |"]
  assert cells["largest batch"] == ["3", "40 |"]
  assert cells["collectives"][1].startswith("1 all-gather of 0.0, 2 all-reduce")
  assert cells["at least"][1].startswith("3 µs a step (HBM 3 µs, ")
  assert tables.verdict(one, four) == "It fits on v5e-4, in 60 % of HBM."
  large = planned(3, (400 * mib, 100 * mib), 1000 * mib, 200 * mib)
  assert tables.verdict(large, four) == (
    "It does not fit on v5e-4: prefill takes 140 % of HBM."
  )
  assert tables.describe(one.use) == (
    "tiny, 1 context of 96 tokens, keydiff at 0.5"
  )
  assert "mesh data:1,model:2,group:2" in tables.facts(one, four)
  assert tables.facts(one, four).startswith("v5e-4: 4 chips (")
  alone = slices.find_slice("v5e-1")
  assert tables.facts(one, alone).startswith("v5e-1: 1 chip (")
  assert "200 GB/s of v5e (https://" in tables.sources(["v5e"])


@pytest.fixture
def small_slices(monkeypatch, for_this_machine):
  """Slices whose chips are this machine's devices."""

  def load(self, rows, kv_heads):
    devices = tuple(jax.devices()[: self.devices])
    chip = dataclasses.replace(here(rows), name=self.name, devices=devices)
    return dataclasses.replace(chip, hbm_bytes=1_200_000)

  shapes = {1: "1x1", 2: "1x2", 4: "2x2"}
  kind = dataclasses.replace(slices.KINDS["v5e"], shapes=shapes)
  monkeypatch.setattr(slices.Slice, "load", load)
  monkeypatch.setattr(slices, "KINDS", {"v5e": kind})


@pytest.mark.slow
def test_a_search_names_the_smallest_slice_and_the_largest_batch(small_slices):
  asked = dataclasses.replace(USE, rows=4)
  found = searching.search(asked, "v5e", silent)
  assert found.slice.name == "v5e-4"
  assert found.asked.fits
  assert found.most.fits
  assert found.most.use.rows == min(found.batches) >= asked.rows
  assert found.most.use.rows % found.most.chip.rows == 0
  smaller = slices.Slice("v5e-2", "v5e", 2)
  for rows in (1, 2):
    chip = smaller.load(rows, 2)
    assert not compiling.compile_use(asked, chip, silent).fits
  more = dataclasses.replace(found.most.use, rows=2 * found.most.use.rows)
  assert not compiling.compile_use(more, found.most.chip, silent).fits
  by_share = searching.batches_by_retention(found, (1.0, 0.5, 0.1))
  least, middle, most = by_share.values()
  assert least.prefill <= middle.prefill <= most.prefill
  assert least.decode < middle.decode < most.decode
  assert middle == found.batches
  figure = search_picture.draw("toy", {"v5e-4": by_share})
  decoded, prefilled = figure.axes[0].lines
  assert [*decoded.get_ydata()] == [least.decode, middle.decode, most.decode]
  assert prefilled.get_ydata()[1] == middle.prefill
  huge = dataclasses.replace(USE, rows=512)
  assert searching.search(huge, "v5e", silent) is None


@pytest.mark.parametrize("name", ["kvzip:chunk=40", "simlayerkv:recent=9"])
def test_layers_that_share_a_budget_have_the_pool_of_a_real_prefill(
  name, for_this_machine
):
  """Whatever its scores: random weights are like no other's."""
  plan = kvjax.get_plan(name, kvjax.Retention(0.5))
  use, chip = dataclasses.replace(USE, name=name, plan=plan), here()
  found = compiling.compile_use(use, chip, silent)
  with jax.set_mesh(chip.mesh):
    model, shapes = TINY.shapes(chip.mesh, TINY.layers)
    draw = np.random.default_rng(0)
    params = jax.tree.map(
      lambda x: jax.device_put(
        draw.standard_normal(x.shape).astype(x.dtype), x.sharding
      ),
      shapes,
    )
    prompts = kvjax.Prompts(
      draw.integers(64, 128, (USE.rows, USE.tokens)).astype(np.int32),
      np.full(USE.rows, USE.tokens),
      repeat_request=engine_programs.REQUEST,
    )
    cache, _ = kvjax.prefill(model, params, prompts, plan)
    cache = kvjax.reserve(cache, USE.answer)
  shards = [x.addressable_shards[0].data for x in jax.tree.leaves(cache.stacks)]
  held = sum(shard.nbytes for shard in shards)
  # Besides, a cache counts the tokens of its rows.
  assert held <= found.sizes.cache < held + 100
  # All layers' keys and values are kept until the last one is scored.
  whole = TINY.layers * 2 * USE.rows * USE.tokens * 2 * 8 * 2
  assert found.prefill.temporary > whole / 4


def test_pools_of_several_kinds_of_layers_are_refused(for_this_machine):
  """How many pages each of them needs depends on scores."""
  fields = dict(TINY.fields) | {
    "model_type": "smollm3",
    "no_rope_layers": [1, 1, 0, 1, 1, 0],
  }
  model = dataclasses.replace(TINY, fields=fields)
  plan = kvjax.get_plan("kvzip", kvjax.Retention(0.5))
  use = dataclasses.replace(USE, name="kvzip", plan=plan, model=model)
  with pytest.raises(InputError, match="What kvzip keeps depends on numbers"):
    compiling.compile_use(use, here(), silent)


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--slice=v5e-12"], "There is no slice 'v5e-12'"),
    (["--model=gpt-5"], "There is no model 'gpt-5'"),
    (["--search", "--slice=v5e-8"], "--search and --slice do not go together"),
    (["--retention=0.5,0.25"], "A plan has one budget; give --retention or"),
    (["--budget="], "A plan has one budget; give --retention or --budget one"),
    (["--threshold=-4"], "There is no --threshold here, by which contexts"),
    (["--budget=64", "--retention=0.5"], "--retention and --budget do not go"),
    (["--chips=v5e"], "--chips is for --search."),
    (["--search", "--chips=v3"], "--chips has 'v3'; there are v5e, v5p, "),
    (["--mesh=data:2,model:4"], "--batch=1 is no multiple of 2, the size"),
    (["--context=0"], "flag --context=0: 0 is not a positive integer"),
    pytest.param(
      [],
      "Compiling for TPUs takes libtpu",
      marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is not None, reason="libtpu is there"
      ),
    ),
  ],
)
def test_mistakes_get_one_sentence(refusal, arguments, sentence):
  told = refusal("kvjax.experiments.plan", *arguments)
  assert told.startswith(sentence)
