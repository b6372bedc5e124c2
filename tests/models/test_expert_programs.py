"""The programs of experts: each against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from kvjax.kernels.compiled.footprints import Footprint
from kvjax.models import experts
from kvjax.models.structure import ExpertSizes

COUNT, PER_TOKEN, WIDTH, INNER = 7, 3, 12, 10


def sparse_mlp(count, per_token, width, inner):
  sizes = ExpertSizes(count, per_token, inner, normalized=True, bias=True)
  mlp = experts.SparseMlp(sizes, width, "silu", jnp.float32, nnx.Rngs(0))
  graph, state = nnx.split(mlp)
  keys = iter(jax.random.split(jax.random.key(1), 100))
  state = jax.tree.map(
    lambda x: 0.3 * jax.random.normal(next(keys), x.shape), state
  )
  return nnx.merge(graph, state)


def project(part, expert, row):
  kernel, bias = (np.asarray(x[...][expert]) for x in (part.kernel, part.bias))
  return row @ kernel.astype(np.float64) + bias


def in_loops(mlp, x, chosen, weights):
  """Computes the experts of every token in float64."""
  of = mlp.experts
  result = np.zeros(x.shape, np.float64)
  for token, row in enumerate(np.asarray(x, np.float64)):
    for place, expert in enumerate(np.asarray(chosen)[token]):
      gate = project(of.gate_proj, expert, row)
      inner = gate / (1 + np.exp(-gate)) * project(of.up_proj, expert, row)
      y = project(of.down_proj, expert, inner)
      result[token] += float(weights[token, place]) * y
  return result


@pytest.mark.parametrize(
  ("program", "tokens"),
  [
    *(("picked", count) for count in (1, 2, 9)),
    *(("grouped", count) for count in (1, 9, 150)),
    *(("blocked", count) for count in (1, 9, 150)),
  ],
)
@pytest.mark.parametrize("alike", [False, True], ids=["any", "alike"])
def test_each_program_computes_the_experts_of_every_token(
  program, tokens, alike
):
  """Also if all tokens are sent to the same, and most experts have none."""
  mlp = sparse_mlp(COUNT, PER_TOKEN, WIDTH, INNER)
  x = jax.random.normal(jax.random.key(2), (tokens, WIDTH))
  chosen, weights = mlp.route(x)
  if alike:
    chosen = jnp.broadcast_to(jnp.array([6, 0, 3])[None], chosen.shape)
  found = getattr(mlp.experts, program)(x, chosen, weights)
  expected = in_loops(mlp, x, chosen, weights)
  assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("platform", "tokens", "program"),
  [
    ("cpu", 4, "picked"),
    ("cpu", 5, "blocked"),
    ("tpu", 4, "picked"),
    ("tpu", 5, "grouped"),
    ("tpu", 500, "grouped"),
    ("gpu", 1, "grouped"),
    ("gpu", 64, "grouped"),
    ("gpu", 65, "blocked"),
  ],
)
def test_the_program_is_chosen_by_platform_and_size(
  monkeypatch, platform, tokens, program
):
  """With 32 experts, four for each token, as gpt-oss has."""
  mlp = sparse_mlp(32, 4, WIDTH, INNER)
  monkeypatch.setattr(experts, "target_platform", lambda: platform)
  asked = []
  for name in ("picked", "grouped", "blocked"):
    monkeypatch.setattr(
      experts.Experts,
      name,
      lambda self, x, *_, name=name: asked.append(name) or x,
    )
  mlp(jnp.zeros((1, tokens, WIDTH)))
  assert asked == [program]


def test_no_token_gets_what_other_experts_would_make_of_it():
  """An expert that overflows spoils its own tokens alone."""
  mlp = sparse_mlp(COUNT, 1, WIDTH, INNER)
  of = mlp.experts
  of.up_proj.kernel[...] = of.up_proj.kernel[...].at[3].set(np.inf)
  x = jax.random.normal(jax.random.key(2), (40, WIDTH))
  chosen = jnp.arange(40, dtype=jnp.int32)[:, None] % COUNT
  found = of.blocked(x, chosen, jnp.ones((40, 1)))
  spoiled = np.isnan(found).any(axis=1)
  np.testing.assert_array_equal(spoiled, chosen[:, 0] == 3)


def test_a_token_reads_no_experts_but_its_own():
  """Two of 16; nine tokens need more."""
  mlp = sparse_mlp(16, 2, 64, 128)
  graph, state = nnx.split(mlp)
  # Two layers in a loop, as in a model.
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  of_experts = sum(x.nbytes for x in jax.tree.leaves(stacked["experts"]))

  def run(stacked, x):
    def layer(x, state):
      return x + nnx.merge(graph, state)(x), None

    return jax.lax.scan(layer, x, stacked)[0]

  def moved(tokens):
    traced = jax.jit(run).trace(stacked, jnp.zeros((1, tokens, 64)))
    return Footprint.of(traced.lower().compile(), traced.jaxpr).moved

  # A CPU's program copies each matrix once.
  assert moved(1) < 3.5 * of_experts * 2 / 16
  assert moved(9) > of_experts
