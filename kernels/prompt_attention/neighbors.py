"""Sends the devices of the axis "context" the earlier keys that windows see.

A query of a layer with a window W sees tokens of its own device and the last
W - 1 of those before, and no others.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.mesh_axes import CONTEXT


def tokens_before(window: int | None, length: int, devices: int) -> int | None:
  """Number of tokens that a device receives of those before its own.

  Args:
    window: W; None means unlimited.
    length: tokens of the prompts.
    devices: number of devices that share them out.

  Returns:
    The number. None if all devices should receive everything: without a window,
    and if it reaches back over more than half of the prompts, where the last
    device would have much more work than the first; also if the devices do not
    divide the prompts.

  Examples:
    >>> from kvjax.kernels.prompt_attention.neighbors import tokens_before
    >>> tokens_before(513, 32768, 8), tokens_before(512, 3072, 8)
    (512, 768)
    >>> tokens_before(4096, 4096, 4) is None
    True
  """
  own, rest = divmod(length, devices)
  if window is None or rest or devices == 1:
    return None
  # A device receives whole blocks of the kernel for TPUs, which needs to begin
  # with one, or as many tokens as it has if these are fewer.
  block = tuning.option("prompt_attention/tpu", "block")
  block = own if own <= block else math.gcd(own, block)
  before = -(-(window - 1) // block) * block
  return before if 2 * before <= length else None


def attend_with_neighbors(
  attend: Callable[..., Float[Array, "B N Q Dv"]],
  before: int,
  queries: Float[Array, "B N Q D"],
  keys: Float[Array, "B K Q D"],
  values: Float[Array, "B K Q Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None,
) -> Float[Array, "B N Q Dv"]:
  """Attends with a device's queries to its own keys and those before.

  Args:
    attend: attention to consecutive tokens; `start` is the first with a query.
      Those after the last query are zeros with the positions of later tokens,
      which the causal mask hides.
    before: number of tokens to receive; see `tokens_before`.
    queries: this device's queries, inside `jax.shard_map`.
    keys: this device's keys.
    values: this device's values.
    positions: positions of all tokens.
    sinks: logits of attention sinks.
  """
  own = queries.shape[2]
  # The first devices have fewer tokens before their own.
  start = jnp.minimum(jax.lax.axis_index(CONTEXT) * own, before)
  first = jax.lax.axis_index(CONTEXT) * own - start

  def receive(x: Float[Array, "B K Q D"]) -> Float[Array, "B K T D"]:
    # Where no device sent tokens, there are zeros: move them to the end.
    return jnp.roll(_with_tokens_before(x, before), start - before, axis=2)

  return attend(
    queries,
    receive(keys),
    receive(values),
    jax.lax.dynamic_slice_in_dim(positions, first, before + own, axis=1),
    sinks,
    start=start,
  )


def _with_tokens_before(
  x: Float[Array, "B K Q D"], before: int
) -> Float[Array, "B K T D"]:
  """Puts what the devices before have in front of a device's own."""
  own, devices = x.shape[2], jax.lax.axis_size(CONTEXT)
  parts = [x]
  for hop in range(1, -(-before // own) + 1):
    count = min(own, before - (hop - 1) * own)
    pairs = [(device, device + hop) for device in range(devices - hop)]
    parts.append(jax.lax.ppermute(x[:, :, own - count :], CONTEXT, pairs))
  return jnp.concatenate(parts[::-1], axis=2)
