"""Compares KV-cache compression methods on needle tasks, or on a text.

  python -m experiments.compare

asks the bundled model about needles hidden in English prose (RULER's single,
multi-key, multi-value and multi-query tasks at 1,024 tokens), with the full
cache and with what each method keeps of it. Only the context is prefilled and
compressed; the question comes afterwards. Ends with a table and writes
results/demo/{samples.jsonl,summary.json,table.md,score_vs_retention.png}.
A run that was stopped goes on where it stopped.

Expect 97 % of the needles found with the full cache, and at a quarter of it
98 % with KeyDiff, 47 % with Compactor, 23 % with StreamingLLM, 7 % with SnapKV
and none at random. It takes two and a quarter minutes on two cores, most of
them to compile.

  python -m experiments.compare --text=notes.txt --question="Who called?"

answers about a text side by side and writes nothing.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import cast

import rich.console
import rich.progress
from absl import flags

import kvjax
import models
from experiments import (
  cli,
  comparison,
  inputs,
  reports,
  results,
  side_by_side,
  suite,
  tables,
)
from experiments.answering import QUERY_AGNOSTIC, QUERY_AWARE, Protocol
from experiments.candidates import FULL, Candidate, candidates
from kvjax.errors import InputError
from kvjax.methods import METHODS

flags.adopt_module_key_flags(inputs)

# LagKV's own default, a lag of 1,024, keeps all of so short a context.
_DEFAULT = [{"lagkv": "lagkv:lag=128"}.get(name, name) for name in METHODS]

_METHODS = flags.DEFINE_list(
  "methods",
  _DEFAULT,
  "Methods or presets, with options as in keydiff:anchor=median_unit.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["1", "0.5", "0.25", "0.1"],
  "Shares of the context to keep, or to look up per token.",
)
_BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to look up, in place of --retention."
)
_BLOCK = flags.DEFINE_integer(
  "block",
  None,
  "Tokens per block of the prompt, evicting after each; by default the whole.",
  lower_bound=1,
)
_EVERY = flags.DEFINE_integer(
  "every",
  None,
  "Evict while decoding too, after every so many tokens.",
  lower_bound=1,
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head decides, or each query head, with keys and values of "
  "its own.",
)
_PROTOCOL = flags.DEFINE_enum(
  "protocol",
  QUERY_AGNOSTIC,
  [QUERY_AGNOSTIC, QUERY_AWARE],
  "Whether the question comes after the context has been compressed, or is "
  "prefilled with it.",
)
_OUTPUT = flags.DEFINE_string("output", "results/demo", "Folder to write to.")
_TEXT = flags.DEFINE_string("text", None, "File to answer a question about.")
_QUESTION = flags.DEFINE_string("question", None, "Asked about --text.")

_NEEDLES_ONLY = ("tasks", "samples", "length", "seed", "batch", "output")


def main() -> None:
  """Checks what can be checked first, then loads the model and asks it."""
  cli.refuse_together("retention", ["budget"], "both say how much to keep")
  cli.refuse_together(
    "text", _NEEDLES_ONLY, "a text is asked one question and nothing is written"
  )
  schedule = kvjax.Schedule(block=_BLOCK.value, every=_EVERY.value)
  budgets = inputs.budgets(_RETENTION.value, _BUDGET.value)
  own = _HEADS.value == "query"
  chosen = candidates(_METHODS.value, budgets, schedule, own)
  text, question = _TEXT.value, _QUESTION.value
  if text is None and question is None:
    _compare(chosen, budgets, schedule)
  elif text is None or question is None:
    raise InputError("--text=FILE and --question=... need each other.")
  else:
    _ask(chosen, side_by_side.read_text(pathlib.Path(text)), question)


def _compare(
  chosen: Sequence[Candidate],
  budgets: Sequence[kvjax.Budget],
  schedule: kvjax.Schedule,
) -> None:
  began = time.monotonic()
  folder = pathlib.Path(_OUTPUT.value)
  suite.check_tasks(inputs.TASKS.value)
  results.check_writable(folder)
  with inputs.loaded() as (lm, devices):
    samples = inputs.samples(lm)
    settings = _settings(schedule)
    store = results.Results(folder, settings)
    wanted = comparison.wanted(chosen, samples)
    new = len(set(wanted) - store.answers.keys())
    seconds = _answer(lm, chosen, samples, store, new)
  seconds["total"] = time.monotonic() - began
  rows = results.summarize([store.answers[key] for key in wanted])
  if kvjax.Retention(1.0) in budgets:
    compressed = [
      c.method for c in chosen if c.method != FULL and c.full_at_one
    ]
    rows += results.at_retention_one(rows, list(dict.fromkeys(compressed)))
  summary = dataclasses.asdict(settings) | {
    "decoding": "greedy",
    "device": reports.device(devices),
    "versions": reports.versions(),
    "seconds": {name: round(value, 1) for name, value in seconds.items()},
    "rows": rows,
  }
  reports.write(folder, summary)
  console = rich.console.Console(highlight=False)
  console.print(tables.to_terminal(summary))
  console.print(
    f"{new} answers in {seconds['total']:.0f} s (prefill "
    f"{seconds['prefill']:.0f} s, answers {seconds['answer']:.0f} s), "
    f"{len(wanted) - new} from before; all in {folder}"
  )


def _answer(
  lm: models.Pretrained,
  chosen: Sequence[Candidate],
  samples: comparison.Samples,
  store: results.Results,
  new: int,
) -> dict[str, float]:
  """Answers under a progress bar; the seconds that the parts took."""
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn("left"),
    rich.progress.TimeRemainingColumn(),
    console=rich.console.Console(stderr=True),
  ) as progress:
    bar = progress.add_task("compiling", total=new)

    def advance(task: str, count: int) -> None:
      progress.update(bar, description=task, advance=count)

    seconds = comparison.compare(
      lm, chosen, samples, store, inputs.BATCH.value, advance, _protocol()
    )
  return dataclasses.asdict(seconds)


def _ask(chosen: Sequence[Candidate], text: str, question: str) -> None:
  with (
    inputs.loaded() as (lm, _),
    rich.console.Console(stderr=True).status("asking"),
  ):
    prompt, found = side_by_side.ask(lm, chosen, text, question, _protocol())
  table = side_by_side.to_terminal(prompt, question, found)
  rich.console.Console().print(table)


def _settings(schedule: kvjax.Schedule) -> results.Settings:
  return results.Settings(
    model=inputs.model_name(),
    weights=results.digest(inputs.model_directory()),
    dtype=inputs.dtype(),
    length=inputs.LENGTH.value,
    seed=inputs.SEED.value,
    protocol=_protocol(),
    schedule=str(schedule),
    heads=f"{_HEADS.value} head",
  )


def _protocol() -> Protocol:
  return cast(Protocol, _PROTOCOL.value)


if __name__ == "__main__":
  cli.run(main)
