"""What a replay says of the tokens that each layer reads, to learn it."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from kvjax.activations import Activations
from kvjax.engine import prompt_programs
from kvjax.engine.replay import replay_prompts
from kvjax.heads import by_kv_head
from kvjax.methods.replay import Replay
from kvjax.model import Model, check_context
from kvjax.prompts import Prompts


class Targets(NamedTuple):
  """What a layer reads of a prompt, and the score of each token.

  Attributes:
    inputs: the layer's normalized input.
    scores: the highest score over the query heads of each KV head, as `KVzip`
      has it; -1 for tokens that are not replayed.
  """

  inputs: Float[Array, "B S E"]
  scores: Float[Array, "B K S"]


def replay_targets(
  model: Model, params: PyTree, prompts: Prompts, replay: Replay
) -> Mapping[int, Targets]:
  """Runs prompts, replays them, and pairs inputs with scores.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts; their inputs in all layers are in memory at once.
    replay: how they are replayed and scored.

  Returns:
    The pairs of each layer that methods may compress, by its number.

  Raises:
    InputError: a prompt and its replay are longer than the model's context.
  """
  geometry = model.geometry
  check_context(model, prompts.known_lengths)
  seen: dict[int, Activations] = {}
  inputs: dict[int, Float[Array, "B S E"]] = {}
  layers = prompt_programs.forward_layers(model, params, prompts, {"inputs"})
  for layer, (_, activations) in enumerate(layers):
    if activations is None:
      continue
    seen[layer] = activations.only(()).with_queries(0)
    if geometry.layers[layer].compressible:
      assert activations.inputs is not None
      inputs[layer] = activations.inputs
  found = replay_prompts(model, params, prompts, seen, (replay,))
  return {
    layer: Targets(
      of_layer,
      jnp.max(
        by_kv_head(found[layer][replay], geometry.layers[layer].kv_heads),
        axis=2,
      ),
    )
    for layer, of_layer in inputs.items()
  }
