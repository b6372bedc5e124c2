"""The prompt attention that the engine calls."""

import functools

import jax
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.dispatch import dispatch, on_mesh
from kvjax.kernels.mesh_axes import CONTEXT
from kvjax.kernels.programs import Programs
from kvjax.kernels.prompt_attention.halves import attend_in_halves
from kvjax.kernels.prompt_attention.neighbors import (
  attend_with_neighbors,
  tokens_before,
)
from kvjax.kernels.prompt_attention.xla import prompt_attention_xla

# cuDNN has it from Ampere on: A100, L4, H100, B200.
_PROGRAMS = Programs.of(
  prompt_attention_xla, gpus=range(8, 100), differentiable=("gpu",)
)


def prompt_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N S Dv"]:
  """Computes causal self-attention of whole prompts, scaled by D^-1/2.

  Slot t is token t of its row. The contents of padding, NaN included, have no
  effect on tokens. The outputs of padding are unspecified. On a mesh with the
  axis "context", each device attends with a part of the queries to all keys,
  which it receives from the others; see `halves`. In a layer with a window, it
  receives the tokens before its own that the window reaches; see `neighbors`.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys.
    values: values, which may be wider or narrower than keys.
    positions: 0, 1, 2, ... in each row, then -1 for padding.
    options: a sliding window, another scale, a softcap on the logits.
    sinks: one logit per query head that joins the softmax denominator and has
      no value.

  Returns:
    The attention output in the dtype of the queries.
  """

  def attend(
    queries: Float[Array, "B N Q D"],
    *others: Array | None,
    start: Int[Array, ""] | None = None,
  ) -> Float[Array, "B N Q Dv"]:
    attended: Array = dispatch(
      _PROGRAMS,
      (queries, *others, start),
      ("BN", "BK", "BK", "B", "N", ""),
      "BN",
      options=options,
    )
    return attended

  def attend_own(
    queries: Float[Array, "B N Q D"], *others: Array | None
  ) -> Float[Array, "B N Q Dv"]:
    own = queries.shape[2]
    if own == length:
      return attend(queries, *others)
    if own % 2:
      start = jax.lax.axis_index(CONTEXT) * own
      return attend(queries, *others, start=start)
    return attend_in_halves(
      lambda half, start: attend(half, *others, start=start), queries
    )

  length, operands = queries.shape[2], (queries, keys, values, positions, sinks)
  mesh = jax.sharding.get_abstract_mesh()
  if CONTEXT not in mesh.auto_axes:
    return attend(*operands)
  before = tokens_before(options.window, length, mesh.shape[CONTEXT])
  if before is None:
    program, keys_of = attend_own, "BK"
  else:
    program = functools.partial(attend_with_neighbors, attend, before)
    keys_of = "BKS"
  spread = ("BNS", keys_of, keys_of, "B", "N")
  attended: Array = on_mesh(program, operands, spread, "BNS")
  return attended
