"""Times the construction of CTkvr's index beside others.

  kvjax index_construction

builds qcIVF, the index of CTkvr, for one KV head of random prompts, and from
the same keys IVF, HNSW and K-means by faiss, and the K-means of kvjax's
ClusterKV. It prints a table and writes
results/index_construction/{summary.json,table.md}. For every length:

- build: median wall time of several builds, which take turns; programs are
  compiled first. For qcIVF it starts from queries and keys and includes
  attention;
- x qcIVF: build time relative to CTkvr's index;
- recall: share of the keys of exact search for the next tokens that the index
  retrieves if all indexes examine as many keys. It shows whether an index is
  useful; experiments/retrieval_recall.py measures recall with real queries.

IVF has 4 sqrt(n) lists, HNSW M = 32, and K-means as many centroids as CTkvr.
faiss runs on the CPU with all threads, JAX on its default device. CTkvr's paper
builds on a GPU, in 0.21 to 0.43 ms from 4K to 128K tokens and orders of
magnitude faster than the others. On a CPU, only the ratios are meaningful.

This needs faiss: `pip install faiss-cpu`. It takes ten minutes on two idle
cores.
"""

import functools
import os
import statistics
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.inputs.number_lists import parse_numbers
from kvjax.experiments.report import benchmark_tables
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import environment, outputs, stopwatch
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.timing import index_builders
from kvjax.experiments.timing.index_builders import (
  KEY_CENTERS,
  QCIVF,
  QUERY_CENTERS,
  SPREAD,
)
from kvjax.retrieval import CTkvr

_LENGTHS = flags.DEFINE_list(
  "lengths",
  ["4096", "8192", "16384", "32768", "65536", "131072"],
  "Tokens of the prompts.",
)
_HEAD_DIM = flags.DEFINE_integer(
  "head_dim", 128, "Channels of a key.", lower_bound=1
)
_GROUP = flags.DEFINE_integer(
  "group", 4, "Query heads of the KV head.", lower_bound=1
)
_READS = flags.DEFINE_integer(
  "reads", 512, "Keys that a token retrieves.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "Builds of each index.", lower_bound=1
)
flags.declare_key_flag("seed")
_OUTPUT = flags.DEFINE_string(
  "output", "results/index_construction", "Output folder."
)

# Its keys take gigabytes.
_LONGEST = 2**24


def main() -> None:
  """Checks all flags, then builds."""
  retrieval = CTkvr(keys=_READS.value)
  lengths = _lengths(retrieval)
  folder = outputs.folder(_OUTPUT.value)
  faiss = index_builders.load_faiss()
  cli.announce()
  rows = _measure(faiss, retrieval, lengths)
  faiss_version = {"faiss": faiss.__version__}
  summary = {
    "head_dim": _HEAD_DIM.value,
    "group": _GROUP.value,
    "reads": _READS.value,
    "repeats": _REPEATS.value,
    "seed": run_inputs.SEED.value,
    "device": environment.device(),
    "faiss_threads": faiss.omp_get_max_threads(),
    "cores": os.cpu_count(),
    "versions": environment.versions() | faiss_version,
    "rows": rows,
  }
  outputs.write_json(folder / "summary.json", summary)
  benchmark_tables.show(
    folder,
    table(rows),
    f"An index of one KV head of {_HEAD_DIM.value} channels, {_GROUP.value} "
    f"query heads, {_READS.value} keys read per token, median of "
    f"{_REPEATS.value}. Read the ratios, not the times: CTkvr's paper builds "
    "on a GPU, in 0.21 to 0.43 ms from 4K to 128K tokens. Random keys around "
    f"{KEY_CENTERS} centers and queries around {QUERY_CENTERS}, spread "
    f"{SPREAD} of that of the centers, seed {run_inputs.SEED.value}. qcIVF and "
    f"K-means of kvjax on {summary['device']}; the others by faiss on the CPU, "
    f"{summary['faiss_threads']} threads of {summary['cores']} cores",
    peers=faiss_version,
  )


def measure(
  builders: Sequence[index_builders.Builder],
  workload: index_builders.Workload,
  repeats: int,
  on_built: Callable[[], None],
) -> list[dict[str, Any]]:
  """Builds the indexes in turns, then retrieves from the last ones.

  Args:
    builders: the builders; the first one is the baseline.
    workload: their workload.
    repeats: builds of each.
    on_built: called after every build.

  Returns:
    For each builder its name, the seconds of every build, their median, its
    ratio to the baseline, and the recall.
  """
  built: dict[str, Any] = {}

  def build(builder: index_builders.Builder) -> float:
    built[builder.name], seconds = stopwatch.timed(builder.build)
    on_built()
    return seconds

  times_of = stopwatch.in_turns(
    [functools.partial(build, builder) for builder in builders], range(repeats)
  )
  return [
    {
      "index": builder.name,
      "seconds": times,
      "median": statistics.median(times),
      "ratio": statistics.median(times) / statistics.median(times_of[0]),
      "recall": float(
        index_builders.recall(workload, builder.candidates(built[builder.name]))
      ),
    }
    for builder, times in zip(builders, times_of, strict=True)
  ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Builds the table of rows of summary.json."""
  lines = [
    (
      f"{row['length']:,}",
      row["index"],
      f"{1000 * row['median']:,.0f}",
      f"{row['ratio']:.2f}",
      f"{100 * row['recall']:.1f}",
    )
    for row in rows
  ]
  head = ("tokens", "index", "build ms", f"× {QCIVF}", "recall %")
  return Table("", head, lines, names=2)


def _measure(
  faiss: types.ModuleType, retrieval: CTkvr, lengths: Sequence[int]
) -> list[dict[str, Any]]:
  """Measures the rows of the table, with a progress bar."""
  rows = []
  total = sum(lengths) * _REPEATS.value
  with progress_bar(total) as advance:
    for length in lengths:
      name = f"{length:,} tokens"
      advance(name, 0)
      workload = index_builders.draw(
        retrieval, run_inputs.SEED.value, length, _GROUP.value, _HEAD_DIM.value
      )
      builders = index_builders.builders(faiss, retrieval, workload)
      step = functools.partial(advance, name, length / len(builders))
      measured = measure(builders, workload, _REPEATS.value, step)
      rows += [{"length": length} | row for row in measured]
  return rows


def _lengths(retrieval: CTkvr) -> list[int]:
  """Parses --lengths."""
  example = "numbers of tokens such as 4096,8192"
  lengths = parse_numbers("lengths", _LENGTHS.value, example, _LONGEST)
  resident = retrieval.sinks + retrieval.local
  shortest = resident + retrieval.keys + 1
  for length in lengths:
    if length < shortest:
      raise InputError(
        f"--lengths must be {shortest} or more, as {resident} tokens are "
        f"resident and --reads={retrieval.keys} of the others are read; "
        f"{length} is not."
      )
  return lengths


if __name__ == "__main__":
  cli.run(main)
