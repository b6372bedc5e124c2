"""Prompts that run through layers row by row, as together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import kvjax
from kvjax import kernels
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine import by_row
from kvjax.engine.prompt_programs import forward_layers
from kvjax.model import Geometry, LayerSpec
from kvjax.testing import TinyModel

RNG = np.random.default_rng(0)
# A layer with sinks, one without a cache, and an ordinary one.
MIXED = TinyModel(
  Geometry(
    (
      LayerSpec(4, 2, 8, sinks=True),
      LayerSpec(4, 2, 8, cache=False, weights=1),
      LayerSpec(4, 2, 8, weights=2),
    ),
    4096,
  )
)
# The second reads weights of the layer, the third replays prompts.
METHODS = ["keydiff", "criticalkv", "kvzip:chunk=16:overlap=8"]
# The mesh, and the rows.
MESHES = {
  "a device": (None, 3),
  "model": ("model:4", 3),
  "data": ("data:2,model:2", 6),
}
LENGTH = 48


def drawn(rows):
  """Rows without a token twice: equal keys would tie."""
  listed = [
    RNG.permutation(64)[: LENGTH - 3 * row].tolist() for row in range(rows)
  ]
  request = kvjax.RepeatRequest(first=(1, 2), later=(3,), suffix=(4,))
  return kvjax.Prompts.of(listed, repeat_request=request)


def placed(axes):
  return jax.set_mesh(split_mesh(parse_mesh(axes or "data:1"), 2))


def apart(rows, length=LENGTH):
  return by_row.runs_by_row(jnp.zeros((rows, length), jnp.int32))


def states(model, prompts):
  layers = forward_layers(model, model.init(), prompts, ())
  # The next layer donates them.
  return [np.array(hidden) for hidden, _ in layers]


@pytest.mark.parametrize("case", MESHES)
def test_a_device_has_its_part_of_all_rows(case, rows_alone):
  axes, rows = MESHES[case]
  prompts = drawn(rows)
  with rows_alone(), placed(axes):
    data = jax.sharding.get_abstract_mesh().shape["data"]
    layers = forward_layers(MIXED, MIXED.init(), prompts, ())
    shapes = {x.addressable_shards[0].data.shape[:2] for x, _ in layers}
  tokens = LENGTH if axes is None else LENGTH * data // 4
  assert shapes == {(rows // data, tokens)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", MESHES)
def test_rows_alone_are_as_rows_together(case, method, rows_alone):
  """In logits after the prompts, and in what answers find in their caches."""
  axes, rows = MESHES[case]
  prompts = drawn(rows)
  plan = kvjax.get_plan(method, kvjax.Retention(0.5))
  question = kvjax.Prompts.of([[5, 6]] * rows)
  answers = kvjax.Prompts.of([[7 + row, 20] for row in range(rows)])

  def found():
    cache, logits = kvjax.prefill(MIXED, MIXED.init(), prompts, plan)
    nll = kvjax.answer_nll(MIXED, MIXED.init(), cache, question, answers)
    return np.asarray(logits), np.asarray(nll)

  assert not apart(rows)
  together = found()
  with rows_alone(), placed(axes):
    assert apart(rows)
    alone = found()
  for ours, theirs in zip(alone, together, strict=True):
    assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


class Sharing(TinyModel):
  """Layers share arrays with rows in any place, or without rows."""

  def embed(self, params, tokens, positions):
    hidden, _ = super().embed(params, tokens, positions)
    length = tokens.shape[1]
    number = tokens.astype(jnp.float32) / 64
    shared = {
      # Of as many kinds as there are rows.
      "kinds": jnp.arange(3 * length, dtype=jnp.float32).reshape(3, length, 1),
      "mask": number[:, None],
      "lengths": number.sum(axis=1),
      "by layer": jnp.stack([number, 2 * number]),
      "one": jnp.float32(0.5),
      # Of the weights, too.
      "embedded": hidden,
    }
    return hidden, shared

  def block(self, weights, spec, hidden, shared, positions, attend):
    output, state = super().block(
      weights, spec, hidden, None, positions, attend
    )
    for term in (
      0.01 * shared["kinds"].sum(axis=0)[None],
      shared["mask"][:, 0, :, None],
      shared["lengths"][:, None, None],
      shared["by layer"][1][..., None],
      shared["one"],
      0.01 * shared["embedded"],
    ):
      output += term
    return output, state


def test_a_row_has_its_part_of_what_layers_share(rows_alone):
  model, prompts = Sharing(), drawn(3)
  together = states(model, prompts)
  with rows_alone():
    alone = states(model, prompts)
  for ours, theirs in zip(alone, together, strict=True):
    assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


class Widening(TinyModel):
  """A block returns more precise numbers than it takes."""

  def block(self, *given):
    weights, spec, hidden, *others = given
    hidden = hidden.astype(self.dtype)
    output, state = super().block(weights, spec, hidden, *others)
    return output.astype(jnp.float32), state


def test_states_have_the_dtype_that_a_block_gives_them(rows_alone):
  model, prompts = Widening(dtype="bfloat16"), drawn(3)
  together = states(model, prompts)
  with rows_alone():
    alone = states(model, prompts)
  assert [x.dtype for x in alone] == [x.dtype for x in together]
  assert alone[0].dtype == np.float32


def test_a_gradient_copies_no_weights_for_each_row(rows_alone):
  model = TinyModel(width=128)
  plan = kvjax.get_plan("keydiff", 0.5)
  prompts = kvjax.Prompts.of([[1, 2, 3, 4, 5, 6, 7, 8]] * 16)

  def loss(params):
    return jnp.sum(kvjax.prefill(model, params, prompts, plan)[1])

  def temporary():
    compiled = jax.jit(jax.grad(loss)).lower(model.init()).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  together = temporary()
  with rows_alone():
    alone = temporary()
  # A copy of the weights for each of sixteen rows takes 1.5 MiB.
  assert alone < together + 2**19


def test_a_gradient_of_a_compiled_prefill_is_that_of_rows_together(rows_alone):
  plan, prompts = kvjax.get_plan("keydiff", 0.5), drawn(3)

  @jax.jit
  def logits(params):
    return kvjax.prefill(MIXED, params, prompts, plan)[1]

  def slopes():
    return jax.grad(lambda params: jnp.sum(jnp.sin(logits(params))))(
      MIXED.init()
    )

  together = slopes()
  with rows_alone():
    alone = slopes()
  same = functools.partial(assert_allclose, rtol=1e-3, atol=1e-4)
  jax.tree.map(same, alone, together)


# Rows and tokens on a mesh, and whether they run row by row.
ON_TPU = {
  "long": ("data:1", 2, 4096, True),
  "short": ("data:1", 2, 4095, False),
  "one": ("data:1", 1, 4096, True),
  "one each": ("data:2", 2, 4096, True),
  "two each": ("data:2,model:2", 4, 4096, True),
  "odd": ("data:2", 3, 4096, False),
  "context": ("context:2", 2, 4096, False),
}


@pytest.mark.parametrize("case", ON_TPU)
def test_long_prompts_run_row_by_row_on_tpus(case):
  mesh, rows, length, alone = ON_TPU[case]
  with jax.set_mesh(parse_mesh(mesh)), kernels.use(platform="tpu"):
    assert apart(rows, length) == alone


def test_prompts_run_together_elsewhere():
  with kernels.use(platform="gpu"):
    assert not apart(2, 4096)
  assert not apart(2, 4096)
