"""The peak memory of a replay, from the compiled programs of a layer."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import PyTree
from llama_8b import FIELDS

import kvjax
from kvjax.activations import Activations
from kvjax.engine import prompt_programs, replay_gradient, replay_layers
from kvjax.methods.replay import Replay
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.struct import tree_bytes

LENGTH, LAYERS = 8192, FIELDS["num_hidden_layers"]
# Tokens that KVzip and KVgrad replay at a time, and of a request for them.
CHUNK, GRADIENT_CHUNK, REQUEST = 2000, 512, 40


def shape(*sizes, dtype=jnp.int32):
  return jax.ShapeDtypeStruct(sizes, dtype)


def peak(lowered, resident):
  """Bytes while a program runs, beside the weights."""
  memory = lowered.compile().memory_analysis()
  fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return resident + memory.temp_size_in_bytes + fresh


def keys_of(spec):
  return shape(1, spec.kv_heads, LENGTH, spec.key_dim, dtype=jnp.bfloat16)


def prompt_and_chunk(spec, kv):
  queries = jnp.zeros((1, spec.heads, 0, spec.key_dim), kv.dtype)
  positions = jnp.zeros((1, LENGTH), jnp.int32)
  row = positions[:, 0]
  return (
    Activations(queries, kv, kv, positions, attention=spec.attention),
    replay_layers.Chunk(row, row, row),
  )


class Case(NamedTuple):
  """A model of these sizes, without arrays, and a prefill's peak."""

  model: kvjax.Model
  params: PyTree
  cache: int
  prefill: int


@pytest.fixture(scope="module")
def llama():
  model, params = from_decoder(
    nnx.eval_shape(
      lambda: Decoder(
        DecoderConfig.from_hf(FIELDS), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
      )
    )
  )
  (stack,), spec = model.layer_weights(params), model.geometry.layers[0]
  embed = jax.eval_shape(
    model.embed, params, shape(1, LENGTH), shape(1, LENGTH)
  )
  cache = LAYERS * 2 * tree_bytes(keys_of(spec))
  prefill = prompt_programs.forward_layer.lower(
    stack,
    shape(),
    *embed,
    shape(1, LENGTH),
    model=model,
    how=(spec, frozenset(), 0),
  )
  return Case(model, params, cache, peak(prefill, cache + tree_bytes(embed)))


class Replayed(NamedTuple):
  """The arguments of a layer's programs, and what stays beside them."""

  hidden: jax.ShapeDtypeStruct
  given: replay_layers.Given
  how: replay_layers.How
  resident: int

  @classmethod
  def of(cls, case, replays):
    (stack,), spec = (
      case.model.layer_weights(case.params),
      case.model.geometry.layers[0],
    )
    chunk = replays[0].chunk
    width = chunk + REQUEST
    hidden, shared = jax.eval_shape(
      case.model.embed, case.params, shape(1, width), shape(1, width)
    )
    given = replay_layers.Given(
      stack,
      shape(),
      shared,
      shape(1, width),
      *jax.eval_shape(functools.partial(prompt_and_chunk, spec), keys_of(spec)),
    )
    how = replay_layers.How(spec, replays, chunk, 30, LENGTH)
    scores = len(replays) * LAYERS * spec.heads * LENGTH * 4
    resident = case.cache + tree_bytes(shared) + scores
    return cls(hidden, given, how, resident)


@pytest.mark.parametrize(
  "program", [replay_layers._replay_layer_once, replay_layers._score_layer]
)
def test_it_is_at_most_a_fifth_above_a_prefill(llama, program):
  replays = (Replay(CHUNK), Replay(CHUNK, weight="output"))
  hidden, given, how, resident = Replayed.of(llama, replays)
  again = program.lower(hidden, given, model=llama.model, how=how)
  after = peak(again, resident + tree_bytes(hidden))
  assert llama.cache < after <= 1.2 * llama.prefill


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_that_of_gradients_is_at_most_a_fifth_above_it_too(llama, direction):
  replays = (Replay(GRADIENT_CHUNK, weight="gradient"),)
  hidden, given, how, resident = Replayed.of(llama, replays)
  # Hidden states before every layer.
  resident += LAYERS * tree_bytes(hidden)
  if direction == "forward":
    program = replay_layers.replay_layer_compiled.lower(
      hidden, given, model=llama.model, how=how._replace(replays=())
    )
  else:
    cotangent = jax.ShapeDtypeStruct(hidden.shape, jnp.float32)
    resident += tree_bytes(cotangent)
    program = replay_gradient._backward_layer.lower(
      cotangent, hidden, given, model=llama.model, how=how
    )
  after = peak(program, resident)
  assert llama.cache < after <= 1.2 * llama.prefill
