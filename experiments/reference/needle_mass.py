"""Measures which layers and heads attend to the needle."""

import functools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

import kvjax
from kvjax.activations import Activations
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
)
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.tasks import niah
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

TASK = "niah_single_2"


def needle_mass(
  lm: Pretrained, samples: int, seed: int, length: int
) -> Float[np.ndarray, "L N"]:
  """Computes the share of attention on the needle's value.

  It is the attention of the token that predicts the value's first symbol, in
  prompts with one needle in prose, averaged over samples.
  """
  masses = []
  for number in range(samples):
    rng = random.Random(f"{seed} needle mass {number}")
    sample = niah.sample(niah.TASKS[TASK], rng, length, lm.text.count)
    masses.append(sample_mass(lm, sample))
  return np.mean(masses, axis=0)


def sample_mass(lm: Pretrained, sample: Sample) -> Float[np.ndarray, "L N"]:
  """Computes the share of attention on the needle's value in one sample."""
  prompt = Prompt.of_sample(lm.text, sample)
  value = lm.text.encode(sample.answers[0])
  # The answer starts with a blank, which is a separate token before digits.
  ids = prompt.context + prompt.question + lm.text.encode(" ")
  places = _places(prompt.context, value)
  prompts = kvjax.Prompts.of([ids])
  wanted = np.zeros(prompts.tokens.shape[1], bool)
  wanted[places] = True
  mass = _mass(
    lm.model,
    lm.params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(prompts.lengths),
    jnp.asarray(wanted),
  )
  return np.asarray(mass)


def _places(ids: Sequence[int], value: Sequence[int]) -> slice:
  """Finds the first occurrence of a value's tokens."""
  for start in range(len(ids)):
    if list(ids[start : start + len(value)]) == list(value):
      return slice(start, start + len(value))
  raise ValueError("The value does not stand in the prompt.")


@functools.partial(jax.jit, static_argnums=0)
def _mass(
  model: kvjax.Model,
  params: PyTree,
  tokens: Int[Array, "1 S"],
  lengths: Int[Array, " 1"],
  wanted: Bool[Array, " S"],
) -> Float[Array, "L N"]:
  def attend(
    layer: int, state: None, activations: Activations
  ) -> tuple[Float[Array, "1 N S D"], Float[Array, " N"]]:
    del layer, state
    query = jax.lax.dynamic_index_in_dim(
      activations.queries[0].astype(jnp.float32), lengths[0] - 1, axis=1
    )
    kv_heads, _, dim = activations.keys[0].shape
    logits = jnp.einsum(
      "kgd,ksd->kgs",
      query.reshape(kv_heads, -1, dim),
      activations.keys[0].astype(jnp.float32),
    )
    real = (activations.positions[0] >= 0)[None, None]
    weights = jax.nn.softmax(logits * dim**-0.5, axis=-1, where=real)
    mass = jnp.sum(weights, axis=-1, where=wanted[None, None])
    return attend_to_prompt(activations), mass.reshape(-1)

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * model.geometry.num_layers
  _, masses = hidden_states(model, params, tokens, positions, none, attend)
  return jnp.stack(masses)
