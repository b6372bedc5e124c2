"""The attention mass of each key, without materializing all weights."""

import functools

import jax
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention_mass.xla import causal_mass_xla, chunk_mass_xla
from kvjax.kernels.dispatch import dispatch, on_mesh, use
from kvjax.kernels.mesh_axes import CONTEXT
from kvjax.kernels.programs import Programs

_CAUSAL = Programs.of(causal_mass_xla)
# A multiple of all tiles of the programs.
_ROUND = 256
_CHUNKS = Programs.of(chunk_mass_xla)


def causal_mass(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T"]:
  """Sums softmax(q.k / sqrt(D)) over all queries, causal by positions.

  A query attends to the slots of its KV head whose position is neither
  negative (an empty slot) nor greater than its own. The contents of all other
  slots, NaN included, have no effect. Logits, weights and sums are float32 and
  exact to rounding, even for 16-bit keys. Only one tile of logits is in memory
  at a time. The log-sum-exp of each query is computed here: reusing the one of
  the preceding attention, which may be of 16 bits, would give weights that do
  not sum to one.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys.
    query_positions: position of each query in its row; -1 for padding, which
      may contain anything and adds nothing.
    key_positions: position of each slot's token in its row, -1 for empty.
    options: a sliding window, another scale, a softcap on the logits; kernels
      support plain attention only.
    sinks: one logit per query head that joins the softmax denominator, so that
      the slots' weights sum to less than one.

  Returns:
    The mass of every slot, 0 if it is empty. Without sinks, the masses of a
    head sum to the number of queries that attend to at least one slot.
  """
  length, slots = queries.shape[2], keys.shape[2]

  def add(*operands: Array | None) -> Float[Array, "B N T"]:
    mass: Array = dispatch(
      _CAUSAL, operands, ("BN", "BK", "B", "BK", "N"), "BN", options=options
    )
    own = operands[0]
    assert own is not None
    return mass if own.shape[2] == length else jax.lax.psum(mass, CONTEXT)

  operands = (queries, keys, query_positions, key_positions, sinks)
  devices = jax.sharding.get_abstract_mesh()
  if CONTEXT not in devices.auto_axes:
    return add(*operands)
  if length < slots:
    # The keys of a prompt stay where they are.
    with use("xla"):
      return add(*operands)
  mass: Array = on_mesh(add, operands, ("BNS", "BK", "BS", "BK", "N"), "BN")
  return mass


def chunk_mass(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """Sums softmax(scale q.k) over the queries of a chunk, without causal mask.

  Source: Compactor, arXiv 2507.08143, Section 3: non-causal chunked attention.

  Args:
    queries: rotated queries, one for every slot of their KV head.
    keys: rotated keys.
    valid: false for slots to ignore as queries and as keys, whatever they
      contain.
    chunk: slots per chunk; the last one may be shorter.
    scale: multiplies the logits.

  Returns:
    The mass of every slot, in float32 throughout as in `causal_mass`. Its mean
    over the valid slots of a chunk is 1.
  """
  # One chunk may be longer than the prompt, by which its padding would grow.
  slots = keys.shape[2]
  chunk = min(chunk, -(-slots // _ROUND) * _ROUND)
  add = functools.partial(
    dispatch,
    _CHUNKS,
    spread=("BN", "BK", "BK"),
    result="BN",
    chunk=chunk,
    scale=scale,
  )
  operands = (queries, keys, valid)
  devices = jax.sharding.get_abstract_mesh()
  whole = devices.shape.get(CONTEXT, 1) * chunk
  if CONTEXT not in devices.auto_axes or slots % whole:
    return add(operands)
  # Each device has whole chunks.
  spread = ("BNS", "BKS", "BKS")
  mass: Array = on_mesh(lambda *own: add(own), operands, spread, "BNS")
  return mass
