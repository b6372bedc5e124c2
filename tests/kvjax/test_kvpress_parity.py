"""Scores and choices equal those of kvpress 0.5.5 (tests/golden).

Where kvpress differs from the specification, on purpose or by accident, the
difference is stated here and taken out; no method imitates it.

- Tokens kept: kvpress rounds n (1 - c) down in floating point, so that
  c = 0.9 keeps 5 of 60; kvjax rounds the share kept up, but for presets. The
  goldens' counts are given to the methods.
- Protected tokens get the highest score or more there. Where they alone are
  too many, its choice among them is arbitrary; kvjax keeps the newest.
- SnapKV averages over the window, LagKV over keys and values; kvjax sums.
- LagKV's ranks are divided by the lag, and equal ranks of different partitions
  are decided arbitrarily; kvjax keeps the earlier token.
- Compactor's parts are standardized over the heads of a layer (and over a
  batch, here one row) with the deviation of N - 1; kvjax divides by N, which
  multiplies the whole score by a constant.
- Compactor's blend is c itself there; the preset `compactor.kvpress` takes the
  share of tokens that is really removed. They are equal where n (1 - c) is
  whole, here up to c = 0.75.
- A short last chunk of Compactor's attention: see the last test.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.activations import Activations
from kvjax.cache.heads import heads_of
from kvjax.cache.layers import LayerCache
from kvjax.kernels.attention_mass import chunk_mass
from kvjax.methods import LayerBudget
from kvjax.registry.names import get_method

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "kvpress"
LENGTHS = (60, 132, 300)
PERCENTS = (25, 50, 75, 90)
LAYER = 1
TOLERANCE = 1e-4
TIE = 1e-6
ABSENT = np.zeros((2, 1), np.int16)


def stored(name):
  return dict(np.load(GOLDEN / f"{name}.npz"))


# From what a method evaluates for one row of n tokens, of which a share c is
# removed, to the scores [K, n] of kvpress; NaN at tokens that it protects.


def as_is(found, method, n, c):
  del method, c
  return found[:, :n].copy()


def window_mean(found, method, n, c):
  votes = as_is(found, method, n, c) / method.window
  votes[:, -method.window :] = np.nan
  return votes


def but_the_last(found, method, n, c):
  votes = as_is(found, method, n, c)
  votes[:, -1] = np.nan
  return votes


def not_comparable(found, method, n, c):
  """Only choices are: the scores are 0 and 1 in kvpress, recency in kvjax."""
  del method, c
  return np.full((len(found), n), np.nan)


def partitions(found, method, n, c):
  """Half the sum of LagKV's deviations, or the rank by it over the lag."""
  scores = not_comparable(found, method, n, c)
  count = (n - method.sinks) // method.lag - 1
  if count > 0:  # kvpress keeps the newest of a shorter row.
    worth = found[:, :count] / 2
    if not method.cross_scoring:
      worth = worth.argsort(axis=-1).argsort(axis=-1) / method.lag
    end = method.sinks + count * method.lag
    scores[:, method.sinks : end] = worth.reshape(len(found), -1)
  return scores


def blended(found, method, n, c):
  """Both of Compactor's parts, standardized with N - 1."""
  blend = c if method.blend_removed else method.blend
  scores = (found.attention + np.float32(blend) * found.outlier)[:, :n]
  size = len(scores) * (n - method.first - method.last)
  scores = scores * np.sqrt(1 - 1 / size)
  scores[:, : method.first] = np.nan
  scores[:, n - method.last :] = np.nan
  return scores


def leverage_alone(found, method, n, c):
  """For a blend that leaves nothing of the attention in float32."""
  return blended(found, method, n, c) / method.blend


@dataclasses.dataclass(frozen=True)
class Parity:
  """A variant of a press, the method that equals it, and how they compare."""

  press: str
  variant: str
  method: str
  scores: Callable = as_is
  percents: tuple[int, ...] = PERCENTS

  def __str__(self):
    return f"{self.press}-{self.variant}-{self.percents[-1]}"


_LAG = "lagkv.kvpress:lag=16"
_COMPACTOR = "compactor.kvpress:chunk=24"
_BLEND = f"{_COMPACTOR}:blend_removed=false"
_NONCAUSAL = "compactor:z_scope=layer:chunk=12:sketch_dim=8:blend=0.0"
_LEVERAGE = "compactor:z_scope=layer:solver=chol:center=true:blend=1e9"
TABLE = [
  Parity("knorm", "default", "key_norm"),
  Parity("keydiff", "default", "keydiff"),
  Parity("snapkv", "default", "snapkv.kvpress", window_mean),
  Parity("snapkv", "window16", "snapkv:window=16:kernel=7", window_mean),
  Parity("tova", "default", "tova.kvpress", but_the_last),
  Parity("observed", "default", "h2o.kvpress"),
  Parity("streaming", "default", "streaming", not_comparable),
  Parity("lagkv", "default", "lagkv.kvpress", partitions),
  Parity("lagkv", "lag16", _LAG, partitions),
  Parity("lagkv", "lag16cross", f"{_LAG}:cross_scoring=true", partitions),
  Parity("noncausal", "chunk12", _NONCAUSAL, blended),
  Parity("leverage", "default", f"{_LEVERAGE}:sketch_dim=48", leverage_alone),
  Parity("leverage", "sketch8", f"{_LEVERAGE}:sketch_dim=8", leverage_alone),
  Parity("compactor", "chunk24", _COMPACTOR, blended, (25, 50, 75)),
  Parity("compactor", "chunk24", f"{_BLEND}:blend=0.9", blended, (90,)),
  Parity("compactor", "blend", f"{_BLEND}:blend=0.35:sketch_dim=8", blended),
]


@pytest.fixture(scope="module")
def activations():
  """The prompts of all lengths as one batch; the padding holds NaN."""
  rows = [stored(f"inputs_{n}") for n in LENGTHS]

  def batch(name):
    extra = [max(LENGTHS) - n for n in LENGTHS]
    padded = [
      np.pad(row[name], ((0, 0), (0, e), (0, 0)), constant_values=np.nan)
      for row, e in zip(rows, extra, strict=True)
    ]
    return jnp.asarray(np.stack(padded))

  index = np.arange(max(LENGTHS))[None]
  real = index < np.asarray(LENGTHS)[:, None]
  return Activations(
    queries=batch("queries"),
    keys=batch("keys"),
    values=batch("values"),
    keys_unrotated=batch("keys_unrotated"),
    positions=jnp.asarray(np.where(real, index, -1), jnp.int32),
  )


@pytest.fixture(autouse=True)
def _sketches_of_kvpress(monkeypatch):
  sketches = stored("sketches")
  monkeypatch.setattr(
    "kvjax.methods.leverage_scores.draw_factors",
    lambda *args: jnp.asarray(sketches[str(args[-1])]),
  )


@jax.jit(static_argnames="method")
def found_and_kept(method, activations, counts):
  """What a method finds in B rows and keeps, for each of `counts` [C, B].

  Returns:
    What `evaluate` answers, and the positions kept, [C, B, K, M].
  """
  cache = LayerCache.of(activations)
  found = method.evaluate(jnp.int32(LAYER), cache, activations)

  def kept(counts):
    budget = LayerBudget(counts, cache.capacity - 1)
    return cache.take(method.select(found, cache, budget)).positions

  return found, jax.vmap(kept)(counts)


def assert_close(ours, theirs):
  """To 1e-4, and to 1e-4 of the largest where all are small."""
  largest = np.abs(theirs).max(initial=0.0)
  atol = TOLERANCE * min(1.0, largest)
  # Column sums of attention reach into the hundreds.
  np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=atol)


def assert_same_but_for_ties(ours, theirs, scores):
  """Two choices differ in tokens of the lowest kept score alone."""
  assert len(ours) == len(theirs)
  differing = sorted(set(ours.tolist()) ^ set(theirs.tolist()))
  last_kept = scores[theirs].min()
  np.testing.assert_allclose(scores[differing], last_kept, rtol=0, atol=TIE)


@pytest.mark.parametrize("parity", TABLE, ids=str)
def test_scores_and_choices(parity, activations):
  golden = stored(parity.press)
  method = get_method(parity.method)
  # kvpress needs more tokens than SnapKV's window: a row may be absent.
  kept = [
    [golden.get(f"{parity.variant}_{n}_{p}_kept", ABSENT) for n in LENGTHS]
    for p in parity.percents
  ]
  counts = jnp.asarray([[each.shape[1] for each in rows] for rows in kept])
  found, chosen = jax.device_get(found_and_kept(method, activations, counts))
  for rows, positions, percent in zip(
    kept, chosen, parity.percents, strict=True
  ):
    for row, n in enumerate(LENGTHS):
      if rows[row] is ABSENT:
        continue
      theirs = golden[f"{parity.variant}_{n}_{percent}_scores"]
      of_row = jax.tree.map(lambda x, row=row: x[row], found)
      ours = parity.scores(of_row, method, n, percent / 100)
      free = ~np.isnan(ours)
      assert_close(ours[free], theirs[free])
      for places, expected, scores in zip(
        positions[row], rows[row], theirs, strict=True
      ):
        assert_same_but_for_ties(places[places >= 0], expected, scores)


def test_every_golden_is_compared():
  goldens = {
    (path.stem, *key.split("_")[::2])
    for path in GOLDEN.glob("*.npz")
    for key in np.load(path)
    if key.endswith("_kept")
  }
  compared = {
    (parity.press, parity.variant, str(percent))
    for parity in TABLE
    for percent in parity.percents
  }
  left = {("noncausal", "default", str(percent)) for percent in PERCENTS}
  assert goldens == compared | left


def test_kvpress_lets_padding_into_a_short_last_chunk(activations):
  """Compactor's attention in chunks of 256 tokens.

  kvpress pads the last chunk with keys of logit 0, which take attention away
  from the tokens, and with queries, which give 1 / 256 to each of them. Whole
  chunks are as here.
  """
  chunk = 256
  golden = stored("noncausal")
  cache = LayerCache.of(activations)
  heads = heads_of(cache, activations)
  masses = chunk_mass(activations.queries, cache.keys, cache.valid, chunk, 1.0)
  for row, n in enumerate(LENGTHS):
    theirs = golden[f"default_{n}_mass"]
    ours = np.asarray(masses[row])[:, :n]
    whole = n // chunk * chunk
    assert_close(ours[:, :whole], theirs[:, :whole])
    queries = np.asarray(heads.queries[row, :, :, whole:n])
    keys = np.asarray(heads.cached_keys[row, :, None, whole:n])
    weights = np.exp(queries @ np.swapaxes(keys, -2, -1))
    total = weights.sum(axis=-1, keepdims=True)
    padding = chunk - n % chunk
    leaky = (weights / (total + padding)).sum(axis=-2) + padding / chunk
    assert_close(leaky.reshape(len(theirs), -1), theirs[:, whole:])
    exact = (weights / total).sum(axis=-2)
    assert_close(exact.reshape(len(theirs), -1), ours[:, whole:])
