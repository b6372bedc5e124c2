"""kvjax beside kvpress: workers, turns, the least work, and the program."""

import ast
import contextlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_published import TINY

import kvjax
from kvjax.engine.forward import prompt_hidden
from kvjax.errors import InputError
from kvjax.experiments.peers import cases, paired_times, workers
from kvjax.experiments.peers.counterparts import PRESSES
from kvjax.experiments.peers.kvjax_side import DeviceMemory, Side
from kvjax.experiments.peers.serving import Memory
from kvjax.experiments.peers.workers import Worker
from kvjax.experiments.run.environment import device
from kvjax.models.pretrained import load_decoder

ROOT = pathlib.Path(__file__).parents[2]
KVPRESS_SIDE = ROOT / "experiments" / "peers" / "kvpress_side.py"
SMALL = dict(method="keydiff", retention=0.25, rows=2, length=40)

# Seconds that grow by one with every call, so that rounds can be told apart.
STUB = """
import types
from peers.serving import Memory, serve
calls = []
def prefill(method, retention, rows, length):
  print("a library prints this")
  calls.append(1)
  return float(SCALE * (len(calls) + rows))
def fail():
  raise ValueError("no such thing")
serve(types.SimpleNamespace(
  versions=lambda: {"NAME": "1"}, device=lambda: "a NAME",
  load=lambda path, dtype: None, prefill=prefill,
  fail=fail, end=lambda: exit("no room"),
  limits=lambda: {"operations": 1e3, "bytes": 1e3},
), Memory())
"""


@contextlib.contextmanager
def stub(name="one", scale=1):
  code = STUB.replace("SCALE", str(scale)).replace("NAME", name)
  worker = Worker(name, (sys.executable, "-c", code), ROOT / "experiments")
  try:
    yield worker
  finally:
    worker.stop()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def side(tiny_directory, request):
  side = Side()
  side.load(str(tiny_directory), request.param)
  return side


def test_a_worker_answers_whatever_libraries_print():
  with stub() as worker:
    answer = worker.ask("prefill", **SMALL)
    assert answer.result == 3.0
    if sys.platform == "linux":
      assert answer.peak > 2**20
    with pytest.raises(InputError, match="one failed: ValueError: no such"):
      worker.ask("fail")
    with pytest.raises(InputError, match=r"during end;.* last: .*no room$"):
      worker.ask("end")
    with pytest.raises(InputError, match="one's process ended"):
      worker.ask("prefill", **SMALL)


def test_libraries_take_turns_and_first_calls_are_apart(tmp_path):
  case = cases.Case("line", "prefill", SMALL, cases.Work(moved=2e3))
  with stub() as ours, stub("other", 2) as theirs:
    found = paired_times.compare(
      case, [ours, theirs], tmp_path, "float32", rounds=3
    )
  assert found.ours.first == 3
  assert found.ours.seconds == [4, 5, 6]
  assert found.theirs.seconds == [8, 10, 12]
  assert found.ratios() == [2, 2, 2]
  assert found.share == 2 / 5
  assert found.versions == {"one": "1", "other": "1"}
  assert (found.ours.device, found.theirs.device) == ("a one", "a other")
  table = paired_times.table("prefill", [found])
  assert table.header == ("prefill", *paired_times.HEADING)
  (line,) = table.lines
  assert line[:6] == ("line", "5.000", "10.0", "2.00", "2.00–2.00", "3.0")
  assert line[-1] == "40"


def test_a_peer_that_takes_row_after_row_is_timed_on_one(tmp_path):
  case = cases.Case("line", "prefill", SMALL, per_row=True)
  with stub() as ours, stub("other") as theirs:
    found = paired_times.compare(
      case, [ours, theirs], tmp_path, "float32", rounds=1
    )
  # Of one round there is no range, and of no counted work no limit.
  assert paired_times.table("prefill", [found]).header[3:5] == (
    *("ratio", "kvjax, first call, s"),
  )
  assert found.ours.seconds == [4]  # the second call, with two rows
  assert found.theirs.seconds == [6]  # twice the second call with one row


def test_a_device_knows_the_memory_that_is_taken_on_it(monkeypatch):
  taken = DeviceMemory().peak()
  assert taken == pytest.approx(Memory().peak(), rel=0.1)
  counts = {"bytes_in_use": 3, "peak_bytes_in_use": 5}
  gpu = types.SimpleNamespace(memory_stats=lambda: counts)
  monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
  assert DeviceMemory().peak() == 5


def test_the_peer_sees_pythonpath_without_this_checkout(tmp_path, monkeypatch):
  """transformers takes the folder kernels for a library that it can use."""
  code = "import importlib.util as u, mine; print(u.find_spec('kernels'))"
  python = tmp_path / "bin" / "python"
  python.parent.mkdir()
  python.write_text(f'#!/bin/sh\n{sys.executable} -Sc "{code}" >&2; exit 1\n')
  python.chmod(0o755)
  site = tmp_path / "site"
  site.mkdir()
  (site / "mine.py").touch()
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", f"site:{ROOT}")
  with (
    workers.started(tmp_path) as (_, peer),
    pytest.raises(InputError, match=r"said last: None$"),
  ):
    peer.ask("versions")


def test_a_table_names_both_devices_where_they_differ():
  case = cases.Case("line", "prefill", SMALL)
  cpu, gpu = (
    paired_times.Times(1, [1], None, name) for name in ("cpu", "H100")
  )
  said = [
    paired_times.devices(paired_times.Compared(case, cpu, theirs, None, {}))
    for theirs in (None, cpu, gpu)
  ]
  assert said == [device(), device(), f"{device()} (kvpress on H100)"]


def test_times_of_less_than_a_tenth_have_three_digits():
  case = cases.Case("line", "prefill", SMALL)
  ours = paired_times.Times(12.34, [0.0012345], None, "H100")
  theirs = paired_times.Times(1, [0.12345], None, "H100")
  found = paired_times.Compared(case, ours, theirs, None, {})
  (line,) = paired_times.table("prefill", [found]).lines
  assert line[1:4] == ("0.00123", "0.123", "100.0")


@pytest.mark.parametrize(
  ("share", "shown"), [(0.0038, "0.38"), (0.997, "100"), (2.23, "223")]
)
def test_small_shares_have_two_digits(share, shown):
  times = paired_times.Times(1, [0.1], None, "cpu")
  found = paired_times.Compared(
    cases.Case("a", "prefill", {}), times, None, share, {}
  )
  assert paired_times.table("prefill", [found]).lines[0][-1] == shown


def test_both_sides_do_the_same_operations():
  (theirs,) = (
    node
    for node in ast.parse(KVPRESS_SIDE.read_text()).body
    if isinstance(node, ast.ClassDef) and node.name == "Side"
  )
  arguments = {
    node.name: [each.arg for each in node.args.args]
    for node in theirs.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
  }
  ours = {name for name in vars(Side) if not name.startswith("_")}
  assert ours - {"limits"} == {*arguments}
  for name, given in arguments.items():
    assert given == [*inspect.signature(vars(Side)[name]).parameters]


@pytest.mark.slow
def test_our_operations_return_seconds(side):
  assert side.prefill(**SMALL) > 0
  assert side.decode(**SMALL, new_tokens=3) > 0
  cells = [("keydiff", 0.25), ("full", 1.0)]
  assert side.answer(cells, rows=3, length=40, new_tokens=3) > 0
  # Compactor reads the most activations.
  layer = dict(heads=4, kv_heads=2, dim=8)
  assert side.compress("compactor", 0.25, 300, **layer) > 0


def test_the_least_work_is_that_of_the_compiled_products(tiny):
  """XLA counts the operations of a forward pass with the whole square."""
  geometry, rows, length = tiny.config.geometry, 2, 96
  layers = jax.tree.leaves(tiny.params["layers"])
  sizes = cases.Sizes(geometry, sum(x.size for x in layers), 0, 4)
  program = jax.jit(
    lambda params, tokens, lengths: prompt_hidden(
      tiny.model, params, tokens, lengths
    )
  )
  tokens = jnp.zeros((rows, length), jnp.int32)
  lengths = jnp.full(rows, length)
  with kvjax.kernels.use("xla"):
    compiled = program.lower(tiny.params, tokens, lengths).compile()
  # The loop over layers is counted once.
  counted = compiled.cost_analysis()["flops"] * geometry.num_layers
  least = sizes.prefill(rows, length).operations
  square = least + sum(
    2 * rows * layer.heads * (layer.key_dim + layer.value_width) * length**2 / 2
    for layer in geometry.layers
  )
  # Besides products there are norms, rotations and the softmax.
  assert 0.6 * counted < square < counted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_reads_weights_and_caches_once_per_token(
  tiny_directory, dtype
):
  model, params = load_decoder(tiny_directory, dtype)
  leaves = jax.tree.leaves(params["layers"])
  itemsize = jnp.dtype(dtype).itemsize
  count = sum(x.size for x in leaves)
  sizes = cases.Sizes(model.geometry, count, 7, itemsize)
  plan = kvjax.get_plan("keydiff", kvjax.Retention(1.0))
  prompts = kvjax.Prompts.of([[5] * 32] * 3)
  cache, _ = kvjax.prefill(model, params, prompts, plan)
  keys = sum(x.nbytes for s in cache.stacks for x in (s.keys, s.values))
  weights = sum(x.nbytes for x in leaves) + itemsize * 7
  assert sizes.decode(3, 32, 10).moved == 10 * (weights + keys)


def test_compaction_moves_half_as_many_bytes_in_half_as_many_bits():
  wide, narrow = (
    cases.compress_case("keydiff", 0.25, 64, size) for size in (4, 2)
  )
  assert wide.work.moved == 2 * narrow.work.moved > 0


def test_limits_bound_each_other():
  limits = {"operations": 10.0, "bytes": 5.0}
  assert cases.Work(operations=20.0, moved=5.0).seconds(limits) == 2.0
  assert cases.Work(operations=20.0, moved=15.0).seconds(limits) == 3.0


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--length=9000"], "--length=9000 and --tokens=32 are more than this"),
    (["--retention=0.5,0.25"], "--retention takes one share for the table"),
    (["--retention=all"], "all"),
    (["--layers=2"], "--layers is for --sizes."),
    (["--sizes=llama-3.1-8b"], "--sizes and --model do not go together"),
  ],
)
def test_wrong_flags_are_refused(refusal, tiny_directory, arguments, message):
  told = refusal(
    "kvjax.experiments.benchmark_peers",
    f"--model={tiny_directory}",
    "--length=64",
    *arguments,
  )
  assert message in told


def test_methods_without_a_counterpart_are_refused(refusal, tmp_path):
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "python").touch()
  told = refusal(
    "kvjax.experiments.benchmark_peers",
    f"--peer={tmp_path}",
    "--methods=keydiff,lagkv",
  )
  assert "--methods has 'lagkv'; there are full, random" in told
  assert all(name in told for name in PRESSES)


def test_a_model_is_not_made_without_a_cpu():
  done = subprocess.run(
    [sys.executable, "-m", "kvjax.experiments.benchmark_peers"],
    env={**os.environ, "JAX_PLATFORMS": "cuda"},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 2
  assert "JAX_PLATFORMS leaves out; it has to be cuda,cpu." in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
  "table", ["prefill", "decode", "compress", "leaderboard"]
)
def test_without_a_peer_we_are_alone(
  run_binary, tiny_directory, tmp_path, table
):
  result = run_binary(
    "kvjax.experiments.benchmark_peers",
    f"--model={tiny_directory}",
    f"--table={table}",
    "--length=64",
    "--rounds=1",
    "--tokens=2",
    "--methods=keydiff",
    f"--peer={tmp_path}",
    f"--output={tmp_path}",
  )
  assert result.returncode == 0, result.stderr
  alone, _, rest = result.stderr.partition("\n")
  assert alone.startswith(f"There is no kvpress in {tmp_path}, so kvjax is al")
  assert f"the {table} table takes about" in rest
  assert "so kvjax is alone" in " ".join(result.stdout.split())
  assert '"theirs": null' in (tmp_path / "measured.json").read_text()
  written = (tmp_path / "table.md").read_text()
  assert written.startswith(f"| {table} | kvjax, s | kvjax, first call, s |")


@pytest.mark.slow
def test_a_model_has_the_sizes_of_a_published_one(run_binary, tmp_path):
  fields = {**TINY.fields, "vocab_size": 1000}
  (tmp_path / "config.json").write_text(json.dumps(fields))
  result = run_binary(
    "kvjax.experiments.benchmark_peers",
    f"--sizes={tmp_path}",
    "--layers=2",
    "--dtype=bfloat16",
    "--table=decode",
    "--length=64",
    "--rounds=1",
    "--tokens=2",
    "--methods=keydiff",
    f"--peer={tmp_path}",
    f"--output={tmp_path}",
  )
  assert result.returncode == 0, result.stderr
  said = " ".join((tmp_path / "table.md").read_text().split())
  assert f"random weights of {tmp_path}'s sizes, 2 layers, bfloat16 on" in said
