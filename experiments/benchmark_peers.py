"""Times kvjax beside kvpress, on the same weights, in turns.

  make peers
  kvjax benchmark_peers --table=prefill

Each library has a process of its own, kvpress in the environment that
`make peers` sets up. For each line of the table both start anew, load the same
weights, make a first call, and then take turns. The tables:

- prefill: prompts whose caches are compressed;
- decode: tokens after that;
- compress: scoring and compaction of one layer at Llama-3.1-8B's shapes;
- leaderboard: prompts answered by 10 methods at 4 retentions. kvpress answers
  one prompt at a time, so that one is timed and multiplied.

The columns:

- s: median seconds of later calls;
- ratio: kvpress's time over kvjax's, median and range over the rounds;
- first: seconds of kvjax's first call, which compiles;
- MiB: peak memory of the process in later calls; on a GPU, of what the library
  has on it, kvjax's since its process started, as JAX cannot reset it;
- % of limit: the least time that the work takes at the speed of this device's
  matrix products and memory, relative to kvjax's.

--model=random is a Llama of 4 layers, 8 query and 2 KV heads, width 512 and a
context of 131,072 tokens.

  kvjax benchmark_peers --sizes=llama-3.1-8b --layers=4

has random weights of a published model's sizes. Each library takes a GPU if it
finds one; the table names both devices if they differ. Without the environment,
the table shows kvjax alone. measured.json in --output keeps every measurement,
beside table.md.

On two cores, SmolLM2's prefill table takes about 30 minutes, the leaderboard 50
with three rounds and 25 with --rounds=1, decode 10, and compress 5.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.compilation.published import SHIPPED
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.peers import cases, paired_times, workers
from kvjax.experiments.peers.counterparts import PRESSES
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.run import outputs, progress_bar
from kvjax.experiments.run.candidates import parse_budgets
from kvjax.experiments.timing import random_models
from kvjax.models import pretrained, saving

_METHODS = ["full", "keydiff", "snapkv", "lagkv:lag=128", "compactor"]


class _Table(NamedTuple):
  """The defaults of a table, and its minutes with them and SmolLM2."""

  lengths: Sequence[str]
  methods: Sequence[str]
  minutes: int
  retentions: Sequence[str] = ("0.25",)
  rows: int = 1


_TABLES = {
  "prefill": _Table(["1024", "1100", "5000", "8000"], _METHODS, 30),
  "decode": _Table(["1024", "4096"], _METHODS, 10),
  "compress": _Table(["8192", "32768"], _METHODS[1:], 5),
  "leaderboard": _Table(
    ["4096"],
    [
      *("random", "streaming", "key_norm", "keydiff", "lagkv:lag=128"),
      *("compactor", "tova", "snapkv", "pyramidkv", "adakv"),
    ],
    50,
    ["0.5", "0.25", "0.1", "0.05"],
    rows=8,
  ),
}

# A model of this name is made here.
_RANDOM = "random"

flags.declare_key_flag("model")
flags.declare_key_flag("dtype")
_SIZES = flags.DEFINE_string(
  "sizes",
  None,
  "Random weights with the sizes of a published model, instead of --model: a "
  f"config.json, or one of {', '.join(SHIPPED)}.",
)
_LAYERS = flags.DEFINE_integer(
  "layers",
  None,
  "With --sizes, layers of the model; the default is all.",
  lower_bound=1,
)
_TABLE = flags.DEFINE_enum("table", "prefill", list(_TABLES), "What to time.")
_NAMES = flags.DEFINE_list(
  "methods", None, "Methods; the default depends on the table."
)
_RETENTION = flags.DEFINE_list(
  "retention", None, "Shares to keep: one, or four for the leaderboard."
)
_LENGTH = flags.DEFINE_list(
  "length", None, "Tokens of a prompt; the default depends on the table."
)
_ROWS = flags.DEFINE_integer(
  "rows", None, "Prompts: 1, or 8 for the leaderboard.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "tokens", 32, "Tokens to decode per prompt.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Timings of each library.", lower_bound=1
)
_PEER = flags.DEFINE_string(
  "peer", ".peers", "Virtual environment with kvpress."
)
_OUTPUT = flags.DEFINE_string("output", "results/peers", "Output folder.")


def main() -> None:
  """Times the lines of a table."""
  refusals.refuse_together("sizes", ["model"], "either is the model")
  if _LAYERS.present and not _SIZES.present:
    raise InputError("--layers is for --sizes.")
  platforms = jax.config.jax_platforms
  if platforms and "cpu" not in platforms.split(","):
    raise InputError(
      "The model is made on a CPU, which JAX_PLATFORMS leaves out; it has to "
      f"be {platforms},cpu."
    )
  # On a GPU, JAX would take most of the memory that all processes share.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  environment = pathlib.Path(_PEER.value)
  peer = environment if (environment / "bin" / "python").exists() else None
  if peer is not None and _NAMES.value:
    refusals.refuse_unknown("methods", _NAMES.value, ["full", *PRESSES])
  table = _TABLES[_TABLE.value]
  lengths = run_inputs.parse_lengths(_LENGTH.value or table.lengths)
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  with _saved_model() as (path, sizes):
    limit = sizes.geometry.max_positions
    if _TABLE.value != "compress" and max(lengths) + _TOKENS.value > limit:
      raise InputError(
        f"--length={max(lengths)} and --tokens={_TOKENS.value} are more than "
        f"this model's context of {limit} tokens; --model=random has a "
        "longer one."
      )
    chosen = list(_cases(sizes, lengths))
    if peer is None:
      print(_alone(), file=sys.stderr)
    print(
      f"With default flags, the {_TABLE.value} table takes about "
      f"{table.minutes} minutes on two cores.",
      file=sys.stderr,
    )
    compared = []
    for case in progress_bar.track(chosen, "timing"):
      with workers.started(peer) as started:
        compared.append(
          paired_times.compare(
            case, started, path, run_inputs.dtype(), _ROUNDS.value
          )
        )
  records = [dataclasses.asdict(one) for one in compared]
  outputs.write_json(folder / "measured.json", {"cases": records})
  devices = paired_times.devices(compared[0])
  benchmark_tables.show(
    folder,
    paired_times.table(_TABLE.value, compared),
    f"{_model_name()}, {run_inputs.dtype()} on {devices}, "
    f"median of {wording.count(_ROUNDS.value, 'round')}",
    peers=compared[0].versions,
  )
  if peer is None:
    print(_alone())


def _alone() -> str:
  return (
    f"There is no kvpress in {_PEER.value}, so kvjax is alone; `make peers` "
    "sets it up."
  )


def _model_name() -> str:
  if _TABLE.value == "compress":
    return "one layer with the heads of Llama-3.1-8B"
  if _SIZES.value is None:
    return str(run_inputs.MODEL.value)
  layers = ""
  if _LAYERS.value is not None:
    layers = f", {wording.count(_LAYERS.value, 'layer')}"
  return f"random weights of {_SIZES.value}'s sizes{layers}"


def _cases(sizes: cases.Sizes, lengths: Sequence[int]) -> Iterator[cases.Case]:
  """Yields the lines of the table."""
  name, table = _TABLE.value, _TABLES[_TABLE.value]
  if _NAMES.present:
    refusals.refuse_no_methods("keydiff,snapkv")
  methods = _NAMES.value or table.methods
  retentions = [_share(text) for text in _RETENTION.value or table.retentions]
  rows, tokens = _ROWS.value or table.rows, _TOKENS.value
  if name == "leaderboard":
    for length in lengths:
      yield cases.leaderboard_case(methods, retentions, rows, length, tokens)
    return
  if len(retentions) > 1:
    raise InputError(
      f"--retention takes one share for the table {name}, such as 0.25."
    )
  (share,) = retentions
  for length, method in itertools.product(lengths, methods):
    if name == "prefill":
      yield cases.prefill_case(sizes, method, share, rows, length)
    elif name == "decode":
      yield cases.decode_case(sizes, method, share, rows, length, tokens)
    else:
      yield cases.compress_case(method, share, length, sizes.itemsize)


def _share(text: str) -> float:
  """Parses a value of --retention."""
  (budget,) = parse_budgets([text], None)
  if not isinstance(budget, kvjax.Retention):
    raise InputError(f"--retention takes shares such as 0.25; {text!r} is not.")
  return budget.share


@contextlib.contextmanager
def _saved_model() -> Iterator[tuple[pathlib.Path, cases.Sizes]]:
  """Saves the model as both libraries read it, in the dtype of the run."""
  dtype = run_inputs.dtype()
  with tempfile.TemporaryDirectory(prefix="kvjax-peers-") as folder:
    # A GPU's memory is for the processes that are timed.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      lm = _model(dtype)
      saving.save(lm, folder)
    decoder = lm.params["layers"]
    sizes = cases.Sizes(
      lm.model.geometry,
      layer_weights=sum(x.size for x in jax.tree.leaves(decoder)),
      head_weights=lm.config.vocab_size * lm.config.hidden_size,
      itemsize=jnp.dtype(dtype).itemsize,
    )
    del lm, decoder
    yield pathlib.Path(folder), sizes


def _model(dtype: str) -> pretrained.Pretrained:
  """Draws or loads the model."""
  if _SIZES.value is not None:
    return random_models.with_sizes(_SIZES.value, dtype, _LAYERS.value)
  if run_inputs.MODEL.value != _RANDOM:
    return pretrained.load(run_inputs.MODEL.value, dtype)
  _, model, params = random_models.random_llama(
    dtype,
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=131_072,
    rope_theta=500_000.0,
  )
  return pretrained.Pretrained(model, params)


if __name__ == "__main__":
  cli.run(main)
