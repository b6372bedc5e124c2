"""Options of kernels by kind of device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

from kvjax import kernels
from kvjax.kernels import tuning
from kvjax.kernels.attention_mass import causal_mass
from kvjax.kernels.gather import compact
from kvjax.kernels.paged_attention import paged_attention
from kvjax.kernels.prompt_attention import prompt_attention
from kvjax.kernels.select import largest
from kvjax.kernels.sketch import leverage_rows, sketch
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.specs import all_choices

CHOICES = {choices.kernel: choices for choices in all_choices()}
READ = functools.partial(tuning.option, "gather/tpu", "read")


def of_kind(kind, platform="tpu", sizes=(), names=(), types=None):
  """A mesh of devices that are not there, as of a topology of TPUs."""
  device = jax.sharding.AbstractDevice(kind, 1, platform)
  mesh = jax.sharding.AbstractMesh(sizes, names, types, abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


def program(run, *operands):
  """The lines of a traced program, without the addresses of its functions.

  Its text as a whole depends on which parts JAX has traced before.
  """

  def lines(jaxpr):
    for equation in jaxpr.eqns:
      yield f"{equation.primitive} {[x.aval for x in equation.outvars]}"
      for name, value in equation.params.items():
        parts = list(jaxprs_in_params({name: value}))
        yield name if parts else re.sub("0x[0-9a-f]+", "", f"{name}={value}")
        for part in parts:
          yield from lines(part)

  return tuple(lines(jax.make_jaxpr(lambda *x: run(*x))(*operands).jaxpr))


def test_a_kind_of_device_has_its_own_values():
  table = {
    "TPU v5 lite": {"gather/tpu": {"read": 4096}},
    "default": {"gather/tpu": {"read": 1024}},
  }
  assert READ() == 2048
  with kernels.use_table(table):
    assert READ() == 1024
    with of_kind("TPU v5"):
      assert READ() == 1024
    with of_kind("TPU v5 lite"):
      assert READ() == 4096
      # What the table lacks is the package's.
      assert tuning.option("gather/tpu", "write") == 1024
      with kernels.use_table({}):
        assert READ() == 2048
  assert READ() == 2048


def test_the_package_may_have_an_entry_of_a_kind(monkeypatch):
  packaged = tuning._packaged() | {("TPU v5", "gather/tpu", "read"): 4096}
  monkeypatch.setattr(tuning, "_packaged", lambda: packaged)
  with of_kind("TPU v5"):
    assert READ() == 4096
    with kernels.use_table({"TPU v5": {"gather/tpu": {"read": 8}}}):
      assert READ() == 8
  assert READ() == 2048


@pytest.mark.parametrize(
  ("kernel", "name"), [("gathr/tpu", "read"), ("gather/tpu", "rows")]
)
def test_an_option_that_there_is_not_is_refused(kernel, name):
  said = f"No kernel '{kernel}' has an option '{name}'"
  with (
    pytest.raises(ValueError, match=said),
    kernels.use_table({"default": {kernel: {name: 1}}}),
  ):
    pass


def test_the_kind_is_that_of_the_mesh_or_of_the_first_device():
  here = jax.devices()[0].device_kind
  assert tuning.device_kind() == here
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh):
    assert tuning.device_kind() == here
  seen = []

  def run(x):
    seen.append(tuning.device_kind())
    return x

  shape = jax.ShapeDtypeStruct((4,), jnp.float32)
  with of_kind("TPU v6 lite", "tpu", (2,), ("data",), (AxisType.Auto,)):
    spread = PartitionSpec("data")
    shards = jax.shard_map(run, in_specs=spread, out_specs=spread)
    jax.make_jaxpr(jax.jit(shards))(shape)
  assert seen == ["TPU v6 lite"]


def test_another_table_or_kind_compiles_another_program():
  compiled = jax.jit(lambda x: x + READ())
  x = jnp.int32(0)
  assert compiled(x) == 2048
  with kernels.use_table({"default": {"gather/tpu": {"read": 4096}}}):
    assert compiled(x) == 4096
  with kernels.use_table({"TPU v5": {"gather/tpu": {"read": 4096}}}):
    assert compiled(x) == 2048
    with of_kind("TPU v5"):
      assert "4096:i32[]" in str(jax.make_jaxpr(compiled)(x))
    with of_kind("TPU v4"):
      assert "2048:i32[]" in str(jax.make_jaxpr(compiled)(x))
  assert compiled(x) == 2048


def test_the_table_has_what_the_kernels_leave_open():
  """Each value is one of those that `kvjax tune` tries."""
  values = tuning._packaged()
  wanted = {
    (kernel, name): candidates
    for kernel, choices in CHOICES.items()
    for name, candidates in choices.candidates.items()
  }
  own = {key[1:] for key in values if key[0] == tuning.DEFAULT}
  assert own == wanted.keys()
  for (_, *key), value in values.items():
    assert value in wanted[tuple(key)]


@pytest.mark.parametrize("kernel", CHOICES)
def test_candidates_are_other_programs_of_the_case_that_is_timed(kernel):
  choices = CHOICES[kernel]
  spec = choices.spec
  traced = []
  with kernels.use("pallas", choices.platform):
    for options in choices.combinations():
      with kernels.use_table({"default": {kernel: options}}):
        traced.append(program(spec.run, *spec.shapes))
    packaged = program(spec.run, *spec.shapes)
    with of_kind("TPU v1000", choices.platform):
      assert program(spec.run, *spec.shapes) == packaged
  assert len(set(traced)) == len(traced) > 1
  assert packaged in traced


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def consecutive(*shape):
  return jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)


def prompts():
  """Longer than the longest block."""
  vectors = normal(0, 3, 1, 1, 1100, 64)
  return prompt_attention, (*vectors, consecutive(1, 1100))


def masses():
  positions = consecutive(1, 600)
  operands = normal(0, 1, 2, 600, 64), normal(1, 1, 1, 700, 64)
  return causal_mass, (*operands, positions + 100, consecutive(1, 1, 700))


def pages():
  positions = consecutive(1, 67 * 32).reshape(1, 67, 32)
  # The last pages are of no head.
  heads = jnp.where(jnp.arange(67) < 60, jnp.arange(67) % 2, -1)[None]
  return functools.partial(paged_attention, kv_heads=2), (
    normal(0, 1, 4, 1, 64),
    *normal(1, 2, 1, 67, 32, 64),
    jnp.full((1, 1), 1999, jnp.int32),
    positions,
    heads.astype(jnp.int32),
  )


def lists():
  """Two, of which the second ends early."""
  slots = np.stack([np.arange(0, 600, 2), np.arange(300)])
  slots[1, 133:] = -1
  slots = jnp.asarray(slots[None], jnp.int32)
  return sparse_decode, (
    normal(0, 1, 4, 128),
    *normal(1, 2, 1, 2, 600, 128),
    slots,
  )


def selection():
  return functools.partial(largest, size=300), (
    normal(0, 1, 3, 1401),
    jnp.asarray([[300, 7, 0]], jnp.int32),
  )


def gathering():
  kept = np.sort(np.random.default_rng(0).permutation(4133)[:1101])
  slots = jnp.asarray(kept[None, None], jnp.int32)
  keys, values = normal(0, 2, 1, 1, 4133, 64)
  operands = keys, values, consecutive(1, 1, 4133), normal(1, 1, 1, 4133), slots
  return compact, operands


def sketching():
  keys, factor = normal(0, 1, 1, 3201, 64), normal(1, 1, 64, 64) / 8

  def run(keys, valid, factor):
    sketched = sketch(keys, valid, factor, chunk=0, center=True)
    lengths = leverage_rows(sketched, sketched.gram / 3201, valid, chunk=0)
    return sketched.rows(valid, 0), sketched.gram, lengths

  return run, (keys, normal(2, 1, 1, 3201) > -1, factor)


CASES = {
  "attention_mass/tpu": masses,
  "gather/tpu": gathering,
  "paged_attention/tpu": pages,
  "prompt_attention/tpu": prompts,
  "select/tpu": selection,
  "sketch/tpu": sketching,
  "sparse_decode/tpu": lists,
}


def test_every_kernel_of_tpus_has_a_case():
  tpu = {name for name, choices in CHOICES.items() if choices.platform == "tpu"}
  assert CASES.keys() == tpu


@pytest.mark.parametrize(
  ("kernel", "number"),
  [
    (kernel, number)
    for kernel in CASES
    for number, _ in enumerate(CHOICES[kernel].combinations())
  ],
)
def test_results_are_equal_with_every_candidate(kernel, number):
  run, operands = CASES[kernel]()
  with kernels.use("xla"):
    wanted = jax.jit(lambda *x: run(*x))(*operands)
  options = next(itertools.islice(CHOICES[kernel].combinations(), number, None))
  with (
    pltpu.force_tpu_interpret_mode(),
    kernels.use("pallas", "tpu"),
    kernels.use_table({"default": {kernel: options}}),
  ):
    actual = jax.jit(lambda *x: run(*x))(*operands)
  for one, other in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
    assert one.dtype == other.dtype
    if one.dtype == jnp.int32:
      np.testing.assert_array_equal(one, other)
    else:
      largest = np.max(np.abs(other[np.isfinite(other)]))
      np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * largest)
