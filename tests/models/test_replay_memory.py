"""The peak memory of a replay, from the compiled programs of a layer."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from llama_8b import FIELDS

from kvjax.activations import Activations
from kvjax.engine import prompt_programs, replay_layers
from kvjax.methods.replay import Replay
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.struct import tree_bytes

LENGTH, CHUNK, LAYERS = 8192, 2000, FIELDS["num_hidden_layers"]


def shape(*sizes, dtype=jnp.int32):
  return jax.ShapeDtypeStruct(sizes, dtype)


def peak(lowered, resident):
  """Bytes while a program runs, beside the weights."""
  memory = lowered.compile().memory_analysis()
  fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return resident + memory.temp_size_in_bytes + fresh


def prompt_and_chunk(spec, kv):
  queries = jnp.zeros((1, spec.heads, 0, spec.key_dim), kv.dtype)
  positions = jnp.zeros((1, LENGTH), jnp.int32)
  row = positions[:, 0]
  return (
    Activations(queries, kv, kv, positions, attention=spec.attention),
    replay_layers.Chunk(row, row, row),
  )


def test_it_is_at_most_a_fifth_above_a_prefill():
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
  kv = shape(1, spec.kv_heads, LENGTH, spec.key_dim, dtype=jnp.bfloat16)
  cache = LAYERS * 2 * tree_bytes(kv)
  prefill = prompt_programs.forward_layer.lower(
    stack,
    shape(),
    *embed,
    shape(1, LENGTH),
    model=model,
    how=(spec, frozenset()),
  )
  seen, chunk = jax.eval_shape(functools.partial(prompt_and_chunk, spec), kv)
  replays = (Replay(CHUNK), Replay(CHUNK, weight="output"))
  width = CHUNK + 40
  embed_again = jax.eval_shape(
    model.embed, params, shape(1, width), shape(1, width)
  )
  hidden, shared = embed_again
  again = replay_layers._replay_layer_once.lower(
    hidden,
    replay_layers.Given(stack, shape(), shared, shape(1, width), seen, chunk),
    model=model,
    how=replay_layers.How(spec, replays, CHUNK, 30, LENGTH),
  )
  scores = len(replays) * LAYERS * spec.heads * LENGTH * 4
  before = peak(prefill, cache + tree_bytes(embed))
  after = peak(again, cache + tree_bytes(embed_again) + scores)
  assert cache < after <= 1.2 * before
