"""Compares methods on needle tasks, or on a text.

  kvjax compare

asks SmolLM2-135M-Instruct, which is fetched once, about needles hidden in
English prose (RULER's single and multi-key tasks at 1,024 tokens), with the
full cache and with what each method keeps of it. Only the context is prefilled
and compressed; the question comes afterwards. Ends with tables and writes
samples.jsonl, processes.json, summary.json, table.md and score_vs_retention.png
to results/demo. An interrupted run resumes where it stopped.

Expect 88 % of the needles with the full cache (--samples=24), and at half of it
60 % with KeyDiff, 54 % with Compactor and TOVA, 31 % with StreamingLLM, 19 %
with SnapKV and none at random. The default, --samples=2, takes three minutes on
two slow cores, and less the next time, as compiled programs are cached.
--model=reference asks the small model that comes with kvjax.

  kvjax compare --text=notes.txt --question="What is the code of the door?"

answers a question about a text with every cache side by side and writes no
files. A text of a page takes half a minute with one method. `--dry_run` says
what a run would cost, and stops. `--timed_rounds` also times each method and
budget alone, and writes speeds.jsonl.
"""

import pathlib
import time
from collections.abc import Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.benchmarks import repetition
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.inputs import (
  dry_run_inputs,
  essay_inputs,
  host_inputs,
  method_inputs,
  needle_inputs,
  run_inputs,
  speed_inputs,
)
from kvjax.experiments.report import run_files, writing
from kvjax.experiments.run import outputs, runner, side_by_side
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.sentences import say
from kvjax.experiments.tasks import suite

for module in (
  run_inputs,
  needle_inputs,
  method_inputs,
  host_inputs,
  speed_inputs,
):
  flags.adopt_module_key_flags(module)
flags.set_default(needle_inputs.SAMPLES, 2)
flags.set_default(needle_inputs.TASKS, ["niah_single_2", "niah_multikey_1"])

_OUTPUT = flags.DEFINE_string(
  "output", "results/demo", "Output folder, or its address."
)
_TEXT = flags.DEFINE_string("text", None, "Text file to ask about.")
_QUESTION = flags.DEFINE_string("question", None, "Question about --text.")

_NEEDLES_ONLY = (
  *("tasks", "samples", "length", "seed", "batch", "output", "multihost"),
  *("dry_run", "timed_rounds"),
  *essay_inputs.NAMES,
)


def main() -> None:
  """Checks all flags, then loads the model and runs it."""
  refusals.refuse_together(
    "text", _NEEDLES_ONLY, "a text is asked one question and nothing is written"
  )
  speed_inputs.check()
  method_inputs.check_flags()
  chosen = method_inputs.chosen()
  text, question = _TEXT.value, _QUESTION.value
  if text is None and question is None:
    _compare(chosen)
  elif text is None or question is None:
    raise InputError("--text=FILE and --question=... need each other.")
  else:
    _answer_question(
      chosen, side_by_side.read_text(pathlib.Path(text)), question
    )


def _compare(chosen: Sequence[Candidate]) -> None:
  began = time.monotonic()
  outputs.check_run(_OUTPUT.value, writes=not dry_run_inputs.DRY_RUN.value)
  folder = outputs.run_folder(_OUTPUT.value)
  _check_tasks(needle_inputs.TASKS.value)
  settings = method_inputs.settings(
    "needles", essay_inputs.texts().needle_origins, method_inputs.protocol()
  )
  console = host_inputs.console()
  with run_inputs.loaded() as (lm, devices):
    samples = needle_inputs.samples(lm)
    repeated = repetition.of(samples)
    for note in repeated.notes:
      say(note)
    batch = run_inputs.batch()
    job = runner.Job(lm, devices, chosen, samples, settings, folder, batch)
    run = speed_inputs.answered(job, began, console)
  if run is None:
    return
  summary = run.summary
  summary["about"] = {**run_files.notes(folder), **repeated.about}
  console.print(writing.write_comparison(folder, summary))
  say(f"{run}; all in {folder}")


def _check_tasks(names: Sequence[str]) -> None:
  """Refuses names that are no tasks, or tasks of another program."""
  for name in names:
    if name in generator.TASKS and name not in suite.TASKS:
      raise InputError(
        f"There is no task {name!r} in kvjax compare; `kvjax evaluate "
        f"--benchmark=ruler --tasks={name}` has it."
      )
  suite.check_tasks(names)


def _answer_question(
  chosen: Sequence[Candidate], text: str, question: str
) -> None:
  protocol = method_inputs.protocol()
  with (
    run_inputs.loaded() as (lm, _),
    progress_bar(len(chosen), transient=True) as on_answers,
  ):
    prompt, replies = side_by_side.answer_question(
      lm, chosen, text, question, protocol, on_answers
    )
  table = side_by_side.to_terminal(prompt, question, replies)
  rich.console.Console().print(table)


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
