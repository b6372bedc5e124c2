"""What a program is said to take of a chip, and when that is an error."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from made_up_chip import MIB, chip, footprint, program
from made_up_kernel import twice

import kvjax
from kvjax import kernels
from kvjax.errors import InputError
from kvjax.experiments.compilation import (
  chips,
  engine_programs,
  kernel_programs,
  outcomes,
  tables,
)
from kvjax.experiments.compilation.programs import Outcome, compiled, find_fault
from kvjax.experiments.compilation.published import LLAMA
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.specs import Spec


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


def test_some_programs_for_gpus_are_those_of_xla():
  gpu = dataclasses.replace(chip(), vmem_bytes=0, platform="gpu")
  assert find_fault(program(), gpu, footprint(kernels=(), vmem=0), 0) is None


def of_operation(tpu):
  """A specification of an operation whose TPU program is the given one."""
  programs = Programs(xla=jnp.negative, tpu=tpu, gpu=tpu)

  def run(x):
    return dispatch(programs, [x], ["BK"], "BK")

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
  assert list(kernel_programs.kernel_programs("tpu")) == []
  spec = Spec("8 x 8", jnp.negative, lambda _: (jnp.zeros((8, 8)),) * 2, 512)
  monkeypatch.setattr("kvjax.kernels.toy.specs.SPECS", (spec,))
  (found,) = kernel_programs.kernel_programs("tpu")
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
  assert outcomes.chosen(PROGRAMS, only) == [PROGRAMS[i] for i in left]


def test_what_there_is_not_is_refused():
  with pytest.raises(InputError, match="--only has 'sel'; there are kernel, "):
    outcomes.chosen(PROGRAMS, ["select", "sel"])


@pytest.mark.parametrize(
  ("platform", "taken"), [("tpu", [0, 2, 4, 5]), ("gpu", [0, 2, 3, 4, 5])]
)
def test_a_quick_run_takes_one_of_each(platform, taken):
  assert outcomes.quick(PROGRAMS, platform) == [PROGRAMS[i] for i in taken]
  several = [program(function=name) for name in ("one", "two", "one")]
  assert outcomes.quick(several, platform) == several[:2]


def test_a_quick_run_takes_one_prefill():
  several = [program("prefill", name) for name in ("keydiff", "compactor")]
  assert outcomes.quick(several, "gpu") == several[:1]


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


def test_a_gpu_has_no_column_of_vmem(capsys):
  gpu = dataclasses.replace(chip(), vmem_bytes=0, platform="gpu")
  outcomes.finish([Outcome(program(), gpu, footprint(vmem=0))], None, {})
  told = capsys.readouterr().out
  assert "a GPU with 100 MiB of HBM at 1 GB/s." in told
  (header,) = (x for x in told.splitlines() if "program " in x)
  assert header.split() == ["program", "temp.", "args.", "HBM", "%"]


def test_a_page_is_written_when_all_is_well(tmp_path, capsys):
  page = tmp_path / "new" / "page.md"
  good = Outcome(program(), chip(), footprint(), 4 * MIB)
  bad = Outcome(program("decode", "ctkvr"), chip(), fault="Too large.")
  with pytest.raises(SystemExit) as stop:
    outcomes.finish([bad, good], page, {"jax": "1.2"})
  assert stop.value.code == 1
  assert not page.exists()
  told = capsys.readouterr()
  assert told.err == "v5e, decode, ctkvr, 8 x 8: Too large.\n"
  assert "twice, 8 x 8" in told.out
  outcomes.finish([good], page, {"jax": "1.2"})
  written = page.read_text()
  assert written == tables.to_markdown(
    [good], "make tpu-compile", {"jax": "1.2"}
  )
  told = capsys.readouterr()
  assert told.err == ""
  assert max(map(len, told.out.splitlines())) <= 80


def test_a_prefill_is_measured_layer_by_layer():
  """What is awaited is called once in each layer, and compiled once."""
  here = chip(jax.devices()[:2])
  model, params = LLAMA.shapes(here.mesh, 3)
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
  model, params = LLAMA.shapes(here.mesh, 1)
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
  told = "`make tpu-compile` and `make plan` fetch it"
  with pytest.raises(InputError, match=told):
    chips.prepare_libtpu()


def test_without_the_plugin_the_user_is_told(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
  with pytest.raises(InputError, match="`make gpu-compile` fetches it"):
    chips.prepare_cuda()


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--platform=gpu", "--chips=v5e"], "--chips has 'v5e'; there are h100."),
    (
      ["--platform=gpu", "--output=page.md"],
      "--output and --platform do not go together: the page is about TPUs.",
    ),
    pytest.param(
      ["--platform=gpu"],
      "Compiling for GPUs takes JAX's plugin",
      marks=pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is not None,
        reason="the plugin is there",
      ),
    ),
    (["--chips=v5e,v3"], "--chips has 'v3'; there are v5e, v5p, v6e, tpu7x."),
    (["--chips="], "--chips is empty"),
    (["--quick", "--layers=3"], "--quick and --layers do not go together"),
    pytest.param(
      ["--quick"],
      "Compiling for TPUs takes libtpu",
      marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is not None, reason="libtpu is there"
      ),
    ),
  ],
)
def test_mistakes_get_one_sentence(refusal, arguments, sentence):
  told = refusal("kvjax.experiments.compile_check", *arguments)
  assert told.startswith(sentence)


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
