"""The attention of whole prompts that the engine calls."""

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.dispatch import Implementation, Programs, dispatch
from kvjax.kernels.prompt_attention.gpu import prompt_attention_gpu
from kvjax.kernels.prompt_attention.tpu import prompt_attention_tpu
from kvjax.kernels.prompt_attention.xla import prompt_attention_xla

_PROGRAMS = Programs(
  prompt_attention_xla, prompt_attention_tpu, prompt_attention_gpu
)


def prompt_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  implementation: Implementation | None = None,
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N S Dv"]:
  """Causal softmax attention, scaled by D^-1/2, of prompts to themselves.

  As `kernels.attention.attention` where slot t holds the row's token t. What
  padding holds, NaN included, has no effect on tokens; what comes out for
  padding means nothing.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys.
    values: values, which may be wider or narrower than keys.
    positions: 0, 1, 2, ... in each row, then -1 for padding.
    implementation: see `kvjax.kernels.use`.
    options: a window, another scale, a cap of the logits.
    sinks: for each query head a logit that joins the denominator of the
      softmax and has no value.

  Returns:
    The attention output in the dtype of the queries.
  """
  return dispatch(
    _PROGRAMS,
    implementation,
    (queries, keys, values, positions, sinks),
    ("BK", "BK", "BK", "B", "K"),
    "BK",
    options=options,
  )
