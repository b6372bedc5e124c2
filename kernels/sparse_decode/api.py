"""Attention of one token to listed slots."""

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.host_memory import is_on_host
from kvjax.kernels.programs import Programs
from kvjax.kernels.quantized import Quantized
from kvjax.kernels.sparse_decode.offloaded import sparse_decode_host
from kvjax.kernels.sparse_decode.xla import sparse_decode_xla
from kvjax.kernels.stacks import Layer, as_stack

# On an H200, XLA's program took less time than a kernel, or as much.
_PROGRAMS = Programs.of(sparse_decode_xla, platforms=("tpu",))


def sparse_decode(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "*L B K T D"] | Quantized,
  values: Float[Array, "*L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None = None,
  options: AttentionOptions = PLAIN,
  layer: Layer = None,
  page: int = 1,
  logits: Float[Array, "B N M"] | None = None,
) -> Partial:
  """Softmax attention, scaled by D^-1/2, to listed slots only.

  Positions are not known here, so windows are not supported.

  Args:
    queries: one rotated query per head; head j reads KV head j // (N / K).
    keys: rotated keys; arbitrary in slots that are not listed. Stacks of layers
      have an additional leading axis. If keys and values are in host memory,
      the host attends to them.
    values: values; arbitrary in slots that are not listed.
    slots: slots of each list, unique, in any order; -1 for none. There is one
      list for each KV head (H = K), or for each of H groups of query heads,
      where H is a multiple of K and divides N.
    bias: added to the scaled, capped logits; -inf hides a slot from a head.
    options: scale and softcap. XLA gathers the slots; kernels read them in
      place and support plain attention only.
    layer: index of the layer in stacks.
    page: number of entries per page: they come in groups of `page`, the slots
      of one page in order, any of which may be -1. Pages start at multiples of
      their size and end within T, since a kernel may copy whole pages.
    logits: float32 scaled logits of the listed slots, before the softcap and
      the bias, if they are known; arbitrary for -1. XLA then reads no keys.
      Kernels and the host ignore them and read the keys.

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
  if (
    not isinstance(keys, Quantized)
    and not isinstance(values, Quantized)
    and is_on_host(keys)
  ):
    return sparse_decode_host(
      queries, keys, values, slots, bias, layer, options
    )
  # Lists of groups of query heads go where these go.
  lists = "BK" if slots.shape[1] == keys.shape[2] else "BN"
  return dispatch(
    _PROGRAMS,
    (queries, keys, values, slots, bias, logits, layer),
    ("BN", "LBK", "LBK", lists, "BN", "BN", ""),
    "BN",
    options=options,
    page=page,
  )
