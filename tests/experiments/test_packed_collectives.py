"""What devices send each other for layers in pages, before they decode."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from made_up_chip import chip

import kvjax
from kvjax.engine.feed import feed
from kvjax.experiments.compilation import engine_programs
from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.compilation.published import Published
from kvjax.experiments.planning.step_collectives import LAYERS, MODEL
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.models import token_chunks

# Four KV heads for four devices; a prompt whose keys are its largest part.
KV_HEADS, QUERY_HEADS, DIM, WIDTH = 4, 8, 16, 32
TOKENS, KEPT, QUESTION = 4096, 1024, 64
FOUR_HEADS = Published(
  "four",
  {
    **MODEL.fields,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2 * TOKENS,
  },
)


def use_of(name, kept):
  plan = kvjax.get_plan(name, kvjax.Retention(kept / TOKENS))
  return Use(name, "", plan, TOKENS, FOUR_HEADS, answer=QUESTION + 32)


FULL, PACKED = use_of("full", TOKENS), use_of("ada/snapkv", KEPT)


@pytest.fixture
def four(monkeypatch):
  """This machine's four devices along "model", compiled for as they are."""

  def within(chip):
    return jax.set_mesh(chip.mesh)

  monkeypatch.setattr(engine_programs, "compiling_for", within)
  return dataclasses.replace(chip(jax.devices()[:4]), kv_heads=KV_HEADS)


def counted(sent):
  """How often each kind of collective leaves how many bytes on a device."""
  counts = collections.Counter()
  for each in sent:
    counts[each.opcode, each.nbytes] += each.times
  return counts


def prefilled(use, chip):
  sent = engine_programs.lower_prefill(use, LAYERS, chip).measure().sent
  return counted(sent)


def test_a_prefill_sends_scores_and_what_is_kept(four):
  """And sums of tensor parallelism, but no whole keys or values."""
  sums = prefilled(FULL, four)
  tokens = token_chunks.MOST["cpu"]
  residual, chunks = 4 * tokens * WIDTH, TOKENS // tokens
  assert chunks == 4
  # Each device keeps the sums of its tokens; a CPU makes those of all first.
  assert {key: n for key, n in sums.items() if key[1] > 4 * TOKENS} == {
    ("all-reduce", residual): 2 * LAYERS * chunks,
    ("all-gather", residual): 2 * LAYERS * chunks,
  }
  packed = prefilled(PACKED, four)
  assert sums <= packed
  added = packed - sums
  # Keys and values in the pages of all heads, some of which are not full, in
  # float32 on CPUs.
  pages = 2 * 4 * KV_HEADS * KEPT * DIM
  in_pages = {key: n for key, n in added.items() if key[1] >= pages / 2}
  assert sum(in_pages.values()) == LAYERS
  assert all(nbytes <= 1.05 * pages for _, nbytes in in_pages)
  # A number for each token of each head.
  others = added - collections.Counter(in_pages)
  assert max(nbytes for _, nbytes in others) <= 4 * KV_HEADS * TOKENS


def asked(use, chip):
  """What a question of 64 tokens sends."""
  model, params = FOUR_HEADS.shapes(chip.mesh, LAYERS)
  with jax.set_mesh(chip.mesh):
    cache = engine_programs.cache_shapes(model, params, use, chip)
    lowered = jax.jit(
      lambda params, cache, *tokens: feed(model, params, cache, *tokens),
      donate_argnames="cache",
    ).lower(
      params,
      cache,
      jax.ShapeDtypeStruct((1, QUESTION), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
    )
  return counted(collectives(Module.of(lowered.compile().as_text())))


def test_a_question_sends_its_queries_and_their_outputs(four):
  sums = {("all-reduce", 4 * QUESTION * WIDTH): 2 * LAYERS + 1}
  assert asked(FULL, four) == sums
  # Each device attends to its own pages with the queries of all heads.
  lse = 4 * QUERY_HEADS * QUESTION
  queries = outputs = lse * DIM
  assert asked(PACKED, four) == sums | {
    ("all-gather", queries): LAYERS,
    ("all-reduce", lse): LAYERS,
    ("all-reduce", outputs + lse): LAYERS,
  }
  # A device's own share of the pages is larger than both.
  assert queries + outputs < 4 * KV_HEADS * KEPT * DIM // 4 * 2
