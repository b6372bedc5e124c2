"""The experiments of Compactor (Chari and Van Durme, arXiv 2507.08143 v1)."""

import dataclasses
from collections.abc import Mapping

from kvjax.experiments.benchmarks.ruler.generator import TASKS
from kvjax.experiments.papers import printed, shared
from kvjax.experiments.papers.analyses import latency, unmasked_attention
from kvjax.experiments.papers.data_model import (
  Analysis,
  Comparison,
  Parts,
  Program,
  Setup,
)
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC
from kvjax.options.budgets import Retention

_COLUMNS = shared.budgets(
  {f"{share} %": Retention(share / 100) for share in (75, 50, 25, 10, 5)}
)
_NIAH = shared.plain("NIAH", shared.NEEDLES)
_QA = shared.plain("QA", ("qa_1", "qa_2"))
_SAME = "Retentions are the paper's; prompts are a quarter as long."
# The paper applies its post-processing to all attention-based methods.
_OTHERS = {
  "SnapKV": "snapkv.compactor",
  "H2O": "h2o.compactor",
  "PyramidKV": "pyramid/snapkv.compactor",
  "Random": "random",
}
_ON_EIGHT = Setup("ruler", shared.NEEDLES, (1024,), 1)

_E3_1 = Comparison(
  "RULER",
  shared.ruler((4096,), 500),
  _ON_EIGHT,
  shared.lines(
    {"Full": "full", "Compactor": "compactor:blend=0.35"}
    | {"kvpress port": "compactor.kvpress"}
    | {"compactor-vllm": "compactor.vllm"}
    | _OTHERS
  ),
  _COLUMNS,
  (shared.MEAN_13,),
  printed.read("E3.1"),
  protocol=QUERY_AGNOSTIC,
  scaling=_SAME,
)

_E3_2 = Comparison(
  "groups",
  shared.ruler((4096,), 500, (*shared.NEEDLES, *_QA.tasks)),
  Setup("ruler", shared.NEEDLES, (1024,), 2),
  shared.lines({"Full": "full", "Compactor": "compactor"} | _OTHERS),
  (_COLUMNS[1],),
  (_NIAH, _QA),
  protocol=QUERY_AGNOSTIC,
  scaling=_SAME,
)

_FOURTEEN = tuple(
  name for name in shared.ENGLISH_16 if name not in shared.of_category("code")
)
_MEAN_14 = shared.plain("mean of 14", _FOURTEEN)

_E3_3 = Comparison(
  "LongBench",
  shared.longbench(shared.ENGLISH_16, shared.LIMIT_32K),
  shared.four_needles(),
  # Without H2O, which did not fit into the paper's memory.
  shared.lines(
    {
      "Full": "full",
      "Compactor": "compactor",
      "SnapKV": "snapkv.compactor",
      "PyramidKV": "pyramid/snapkv.compactor",
    }
  ),
  _COLUMNS[1:],
  (_MEAN_14, *shared.CATEGORIES, *shared.code_scores()),
  printed.read("E3.3"),
  protocol=QUERY_AGNOSTIC,
  scaling="Retentions are the paper's.",
)

_BLEND = "compactor:blend=0.35"


def _sketched(method: str) -> tuple[str, str]:
  """Sketches to half a head's dimensions, as the paper: 64 of 128, 16 of 32."""
  return method, f"{method}:sketch_dim=16"


_E3_4 = Comparison(
  "ablations",
  shared.ruler((4096,), 500),
  _ON_EIGHT,
  shared.lines(
    {
      "Full": "full",
      "svd, lambda .35": _sketched(_BLEND),
      "exact leverage": f"{_BLEND}:sketch=none",
      "lambda .15": _sketched("compactor:blend=0.15"),
      "lambda .2": _sketched("compactor:blend=0.2"),
      "lambda .4": _sketched("compactor:blend=0.4"),
      "no a": _sketched("compactor:attention=none"),
      "qr": _sketched(f"{_BLEND}:solver=qr"),
      "eig": _sketched(f"{_BLEND}:solver=eig"),
      "srht": _sketched(f"{_BLEND}:sketch=srht"),
    }
  ),
  _COLUMNS,
  (shared.MEAN_13,),
  printed.read("E3.4"),
  protocol=QUERY_AGNOSTIC,
  scaling=f"{_SAME} Sketches have 16 columns in place of 64, half a head's "
  "dimensions.",
)


# The programs of E3.5 to E3.7: calibrated retention.
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
_SETS = ",".join(_FOURTEEN)
_RULER = (f"--tasks={','.join(TASKS)}", "--length=4096")
_TAU = "--tau={tau}"
_RULE = "--rule=paper"

_CURVES = Program(
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
    f"--tasks={','.join(shared.FOUR_NEEDLES)}",
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
_ZERO_SHOT = (_REPORTS, _CALIBRATION, _ON_REPORTS, _ON_LONGBENCH, _TRIALS)


def _of_tuned(program: Program, *more: str) -> Program:
  """Returns the program with the fine-tuned model."""
  takes = {
    name: flag for name, flag in program.takes.items() if name != "model"
  }
  arguments = [*program.arguments, "--model={folder}/tuned", *more]
  return dataclasses.replace(program, arguments=arguments, takes=takes)


_LEARNT = "{folder}/reports/learnt"
_FINETUNED = (
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

PARTS: Parts = {
  "E3.1": _E3_1,
  "E3.2": _E3_2,
  "E3.3": _E3_3,
  "E3.4": _E3_4,
  "E3.5": _CURVES,
  "E3.6": _ZERO_SHOT,
  "E3.7": _FINETUNED,
  "E3.8": Analysis(
    "latency",
    latency.scorers,
    shared.at_random(10_000, 100_000, 1_000_000),
    shared.at_random(1024, 2048, 4096),
    model=False,
  ),
  "E3.9": Analysis(
    "attention",
    unmasked_attention.measure,
    shared.ruler((4096,), 1, ("niah_single_2",)),
    shared.prose(512, 1),
  ),
}
