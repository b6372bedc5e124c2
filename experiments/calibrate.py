"""Calibrates how much contexts can be compressed, for --retention=auto.

  python -m kvjax.experiments.calibrate

measures with the bundled model how likely correct answers remain when each
method compresses RULER's contexts to 5, 10, 20, 30, 50, 75 and 90 %, all from
one prefill. For every method it fits a curve of the remaining quality against
the retention and the likelihood of the context. As many other samples are then
compressed to the retentions that the curves give. Where the quality falls short
of the curve, the record asks the curve for a higher quality, or for everything.
A third set of samples is compressed to the retentions that the records give at
--tau, to evaluate them.

The output is triples.jsonl, tried.jsonl, held_out.jsonl, summary.json,
calibration.md, ratio_curves.png, retention_bars.png and a record for each
method in the folder records. An interrupted run resumes where it stopped.
compare and evaluate read the records by --calibrations=DIR, or from the folder
`calibrations` in the model's directory if copied there.

Without --essay, needles are hidden in prose that the bundled model was trained
on. Tasks whose texts are missing are left out.

Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import rich.console
import rich.text
from absl import flags

import kvjax
from kvjax import models
from kvjax.calibration.record import check_tau
from kvjax.errors import InputError
from kvjax.experiments import (
  cli,
  inputs,
  reports,
  results,
  runs,
  text_inputs,
)
from kvjax.experiments.benchmarks import ruler
from kvjax.experiments.calibration import (
  fits,
  measuring,
  pictures,
  records,
  tables,
)
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.candidates import (
  DEFAULT,
  FULL,
  Candidate,
  candidates,
  parse_budgets,
)
from kvjax.experiments.comparison import wanted
from kvjax.experiments.line_files import check_writable
from kvjax.experiments.reporting import wording
from kvjax.experiments.reporting.pictures import png
from kvjax.experiments.tasks import prose

for module in (inputs, text_inputs):
  flags.adopt_module_key_flags(module)

_TASKS = flags.DEFINE_list(
  "tasks",
  [
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
  ],
  "Tasks of RULER; the default is those that the bundled model can do.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  12,
  "Samples per task to fit the curves to, and as many to test them.",
  lower_bound=1,
  upper_bound=inputs.MOST_SAMPLES,
)
_HELD_OUT = flags.DEFINE_integer(
  "held_out",
  12,
  "Further samples per task, to evaluate the records.",
  lower_bound=1,
  upper_bound=inputs.MOST_SAMPLES,
)
_LENGTH = flags.DEFINE_integer(
  "length",
  1024,
  "Tokens of prompt and answer, without the chat template.",
  lower_bound=1,
)
_METHODS = flags.DEFINE_list(
  "methods",
  [name for name in DEFAULT if name != FULL],
  "Eviction methods or presets, with options as in keydiff:anchor=median_unit.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["0.05", "0.1", "0.2", "0.3", "0.5", "0.75", "0.9"],
  "Shares of the context to keep.",
)
_ASKED = flags.DEFINE_list(
  "asked",
  ["0.5", "0.7", "0.8", "0.9", "0.95", "0.97", "0.98", "0.99", "0.995"],
  "Qualities to request from the curves, to test them.",
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head selects tokens, or each query head with its own copy "
  "of keys and values.",
)
_TAU = flags.DEFINE_float(
  "tau",
  0.95,
  "Share of quality to preserve on the held-out samples.",
)
_OUTPUT = flags.DEFINE_string("output", "results/calibration", "Output folder.")

_RECORDS = "records"
# The records that survive if another file cannot be written.
_KEPT = "measurements"


def main() -> None:
  """Checks all flags, then measures, fits, tests and evaluates."""
  began = time.monotonic()
  folder = pathlib.Path(_OUTPUT.value)
  chosen, qualities = _chosen(), _qualities()
  check_tau(_TAU.value)
  texts = _texts()
  choice = ruler.choose(_TASKS.value, texts)
  check_writable(folder)
  console = rich.console.Console(highlight=False)
  for note in choice.notes:
    console.print(note)
  settings = _settings(choice.data)
  with inputs.loaded() as (lm, devices):
    inputs.check_lengths(lm, [_LENGTH.value])
    run = _Run(lm, choice.tasks, texts, settings, folder)
    samples = run.samples(_SAMPLES.value, 0)
    measuring.check(lm, chosen, samples)
    measured = run.measure("triples.jsonl", chosen, samples, 0)
    fitted = fits.fit(chosen, measured, settings.weights)
    automatic = [method.automatic(q) for method in fitted for q in qualities]
    new_samples = run.samples(_SAMPLES.value, 1)
    tried = run.measure("tried.jsonl", automatic, new_samples, 1)
    fitted = fits.add_promises(fitted, qualities, tried)
    automatic = [method.automatic(_TAU.value) for method in fitted]
    new_samples = run.samples(_HELD_OUT.value, 2)
    held_out = run.measure("held_out.jsonl", automatic, new_samples, 2)
  fitted = [
    dataclasses.replace(
      method, held_out=[m for m in held_out if m.method == method.name]
    )
    for method in fitted
  ]
  summary = dataclasses.asdict(settings) | {
    "length": _LENGTH.value,
    "samples": _SAMPLES.value,
    "held_out": _HELD_OUT.value,
    "tau": _TAU.value,
    "device": reports.device(devices),
    "versions": reports.versions(),
    "seconds": round(time.monotonic() - began, 1),
    "rows": [method.row(_TAU.value) for method in fitted],
  }
  title = tables.title(summary)
  plots = {
    "ratio_curves.png": pictures.ratio_curves(fitted, title),
    "retention_bars.png": pictures.retention_bars(fitted, _TAU.value, title),
  }
  records_folder = folder / _RECORDS
  records_folder.mkdir(exist_ok=True)
  for method in fitted:
    name = records.file_name(method.name, method.plan.per_query_head)
    method.calibration.save(records_folder / name)
  for name, figure in plots.items():
    reports.write_bytes(folder / name, png(figure), _KEPT)
  text = tables.markdown(summary, list(plots))
  reports.write_json(folder / "summary.json", summary, _KEPT)
  reports.write_text(folder / "calibration.md", text, _KEPT)
  console.print(rich.text.Text(title), *tables.tables(summary), sep="\n")
  console.print(rich.text.Text(tables.circumstances(summary), style="dim"))
  console.print(
    f"{wording.count(len(fitted), 'record')} in {records_folder}; all in "
    f"{folder}",
    soft_wrap=True,
  )


class _Run(NamedTuple):
  """The model, data and settings of a run."""

  lm: models.Pretrained
  tasks: Sequence[str]
  texts: ruler.Texts
  settings: results.Settings
  folder: pathlib.Path

  def samples(self, count: int, step: int) -> results.Samples:
    """Draws samples of each task, with the run's seed plus `step`."""
    return ruler.samples(
      self.tasks,
      [_LENGTH.value],
      count,
      self.settings.seed + step,
      self.lm.text.count,
      self.texts,
    )

  def measure(
    self,
    file: str,
    chosen: Sequence[Candidate],
    samples: results.Samples,
    step: int,
  ) -> list[Measurement]:
    """Measures the samples of a step, with a progress bar."""
    settings = dataclasses.replace(
      self.settings, seed=self.settings.seed + step
    )
    store = Measurements(
      self.folder / file, settings, Measurement, "measurement"
    )
    new = len(set(wanted(chosen, samples)) - store.records.keys())
    with runs.progress_bar(new) as advance:
      return measuring.measure(
        self.lm, chosen, samples, store, inputs.BATCH.value, advance
      )


def _chosen() -> list[Candidate]:
  """Lists every method at every retention.

  Raises:
    InputError: a method evicts nothing, or a retention is 1.
  """
  if FULL in [name.strip() for name in _METHODS.value]:
    raise InputError(f"{FULL} loses nothing; name methods that evict.")
  budgets = parse_budgets(_RETENTION.value, None)
  if kvjax.Retention(1.0) in budgets:
    raise InputError(
      "--retention takes shares below 1, for at 1 there is nothing to learn."
    )
  per_query_head = _HEADS.value == "query"
  chosen = list(
    candidates(_METHODS.value, budgets, per_query_head=per_query_head)[1:]
  )
  for candidate in chosen:
    if candidate.plan.sparse is not None:
      raise InputError(
        f"--methods has {candidate.method}, which loses nothing; name methods "
        "that evict."
      )
  return chosen


def _qualities() -> list[float]:
  """Parses --asked, ascending.

  Raises:
    InputError: a value is not between 0 and 1.
  """
  try:
    qualities = sorted({float(text) for text in _ASKED.value})
  except ValueError:
    qualities = []
  if not qualities or not all(0 < quality < 1 for quality in qualities):
    raise InputError(
      "--asked takes numbers between 0 and 1, such as 0.9,0.95; "
      f"{','.join(_ASKED.value)!r} is not that."
    )
  return qualities


def _texts() -> ruler.Texts:
  """Reads the user's texts, or the bundled model's training prose.

  A likelihood predicts how much a context can be compressed only if the model
  knows this kind of text.
  """
  texts = text_inputs.texts()
  if flags.FLAGS["essay"].present:
    return texts
  origins = {**texts.origins, "essay": f"{prose.SOURCE}, chapters of training"}
  return dataclasses.replace(texts, essay="train", origins=origins)


def _settings(data: dict[str, str]) -> results.Settings:
  return results.Settings(
    model=inputs.model_name(),
    weights=results.digest(inputs.model_directory()),
    dtype=inputs.dtype(),
    seed=inputs.SEED.value,
    benchmark="ruler",
    data=data,
    heads=f"{_HEADS.value} head",
  )


if __name__ == "__main__":
  cli.run(main)
