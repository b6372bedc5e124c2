"""The operations of a replay: the engine's, and those that a page counts."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import operations
import pytest
from flax import nnx
from llama_8b import FIELDS

import kvjax
from kvjax.engine import replay
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "methods" / "kvzip.md"
SMOLLM2 = FIELDS | dict(
  vocab_size=49152,
  hidden_size=576,
  intermediate_size=1536,
  num_hidden_layers=30,
  num_attention_heads=9,
  num_key_value_heads=3,
  head_dim=64,
)
# About as long as the requests of chat templates.
REQUEST = kvjax.RepeatRequest(tuple(range(25)), (1,) * 10, (1,) * 16, (1,) * 10)
CHUNK, OVERLAP = 2000, 8


def without_arrays(fields):
  """The model of a config, and its weights without arrays."""
  config = DecoderConfig.from_hf(fields)
  return from_decoder(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def prefill_of(name, fields, length):
  """A prefill, traced; the replay is that of any level."""
  model, params = without_arrays(fields)
  rows = [[token % 50 for token in range(length)]]
  prompts = kvjax.Prompts.of(rows, repeat_request=REQUEST)
  plan = kvjax.get_plan(name, kvjax.Retention(0.25))
  return jax.jit(
    lambda params: kvjax.prefill(model, params, prompts, plan)
  ).trace(params)


@functools.cache
def engine_takes(name, fields, length):
  """Operations of all products of a prefill by the engine."""
  return operations.traced(prefill_of(name, dict(fields), length).jaxpr)


def engine_prefills(name, fields, length):
  """What a method takes beside a prefill, in prefills."""
  # Embeddings are no products; those of the logits are of one token.
  key = tuple((fields | dict(vocab_size=64)).items())
  full = engine_takes("full", key, length)
  return engine_takes(f"{name}:level=layer", key, length) / full - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "kvzip", "kvzip.plus"])
def test_operations_are_those_of_the_compiled_programs(name):
  fields = SMOLLM2 | dict(num_hidden_layers=2, vocab_size=64)
  level = "" if name == "full" else ":level=layer"
  program = prefill_of(name + level, fields, 1024)
  counted = operations.traced(program.jaxpr, known=False)
  text = program.lower().compile().as_text()
  assert operations.compiled(text) == counted
  # Attention skips what no query sees.
  assert 0.8 * counted < operations.traced(program.jaxpr) < counted


def test_what_is_done_twice_counts_twice():
  def product(x):
    return x @ x

  def loop(x, turns):
    return jax.lax.fori_loop(0, turns, lambda _, x: x @ x, x)

  def count(program):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return operations.traced(jax.make_jaxpr(program)(x))

  def skipped(x, number):
    x = jax.lax.cond(number > 1, product, lambda x: x, x)
    return jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]

  assert count(product) == 2 * 8**3
  assert count(lambda x: loop(x, jnp.int32(5))) == 5 * 2 * 8**3
  assert count(lambda x: skipped(x, jnp.int32(1))) == 3 * 2 * 8**3
  assert count(lambda x: skipped(x, jnp.int32(2))) == 4 * 2 * 8**3
  # A program computes what its results depend on, whoever reads them.
  assert count(jax.jit(lambda x: (product(x), x)[1])) == 0
  assert count(lambda x: (jax.jit(product)(x), x)[1]) == 2 * 8**3


def sizes(fields):
  """Weights of a layer, and the width N D of its queries."""
  model, params = without_arrays(fields)
  (stack,) = model.layer_weights(params)
  weights = sum(
    x.size // x.shape[0] for x in jax.tree.leaves(stack) if x.ndim == 3
  )
  (spec,) = {*model.geometry.layers}
  return weights, spec.heads * spec.key_dim


def replayed(length):
  """Tokens of the replay of each chunk, and slots of the chunk."""
  found = []
  for number, width in enumerate(replay._widths(length, CHUNK)):
    tokens, _, _ = jax.eval_shape(
      lambda tokens, lengths, number=number, width=width: (
        replay._tokens_of_chunk(
          tokens,
          lengths,
          np.int32(number * CHUNK),
          request=REQUEST,
          sizes=(width, OVERLAP if number else None),
        )
      ),
      jax.ShapeDtypeStruct((1, length), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    found.append((tokens.shape[1], width))
  return found


def prefills(fields, length):
  """The multiplications of a replay over those of a prefill, in a layer.

  Every pair of a query and a key that it sees is counted, one by one.
  """
  weights, width = sizes(fields)
  pairs = sum(range(1, length + 1))
  prefill = length * weights + 2 * width * pairs
  again = 0
  for count, slots in replayed(length):
    seen = sum(length + own for own in range(1, count + 1))
    # Logits of the chunk and of the sinks once more, for the scores.
    scored = count * (slots + len(REQUEST.prefix))
    again += count * weights + 2 * width * seen + width * scored
  return again / prefill


def closed(fields, length):
  """The formula of the page."""
  weights, width = sizes(fields)
  found = replayed(length)
  tokens = sum(count for count, _ in found)
  own = sum(count**2 for count, _ in found) / 2
  scored = sum(count * slots for count, slots in found)
  again = (
    tokens * weights + 2 * width * (tokens * length + own) + width * scored
  )
  return again / (length * weights + width * length**2)


@pytest.mark.parametrize(
  ("fields", "length"), [(FIELDS, 4096), (SMOLLM2, 1024)]
)
def test_the_closed_form_counts_every_pair(fields, length):
  assert closed(fields, length) == pytest.approx(
    prefills(fields, length), rel=0.01
  )


# The engine attends to blocks of keys, some of which are masked. Of the last
# layer, it computes the scores alone.
@pytest.mark.parametrize(
  ("place", "fields", "length"),
  [(0, FIELDS, 4096), (1, SMOLLM2, 1024), (2, SMOLLM2, 4096)],
  ids=["8b", "smollm2", "smollm2 long"],
)
def test_the_engine_takes_what_the_page_counts(place, fields, length):
  found = engine_prefills("kvzip", fields, length)
  assert found == pytest.approx(prefills(fields, length), rel=0.03)
  (numbers,) = re.findall(
    r"compiled programs take (\S+) prefills in the first row, (\S+) in the "
    r"fourth and (\S+) in the fifth",
    " ".join(PAGE.read_text(encoding="utf-8").split()),
  )
  assert f"{found:.2f}" == numbers[place]


@pytest.mark.parametrize("name", ["kvzip", "kvzip.plus"])
def test_a_replay_is_at_most_a_fifth_more_than_a_prefill_of_llama(name):
  assert engine_prefills(name, FIELDS, 4096) <= 1.2


def test_narrow_models_attend_for_a_larger_part_of_their_time():
  assert prefills(SMOLLM2, 1024) > 1.2


@pytest.mark.parametrize(
  ("name", "fields", "length"),
  [
    ("Llama-3.1-8B, 4,096 tokens", FIELDS, 4096),
    ("Llama-3.1-8B, 8,192 tokens", FIELDS, 8192),
    ("Llama-3.1-8B, 32,768 tokens", FIELDS, 32768),
    ("SmolLM2-135M, 1,024 tokens", SMOLLM2, 1024),
    ("SmolLM2-135M, 4,096 tokens", SMOLLM2, 4096),
  ],
)
def test_the_page_has_these_numbers(name, fields, length):
  weights, width = sizes(fields)
  attention = width * length / (weights + width * length)
  row = f"| {name} | {attention:.0%} | {prefills(fields, length):.2f} |"
  assert row.replace("%", " %") in PAGE.read_text(encoding="utf-8")
