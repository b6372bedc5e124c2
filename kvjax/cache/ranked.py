"""Retrieval by a ranking that the host makes, where the stored keys are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.index import LayerIndex
from kvjax.cache.retrieve import candidate_slots
from kvjax.cache.rows import Rows
from kvjax.heads import by_kv_head
from kvjax.kernels.attention import AttentionOptions, Partial
from kvjax.kernels.sparse_decode.ranked import Best, ranked_decode_host
from kvjax.retrieval.base import KeyBudget, Ranking, Retrieval, Store


def attend_to_ranked(
  retrieval: Retrieval,
  index: LayerIndex,
  queries: Float[Array, "B N D"],
  real: Bool[Array, " B"],
  store: Store,
  rows: Rows,
  budget: KeyBudget,
  options: AttentionOptions,
) -> tuple[LayerIndex, Partial] | None:
  """Attends to the candidates that the host ranks best, for a token per row.

  Args:
    retrieval: the method.
    index: the index before the token.
    queries: queries of the token.
    real: false for padding.
    store: the stored tokens of every head, without keys.
    rows: the stored keys and values, on the host.
    budget: how many keys each head retrieves.
    options: scale and softcap of the layer.

  Returns:
    The index after the token, and the attention; None if the method does not
    only rank.
  """
  arrays = index.read()
  kv_heads = store.valid.shape[1]
  # As for `retrieve`: methods scale logits by D^-1/2.
  grouped = by_kv_head(queries, kv_heads).astype(jnp.float32)
  grouped = options.rescale(grouped)
  ranking = jax.vmap(jax.vmap(retrieval.ranking))(arrays, budget)
  if ranking is None:
    return None
  with jax.default_matmul_precision("highest"):
    candidates = candidate_slots(retrieval, arrays, grouped, store, budget)
  partial, listed = attend_to_best(ranking, queries, candidates, rows, options)
  update = jax.vmap(jax.vmap(retrieval.update_of))(arrays, grouped, listed)
  real = jnp.broadcast_to(real[:, None], (len(real), kv_heads))
  changes = jax.vmap(jax.vmap(retrieval.update_index))(arrays, update, real)
  return index.write(changes, candidates[:, :, None]), partial


def attend_to_best(
  ranking: Ranking,
  queries: Float[Array, "B N D"],
  candidates: Int[Array, "B K U"],
  rows: Rows,
  options: AttentionOptions,
) -> tuple[Partial, Int[Array, "B K R"] | None]:
  """Lets the host rank candidates and attend to the best of them.

  Args:
    ranking: what each head does with them.
    queries: as for `attend_to_ranked`.
    candidates: slots to rank, ascending and unique, then -1.
    rows: as for `attend_to_ranked`.
    options: as for `attend_to_ranked`.

  Returns:
    The attention, and the candidates that the update lists.
  """
  return ranked_decode_host(
    queries,
    rows.keys,
    rows.values,
    candidates,
    _best(ranking.attended),
    _best(ranking.listed),
    options,
    rows.layer,
  )


def _best(budget: KeyBudget | None) -> Best | None:
  return None if budget is None else Best(budget.num_keys, budget.max_keys)
