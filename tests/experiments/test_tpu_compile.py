"""What a program is said to take of a chip, and when that is an error."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax import kernels
from kvjax.errors import InputError
from kvjax.experiments.tpu import (
  calls,
  chips,
  engine_programs,
  kernel_programs,
  llama,
  runs,
  tables,
)
from kvjax.experiments.tpu.footprints import Footprint
from kvjax.experiments.tpu.hlo import Module
from kvjax.experiments.tpu.host_arrays import copied_from_host
from kvjax.experiments.tpu.programs import (
  Outcome,
  Program,
  compiled,
  find_fault,
)
from kvjax.kernels.dispatch import Programs, dispatch
from kvjax.kernels.specs import Spec

MIB = 2**20


def chip(devices=()):
  """A v5e that is not there, or that stands on this machine's devices."""
  return chips.Chip("v5e", tuple(devices), 100 * MIB, 10 * MIB, 10**9)


def footprint(**changed):
  given = dict(
    arguments=3 * MIB,
    results=1 * MIB,
    temporary=2 * MIB,
    host=0,
    copied=0,
    moved=8 * MIB,
    overlap=3,
    kernels=("twice",),
    vmem=5 * MIB,
  )
  return Footprint(**(given | changed))


def unused(chip):
  raise AssertionError(chip)


def program(kind="kernel", name="twice", shapes="8 x 8", **changed):
  return Program(kind, name, shapes, **({"lower": unused} | changed))


def twice(x):
  """A kernel that reads a row of blocks once and writes every block."""

  def body(x_ref, out_ref):
    out_ref[0] = x_ref[...] * 2

  return pl.pallas_call(
    body,
    grid=(2, 4),
    in_specs=[pl.BlockSpec((None, 8, 128), lambda i, j: (i, 0, 0))],
    out_specs=pl.BlockSpec((1, 8, 128), lambda i, j: (i, j, 0)),
    out_shape=jax.ShapeDtypeStruct((2, 32, 128), jnp.float32),
    name="twice",
  )(x)


@pytest.mark.parametrize(
  ("changed", "host", "fault"),
  [
    ({"arguments": 97 * MIB, "vmem": 10 * MIB}, 0, None),
    ({"kernels": ()}, 0, "No kernel is in the program."),
    (
      {"arguments": 97 * MIB + 1},
      0,
      "It takes 104,857,601 bytes of HBM of 104,857,600.",
    ),
    ({"vmem": 10 * MIB + 1}, 0, "It takes 10,485,761 bytes of VMEM of"),
    ({"host": 9}, 10, "The host holds 9 bytes of 10."),
    ({"host": 3 * MIB}, 3 * MIB, None),
    (
      {"host": 3 * MIB, "copied": MIB},
      3 * MIB,
      "An array of 1,048,576 bytes comes whole from the host.",
    ),
  ],
)
def test_what_does_not_fit_is_a_fault(changed, host, fault):
  found = find_fault(program(), chip(), footprint(**changed), host)
  assert (found is None) == (fault is None)
  assert found is None or found.startswith(fault)


def of_operation(tpu):
  """A specification of an operation whose TPU program is the given one."""
  programs = Programs(xla=jnp.negative, tpu=tpu, gpu=tpu)

  def run(x):
    return dispatch(programs, None, [x], ["BK"], "BK")

  return kernel_programs.of_spec(
    "toy", Spec("8 x 8", run, lambda _: (jnp.zeros((8, 8)),), 512)
  )


def declines(x):
  raise NotImplementedError("Only rows of 16 serve.\nThis is a detail.")


@pytest.mark.parametrize(
  ("tpu", "fault"),
  [
    (declines, "NotImplementedError: Only rows of 16 serve."),
    (lambda x: x.undefined, "AttributeError: "),
    (jnp.negative, "No kernel is in the program."),
  ],
)
def test_where_no_kernel_runs_is_a_fault(tpu, fault):
  outcome = compiled(of_operation(tpu), chip(jax.devices()[:1]))
  assert outcome.fault is not None
  assert outcome.fault.startswith(fault)
  assert "\n" not in outcome.fault


def test_specifications_are_found_by_themselves(monkeypatch, tmp_path):
  for name, text in {
    "plain/__init__.py": "",
    "toy/__init__.py": "",
    "toy/specs.py": "SPECS = ()",
    "file.py": "",
  }.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
  assert list(kernel_programs.kernel_programs()) == []
  spec = Spec("8 x 8", jnp.negative, lambda _: (jnp.zeros((8, 8)),) * 2, 512)
  monkeypatch.setattr("kvjax.kernels.toy.specs.SPECS", (spec,))
  (found,) = kernel_programs.kernel_programs()
  assert (found.kind, found.name, found.shapes) == ("kernel", "toy", "8 x 8")
  assert found.operands() == "2 float32[8,8]"
  assert found.function == "negative"


PROGRAMS = [
  program(name="select", shapes="small"),
  program(name="select", shapes="large"),
  program(name="gather", shapes="small"),
  program("prefill", "keydiff"),
  program("decode", "keydiff"),
  program("decode", "ctkvr"),
]


@pytest.mark.parametrize(
  ("only", "left"),
  [
    (None, [0, 1, 2, 3, 4, 5]),
    (["kernel"], [0, 1, 2]),
    (["select", "prefill"], [0, 1, 3]),
    (["keydiff"], [3, 4]),
  ],
)
def test_kinds_and_names_are_chosen(only, left):
  assert runs.chosen(PROGRAMS, only) == [PROGRAMS[i] for i in left]


def test_what_there_is_not_is_refused():
  with pytest.raises(InputError, match="--only has 'sel'; there are kernel, "):
    runs.chosen(PROGRAMS, ["select", "sel"])


def test_a_quick_run_takes_one_of_each():
  assert runs.quick(PROGRAMS) == [PROGRAMS[i] for i in (0, 2, 4, 5)]
  several = [program(function=name) for name in ("one", "two", "one")]
  assert runs.quick(several) == several[:2]


def test_tables_say_what_fits_and_what_does_not():
  good = Outcome(
    program(operands=lambda: "float32[8,8]"), chip(), footprint(), 4 * MIB
  )
  prefill = Outcome(
    program("prefill", "keydiff"), chip(), footprint(kernels=(), host=MIB)
  )
  bad = Outcome(program("decode", "ctkvr"), chip(), fault="Too large.")
  h2o = Outcome(
    program("decode", "h2o"), chip(), footprint(kernels=("select",))
  )
  outcomes = [good, prefill, bad, h2o]
  page = tables.to_markdown(outcomes, "make it", {"jax": "1.2"})
  lines = page.splitlines()
  assert "    make it" in lines
  assert "jax 1.2" in page
  assert lines[-2:] == [
    "| twice, 8 x 8 | `float32[8,8]` |",
    "| decode, h2o, 8 x 8 | `select` |",
  ]
  numbers = "5.0 2.0 3.0 – – 6.0 8.0 4.0 2.00 4,194".split()
  assert f"| twice, 8 x 8 | {' | '.join(numbers)} |" in lines
  numbers = ["–", "2.0", "3.0", "1.0", "3", "6.0", "–", "–", "–", "–"]
  assert f"| prefill, keydiff, 8 x 8 | {' | '.join(numbers)} |" in lines
  assert f"| decode, ctkvr, 8 x 8 |{' – |' * 10}" in lines
  assert tables.faults(outcomes) == "v5e, decode, ctkvr, 8 x 8: Too large.\n"


def test_a_page_is_written_when_all_is_well(tmp_path, capsys):
  page = tmp_path / "new" / "page.md"
  good = Outcome(program(), chip(), footprint(), 4 * MIB)
  bad = Outcome(program("decode", "ctkvr"), chip(), fault="Too large.")
  with pytest.raises(SystemExit) as stop:
    runs.finish([bad, good], page, {"jax": "1.2"})
  assert stop.value.code == 1
  assert not page.exists()
  told = capsys.readouterr()
  assert told.err == "v5e, decode, ctkvr, 8 x 8: Too large.\n"
  assert "twice, 8 x 8" in told.out
  runs.finish([good], page, {"jax": "1.2"})
  written = page.read_text()
  assert written == tables.to_markdown(
    [good], "make tpu-compile", {"jax": "1.2"}
  )
  told = capsys.readouterr()
  assert told.err == ""
  assert max(map(len, told.out.splitlines())) <= 80


@functools.partial(jax.jit, donate_argnums=0)
def move_on(state, weights):
  """A layer: what it adds to the state in place, and what it leaves behind."""
  return state + jnp.sum(weights), weights * 2


@jax.jit
def keep(left, lengths):
  return left[:2] * lengths


def layer_by_layer(weights, state):
  """Three layers; the host makes up lengths that the programs are given."""
  kept = []
  for _ in range(3):
    state, left = move_on(state, weights)
    kept.append(keep(left, jnp.asarray(np.full(2, 7, np.float32))))
  return state, kept


@pytest.fixture(scope="module")
def spread_calls():
  """Weights in halves, the state whole, on two of this machine's devices."""
  here = chip(jax.devices()[:2])
  spread = NamedSharding(here.mesh, PartitionSpec("model"))
  whole = NamedSharding(here.mesh, PartitionSpec())
  given = [
    jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=spread),
    jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=whole),
  ]
  jaxpr = jax.make_jaxpr(layer_by_layer)(*given)
  return calls.compile_calls(jaxpr, given, whole), spread, whole


def test_programs_that_are_called_are_compiled_once(spread_calls):
  """Where one leaves its results, the next takes them."""
  found, spread, whole = spread_calls
  layers = [x for x in found.calls if x.name in ("move_on", "keep")]
  assert [x.name for x in layers] == ["move_on", "keep"] * 3
  assert len({id(x.footprint) for x in layers}) == 2
  for move in layers[::2]:
    state, left = move.results
    assert move.reused == (move.arguments[0], None)
    assert found.shapes[state].sharding.is_equivalent_to(whole, 1)
    assert found.shapes[left].sharding.is_equivalent_to(spread, 1)
  assert layers[0].results[0] == layers[2].arguments[0]
  assert layers[0].footprint.arguments == 4096 * 4 // 2 + 1024 * 4


def test_calls_hold_what_two_stretches_hold_at_most(spread_calls):
  """Of three layers two leave halves of what is read; the state is reused."""
  found, _, _ = spread_calls
  weights, state, left, kept = 2048 * 4, 1024 * 4, 2048 * 4, 1 * 4
  lengths = 3 * 2 * 4
  temporary = max(x.footprint.temporary for x in found.calls)
  measured = calls.measure_calls(found, awaited="move_on")
  assert measured.arguments - lengths == weights + state
  assert measured.results == state + 3 * kept
  at_most = weights + 2 * left + state + 3 * kept + lengths + temporary
  assert measured.hbm == at_most
  # Nothing is awaited: what all layers leave behind may be there at once.
  together = calls.measure_calls(found, awaited="nothing")
  assert together.hbm == at_most + left


def test_a_prefill_is_measured_layer_by_layer():
  """What is awaited is called once in each layer, and compiled once."""
  here = chip(jax.devices()[:2])
  model, params = llama.shapes(here.mesh, 3)
  use = engine_programs.Use(
    "keydiff", "", kvjax.get_plan("keydiff", kvjax.Tokens(8)), 16
  )
  jaxpr, given = engine_programs.trace_prefill(model, params, use, here)
  del given
  names = [str(x.params.get("name", "")) for x in jaxpr.jaxpr.eqns]
  assert names.count(engine_programs.LAYER) == 3
  bodies = {
    id(x.params["jaxpr"])
    for x in jaxpr.jaxpr.eqns
    if x.params.get("name") == engine_programs.LAYER
  }
  assert len(bodies) == 1


@pytest.mark.slow
def test_what_is_looked_up_has_to_be_with_the_host():
  """Of 65,536 tokens all but the first 4 and last 64, of 2 of 8 heads."""
  here = chip(jax.devices()[:4])
  model, params = llama.shapes(here.mesh, 1)
  use = engine_programs.CTKVR
  with jax.set_mesh(here.mesh), kernels.use(platform="tpu"):
    cache = engine_programs.cache_shapes(model, params, use, here)
  offloaded = engine_programs.offloaded(cache)
  assert {x.sharding.memory_kind for x in jax.tree.leaves(offloaded)} == {
    "pinned_host"
  }
  assert (
    engine_programs.share_bytes(offloaded)
    == 2 * (65_536 - 4 - 64) * 2 * 128 * 2
  )
  keys = cache.stacks[0].resident.keys
  assert keys.sharding.shard_shape(keys.shape)[2] == 2
  assert keys.shape[3] == 4 + 64 + 128
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(cache)}
  assert kinds == {"device", "pinned_host"}


def test_without_libtpu_the_user_is_told(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
  with pytest.raises(InputError, match="`make tpu-compile` fetches it"):
    chips.prepare_libtpu()


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--chips=v5e,v3"], "--chips has 'v3'; there are v5e, v5p, v6e, tpu7x."),
    (["--chips="], "--chips is empty"),
    (["--quick", "--layers=3"], "--quick and --layers do not go together"),
    pytest.param(
      ["--quick"],
      "Compiling for TPUs takes libtpu",
      marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is not None,
        reason="libtpu is there",
      ),
    ),
  ],
)
def test_mistakes_get_one_sentence(run_binary, arguments, sentence):
  result = run_binary("kvjax.experiments.tpu_compile", *arguments)
  assert result.returncode == 2
  assert result.stdout == ""
  assert len(result.stderr.splitlines()) == 1
  assert result.stderr.startswith(sentence)


@pytest.mark.libtpu
@pytest.mark.parametrize("name", chips.TOPOLOGIES)
def test_chips_are_known(name):
  chips.prepare_libtpu()
  found = chips.Chip.load(name)
  assert found.hbm_bytes * len(found.devices) > 100e9
  assert found.vmem_bytes >= 64 * MIB
  assert 5e11 < found.bytes_per_second < 5e12


@pytest.mark.libtpu
def test_a_kernel_is_measured():
  """Two blocks of VMEM for each of what it reads and writes."""
  chips.prepare_libtpu()
  spec = Spec("toy", twice, lambda _: (jnp.zeros((2, 8, 128)),), 10 * 4096)
  toy = kernel_programs.of_spec("toy", spec)
  outcome = compiled(toy, chips.Chip.load("v5e"))
  assert outcome.fault is None
  found = outcome.footprint
  assert found.kernels == ("twice",)
  assert 4 * 4096 <= found.vmem <= 5 * 4096
  assert found.arguments == 2 * 4096
  assert found.results == 8 * 4096
  assert found.moved == outcome.ideal


@pytest.mark.libtpu
def test_a_token_moves_little_more_than_it_must():
  """What it retrieves stays with the host, on each of eight chips."""
  chips.prepare_libtpu()
  use, v5e = engine_programs.CTKVR, chips.Chip.load("v5e")
  lower = functools.partial(engine_programs.lower_decode, use, 1)
  outcome = compiled(program("decode", use.name, lower=lower), v5e)
  assert outcome.fault is None
  found = outcome.footprint
  stored = 2 * (65_536 - 4 - 64) * 128 * 2
  assert stored <= found.host < 1.001 * stored  # tiles are whole
  assert found.temporary < found.host
  assert 0.8 < found.moved / outcome.ideal < 1.2
  assert found.copied == 0
  if not found.overlap:
    pytest.xfail("XLA lets the device wait while the host attends")


@pytest.mark.libtpu
@pytest.mark.parametrize(
  ("use", "layers", "most"),
  [
    (engine_programs.COMPACTOR, 4, 1.01),
    (engine_programs.ADAKV_IN_INT8, 4, 1.01),
  ],
  ids=["stacked", "packed"],
)
def test_layers_are_read_where_they_stand_in_their_stacks(use, layers, most):
  """Nothing is copied out of the weights or the cache, or into it."""
  chips.prepare_libtpu()
  v5e = chips.Chip.load("v5e")
  lower = functools.partial(engine_programs.lower_decode, use, layers)
  outcome = compiled(program("decode", use.name, lower=lower), v5e)
  assert outcome.fault is None
  _, params = llama.shapes(v5e.mesh, layers)
  layer = engine_programs.share_bytes(params["layers"]) / layers
  assert outcome.footprint.temporary < layer / 4
  assert outcome.footprint.results < MIB
  assert 0.9 < outcome.footprint.moved / outcome.ideal < most


@pytest.mark.libtpu
def test_a_prefill_holds_no_more_for_more_layers():
  """Besides their weights, and what is kept of them.

  All of them have stacks of weights that VMEM does not hold.
  """
  chips.prepare_libtpu()
  plan = kvjax.get_plan("keydiff", kvjax.Retention(0.25))
  use, v5e = (
    engine_programs.Use("keydiff", "", plan, 2048),
    chips.Chip.load("v5e"),
  )
  found = []
  for layers in (16, 32):
    lower = functools.partial(engine_programs.lower_prefill, use, layers)
    outcome = compiled(program("prefill", use.name, lower=lower), v5e)
    assert outcome.fault is None
    found.append(outcome.footprint)
  shallow, deep = found
  assert deep.temporary < 1.01 * shallow.temporary
  assert 1.8 < deep.results / shallow.results < 2
  assert "splash_mha_fwd_no_residuals" in deep.kernels


@pytest.mark.libtpu
@pytest.mark.parametrize(("rows", "copied"), [(512, 512 * 128 * 4), (8, 0)])
def test_an_array_that_comes_whole_from_the_host_is_found(rows, copied):
  chips.prepare_libtpu()
  lone = chips.Chip.load("v5e").lone
  kinds = "pinned_host", "device"
  stored, own = (
    jax.ShapeDtypeStruct(
      (size, 128),
      jnp.float32,
      sharding=NamedSharding(lone, PartitionSpec(), memory_kind=kind),
    )
    for kind, size in zip(kinds, (512, rows), strict=True)
  )

  def read(stored, own):
    some = jax.device_put(stored[:rows], jax.memory.Space.Device)
    return jnp.sort(some + own, axis=0)

  text = jax.jit(read).lower(stored, own).compile().as_text()
  assert copied_from_host(Module.of(text)) == copied
