"""What two hosts compute together, read on both of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_hosts import call

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.hosts import read, spanned
from kvjax.testing import TinyModel, kept_positions

RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 43, 64, 50)]
HALF = kvjax.Retention(0.5)
PLANS = {
  "full": ("full", kvjax.Retention(1.0)),
  "keydiff": ("keydiff", HALF),
  "snapkv": ("snapkv:window=5", HALF),
  "ada/snapkv": ("ada/snapkv:window=5", HALF),
  "kvzip": ("kvzip:chunk=32", HALF),
  "simlayerkv": ("simlayerkv", HALF),
  "ctkvr": ("ctkvr:sinks=2:local=5:probes=2", kvjax.Tokens(8)),
  "evicting": ("snapkv:window=5", kvjax.Tokens(24)),
}

# Heads share pages, of which each device has some of its own.
IN_PAGES = {"ada/snapkv", "kvzip", "simlayerkv"}


def answer(name):
  """Kept positions, answers, logits and the cache; on the mesh in context."""
  every = 4 if name == "evicting" else None
  schedule = kvjax.Schedule(every=every)
  model, plan = TinyModel(), kvjax.get_plan(*PLANS[name], schedule=schedule)
  params, prompts = model.init(), kvjax.Prompts.of(ROWS)
  cache, logits = kvjax.prefill(model, params, prompts, plan)
  questions = kvjax.Prompts.of([[5, 6], [1, 2, 3], [4], [7, 8]])
  given = kvjax.generate(model, params, cache, questions, kvjax.Decoding(6))
  nll = None
  if name != "evicting":
    # A tiny model's own answers repeat the question, whatever is cached.
    others = kvjax.Prompts.of([[9, 8, 7], [4], [6, 2], [1]])
    nll = kvjax.answer_nll(model, params, cache, questions, others)
  cache, logits, nll = read((cache, logits, nll))
  kept = [kept_positions(cache, row) for row in range(len(ROWS))]
  leaves = [] if name in IN_PAGES else jax.tree.leaves(cache)
  return [kept, given.rows()], [logits, *jax.tree.leaves(nll), *leaves]


def compare(axes, name):
  """Runs on each of two hosts; compares their mesh with a device of each.

  Returns:
    The number of tokens that both keep.
  """
  mesh = parse_mesh(axes)
  assert not spanned()
  exact, numbers = answer(name)
  with jax.set_mesh(mesh):
    assert spanned()
    found, found_numbers = answer(name)
  assert found == exact
  for ours, theirs in zip(found_numbers, numbers, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  return sum(len(head) for row in exact[0] for of in row for head in of)


def gather(axes):
  """Runs on each of two hosts; reads an array that is spread over both."""
  mesh = parse_mesh(axes)
  with jax.set_mesh(mesh):
    rows = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P("data")))
    assert not rows.is_fully_addressable
    found = read({"rows": rows, "host": np.ones(2)})
  assert isinstance(found["rows"], np.ndarray)
  return [found["rows"].tolist(), found["host"].tolist()]


def test_what_is_spread_over_hosts_is_read_whole():
  assert call(gather, "data:4") == 2 * [[list(range(8)), [1, 1]]]


@pytest.mark.parametrize("mesh", ["data:4", "data:2,model:2"])
@pytest.mark.parametrize("name", PLANS)
def test_two_hosts_keep_and_answer_what_one_does(mesh, name):
  kept, other = call(compare, mesh, name)
  assert kept == other
  everything = 2 * 2 * sum(map(len, ROWS))
  assert (kept < everything) == (name not in ("full", "ctkvr"))
