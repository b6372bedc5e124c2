"""The setups of Compactor's comparisons, and its printed numbers."""

from kvjax.experiments.benchmarks.ruler.generator import TASKS as RULER
from kvjax.experiments.papers.records import (
  Average,
  Comparison,
  Key,
  Setup,
  Targets,
)
from kvjax.experiments.papers.shared import (
  ENGLISH_16,
  NEEDLES,
  budgets,
  code_by_difflib,
  four_needles,
  lines,
  longbench,
  of_category,
  plain,
  ruler,
)
from kvjax.experiments.papers.transcription import across, scaled
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC
from kvjax.options.budgets import Retention

_LLAMA, _QWEN = "Llama-3.1-8B", "Qwen2.5-14B-1M"
_LIMIT = 31500

_COLUMNS = budgets(
  {
    f"{share} %": (Retention(share / 100), Retention(share / 100))
    for share in (75, 50, 25, 10, 5)
  }
)
_NAMES = [column.name for column in _COLUMNS]
_MEAN_13 = plain("mean of 13", RULER)
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
  (_MEAN_13,),
  (
    Targets(
      _LLAMA,
      across(
        """
        Compactor | 93.8 87.4 77.5 59.5 43.1
        kvpress port | 94.0 87.7 77.8 - 63.5
        compactor-vllm | 95.63 94.75 83.07 - 64.79
        """,
        _NAMES,
        _MEAN_13.name,
      ),
      {
        "compactor-vllm": "the question was inside the prompt and protected: "
        "another protocol"
      },
    ),
  ),
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
_CODE = plain("code", of_category("code"))
_MEAN_14 = Average("mean of 14", (_FOURTEEN,))


def _by_category(text: str) -> dict[Key, float]:
  """Parses Compactor's lines by category; 100 % is the full cache."""
  numbers_by_key: dict[Key, float] = {}
  for number, category in enumerate(_CATEGORIES):
    rows = [row.split() for row in text.strip().splitlines()]
    full, *compressed = [row[number] for row in rows]
    names = _NAMES[1:]
    numbers_by_key |= across(
      f"Compactor | {' '.join(compressed)}", names, category.name
    )
    full_line = " ".join([full] * len(names))
    numbers_by_key |= across(f"Full | {full_line}", names, category.name)
  return numbers_by_key


E3_3 = Comparison(
  "LongBench",
  longbench(ENGLISH_16, _LIMIT),
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
  (_MEAN_14, *_CATEGORIES, _CODE, code_by_difflib()),
  (
    Targets(
      _LLAMA,
      scaled(
        across(
          """
          Full | .455 .455 .455 .455
          Compactor | .458 .425 .302 .225
          SnapKV | .417 .344 .196 .153
          PyramidKV | .413 .337 .201 .146
          """,
          _NAMES[1:],
          _MEAN_14.name,
        )
        | _by_category(
          """
          .484 .476 .286 .490 .580
          .485 .465 .283 .509 .594
          .434 .448 .265 .492 .520
          .279 .389 .238 .400 .153
          .172 .254 .206 .364 .081
          """
        )
        | across(
          """
          Full | .253 .253 .253 .253
          Compactor | .250 .248 .231 .229
          SnapKV | .255 .249 .256 .223
          """,
          _NAMES[1:],
          _CODE.name,
        ),
        100,
      ),
    ),
    Targets(
      _QWEN,
      scaled(
        across(
          """
          Full | .489 .489 .489 .489
          Compactor | .485 .438 .331 .261
          SnapKV | .445 .360 .267 .202
          PyramidKV | .444 .353 .264 .198
          """,
          _NAMES[1:],
          _MEAN_14.name,
        )
        | _by_category(
          """
          .438 .563 .258 .617 .607
          .433 .572 .253 .623 .593
          .369 .549 .238 .588 .447
          .277 .455 .214 .497 .153
          .174 .419 .196 .377 .073
          """
        ),
        100,
      ),
    ),
  ),
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
  (_MEAN_13,),
  (
    Targets(
      _LLAMA,
      across(
        """
        svd, lambda .35 | 93.8 87.4 77.5 59.5 43.1
        exact leverage | 93.9 88.1 77.5 59.4 43.0
        lambda .15 | - 87.8 - 60.1 -
        lambda .2 | - 86.4 - 58.6 -
        lambda .4 | - 88.2 - 58.8 -
        no a | 93.1 81.7 60.2 34.7 24.8
        qr | 93.9 87.2 76.9 59.8 42.9
        eig | 92.1 86.8 76.3 58.2 40.8
        srht | 93.7 87.8 77.4 59.9 42.4
        """,
        _NAMES,
        _MEAN_13.name,
      ),
    ),
  ),
  scaling=f"{_SAME} Sketches have 16 columns in place of 64, half a head's "
  "dimensions.",
)
