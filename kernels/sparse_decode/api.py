"""Attention of one token to the slots that a list names."""

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.dispatch import Implementation, Programs, dispatch
from kvjax.kernels.quantized import Quantized
from kvjax.kernels.sparse_decode.gpu import sparse_decode_gpu
from kvjax.kernels.sparse_decode.tpu import sparse_decode_tpu
from kvjax.kernels.sparse_decode.xla import sparse_decode_xla
from kvjax.kernels.stacks import Layer, as_stack

_PROGRAMS = Programs(sparse_decode_xla, sparse_decode_tpu, sparse_decode_gpu)


def sparse_decode(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "*L B K T D"] | Quantized,
  values: Float[Array, "*L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None = None,
  implementation: Implementation | None = None,
  options: AttentionOptions = PLAIN,
  layer: Layer = None,
) -> Partial:
  """Softmax attention, scaled by D^-1/2, to listed slots alone.

  Where tokens stand is not known here: what lies outside a window must not be
  listed, and a window is declined.

  Args:
    queries: one rotated query per head; head j reads KV head j // (N / K).
    keys: rotated keys. Stacks of layers have one more axis in front.
    values: values; slots that no list names may hold anything, as in keys.
    slots: what each list names, at most once, in any order; -1 for nothing.
      There is a list for each KV head (H = K) or for each of the groups of
      query heads that H, a multiple of K that divides N, makes.
    bias: added to the scaled, capped logits; -inf hides a slot from a head.
    implementation: XLA gathers the slots; the kernels do not, and are for
      plain attention.
    options: another scale, a cap of the logits.
    layer: of stacks, the layer to read.

  Returns:
    The output in the dtype of the queries, and its float32 log-sum-exp, for
    `kvjax.kernels.attention.merge`. A head without slots gets zeros and -inf.

  Raises:
    NotImplementedError: there is a window.
  """
  if options.window is not None:
    raise NotImplementedError(
      "Lists of slots do not say where tokens stand, so that a window cannot "
      "be applied to them."
    )
  (keys, values), layer = as_stack((keys, values), layer)
  return dispatch(
    _PROGRAMS,
    implementation,
    (queries, keys, values, slots, bias, layer),
    ("BK", "LBK", "LBK", "BK", "BK", ""),
    "BK",
    options=options,
  )
