"""The setups of Compactor's comparisons."""

from kvjax.experiments.papers import printed
from kvjax.experiments.papers.data_model import Average, Comparison, Setup
from kvjax.experiments.papers.shared import (
  ENGLISH_16,
  LIMIT_32K,
  MEAN_13,
  NEEDLES,
  budgets,
  code_scores,
  four_needles,
  lines,
  longbench,
  of_category,
  plain,
  ruler,
)
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC
from kvjax.options.budgets import Retention

_COLUMNS = budgets(
  {f"{share} %": Retention(share / 100) for share in (75, 50, 25, 10, 5)}
)
_NIAH = plain("NIAH", NEEDLES)
_QA = plain("QA", ("qa_1", "qa_2"))
_SAME = "Retentions are the paper's; prompts are a quarter as long."
# The paper applies its post-processing to all attention-based methods.
_OTHERS = {
  "SnapKV": "snapkv.compactor",
  "H2O": "h2o.compactor",
  "PyramidKV": "pyramid/snapkv.compactor",
  "Random": "random",
}
_ON_EIGHT = Setup("ruler", NEEDLES, (1024,), 1)

E3_1 = Comparison(
  "RULER",
  ruler((4096,), 500),
  _ON_EIGHT,
  QUERY_AGNOSTIC,
  lines(
    {"Full": "full", "Compactor": "compactor:blend=0.35"}
    | {"kvpress port": "compactor.kvpress"}
    | {"compactor-vllm": "compactor.vllm"}
    | _OTHERS
  ),
  _COLUMNS,
  (MEAN_13,),
  printed.read("E3.1"),
  scaling=_SAME,
)

E3_2 = Comparison(
  "groups",
  ruler((4096,), 500, (*NEEDLES, *_QA.tasks)),
  Setup("ruler", NEEDLES, (1024,), 2),
  QUERY_AGNOSTIC,
  lines({"Full": "full", "Compactor": "compactor"} | _OTHERS),
  (_COLUMNS[1],),
  (_NIAH, _QA),
  scaling=_SAME,
)

_FOURTEEN = tuple(
  name for name in ENGLISH_16 if name not in of_category("code")
)
_CATEGORIES = (
  plain("single-document", of_category("single-document")),
  plain("multi-document", of_category("multi-document")),
  plain("summaries", of_category("summaries")),
  plain("few-shot", of_category("few-shot")),
  plain("synthetic", of_category("synthetic")),
)
_MEAN_14 = Average("mean of 14", (_FOURTEEN,))


E3_3 = Comparison(
  "LongBench",
  longbench(ENGLISH_16, LIMIT_32K),
  four_needles(),
  QUERY_AGNOSTIC,
  # Without H2O, which did not fit into the paper's memory.
  lines(
    {
      "Full": "full",
      "Compactor": "compactor",
      "SnapKV": "snapkv.compactor",
      "PyramidKV": "pyramid/snapkv.compactor",
    }
  ),
  _COLUMNS[1:],
  (_MEAN_14, *_CATEGORIES, *code_scores()),
  printed.read("E3.3"),
  scaling="Retentions are the paper's.",
)

_BLEND = "compactor:blend=0.35"


def _sketched(method: str) -> tuple[str, str]:
  """Sketches to half a head's dimensions, as the paper: 64 of 128, 16 of 32."""
  return method, f"{method}:sketch_dim=16"


E3_4 = Comparison(
  "ablations",
  ruler((4096,), 500),
  _ON_EIGHT,
  QUERY_AGNOSTIC,
  lines(
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
  (MEAN_13,),
  printed.read("E3.4"),
  scaling=f"{_SAME} Sketches have 16 columns in place of 64, half a head's "
  "dimensions.",
)
