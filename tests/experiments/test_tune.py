"""Block sizes of kernels, as `kvjax tune` chooses and programs take them."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
from kvjax.errors import InputError
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.run import tuned_tables
from kvjax.experiments.timing import kernel_choices, kernel_timing
from kvjax.kernels import tuning
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.select import largest
from kvjax.kernels.specs import Choices, Spec

HERE = jax.devices()[0].device_kind


class MosaicError(Exception):
  """Stands for the error of Pallas."""


class Value:
  def __init__(self, value):
    self.value = value


def stub(kernel, name="select/tpu"):
  """Choices of eight numbers: `kernel` is given them and the option's value."""
  options = {
    "select/tpu": "unroll",
    "paged_attention/gpu": "blocks",
    "sketch/tpu": "step",
  }
  option = options[name]

  def xla(x):
    return x

  def with_option(x):
    return kernel(x, tuning.option(name, option))

  programs = Programs(xla, with_option, with_option)
  spec = Spec(
    "8 numbers",
    lambda x: dispatch(programs, (x,), ("",), ""),
    lambda key: (jax.random.normal(key, (8,)),),
    64,
  )
  return Choices(name, {option: (4, 8, 16)}, spec)


@pytest.fixture
def clock(monkeypatch):
  """Programs take as many seconds as the option says, in their median round.

  Returns the uses, by option, in the order in which they were timed.
  """
  timed = []

  def timer(run, operands):
    unroll = tuning.option("select/tpu", "unroll")
    rounds = iter([unroll, 1000, 0.0])

    def seconds():
      timed.append(unroll)
      return next(rounds)

    return seconds

  monkeypatch.setattr(kernel_timing, "timer", timer)
  return timed


def test_candidates_take_turns_and_the_fastest_wins(clock):
  tried = kernel_choices.measure(stub(lambda x, _: x), 3, 0)
  assert clock == [4, 8, 16] * 3
  assert [one.options["unroll"] for one in tried] == [4, 8, 16]
  assert [one.seconds for one in tried] == [4, 8, 16]
  assert {one.said for one in tried} == {"equal"}
  assert kernel_choices.fastest(tried).options == {"unroll": 4}
  assert kernel_choices.fastest(tried[::-1]).options == {"unroll": 4}


def wrong(x, value):
  return x * 2 if value == 4 else x


def failing(x, value):
  if value == 4:
    raise MosaicError("INTERNAL: bad\nlayout.")
  return x


def declining(x, value):
  if value == 4:
    raise NotImplementedError
  return x


@pytest.mark.parametrize(
  ("kernel", "said"),
  [
    (wrong, "differs by 1"),
    (failing, "does not compile (INTERNAL: bad layout)"),
    (declining, "declines"),
  ],
)
def test_a_candidate_that_does_not_serve_is_named(clock, kernel, said):
  tried = kernel_choices.measure(stub(kernel), 3, 0)
  assert clock == [8, 16] * 3
  assert tried[0].said == said
  assert tried[0].seconds is None
  assert kernel_choices.fastest(tried).options == {"unroll": 8}
  assert kernel_choices.fastest(tried[:1]) is None


def test_another_error_is_none_of_the_compilers():
  def breaks(x, value):
    raise TypeError("no compiler's error")

  with pytest.raises(TypeError, match="no compiler's"):
    kernel_choices.measure(stub(breaks), 1, 0)


def test_a_kernel_of_tpus_is_measured_by_an_interpreter(monkeypatch):
  monkeypatch.setattr(kernel_timing, "_SECONDS", 1e-4)
  spec = Spec(
    "300 scores",
    lambda scores, counts: largest(scores, counts, 5),
    lambda key: (jax.random.normal(key, (1, 300)), jnp.full(1, 4, jnp.int32)),
    1200,
  )
  choices = Choices("select/tpu", {"unroll": (4, 8)}, spec)
  with pltpu.force_tpu_interpret_mode():
    tried = kernel_choices.measure(choices, 1, 0)
  assert [(one.label, one.said) for one in tried] == [
    ("unroll=4", "equal"),
    ("unroll=8", "equal"),
  ]
  assert min(one.seconds for one in tried) > 0


@pytest.fixture
def tuned(monkeypatch, tmp_path):
  """Tunes stubs of kernels as on a TPU; returns the table."""
  path = tmp_path / "made" / "table.json"

  def run(*choices):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    kernel_choices.tune(choices, path, 1, 0)
    return json.loads(path.read_text())

  run.path = path
  return run


@pytest.mark.usefixtures("clock")
def test_the_fastest_are_written_and_others_stay(tuned, capsys):
  tuned.path.parent.mkdir()
  kept = {
    "TPU v5 lite": {"gather/tpu": {"read": 4096, "write": 1024}},
    HERE: {
      "paged_attention/gpu": {"blocks": 528},
      "select/tpu": {"unroll": 16},
    },
  }
  tuned.path.write_text(json.dumps(kept))
  written = tuned(stub(failing), stub(failing, "paged_attention/gpu"))
  kept[HERE]["select/tpu"] = {"unroll": 8}
  assert written == kept
  lines = capsys.readouterr().out.splitlines()
  assert "select/tpu, 8 numbers:" in lines
  assert "! unroll=4: does not compile (INTERNAL: bad layout)" in lines
  assert "* unroll=8: 8,000.000 ms, equal" in lines
  assert "  unroll=16: 16,000.000 ms, equal" in lines
  # Kernels of GPUs are not run on TPUs.
  assert not any("paged_attention/gpu" in line for line in lines)


@pytest.mark.usefixtures("clock")
def test_what_is_measured_outlives_a_later_error(tuned):
  def breaks(x, value):
    raise TypeError("no compiler's")

  with pytest.raises(TypeError, match="no compiler's"):
    tuned(stub(failing), stub(breaks, "sketch/tpu"))
  assert json.loads(tuned.path.read_text()) == {
    HERE: {"select/tpu": {"unroll": 8}}
  }


@pytest.mark.parametrize("name", ["select/tpu", "paged_attention/gpu"])
def test_where_nothing_can_be_tuned_nothing_is_written(tuned, name):
  def declines(x, value):
    raise NotImplementedError

  said = "None of these kernels runs on this cpu, and "
  with pytest.raises(InputError, match=said):
    tuned(stub(declines, name))
  assert not tuned.path.parent.exists()


def test_on_a_cpu_it_is_one_sentence(refusal, tmp_path):
  path = tmp_path / "table.json"
  told = refusal("kvjax.experiments.tune", f"--output={path}")
  assert told.startswith("JAX finds no TPU or GPU here")
  assert not path.exists()


def test_flags_of_other_programs_are_none_of_its_own(refusal):
  # Its imports define them.
  told = refusal("kvjax.experiments.tune", "--mesh=data:2")
  said = "There is no flag --mesh; --help lists the flags.\n"
  assert told == said


@pytest.mark.parametrize("flag", ["multihost", "coordinator", "hosts", "host"])
def test_it_is_said_which_programs_run_on_several_hosts(refusal, flag):
  told = refusal("kvjax.experiments.tune", f"--{flag}=1")
  assert told == (
    f"This program runs on one host, without --{flag}; evaluate, compare, "
    "trials, reproduce, retrieval_recall, calibrate, calibrate_queries, "
    "train_gate and finetune run on several.\n"
  )


TABLES = {
  "3": "must hold a JSON object",
  '{"TPU v4": 3}': "'TPU v4' has 3",
  '{"TPU v4": {"gather/tpu": [1]}}': r"'gather/tpu' has \[1\]",
  '{"TPU v4": {"gathr/tpu": {"read": 1}}}': "no 'read' of 'gathr/tpu'",
  '{"TPU v4": {"gather/tpu": {"rea": 1}}}': "no 'rea' of 'gather/tpu'",
  '{"TPU v4": {"gather/tpu": {"read": 1}}}': "is 1, and not one of 2048, 4096",
  '{"TPU v4": {"gather/tpu": {"read": 2048.0}}}': r"is 2048\.0, and not one",
  '{"TPU v4": {"gather/tpu": {"read": [2]}}}': r"is \[2\], and not one",
}


@pytest.mark.parametrize("text", TABLES, ids=range(len(TABLES)))
def test_what_is_no_table_is_refused(tmp_path, text):
  path = tmp_path / "table.json"
  path.write_text(text)
  with pytest.raises(InputError, match=TABLES[text]) as refused:
    tuned_tables.read(path)
  assert str(refused.value).startswith(str(path))
  assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
  "arguments",
  [["benchmark_kernels", "--only=select"], ["compare", "--model=reference"]],
)
def test_a_program_refuses_it_in_one_sentence(refusal, tmp_path, arguments):
  path = tmp_path / "table.json"
  path.write_text('{"TPU v4": 3}')
  program, *flags = arguments
  told = refusal(
    f"kvjax.experiments.{program}",
    *flags,
    f"--kernels_table={path}",
    f"--output={tmp_path / 'out'}",
  )
  assert told.startswith(f"{path} is no table of kvjax")
  assert not (tmp_path / "out").exists()


def test_a_table_applies_where_kernels_are_chosen(monkeypatch, tmp_path):
  path = tmp_path / "table.json"
  path.write_text(json.dumps({HERE: {"gather/tpu": {"read": 4096}}}))
  monkeypatch.setattr(run_inputs, "_KERNELS", Value("select:xla"))
  for value, wanted in ((None, 2048), (str(path), 4096)):
    monkeypatch.setattr(run_inputs, "_KERNELS_TABLE", Value(value))
    with run_inputs.chosen_kernels():
      assert tuning.option("gather/tpu", "read") == wanted
  assert tuning.option("gather/tpu", "read") == 2048


def test_tables_are_used_from_python_too():
  spec = stub(wrong).spec
  run = kernel_timing.by(spec, kernel_timing.PALLAS)
  assert kernel_timing.results(spec, run, (jnp.ones(8),))[0] == 1
  with kernels.use_table({HERE: {"select/tpu": {"unroll": 4}}}):
    assert kernel_timing.results(spec, run, (jnp.ones(8),))[0] == 2
