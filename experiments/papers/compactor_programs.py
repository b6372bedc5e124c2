"""The programs of Compactor's E3.5 to E3.7: calibrated retention."""

import dataclasses
from collections.abc import Mapping

from kvjax.experiments.benchmarks.longbench.sets import SETS
from kvjax.experiments.benchmarks.ruler.generator import TASKS
from kvjax.experiments.papers.data_model import Program
from kvjax.experiments.papers.shared import ENGLISH_16, FOUR_NEEDLES


def _same(*names: str) -> Mapping[str, str]:
  """Passes flags on under their own names."""
  return {name: name for name in names}


# Flags of all programs that run a model.
_FLAGS = _same(
  "model", "seed", "dtype", "mesh", "kernels", "kernels_table", "batch"
)
_SAMPLED = {**_FLAGS, "samples": "samples"}
_SIZED = {**_SAMPLED, "length": "length"}
_CALIBRATED = {
  **_SIZED,
  **_same("tasks", "tau", "essay", "words", "squad", "hotpotqa"),
}
_METHODS = "--methods=compactor,snapkv.compactor"
_MORE = f"{_METHODS},pyramid/snapkv.compactor,random"
_SETS = ",".join(name for name in ENGLISH_16 if SETS[name].category != "code")
_RULER = (f"--tasks={','.join(TASKS)}", "--length=4096")
_TAU = "--tau={tau}"
_RULE = "--rule=paper"

CURVES = Program(
  "curves", "calibrate", [_METHODS, _TAU, _RULE], _CALIBRATED, paper=_RULER
)

_REPORTS = Program("reports", "generate_documents", unless=("essay", "data"))
_CALIBRATION = Program(
  "calibration",
  "calibrate",
  [_MORE, _TAU, _RULE],
  _CALIBRATED,
  paper=_RULER,
  small=("--samples=6", "--held_out=6"),
)
_AUTOMATIC = [
  _MORE,
  "--retention=1,auto",
  _TAU,
  "--calibrations={folder}/calibration/records",
]
_ON_REPORTS = Program(
  "documents",
  "evaluate",
  [
    *_AUTOMATIC,
    "--benchmark=ruler",
    f"--tasks={','.join(FOUR_NEEDLES)}",
    "--length=1024",
    "--samples=6",
    "--essay={folder}/reports/other",
  ],
  {**_SIZED, **_same("tau", "essay", "words")},
  unless=("data",),
)
_ON_LONGBENCH = Program(
  "longbench",
  "evaluate",
  [
    *_AUTOMATIC,
    "--benchmark=longbench",
    f"--tasks={_SETS}",
    "--chat=official",
    "--strict_official",
  ],
  {**_SAMPLED, **_same("tau", "data")},
  needs=("data",),
)
# The same with twenty sketches, as in the paper. Seeds are the trials' own.
_TRIALS = dataclasses.replace(
  _ON_LONGBENCH,
  name="trials",
  module="trials",
  arguments=["--trials=20", "--", *_ON_LONGBENCH.arguments],
  takes={n: f for n, f in _ON_LONGBENCH.takes.items() if n != "seed"},
  needs=("data", "trials"),
)
ZERO_SHOT = (_REPORTS, _CALIBRATION, _ON_REPORTS, _ON_LONGBENCH, _TRIALS)


def _of_tuned(program: Program, *more: str) -> Program:
  """Returns the program with the fine-tuned model."""
  takes = {
    name: flag for name, flag in program.takes.items() if name != "model"
  }
  arguments = [*program.arguments, "--model={folder}/tuned", *more]
  return dataclasses.replace(program, arguments=arguments, takes=takes)


_LEARNT = "{folder}/reports/learnt"
FINETUNED = (
  _REPORTS,
  Program(
    "tuned",
    "finetune",
    [f"--documents={_LEARNT}"],
    {**_FLAGS, "essay": "documents"},
    unless=("data",),
  ),
  Program(
    "tuned",
    "finetune",
    [f"--tasks={_SETS}"],
    {**_SAMPLED, "data": "data"},
    needs=("data",),
  ),
  # A likelihood predicts the retention only for text that a model knows.
  dataclasses.replace(
    _of_tuned(_CALIBRATION, f"--essay={_LEARNT}"), unless=("data",)
  ),
  dataclasses.replace(_of_tuned(_CALIBRATION), needs=("data",)),
  _of_tuned(_ON_REPORTS),
  _of_tuned(_ON_LONGBENCH),
  _of_tuned(_TRIALS),
)
