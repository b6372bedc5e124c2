"""The programs of Compactor's E3.5 to E3.7: calibrated retention."""

import dataclasses

from kvjax.experiments.benchmarks.longbench_sets import SETS
from kvjax.experiments.paper_experiments.records import Program
from kvjax.experiments.paper_experiments.shared import (
  ENGLISH_16,
  FOUR_NEEDLES,
)

# Flags of all programs that run a model.
_FLAGS = {
  name: name for name in ("model", "seed", "dtype", "mesh", "kernels", "batch")
}
_SAMPLED = {**_FLAGS, "samples": "samples"}
_SIZED = {**_SAMPLED, "length": "length"}
_METHODS = "--methods=compactor,snapkv.compactor"
_MORE = f"{_METHODS},pyramid/snapkv.compactor,random"
_SETS = [name for name in ENGLISH_16 if SETS[name].category != "code"]

CURVES = Program("curves", "calibrate", [_METHODS], _SIZED)

_REPORTS = Program("reports", "make_reports", unless="essay")
_CALIBRATION = Program(
  "calibration",
  "calibrate",
  [_MORE, "--samples=6", "--held_out=6"],
  {**_SIZED, "essay": "essay"},
)
_AUTOMATIC = [
  _MORE,
  "--retention=1,auto",
  "--tau=0.95",
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
  {**_SIZED, "essay": "essay"},
)
_ON_LONGBENCH = Program(
  "longbench",
  "evaluate",
  [*_AUTOMATIC, "--benchmark=longbench", f"--tasks={','.join(_SETS)}"],
  {**_SAMPLED, "data": "data"},
  needs="data",
)
ZERO_SHOT = (_REPORTS, _CALIBRATION, _ON_REPORTS, _ON_LONGBENCH)


def _of_tuned(program: Program, *more: str) -> Program:
  """Returns the program with the fine-tuned model."""
  takes = {
    name: flag for name, flag in program.takes.items() if name != "model"
  }
  arguments = [*program.arguments, "--model={folder}/tuned", *more]
  return dataclasses.replace(program, arguments=arguments, takes=takes)


FINETUNED = (
  _REPORTS,
  Program(
    "tuned",
    "finetune",
    ["--documents={folder}/reports/learnt"],
    {**_FLAGS, "essay": "documents"},
  ),
  # A likelihood predicts the retention only for text that a model knows.
  _of_tuned(_CALIBRATION, "--essay={folder}/reports/learnt"),
  _of_tuned(_ON_REPORTS),
)
