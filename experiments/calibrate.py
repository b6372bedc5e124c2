"""Calibrates how far to compress, for --retention=auto.

  kvjax calibrate

measures with SmolLM2-135M-Instruct how likely correct answers remain when each
method compresses RULER's contexts to 13 retentions from 5 to 98 %, all from one
prefill. For every method it fits a curve of the remaining quality against the
retention and what the prefill tells about the context. As many other samples,
measured at the same retentions, tell what quality the curve's retentions leave
on average. A third set of samples evaluates the records at --tau, next to the
least retention that each context needs. With all methods it takes hours on two
cores; --methods=keydiff,compactor names a few.

--rule=prefill chooses among NLL of the context and of its tail, the shape of
the method's scores, and length by how well they predict other contexts.
--rule=paper is Compactor's rule of two parameters. --rule=recite makes caches
of all retentions of each context and lets them recite it: a pass for each, but
it tells contexts apart better.

The output is triples.jsonl, others.jsonl, held_out.jsonl, processes.json,
summary.json, calibration.md, ratio_curves.png, retention_bars.png and a record
for each method in the folder records; --rule=paper writes reached.jsonl instead
of others.jsonl. An interrupted run resumes where it stopped. --dry_run says
what is left to measure and, from a first batch, how long that takes; it stops
there. The same command with another --rule or --tau, or with fewer samples,
methods or retentions, fits anew to the measurements that are there. Only
--rule=recite measures again what has no recitals, or recitals with weights of
other --samples, --tasks or --length. With --multihost, hosts that run the same
command share the contexts.

Likelihoods are not scores: the last line, also in calibration.md, is a command
that tests whether scores of tasks stay equal over seeds.

compare and evaluate read the records by --calibrations=DIR, or from the folder
`calibrations` in the model's directory if copied there.

Without --essay, needles are hidden in prose that comes with kvjax, in chapters
that its reference model has learned from: a likelihood predicts how much a
context can be compressed only if the model knows this kind of text. Tasks whose
texts are missing are left out.

Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.
"""

import dataclasses
import math
import pathlib
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from absl import flags

import kvjax
from kvjax import models
from kvjax.calibration.curve import check_tau
from kvjax.calibration.fields import Preset
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.benchmarks import essays
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.calibration import dry_run, fits, measuring, writing
from kvjax.experiments.calibration.answers import TokenWeights
from kvjax.experiments.calibration.fits import PAPER, PREFILL, RECITE
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.inputs import (
  dry_run_inputs,
  essay_inputs,
  host_inputs,
  plugin_inputs,
  run_inputs,
  text_inputs,
)
from kvjax.experiments.inputs.passed_on import passed_on
from kvjax.experiments.report import wording
from kvjax.experiments.run import environment, multihost, outputs, results
from kvjax.experiments.run.candidates import (
  DEFAULT,
  FULL,
  Candidate,
  candidates,
  parse_budgets,
)
from kvjax.experiments.run.comparison import Work, check_hosts, pending, wanted
from kvjax.experiments.run.processes import Processes
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.sentences import say

# Of flags that evaluate has, too.
_SHARED_FLAGS = (essay_inputs, plugin_inputs, run_inputs, text_inputs)
for module in (*_SHARED_FLAGS, dry_run_inputs, host_inputs):
  flags.adopt_module_key_flags(module)
flags.set_default(essay_inputs.ESSAY, essays.TRAINING)

_TASKS = flags.DEFINE_list(
  "tasks",
  [
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"),
    *("niah_multikey_2", "niah_multikey_3", "niah_multivalue"),
  ],
  "Tasks of RULER; the default is those that small models can do.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  12,
  "Samples per task and length to fit the rule to.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_OTHERS = flags.DEFINE_integer(
  "others",
  12,
  "Other samples per task and length, to test what --rule=prefill and "
  "--rule=recite keep; 0: test the former by cross-validation, and the latter "
  "on the --samples that its weights are of.",
  lower_bound=0,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_HELD_OUT = flags.DEFINE_integer(
  "held_out",
  12,
  "Further samples per task and length, to evaluate the records.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_LENGTH = flags.DEFINE_list(
  "length", ["1024"], "Tokens of prompt and answer, without the chat template."
)
_METHODS = flags.DEFINE_list(
  "methods",
  [name for name in DEFAULT if name != FULL],
  "Eviction methods or presets, with options as in keydiff:anchor=median_unit.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  "0.05 0.1 0.15 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 0.95 0.98".split(),
  "Shares of the context to keep.",
)
_RULE = flags.DEFINE_enum(
  "rule",
  PREFILL,
  [PREFILL, RECITE, PAPER],
  "paper: Compactor's rule; prefill: a rule on more of what the prefill tells; "
  "recite: what the caches of all --retention recite of the context, which "
  "takes a pass over it for each, whenever a context is compressed.",
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head selects tokens, or each query head with its own copy "
  "of keys and values.",
)
_TAU = flags.DEFINE_float(
  "tau", 0.95, "Share of quality to preserve on the held-out samples."
)
_OUTPUT = flags.DEFINE_string(
  "output", "results/calibration", "Output folder, or its address."
)

# The files of measurements, and what is added to the seed of their samples.
_TRIPLES, _MORE, _HELD = "triples.jsonl", "others.jsonl", "held_out.jsonl"
_REACHED = "reached.jsonl"
_SEEDS = {_TRIPLES: 0, _MORE: 1, _HELD: 2, _REACHED: 2}


def main() -> None:
  """Checks all flags, then measures, fits, tests and evaluates."""
  began = time.monotonic()
  chosen, lengths = _chosen(), run_inputs.parse_lengths(_LENGTH.value)
  check_tau(_TAU.value)
  texts = text_inputs.texts()
  choice = generator.choose(_TASKS.value, texts)
  outputs.check_run(_OUTPUT.value, writes=not dry_run_inputs.DRY_RUN.value)
  folder = outputs.run_folder(_OUTPUT.value)
  console = host_inputs.console()
  for note in choice.notes:
    say(note)
  settings = dataclasses.replace(
    run_inputs.settings(),
    benchmark="ruler",
    data=choice.data,
    heads=f"{_HEADS.value} head",
  )
  with run_inputs.loaded() as (lm, devices):
    run_inputs.check_lengths(lm, lengths)
    processes = Processes(folder, environment.device(devices), began)
    run = _Run(lm, choice.tasks, lengths, texts, settings, folder, processes)
    drawn = run.draw()
    if _RULE.value == RECITE:
      run = run._replace(weights=TokenWeights.of(lm, drawn[_TRIPLES]))
    for samples in drawn.values():
      measuring.check(lm, chosen, samples, run.weights)
    steps = {file: run.step(file, chosen, drawn[file]) for file in drawn}
    works = [step.work for step in steps.values()]
    dry_run.announce(lm, works, run.weights)
    if dry_run_inputs.DRY_RUN.value:
      with progress_bar(None, transient=True):
        foreseen = dry_run.foresee(lm, works, run.weights)
      say(str(foreseen))
      return
    if note := _too_few(len(choice.tasks) * len(lengths)):
      say(note)
    fitted = run.fit(chosen, steps, drawn[_HELD])
  if not multihost.is_first():
    return
  total = processes.summary()
  summary = dataclasses.asdict(settings) | {
    "length": lengths,
    "rule": _RULE.value,
    "samples": _SAMPLES.value,
    "others": _others(),
    "held_out": _HELD_OUT.value,
    "tau": _TAU.value,
    **total,
    "seconds": total["seconds"]["total"],
    "trials": _trials(writing.records_of(folder)),
    "rows": [method.row(_TAU.value) for method in fitted],
  }
  writing.write(folder, summary, fitted, console)


class _Step(NamedTuple):
  """The measurements of a file: all that are wanted, and those to take."""

  store: Measurements
  keys: Sequence[results.Key]
  work: Work


class _Run(NamedTuple):
  """The model, data and settings of a run; weights for --rule=recite."""

  lm: models.Pretrained
  tasks: Sequence[str]
  lengths: Sequence[int]
  texts: generator.Texts
  settings: results.Settings
  folder: pathlib.Path
  processes: Processes
  weights: TokenWeights | None = None

  def draw(self) -> dict[str, results.Samples]:
    """Draws the samples of each task for each file, with seeds of their own."""
    counts = {
      _TRIPLES: _SAMPLES.value,
      _MORE: _others(),
      _HELD: _HELD_OUT.value,
    }
    return {
      file: generator.samples(
        self.tasks,
        self.lengths,
        count,
        self.settings.seed + _SEEDS[file],
        self.lm.text.count,
        self.texts,
      )
      for file, count in counts.items()
      if count
    }

  def fit(
    self,
    chosen: Sequence[Candidate],
    steps: Mapping[str, _Step],
    held_out: results.Samples,
  ) -> list[fits.Fitted]:
    """Measures all steps and fits a curve for each method."""
    measured = {file: self._measure(step) for file, step in steps.items()}
    lengths = ", ".join(map(str, self.lengths))
    texts = "; ".join(f"{k}: {v}" for k, v in self.settings.data.items())
    data = f"RULER's {', '.join(self.tasks)} of {lengths} tokens; {texts}"
    fitted = fits.fit(
      chosen,
      fits.Sets(measured[_TRIPLES], measured.get(_MORE, []), measured[_HELD]),
      cast(Preset, _RULE.value),
      fits.Origin(self.settings.weights, data, self.settings.seed),
      () if self.weights is None else self.weights.pairs,
    )
    if _RULE.value == PAPER:
      # Its retentions are not among the measured ones.
      automatic = [method.automatic(_TAU.value) for method in fitted]
      reached = self._measure(self.step(_REACHED, automatic, held_out))
      fitted = fits.add_reached(fitted, reached)
    return fitted

  def step(
    self, file: str, chosen: Sequence[Candidate], samples: results.Samples
  ) -> _Step:
    """Opens a file, the same on all hosts, and finds what it lacks."""
    settings = dataclasses.replace(
      self.settings, seed=self.settings.seed + _SEEDS[file]
    )
    keys = wanted(chosen, samples)
    check_hosts(settings, keys)
    store = measuring.stored(self.folder / file, settings, self.weights)
    batch = run_inputs.batch()
    work = pending(self.lm, chosen, samples, store, batch, apart=True)
    return _Step(store, keys, work)

  def _measure(self, step: _Step) -> list[Measurement]:
    """Takes the measurements of a step, with a progress bar."""
    new = len(step.work.missing)
    # One that is transient leaves nothing behind where there is nothing to do.
    with progress_bar(new, transient=not new) as advance:

      def on_measured(task: str, count: int) -> None:
        advance(task, count)
        self.processes.note()

      measuring.measure(
        self.lm, step.work, step.store, on_measured, self.weights
      )
    return [step.store.records[key] for key in step.keys]


def _others() -> int:
  """The number of other samples of a task; the paper's rule needs none."""
  return 0 if _RULE.value == PAPER else _OTHERS.value


def _too_few(parts: int) -> str:
  """Says if the promises of n contexts, up to n / (n + 1), are below --tau."""
  tau, others = _TAU.value, _others()
  flag, samples = ("others", others) if others else ("samples", _SAMPLES.value)
  needed = 0 if tau == 1 else math.ceil(tau / (1 - tau) - 1e-9)
  if _RULE.value == PAPER or samples * parts >= needed:
    return ""
  return (
    f"{wording.count(samples * parts, 'context')} of --{flag} cannot promise "
    f"--tau={tau:g}, so every context is kept whole; {needed} can, as "
    f"--{flag}={math.ceil(needed / parts)} draws."
  )


def _trials(records: str) -> str:
  """The command that compares scores at the calibrated retentions.

  Its samples are none of those that the records were fitted to or tested with.
  """
  values = {
    "methods": ",".join(dict.fromkeys(_METHODS.value)),
    "tasks": ",".join(_TASKS.value),
    "length": ",".join(_LENGTH.value),
    "heads": _HEADS.value,
    "retention": "auto",
    "tau": f"{_TAU.value:g}",
    "calibrations": records,
  }
  first_seed = run_inputs.SEED.value + max(_SEEDS.values()) + 1
  return shlex.join(
    [
      *("kvjax", "trials", f"--first_seed={first_seed}", "--"),
      *(f"--{name}={value}" for name, value in values.items()),
      # Every trial has a seed of its own.
      *passed_on(_SHARED_FLAGS, always=("model", "essay"), never=("seed",)),
    ]
  )


def _chosen() -> list[Candidate]:
  """Lists every method at every retention."""
  if FULL in [name.strip() for name in _METHODS.value]:
    raise InputError(f"{FULL} loses nothing; name methods that evict.")
  budgets = parse_budgets(_RETENTION.value, None)
  if kvjax.Retention(1.0) in budgets:
    raise InputError(
      "--retention takes shares below 1, for at 1 there is nothing to learn."
    )
  per_query_head = _HEADS.value == "query"
  _, *chosen = candidates(
    _METHODS.value, budgets, per_query_head=per_query_head
  )
  for candidate in chosen:
    if candidate.plan.sparse is not None:
      raise InputError(
        f"--methods has {candidate.method}, which loses nothing; name methods "
        "that evict."
      )
  return chosen


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
