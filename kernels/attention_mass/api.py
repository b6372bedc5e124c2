"""How much attention each key receives, without the matrix of weights."""

from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention_mass.gpu import causal_mass_gpu, chunk_mass_gpu
from kvjax.kernels.attention_mass.tpu import causal_mass_tpu, chunk_mass_tpu
from kvjax.kernels.attention_mass.xla import causal_mass_xla, chunk_mass_xla
from kvjax.kernels.dispatch import Implementation, Programs, dispatch

_CAUSAL = Programs(causal_mass_xla, causal_mass_tpu, causal_mass_gpu)
_CHUNKS = Programs(chunk_mass_xla, chunk_mass_tpu, chunk_mass_gpu)


def causal_mass(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  implementation: Implementation | None = None,
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T"]:
  """Sums over all queries of softmax(q.k / sqrt(D)), causal by positions.

  A query sees the slots of its KV head whose position is neither negative
  (empty) nor greater than its own; what else those slots hold, NaN included,
  has no effect. Logits, weights and sums are float32 and exact to rounding,
  also for keys of fewer bits. No more logits than a tile's are alive at once.
  The log-sum-exp of a query is computed here: that of the attention before,
  which may have been of 16 bits, would not make its weights sum to one.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys.
    query_positions: place of each query in its row; -1 for padding, which may
      hold anything and adds nothing.
    key_positions: place of each slot's token in its row, -1 for empty.
    implementation: see `kernels.use`; the kernels are for plain attention.
    options: a window, another scale, a cap of the logits.
    sinks: for each query head a logit that joins the denominator of the
      softmax, which leaves less for the slots.

  Returns:
    The mass of every slot, 0 where it is empty; the masses of a head sum to
    the number of its queries that see a slot, if there are no sinks.
  """
  return dispatch(
    _CAUSAL,
    implementation,
    (queries, keys, query_positions, key_positions, sinks),
    ("BK", "BK", "B", "BK", "K"),
    "BK",
    options=options,
  )


def chunk_mass(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
  implementation: Implementation | None = None,
) -> Float[Array, "B N T"]:
  """Column sums of softmax(scale q.k) inside chunks, without a causal mask.

  Source: Compactor, arXiv 2507.08143, Section 3: non-causal chunked attention.

  Args:
    queries: rotated queries, one for every slot of the KV head that they read.
    keys: rotated keys.
    valid: false for slots that neither ask nor receive; queries and keys may
      hold anything there.
    chunk: slots per chunk; the last one may be shorter.
    scale: of the logits.
    implementation: see `kvjax.kernels.use`.

  Returns:
    The mass of every slot, in float32 throughout as in `causal_mass`: its mean
    over the held slots of a chunk is 1.
  """
  return dispatch(
    _CHUNKS,
    implementation,
    (queries, keys, valid),
    ("BK", "BK", "BK"),
    "BK",
    chunk=chunk,
    scale=scale,
  )
