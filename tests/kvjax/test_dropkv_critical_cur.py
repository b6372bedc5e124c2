"""DropKV, CriticalKV and CurDKV: what their papers say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scoring

import kvjax
from kvjax.errors import InputError
from kvjax.methods import Critical, Cur, DropKV, SnapKV, Tova
from kvjax.registry.names import get_recipe
from kvjax.testing.checks import all_activations

LENGTHS = [37, 21]
PADDED = 40


def softmax(logits):
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def changes(activations, row, length, window):
  """Squared changes of the last outputs without each token, [K, T].

  The softmax is computed again without the token, in float64.
  """
  keys, values, queries = (
    np.asarray(x[row], np.float64)
    for x in (activations.keys, activations.values, activations.queries)
  )
  sinks = activations.sinks
  total = np.zeros((len(keys), length))
  for head in range(len(queries)):
    own = head // (len(queries) // len(keys))
    for at in range(length - window, length):
      logits = queries[head, at] @ keys[own, : at + 1].T / keys.shape[-1] ** 0.5
      sink = [] if sinks is None else [float(sinks[head])]

      def output(left, logits=logits, own=own, sink=sink):
        weights = softmax(np.append(logits[left], sink))[: len(left)]
        return weights @ values[own, left]

      everything = np.arange(at + 1)
      before = output(everything)
      for token in everything:
        after = output(np.delete(everything, token))
        total[own, token] += np.sum((after - before) ** 2)
  return total / (len(queries) // len(keys))


@pytest.mark.parametrize("sinks", [False, True])
def test_dropkv_is_the_change_of_the_output_without_a_token(sinks):
  activations = all_activations(2, LENGTHS, PADDED)
  # Values far from zero: only their differences count.
  activations = dataclasses.replace(
    activations,
    values=activations.values + 30.0,
    sinks=jnp.linspace(-1, 2, 6) if sinks else None,
  )
  method = DropKV(window=3, kernel=1, epsilon=0)
  ours = np.asarray(scoring.evaluate(method, activations))
  for row, length in enumerate(LENGTHS):
    expected = changes(activations, row, length, 3)
    np.testing.assert_allclose(ours[row, :, :length], expected, rtol=2e-3)


@pytest.mark.parametrize("sharpness", [10.0, 30.0])
def test_dropkv_is_exact_for_tokens_with_nearly_all_of_the_attention(sharpness):
  activations = all_activations(2, LENGTHS, PADDED)
  activations = dataclasses.replace(
    activations, queries=activations.queries * sharpness
  )
  method = DropKV(window=3, kernel=1, epsilon=0)
  ours = np.asarray(scoring.evaluate(method, activations))
  for row, length in enumerate(LENGTHS):
    expected = changes(activations, row, length, 3)
    largest = expected.max(axis=1, keepdims=True)
    np.testing.assert_allclose(
      ours[row, :, :length] / largest, expected / largest, atol=2e-3
    )


@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_dropkv_rounds_weights_as_the_authors_do_if_it_is_told_to(sharpness):
  activations = all_activations(2, LENGTHS, PADDED)
  activations = dataclasses.replace(
    activations, queries=activations.queries * sharpness
  )
  method = DropKV(window=1, kernel=1, match_bf16=True)
  ours = np.asarray(scoring.evaluate(method, activations))[0, :, :37]
  keys, values, queries = (
    np.asarray(x[0, :, :37], np.float64)
    for x in (activations.keys, activations.values, activations.queries)
  )
  expected, exact = np.zeros(ours.shape), []
  for head, query in enumerate(queries):
    own = head // (len(queries) // len(keys))
    weights = softmax(keys[own] @ query[-1] / keys.shape[-1] ** 0.5)
    rounded = weights.astype(jnp.bfloat16).astype(np.float64)
    apart = ((values[own] - weights @ values[own]) ** 2).sum(-1)
    ratios = (rounded / (1 - rounded + 1e-6)) ** 2
    expected[own] += ratios * apart * len(keys) / len(queries)
    exact.append(rounded.max() == 1)
  # One weight may be rounded the other way, which is 0.8 % of it.
  np.testing.assert_allclose(ours, expected, rtol=0.02, atol=1e-9)
  assert any(exact) == (sharpness > 1)
  default = scoring.evaluate(DropKV(window=1, kernel=1), activations)
  difference = abs(np.asarray(default)[0, :, :37] - expected)
  assert (difference > 1e-3 * expected + 1e-6).any()


def test_dropkv_of_equal_values_is_0_and_its_average_divides_by_the_kernel():
  activations = all_activations(2, LENGTHS, PADDED)
  equal = dataclasses.replace(
    activations, values=jnp.full_like(activations.values, 7.0)
  )
  assert (
    np.asarray(scoring.evaluate(DropKV(window=3), equal))[0, :, :37].max()
    < 1e-9
  )
  plain, pooled = (
    np.asarray(scoring.evaluate(DropKV(window=3, kernel=kernel), activations))[
      0, 0, :37
    ]
    for kernel in (1, 5)
  )
  expected = np.convolve(plain, np.ones(5), "same") / 5
  np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-9)


def kept(recipe, activations, count):
  """The positions that rows keep, as sets by head."""
  slots = np.asarray(scoring.select(recipe, activations, count, PADDED))
  return [[{*head[head >= 0].tolist()} for head in row] for row in slots]


def test_projected_norms_are_the_papers():
  activations = all_activations(4, LENGTHS, PADDED)
  norms = np.asarray(scoring.evaluate(Critical(Tova()), activations).norms)
  values = np.asarray(activations.values, np.float64)[0, :, :37]
  projection = np.asarray(activations.output_projection, np.float64)
  by_group = projection.reshape(3, 2, *projection.shape[1:])
  expected = np.abs(np.einsum("ktd,kgde->kgte", values, by_group)).sum(-1)
  np.testing.assert_allclose(norms[0, :, :37], expected.mean(1), rtol=1e-5)
  np.testing.assert_array_equal(norms[1, :, 21:], 0)


def test_equal_norms_leave_the_choice_to_the_inner_method():
  activations = all_activations(4, LENGTHS, PADDED)
  equal = dataclasses.replace(
    activations, values=jnp.ones_like(activations.values)
  )
  # The norms of a group's heads differ, those of tokens do not.
  for inner in ("snapkv:window=3", "h2o:recent_frac=0", "dropkv:window=3"):
    name = f"critical:epsilon=0/{inner}"
    if inner.startswith("dropkv"):
      continue  # it is 0 for equal values
    assert kept(get_recipe(name), equal, 11) == kept(
      get_recipe(inner), equal, 11
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_first_stage_is_the_inner_methods(share):
  activations = all_activations(4, LENGTHS, PADDED)
  ours = kept(
    get_recipe(f"critical:first_stage={share}/h2o:recent_frac=0"),
    activations,
    12,
  )
  inner = get_recipe("h2o:recent_frac=0")
  first = kept(inner, activations, max(1, int(12 * share)))
  products = scoring.evaluate(Critical(inner.method), activations)
  products = np.asarray((products.scores + 1e-4) * products.norms)
  for row, length in enumerate(LENGTHS):
    for head in range(3):
      if share:
        assert first[row][head] <= ours[row][head]
      rest = ours[row][head] - (first[row][head] if share else set())
      others = {*range(length)} - ours[row][head]
      of = products[row, head]
      assert len(ours[row][head]) == 12
      if rest:
        assert min(of[[*rest]]) >= max(of[[*others]])


def test_the_budgets_of_heads_are_those_of_the_inner_method():
  activations = all_activations(4, LENGTHS, PADDED)
  for prefix in ("ada", "ada.kvpress"):
    one = kept(get_recipe(f"{prefix}/critical/snapkv:window=3"), activations, 9)
    other = kept(get_recipe(f"{prefix}/snapkv:window=3"), activations, 9)
    assert [[len(h) for h in row] for row in one] == [
      [len(h) for h in row] for row in other
    ]
    assert one != other


def test_scores_that_are_no_weights_are_refused():
  values_count = (
    *("dropkv", "expected_attention", "noncausal", "cur", "h2o.compactor"),
    *("snapkv.compactor", "snapkv:paper_postproc=true"),
  )
  for name in ("keydiff", *values_count):
    with pytest.raises(InputError, match="no values are part of"):
      kvjax.get_plan(f"critical/{name}", kvjax.Tokens(3))
  for name in (
    "expected_attention:value_norm=false",
    "noncausal:value_norm=none",
    "cur:leverage=key",
  ):
    kvjax.get_plan(f"critical/{name}", kvjax.Tokens(3))
  for name in ("protokv", "compactor", "finch"):
    with pytest.raises(InputError, match=f"final before .* {name} gives none"):
      kvjax.get_plan(f"critical/{name}", kvjax.Tokens(3))
  with pytest.raises(InputError, match="no values are part of"):
    Critical(SnapKV(keep="least"))


@pytest.mark.parametrize("leverage", ["key", "value"])
def test_leverage_is_a_share_of_a_block(leverage):
  activations = all_activations(1, LENGTHS, PADDED)
  method = Cur(leverage=leverage, block=8)
  ours = np.asarray(scoring.evaluate(method, activations), np.float64)
  part = activations.keys if leverage == "key" else activations.values
  for row, length in enumerate(LENGTHS):
    squares = np.sum(np.asarray(part[row, :, :length], np.float64) ** 2, -1)
    blocks = -(-length // 8)
    for start in range(0, length, 8):
      block = squares[:, start : start + 8]
      expected = block / block.sum(axis=-1, keepdims=True) / blocks
      np.testing.assert_allclose(
        ours[row, :, start : start + block.shape[1]], expected, rtol=1e-5
      )
    np.testing.assert_allclose(ours[row, :, :length].sum(-1), 1, rtol=1e-5)


def test_a_block_of_zeros_has_no_leverage():
  activations = all_activations(1, LENGTHS, PADDED)
  empty = dataclasses.replace(
    activations, keys=activations.keys.at[:, :, 8:16].set(0.0)
  )
  ours = np.asarray(scoring.evaluate(Cur(block=8), empty))
  np.testing.assert_array_equal(ours[:, :, 8:16], 0)
  assert np.isfinite(ours[0, :, :37]).all()
