"""Kernels beside XLA's programs on the device at hand, by specs of stubs."""

import json

import jax
import jax.numpy as jnp
import pytest

from kvjax.errors import InputError
from kvjax.experiments import device_check
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.run import device_failures
from kvjax.experiments.timing import kernel_checks
from kvjax.kernels import tuning
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.specs import Spec


class MosaicError(Exception):
  """Stands for the error of Pallas."""


def declines(x):
  raise NotImplementedError


def fails(x):
  raise MosaicError("INTERNAL: bad layout\nat kernels/sketch/tpu.py:3")


def breaks(x):
  raise TypeError("no compiler's error")


def spec(kernel):
  def xla(x):
    return x, jnp.argsort(x)

  programs = Programs(xla, kernel, kernel)
  return Spec(
    "8 numbers",
    lambda x: dispatch(programs, (x,), ("",), ("", "")),
    lambda key: (jax.random.normal(key, (8,)),),
    64,
  )


CASES = {
  "equal": (lambda x: (x, jnp.argsort(x)), True, "equal"),
  "nearly": (lambda x: (x * 1.001, jnp.argsort(x)), True, "differs by 0.001"),
  "far": (lambda x: (x * 1.1, jnp.argsort(x)), False, "differs by 0.1"),
  "nan": (lambda x: (x * jnp.nan, jnp.argsort(x)), False, "differs by nan"),
  "a slot": (lambda x: (x, jnp.argsort(-x)), False, "differs by 0.9"),
  "declines": (declines, True, "declines"),
  "fails": (fails, False, "kernel of sketch does not compile"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_compared(case):
  kernel, fine, said = CASES[case]
  checked = kernel_checks.check(spec(kernel), 0)
  assert checked.fine == fine
  assert said in checked.said


def test_another_error_is_none_of_the_compilers():
  with pytest.raises(TypeError):
    kernel_checks.check(spec(breaks), 0)


@pytest.mark.parametrize(("case", "code"), [("equal", 0), ("far", 1)])
def test_a_difference_is_an_exit_code(monkeypatch, capsys, case, code):
  made = [("select", spec(CASES["equal"][0])), ("gather", spec(CASES[case][0]))]
  monkeypatch.setattr(device_check, "named_specs", lambda: made)
  monkeypatch.setattr(device_check, "_ONLY", _Value(["select", "gather"]))
  monkeypatch.setattr(run_inputs, "SEED", _Value(0))
  monkeypatch.setattr(run_inputs, "_KERNELS_TABLE", _Value(None))
  with pytest.raises(InputError, match="no TPU or GPU"):
    device_check.main()
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  if code:
    with pytest.raises(SystemExit) as stopped:
      device_check.main()
    assert stopped.value.code == code
  else:
    device_check.main()
  printed = capsys.readouterr().out
  assert "  select, 8 numbers: equal" in printed
  assert ("! gather, 8 numbers: differs" in printed) == bool(code)


def test_kernels_are_checked_as_a_table_says(monkeypatch, tmp_path, capsys):
  path = tmp_path / "table.json"
  table = {jax.devices()[0].device_kind: {"gather/tpu": {"read": 4096}}}
  path.write_text(json.dumps(table))

  def reads(x):
    factor = tuning.option("gather/tpu", "read") / 2048
    return x * factor, jnp.argsort(x)

  made = [("gather", spec(reads))]
  monkeypatch.setattr(device_check, "named_specs", lambda: made)
  monkeypatch.setattr(device_check, "_ONLY", _Value(["gather"]))
  monkeypatch.setattr(run_inputs, "SEED", _Value(0))
  monkeypatch.setattr(run_inputs, "_KERNELS_TABLE", _Value(None))
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  device_check.main()
  monkeypatch.setattr(run_inputs, "_KERNELS_TABLE", _Value(str(path)))
  with pytest.raises(SystemExit):
    device_check.main()
  assert "! gather, 8 numbers: differs" in capsys.readouterr().out


class _Value:
  def __init__(self, value):
    self.value = value


def test_what_a_compiler_says_of_a_kernel_names_the_flag():
  def at(place):
    return RuntimeError(f"INTERNAL: Mosaic failed to compile: {place}.\n more")

  said = device_failures.of_kernel(at("a/kvjax/kernels/select/tpu.py:9"))
  assert said.startswith(
    "The kernel of select does not compile for this device"
  )
  assert "--kernels=select:xla runs XLA's program instead (INTERNAL" in said
  assert "\n" not in said
  assert "; --kernels=xla runs" in device_failures.of_kernel(at("nowhere"))
  assert device_failures.of_kernel(RuntimeError("out of memory")) is None
  scalar = RuntimeError("Ran out of memory in memory space smem.")
  assert "--kernels=xla runs" in device_failures.of_kernel(scalar)
  # JAX raises an error of its own in place of the compiler's.
  outer = ValueError("cannot run")
  outer.__cause__ = at("kernels/gather/tpu.py")
  assert "--kernels=gather:xla" in device_failures.of_kernel(outer)


@pytest.mark.parametrize(
  ("text", "parsed"),
  [
    ("auto", (None, {})),
    ("xla", ("xla", {})),
    ("select:xla, gather:xla", (None, {"select": "xla", "gather": "xla"})),
  ],
)
def test_kernels_are_chosen_by_operation(text, parsed):
  assert run_inputs._kernels(text) == parsed


@pytest.mark.parametrize("text", ["pallas", "select", "select:xl", "sel:xla,"])
def test_kernels_that_are_none(text):
  with pytest.raises(
    InputError, match="--kernels is auto, xla, or a list such"
  ):
    run_inputs._kernels(text)
