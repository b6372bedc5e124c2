"""Candidates that the host ranks and attends to, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.sparse_decode.ranked import Best, ranked_decode_host
from kvjax.placement import to_host

B, K, G, T, U, D = 2, 3, 2, 50, 30, 8
# Of each row and KV head; the fifth has no candidates, the sixth few.
CANDIDATES = ((30, 29, 12), (17, 0, 4))
READ, LISTED = ((5, 7, 3), (1, 4, 7)), ((12, 9, 15), (3, 8, 11))


def case():
  """Inputs; NaN in slots that are no candidates, and equal keys."""
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(B, K * G, D)).astype("float32")
  keys, values = rng.normal(size=(2, B, K, T, D)).astype("float32")
  candidates = np.full((B, K, U), -1, np.int32)
  for row, head in np.ndindex(B, K):
    count = CANDIDATES[row][head]
    chosen = np.sort(rng.permutation(T - 1)[:count]) + 1
    candidates[row, head, :count] = chosen
    # Every second key is equal to the one before: the lower slot wins.
    keys[row, head, chosen[1::2]] = keys[
      row, head, chosen[: count // 2 * 2 : 2]
    ]
    others = np.setdiff1d(np.arange(T), chosen)
    keys[row, head, others] = values[row, head, others] = np.nan
  return queries, keys, values, candidates


def ranked_by_hand(queries, keys, candidates, scale):
  """Candidates of a KV head, those of the highest weight first."""
  listed = candidates[candidates >= 0]
  if not len(listed):
    return listed
  logits = scale * queries.astype("float64") @ keys[listed].astype("float64").T
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  weights /= weights.sum(axis=1, keepdims=True)
  # Equal keys have weights that differ by rounding.
  best = -np.round(weights.max(axis=0), 12)
  return listed[np.argsort(best, kind="stable")]


def attended_by_hand(query, keys, values, slots, options):
  if not len(slots):
    return np.zeros(D), -np.inf
  logits = keys[slots].astype("float64") @ query.astype("float64")
  logits = logits * options.scale_of(D)
  if options.softcap:
    logits = options.softcap * np.tanh(logits / options.softcap)
  weights = np.exp(logits - logits.max())
  lse = logits.max() + np.log(weights.sum())
  return weights @ values[slots].astype("float64") / weights.sum(), lse


def ran(arrays, read, listed, options, stacked):
  """The host's attention and lists, with the slots that it attended to."""
  queries, keys, values, candidates = map(jnp.asarray, arrays)
  if stacked:
    keys, values = (
      jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in (keys, values)
    )
  layer = jnp.int32(1) if stacked else None

  def best(counts):
    return None if counts is None else Best(jnp.asarray(counts), 15)

  def run(queries, keys, values, candidates):
    return ranked_decode_host(
      queries,
      keys,
      values,
      candidates,
      best(read),
      best(listed),
      options,
      layer,
    )

  keys, values = to_host((keys, values))
  return jax.jit(run)(queries, keys, values, candidates)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
  "options", [PLAIN, AttentionOptions(scale=0.7, softcap=2.0)], ids=repr
)
@pytest.mark.parametrize("listed", [LISTED, None], ids=["lists", "no lists"])
@pytest.mark.parametrize("read", [READ, None], ids=["best", "all"])
def test_the_best_are_those_of_a_loop(read, listed, options, stacked):
  arrays = queries, keys, values, candidates = case()
  partial, lists = ran(arrays, read, listed, options, stacked)
  assert (lists is None) == (listed is None)
  grouped = queries.reshape(B, K, G, D)
  for row, head in np.ndindex(B, K):
    order = ranked_by_hand(
      grouped[row, head],
      keys[row, head],
      candidates[row, head],
      options.scale_of(D),
    )
    if lists is not None:
      best = sorted(order[: listed[row][head]])
      found = np.asarray(lists)[row, head]
      assert found.tolist() == best + [-1] * (15 - len(best))
    slots = order if read is None else order[: read[row][head]]
    for group in range(G):
      output, lse = attended_by_hand(
        grouped[row, head, group],
        keys[row, head],
        values[row, head],
        slots,
        options,
      )
      place = row, head * G + group
      np.testing.assert_allclose(partial.output[place], output, atol=1e-5)
      np.testing.assert_allclose(partial.lse[place], lse, atol=1e-5)


def test_weights_that_are_no_numbers_are_never_the_best():
  queries, keys, values, candidates = case()
  keys[0, 1, candidates[0, 1, 3]] = np.nan
  arrays = queries, keys, values, candidates
  partial, lists = ran(arrays, READ, LISTED, PLAIN, False)
  assert (np.asarray(lists)[0, 1] == -1).all()
  assert not np.asarray(partial.output)[0, G : 2 * G].any()
  assert np.isneginf(np.asarray(partial.lse)[0, G : 2 * G]).all()
  assert (np.asarray(lists)[0, 0] >= 0).sum() == LISTED[0][0]
