"""Scores and choices equal those of kvpress 0.5.5 (tests/golden).

Where kvpress differs from the specification on purpose or by accident, the
difference is stated here and taken out; no method imitates it.

- Tokens kept: kvpress rounds n (1 - c) down in floating point, so that
  c = 0.9 keeps 5 of 60; kvjax rounds the share kept up. The goldens' counts
  are given to the methods.
- Protected tokens get the highest score or more there. Where they alone are
  too many, its choice among them is arbitrary; kvjax keeps the newest.
- SnapKV averages over the window, LagKV over keys and values; kvjax sums.
- LagKV's ranks are divided by the lag, and equal ranks of different partitions
  are decided arbitrarily; kvjax keeps the earlier token.
- Compactor's parts are standardised over the heads of a layer (and over a
  batch, here one row) with the deviation of N - 1; kvjax divides by N, which
  multiplies the whole score by a constant.
- Compactor's blend is c itself there; the preset `compactor.kvpress` takes the
  share of tokens that is really removed, which rounding makes differ.
- A short last chunk of Compactor's attention: see the last test.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention_mass import chunk_mass
from kvjax.activations import Activations
from kvjax.cache import LayerCache
from kvjax.methods import Allowance, Compactor, LagKV, get_method
from kvjax.step import compress

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "kvpress"
LENGTHS = (60, 132, 300)
PERCENTS = (25, 50, 75, 90)
LAYER = 1
TOLERANCE = 1e-4
TIE = 1e-6


def stored(name):
  return dict(np.load(GOLDEN / f"{name}.npz"))


INPUTS = {length: stored(f"inputs_{length}") for length in LENGTHS}
SKETCHES = stored("sketches")


# From what a method evaluates for one row to the scores [K, n] of kvpress, NaN
# where they stand for no more than "protected".


def as_is(found, method, length):
  del method
  return found[:, :length].copy()


def window_mean(found, method, length):
  votes = found[:, :length] / method.window
  votes[:, -method.window :] = np.nan
  return votes


def but_the_last(found, method, length):
  votes = as_is(found, method, length)
  votes[:, -1] = np.nan
  return votes


def not_comparable(found, method, length):
  """Kept tokens alone: 0 and 1 in kvpress, recency in kvjax."""
  del method
  return np.full((found.shape[0], length), np.nan)


def partitions(found, method, length):
  """Half the sum of LagKV, or ranks; NaN at sinks, window and short rows."""
  scores = np.full((len(found), length), np.nan)
  count = (length - method.sinks) // method.lag - 1
  if count > 0:
    worth = found[:, :count] / 2
    if not method.cross_scoring:
      worth = worth.argsort(axis=-1).argsort(axis=-1) / method.lag
    end = method.sinks + count * method.lag
    scores[:, method.sinks : end] = worth.reshape(len(found), -1)
  return scores


def blended(found, method, length):
  """z scores with N - 1; protected ends are NaN."""
  scores = found.attention + method.blend * found.outlier
  scores = scores[:, :length]
  size = len(scores) * (length - method.first - method.last)
  scores = scores * np.sqrt((size - 1) / size)
  scores[:, : method.first] = np.nan
  scores[:, length - method.last :] = np.nan
  return scores


def leverage_alone(found, method, length):
  """A blend that leaves nothing of the attention in float32."""
  return blended(found, method, length) / method.blend


@dataclasses.dataclass(frozen=True)
class Parity:
  """A variant of a press, the method that equals it, and how they compare.

  In `method`, {c} stands for the share removed.
  """

  press: str
  variant: str
  method: str
  scores: Callable = as_is

  def __str__(self):
    return f"{self.press}-{self.variant}"


_COMPACTOR = "compactor.kvpress:blend_removed=false:chunk=24"
_LEVERAGE = "compactor:z_scope=layer:solver=chol:center=true:blend=1e9"
TABLE = [
  Parity("knorm", "default", "key_norm"),
  Parity("keydiff", "default", "keydiff"),
  Parity("snapkv", "default", "snapkv.kvpress", window_mean),
  Parity("snapkv", "window16", "snapkv:window=16:kernel=7", window_mean),
  Parity("snapkv", "window1", "snapkv:window=1:kernel=1", window_mean),
  Parity("tova", "default", "tova.kvpress", but_the_last),
  Parity("observed", "default", "h2o.kvpress"),
  Parity("streaming", "default", "streaming", not_comparable),
  Parity("streaming", "nosink", "streaming:sinks=0", not_comparable),
  Parity("lagkv", "default", "lagkv.kvpress", partitions),
  Parity("lagkv", "lag16", "lagkv.kvpress:lag=16", partitions),
  Parity("lagkv", "cross", "lagkv.kvpress:cross_scoring=true", partitions),
  Parity(
    "lagkv",
    "lag16cross",
    "lagkv.kvpress:lag=16:cross_scoring=true",
    partitions,
  ),
  Parity(
    "noncausal",
    "chunk12",
    "compactor:z_scope=layer:chunk=12:blend=0.0",
    blended,
  ),
  Parity("leverage", "default", f"{_LEVERAGE}:sketch_dim=48", leverage_alone),
  Parity("leverage", "sketch8", f"{_LEVERAGE}:sketch_dim=8", leverage_alone),
  Parity("compactor", "chunk24", f"{_COMPACTOR}:blend={{c}}", blended),
  Parity(
    "compactor", "blend", f"{_COMPACTOR}:blend=0.35:sketch_dim=8", blended
  ),
]


@pytest.fixture(scope="module")
def seen():
  """The prompts of all lengths as one batch; the padding holds NaN."""

  def batch(name):
    longest = max(LENGTHS)
    rows = [INPUTS[length][name] for length in LENGTHS]
    wide = [((0, 0), (0, longest - x.shape[1]), (0, 0)) for x in rows]
    pads = [np.pad(x, w, constant_values=np.nan) for x, w in zip(rows, wide)]
    return jnp.asarray(np.stack(pads))

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
def the_sketches_of_kvpress(monkeypatch):
  def stored_sketches(self, layer, kv_heads, seen):
    return jnp.asarray(SKETCHES[str(self.sketch_dim)])

  monkeypatch.setattr(Compactor, "_sketches", stored_sketches)


def assert_same_but_for_ties(ours, theirs, scores):
  """Two choices of equally many tokens differ in tied tokens alone.

  Args:
    ours: positions that kvjax kept in one head.
    theirs: positions that kvpress kept.
    scores: of kvpress, [n].
  """
  assert len(ours) == len(theirs)
  differing = sorted(set(ours) ^ set(theirs))
  last_kept = scores[theirs].min()
  np.testing.assert_allclose(scores[differing], last_kept, rtol=0, atol=TIE)


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("parity", TABLE, ids=str)
def test_scores_and_choices(parity, percent, seen):
  golden = stored(parity.press)
  cases = [f"{parity.variant}_{n}_{percent}" for n in LENGTHS]
  method = get_method(parity.method.format(c=percent / 100))
  cache = LayerCache.of(seen)
  found = method.evaluate(LAYER, cache, seen)
  kept = [golden.get(f"{case}_kept", np.zeros((2, 1))) for case in cases]
  counts = [x.shape[1] for x in kept]
  allowance = Allowance(jnp.asarray(counts, jnp.int32), max(counts))
  (small,) = compress(method, LAYER, cache, seen, [allowance])
  for row, (case, length) in enumerate(zip(cases, LENGTHS, strict=True)):
    if f"{case}_scores" not in golden:
      continue  # kvpress needs more tokens than SnapKV's window.
    theirs = golden[f"{case}_scores"]
    one = jax.tree.map(lambda x, row=row: np.asarray(x[row], np.float64), found)
    ours = parity.scores(one, method, length)
    comparable = ~np.isnan(ours)
    np.testing.assert_allclose(
      ours[comparable], theirs[comparable], rtol=0, atol=TOLERANCE
    )
    for head, places in enumerate(np.asarray(small.positions[row])):
      chosen = places[places >= 0]
      assert_same_but_for_ties(chosen, kept[row][head], theirs[head])


def test_every_golden_is_compared():
  files = {path.stem for path in GOLDEN.glob("*.npz")}
  presses = {name for name in files - {"sketches"} if "inputs" not in name}
  variants = {
    (press, key.split("_")[0]) for press in presses for key in stored(press)
  }
  in_table = {(parity.press, parity.variant) for parity in TABLE}
  assert variants - in_table == {("noncausal", "default")}
  assert in_table <= variants


def test_kvpress_lets_padding_into_a_short_last_chunk():
  """Compactor's attention in chunks of 256 tokens.

  kvpress pads the last chunk with keys of logit 0, which take attention away
  from the tokens, and with queries, which give 1 / 256 to each. In whole
  chunks it is as here.
  """
  chunk = 256
  golden = stored("noncausal")
  for length, inputs in INPUTS.items():
    theirs = golden[f"default_{length}_mass"]
    keys = np.repeat(inputs["keys"], 2, axis=0)
    ours = jax.vmap(
      lambda q, k, n=length: chunk_mass(
        q[None], k, jnp.ones(n, bool), chunk, 1.0
      )[0]
    )(jnp.asarray(inputs["queries"]), jnp.asarray(keys))
    whole = length // chunk * chunk
    np.testing.assert_allclose(
      ours[:, :whole], theirs[:, :whole], rtol=1e-5, atol=TOLERANCE
    )
    tail = np.s_[:, whole:]
    logits = inputs["queries"][tail] @ np.swapaxes(keys[tail], 1, 2)
    padding = chunk - logits.shape[-1]
    total = np.exp(logits).sum(axis=-1, keepdims=True)
    leaky = (np.exp(logits) / (total + padding)).sum(axis=1) + padding / chunk
    exact = (np.exp(logits) / total).sum(axis=1)
    np.testing.assert_allclose(leaky, theirs[tail], rtol=1e-5, atol=TOLERANCE)
    np.testing.assert_allclose(exact, ours[tail], rtol=1e-5, atol=TOLERANCE)
