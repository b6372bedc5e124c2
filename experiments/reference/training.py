"""Model, loss and optimizer step of the bundled model's training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.forward import Place, States, run_layers
from kvjax.experiments.reference import vocabulary
from kvjax.experiments.reference.attention import causal_attention
from kvjax.experiments.reference.rows import Batch
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel

MAX_POSITIONS = 4096
LAYERS = 4
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MOST_NORM = 1.0
_EMBEDDING_STD = 0.3


def config() -> DecoderConfig:
  """Returns the initial configuration, a plain Llama."""
  return DecoderConfig.from_hf(
    {
      "model_type": "llama",
      "vocab_size": vocabulary.SIZE,
      "hidden_size": 128,
      "intermediate_size": 384,
      "num_hidden_layers": LAYERS,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 32,
      "max_position_embeddings": MAX_POSITIONS,
      "rms_norm_eps": 1e-6,
      # Enough low-frequency pairs to match content 2,000 positions away.
      "rope_theta": 5e5,
      "tie_word_embeddings": True,
    }
  )


def initial_decoder(seed: int) -> Decoder:
  """Creates a decoder with the initial weights.

  Embeddings have a standard deviation of 0.3, so that a token's identity
  remains readable in the residual stream; otherwise retrieval never emerges.
  """
  decoder = Decoder(config(), rngs=nnx.Rngs(seed))
  depth = (2 * decoder.config.num_layers) ** -0.5
  graphdef, params = nnx.split(decoder)
  key = jax.random.key(seed)
  leaves = jax.tree.leaves_with_path(params)
  new = []
  for index, (path, leaf) in enumerate(leaves):
    if not _is_matrix(path):
      new.append(leaf)
      continue
    name = jax.tree_util.keystr(path)
    # Stacked layers have an axis before that of the inputs.
    scale = 1.0 / np.sqrt(leaf.shape[-2])
    if "embedding" in name:
      scale = _EMBEDDING_STD
    elif "o_proj" in name or "down_proj" in name:
      scale *= depth
    draw = jax.random.normal(jax.random.fold_in(key, index), leaf.shape)
    new.append(scale * draw)
  params = jax.tree.unflatten(jax.tree.structure(params), new)
  return nnx.merge(graphdef, params)


def _is_matrix(path: tuple[Any, ...]) -> bool:
  """Returns whether a parameter is a matrix, stacked or not."""
  name = jax.tree_util.keystr(path)
  return "kernel" in name or "embedding" in name


def scored_logits(
  model: DecoderModel,
  params: PyTree,
  tokens: Int[Array | np.ndarray, "B T"],
  place: Int[Array | np.ndarray, "B M"],
) -> Float[Array, "B M V"]:
  """Computes logits at the scored places only."""
  tokens, place = jnp.asarray(tokens), jnp.asarray(place)
  batch, length = tokens.shape
  positions = jnp.broadcast_to(
    jnp.arange(length, dtype=jnp.int32)[None], (batch, length)
  )
  hidden, _ = run_layers(
    model, params, tokens, positions, States.none(model), _step
  )
  hidden = jnp.take_along_axis(hidden, place[:, :, None], axis=1)
  return model.logits(params, hidden)


def _step(
  place: Place, stack: None, activations: Activations
) -> tuple[Float[Array, "B N S D"], None]:
  del place
  return causal_attention(activations), stack


def _loss(params: PyTree, model: DecoderModel, part: Batch) -> Float[Array, ""]:
  logits = scored_logits(model, params, part.tokens, part.place)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, part.target)
  return jnp.sum(losses * part.weight)


def optimizer() -> optax.GradientTransformation:
  """Creates AdamW without a learning rate, which the step applies."""
  return optax.chain(
    optax.clip_by_global_norm(MOST_NORM),
    optax.scale_by_adam(*BETAS),
    optax.add_decayed_weights(
      WEIGHT_DECAY,
      mask=lambda tree: jax.tree.map_with_path(
        lambda path, _: _is_matrix(path), tree
      ),
    ),
  )


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=(1, 2))
def train_step(
  model: DecoderModel,
  params: PyTree,
  state: PyTree,
  batch: Batch,
  rate: Float[Array, ""],
  micro: int,
) -> tuple[PyTree, PyTree, Float[Array, ""]]:
  """Takes one step; returns the new weights, optimizer state and loss.

  The batch is processed `micro` rows at a time, so that activations stay in a
  CPU's caches.
  """
  rows = batch.tokens.shape[0]
  parts = jax.tree.map(
    lambda x: x.reshape(rows // micro, micro, *x.shape[1:]), batch
  )
  total = jnp.sum(batch.weight)

  def add(carry: PyTree, part: Batch) -> tuple[PyTree, None]:
    loss_and_gradients = jax.value_and_grad(_loss)(params, model, part)
    return jax.tree.map(jnp.add, carry, loss_and_gradients), None

  zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
  (loss, gradients), _ = jax.lax.scan(add, zero, parts)
  gradients = jax.tree.map(lambda g: g / total, gradients)
  # Adam's bias correction raises a float to an integer power, a promotion.
  with jax.numpy_dtype_promotion("standard"):
    updates, state = optimizer().update(gradients, state, params)
  updates = jax.tree.map(lambda u: -rate * u, updates)
  return optax.apply_updates(params, updates), state, loss / total


@functools.partial(jax.jit, static_argnums=0)
def right(
  model: DecoderModel, params: PyTree, batch: Batch
) -> Bool[Array, "B M"]:
  """Computes which scored places the model predicts correctly, row by row."""

  def row(part: Batch) -> Bool[Array, " M"]:
    logits = scored_logits(model, params, part.tokens[None], part.place[None])
    return jnp.argmax(logits[0], axis=-1) == part.target

  return jax.lax.map(row, batch)
