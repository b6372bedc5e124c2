"""Calibrates what contexts can bear to lose, for --retention=auto.

  python -m kvjax.experiments.calibrate

measures with the bundled model how likely right answers stay when each method
compresses RULER's contexts to 5, 10, 20, 30, 50, 75 and 90 %, all from one
prefill, and fits to every method a curve that tells the quality left from the
retention and from the likelihood of the context itself. As many other samples
are compressed to what the curves ask for: where less is left than a curve
promises, the record asks it for more, or for everything. Yet others are
compressed to what the records allow at --tau, which shows what they are worth.

Writes triples.jsonl, tried.jsonl, held_out.jsonl, summary.json, calibration.md,
ratio_curves.png, retention_bars.png and, in the folder records, a record for
each method. A run that was stopped goes on where it stopped. compare and
evaluate read the records by --calibrations=DIR, or from the folder
`calibrations` in the model's directory when they have been copied there.

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
from kvjax.experiments import cli, inputs, reports, results, runs
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

flags.adopt_module_key_flags(inputs)

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
  "Tasks of RULER; by default those that the bundled model can do.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  12,
  "Samples per task to fit the curves to, and of others to try them with.",
  lower_bound=1,
)
_HELD_OUT = flags.DEFINE_integer(
  "held_out",
  12,
  "Yet other samples per task, to apply the records to.",
  lower_bound=1,
)
_LENGTH = flags.DEFINE_integer(
  "length",
  1024,
  "Tokens of prompt and answer, chat template aside.",
  lower_bound=1,
)
_ESSAY = flags.DEFINE_string(
  "essay",
  None,
  "Text, or folder of texts, to hide needles in; by default prose that the "
  "bundled model has been trained on.",
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
  "Qualities that the curves are asked for, to see what they are worth.",
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head decides, or each query head, with keys and values of "
  "its own.",
)
_TAU = flags.DEFINE_float(
  "tau",
  0.95,
  "Share of quality that other samples are to keep.",
)
_OUTPUT = flags.DEFINE_string(
  "output", "results/calibration", "Folder to write to."
)

_RECORDS = "records"
# By its folder, when something beside them cannot be written.
_KEPT = "measurements"


def main() -> None:
  """Checks what can be checked first, then measures, fits, tries, applies."""
  began = time.monotonic()
  folder = pathlib.Path(_OUTPUT.value)
  chosen, asked = _chosen(), _asked()
  check_tau(_TAU.value)
  texts = _texts()
  choice = ruler.choose(_TASKS.value, texts)
  check_writable(folder)
  settings = _settings(choice.data)
  with inputs.loaded() as (lm, devices):
    inputs.check_lengths(lm, [_LENGTH.value])
    run = _Run(lm, choice.tasks, texts, settings, folder)
    samples = run.samples(_SAMPLES.value, 0)
    measuring.check(lm, chosen, samples)
    found = run.measured("triples.jsonl", chosen, samples, 0)
    fitted = fits.fit(chosen, found, settings.weights)
    automatic = [method.automatic(q) for method in fitted for q in asked]
    others = run.samples(_SAMPLES.value, 1)
    tried = run.measured("tried.jsonl", automatic, others, 1)
    fitted = fits.promised(fitted, asked, tried)
    automatic = [method.automatic(_TAU.value) for method in fitted]
    others = run.samples(_HELD_OUT.value, 2)
    held_out = run.measured("held_out.jsonl", automatic, others, 2)
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
  own = folder / _RECORDS
  own.mkdir(exist_ok=True)
  for method in fitted:
    name = records.file_name(method.name, method.plan.per_query_head)
    method.calibration.save(own / name)
  for name, figure in plots.items():
    (folder / name).write_bytes(png(figure))
  text = tables.markdown(summary, list(plots))
  reports.write_json(folder / "summary.json", summary, _KEPT)
  reports.write_text(folder / "calibration.md", text, _KEPT)
  console = rich.console.Console(highlight=False)
  console.print(rich.text.Text(title), *tables.tables(summary), sep="\n")
  console.print(rich.text.Text(tables.circumstances(summary), style="dim"))
  console.print(
    f"{wording.count(len(fitted), 'record')} in {own}; all in {folder}",
    soft_wrap=True,
  )


class _Run(NamedTuple):
  """What the parts of a run share."""

  lm: models.Pretrained
  tasks: Sequence[str]
  texts: ruler.Texts
  settings: results.Settings
  folder: pathlib.Path

  def samples(self, count: int, step: int) -> results.Samples:
    """So many of each task, of a seed that is so many steps from the run's."""
    return ruler.samples(
      self.tasks,
      [_LENGTH.value],
      count,
      self.settings.seed + step,
      self.lm.text.count,
      self.texts,
    )

  def measured(
    self,
    file: str,
    chosen: Sequence[Candidate],
    samples: results.Samples,
    step: int,
  ) -> list[Measurement]:
    """Measures samples of that step under a progress bar."""
    settings = dataclasses.replace(
      self.settings, seed=self.settings.seed + step
    )
    store = Measurements(
      self.folder / file, settings, Measurement, "measurement"
    )
    new = len(set(wanted(chosen, samples)) - store.found.keys())
    with runs.progress_bar(new) as advance:
      return measuring.measure(
        self.lm, chosen, samples, store, inputs.BATCH.value, advance
      )


def _chosen() -> list[Candidate]:
  """Every method at every retention.

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
  own = _HEADS.value == "query"
  chosen = list(candidates(_METHODS.value, budgets, per_query_head=own)[1:])
  for candidate in chosen:
    if candidate.plan.sparse is not None:
      raise InputError(
        f"--methods has {candidate.method}, which loses nothing; name methods "
        "that evict."
      )
  return chosen


def _asked() -> list[float]:
  """Qualities, ascending.

  Raises:
    InputError: they are no numbers between 0 and 1.
  """
  try:
    asked = sorted({float(text) for text in _ASKED.value})
  except ValueError:
    asked = []
  if not asked or not all(0 < quality < 1 for quality in asked):
    raise InputError(
      "--asked takes numbers between 0 and 1, such as 0.9,0.95; "
      f"{','.join(_ASKED.value)!r} is not that."
    )
  return asked


def _texts() -> ruler.Texts:
  """Needles in the user's text, or in what the bundled model was trained on.

  A likelihood tells how much a context can lose where a model knows its kind.
  """
  if _ESSAY.value is not None:
    return ruler.Texts.read(pathlib.Path(_ESSAY.value))
  texts = ruler.Texts.read()
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
