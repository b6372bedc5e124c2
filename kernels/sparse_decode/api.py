"""Attention of one token to the slots that a list names."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels.attention.partial import Partial
from kernels.sparse_decode.reference import sparse_decode_reference
from kernels.sparse_decode.xla import sparse_decode_xla

Implementation = Literal["xla", "reference"]

_IMPLEMENTATIONS = {
  "xla": sparse_decode_xla,
  "reference": sparse_decode_reference,
}


def sparse_decode(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "B K T D"],
  values: Float[Array, "B K T D"],
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None = None,
  implementation: Implementation = "xla",
) -> Partial:
  """Softmax attention, scaled by D^-1/2, to listed slots alone.

  Args:
    queries: one rotated query per head; head j reads KV head j // (N / K).
    keys: rotated keys.
    values: values; slots that no list names may hold anything, as in keys.
    slots: what each list names, at most once, in any order; -1 for nothing.
      There is a list for each KV head (H = K) or for each of the groups of
      query heads that H, a multiple of K that divides N, makes.
    bias: added to the scaled logits; -inf hides a slot from a head.
    implementation: "xla" gathers the slots.

  Returns:
    The output in the dtype of the queries, and its float32 log-sum-exp, for
    `kernels.attention.merge`. A head without slots gets zeros and -inf.
  """
  return _IMPLEMENTATIONS[implementation](queries, keys, values, slots, bias)
