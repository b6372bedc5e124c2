"""Replays of prompts with gradients: one pass forward and one backward.

With h_t the hidden state of token t of the replay after the last layer, and
Phi = sum_t |h_t|^2, the gradient of a layer is that of Phi with respect to what
the layer's attention adds to the residual. Weights of the model, and keys and
values of the prompt, are constants.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.engine.model_layers import run_block
from kvjax.engine.replay_layers import (
  Given,
  How,
  Pass,
  Scores,
  attend,
  replay_layer_compiled,
  score,
)
from kvjax.kernels.attention import Partial
from kvjax.kernels.attention.gradient import attention_gradient
from kvjax.model import Model


def run_with_gradients(
  one: Pass, hidden: Float[Array, "B R E"]
) -> list[Scores]:
  """Runs all layers forward and backward, and scores the chunk in each.

  The hidden states before every layer are in memory at once; what happens
  within a layer is computed again on the way back.

  Args:
    one: the replay of a chunk.
    hidden: embedded tokens of the replay.
  """
  states, model = [], one.model
  for layer, how in enumerate(one.hows):
    states.append(hidden)
    unscored = how._replace(replays=())
    given = one.given(layer)
    hidden, _ = replay_layer_compiled(hidden, given, model=model, how=unscored)
  cotangent = _last_cotangent(hidden, one.positions)
  scores = []
  for layer in reversed(range(len(one.hows))):
    cotangent, found = _backward_layer(
      cotangent,
      states.pop(),
      one.given(layer),
      model=model,
      how=one.hows[layer],
    )
    scores.append(found)
  return scores[::-1]


@jax.jit
def _last_cotangent(
  hidden: Float[Array, "B R E"], positions: Int[Array, "B R"]
) -> Float[Array, "B R E"]:
  """The gradient of the sum of squares of real tokens, in float32."""
  return _of_tokens(2.0 * hidden.astype(jnp.float32), positions)


@functools.partial(
  jax.jit, static_argnames=("model", "how"), donate_argnames=("cotangent",)
)
def _backward_layer(
  cotangent: Float[Array, "B R E"],
  hidden: Float[Array, "B R E"],
  given: Given,
  *,
  model: Model,
  how: How,
) -> tuple[Float[Array, "B R E"], Scores]:
  """Takes the gradient through a layer, and scores the chunk.

  Args:
    cotangent: gradient with respect to the layer's output; donated.
    hidden: the layer's input.
    given: the layer, the prompt and the chunk.
    model: the functions.
    how: see `How`.

  Returns:
    The gradient with respect to the layer's input, and the scores.
  """
  weights, dtype = given.weights, hidden.dtype
  prompt, positions = given.prompt, given.positions
  # Gradients between layers are float32, whatever the layers compute with.
  wide = hidden.astype(jnp.float32)

  def block(hidden: Float[Array, "B R E"], read: Any) -> Any:
    hidden = hidden.astype(dtype)
    return run_block(
      model, weights, how.spec, hidden, given.shared, positions, read
    )

  def output(
    hidden: Float[Array, "B R E"], attended: Float[Array, "B N R Dv"] | None
  ) -> Float[Array, "B R E"]:
    """The layer's output, if its attention gives `attended`."""
    new, _ = block(hidden, lambda _: (attended, ()))
    return new.astype(jnp.float32)

  if not how.spec.cache:
    _, pull = jax.vjp(lambda hidden: output(hidden, None), wide)
    (before,) = pull(cotangent)
    return _of_tokens(before, positions), ()
  assert prompt is not None

  def project(hidden: Float[Array, "B R E"]) -> tuple[Any, Activations]:
    """Queries, keys and values, in float32, and all activations."""

    def read(seen: Activations) -> tuple[Float[Array, "B N R Dv"], Activations]:
      shape = (*seen.queries.shape[:3], seen.values.shape[3])
      return jnp.zeros(shape, dtype), seen

    _, seen = block(hidden, read)
    parts = (seen.queries, seen.keys, seen.values)
    return tuple(x.astype(jnp.float32) for x in parts), seen

  _, pull_projections, seen = jax.vjp(project, wide, has_aux=True)
  found = attend(seen, prompt, given.chunk, how)
  _, pull = jax.vjp(output, wide, found.whole.output)
  before, of_attended = pull(cotangent)
  # In sequence, the residual after attention passes on what the input does.
  gradient = cotangent if how.spec.parallel else before
  norms = jnp.linalg.norm(_of_tokens(gradient, positions), axis=-1)
  scores = score(seen, prompt, given.chunk, how, found, norms)
  projected = _through_attention(seen, prompt, found.whole, of_attended)
  (through,) = pull_projections(projected)
  return _of_tokens(before + through, positions), scores


def _through_attention(
  seen: Activations,
  prompt: Activations,
  whole: Partial,
  cotangent: Float[Array, "B N R Dv"],
) -> tuple[
  Float[Array, "B N R D"], Float[Array, "B K R D"], Float[Array, "B K R Dv"]
]:
  """Gradients with respect to queries, keys and values of the replay."""

  def of(part: Activations) -> Any:
    return attention_gradient(
      seen.queries,
      part.keys,
      part.values,
      seen.positions,
      part.positions,
      whole,
      cotangent,
      seen.attention,
    )

  own = of(seen)
  return own.queries + of(prompt).queries, own.keys, own.values


def _of_tokens(
  x: Float[Array, "B R E"], positions: Int[Array, "B R"]
) -> Float[Array, "B R E"]:
  """Zeros for padding, whatever it has."""
  return jnp.where((positions >= 0)[..., None], x, 0.0)
