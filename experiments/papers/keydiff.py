"""The experiments of KeyDiff (Park et al., arXiv 2504.15364).

Figures and tables are numbered as in the paper's fourth version.
"""

import dataclasses

from kvjax.experiments.papers import printed, shared
from kvjax.experiments.papers.analyses import (
  costs,
  head_statistics,
  key_cosines,
  prompt_lengths,
  query_plane,
  retained_keys,
)
from kvjax.experiments.papers.data_model import (
  Analysis,
  Column,
  Comparison,
  Parts,
  Setup,
  Targets,
)
from kvjax.options.budgets import Retention, Tokens
from kvjax.options.schedules import Schedule

# The paper does not state its truncation; this is usual for long models.
_LIMIT = 31500

_METHODS = {"Full": "full", **retained_keys.METHODS}
# The mean share of LongBench's prompts that the paper's budgets keep.
_BUDGETS = shared.budgets(
  {
    "N = 2K": (Tokens(2048), Retention(0.31)),
    "N = 4K": (Tokens(4096), Retention(0.53)),
    "N = 6K": (Tokens(6144), Retention(0.67)),
    "N = 8K": (Tokens(8192), Retention(0.77)),
  }
)
# Each of these has its own prefill, so four would take too long.
_TWO, _ONE = shared.small_at(_BUDGETS, 0, 1), shared.small_at(_BUDGETS, 1)
_SCALING = (
  "Methods keep the shares that the paper's budgets keep of LongBench on "
  "average (31, 53, 67 and 77 %)"
)
_BLOCKS = f"{_SCALING}; blocks are an eighth as long, as prompts are."

# Means marked [21] in the paper's table are over all datasets of LongBench,
# others over the 16 English and code datasets; without blocks they are over all
# but narrativeqa.
_AVERAGES = (
  shared.plain("mean of 21", shared.ALL_21),
  shared.plain("mean of 16", shared.ENGLISH_16),
  *shared.code_scores(),
)


def _in_blocks(size: int) -> Schedule:
  return Schedule(block=size, every=1)


def _compared(
  name: str,
  block: int,
  methods: dict[str, str],
  targets: tuple[Targets, ...] = (),
) -> Comparison:
  """Defines LongBench in blocks; the small setup has blocks of an eighth."""
  return Comparison(
    name,
    shared.longbench(shared.ALL_21, _LIMIT, _in_blocks(block)),
    shared.four_needles(_in_blocks(block // 8), samples=2),
    shared.lines(methods),
    _ONE,
    _AVERAGES,
    targets,
    scaling=_BLOCKS,
  )


_E2_1 = dataclasses.replace(
  _compared("blocks of 128", 128, _METHODS, printed.read("E2.1")), columns=_TWO
)

_OVER_20 = tuple(name for name in shared.ALL_21 if name != "narrativeqa")
_WHOLE = Schedule(every=1)
_E2_2 = dataclasses.replace(
  _E2_1,
  name="no blocks",
  paper=shared.longbench(shared.ALL_21, _LIMIT, _WHOLE),
  small=shared.four_needles(_WHOLE, samples=2),
  averages=(shared.plain("mean of 20", _OVER_20), *_AVERAGES),
  targets=printed.read("E2.2"),
  scaling=f"{_SCALING}.",
)

_FIVE = {name: _METHODS[name] for name in _METHODS if name != "KeyL2Norm"}
_E2_3 = (
  _compared("blocks of 64", 64, _FIVE, printed.read("E2.3_64")),
  _compared("blocks of 256", 256, _FIVE, printed.read("E2.3_256")),
)

_VARIANTS = {
  "Full": "full",
  "mean_unit": "keydiff",
  "pairwise": "keydiff:anchor=pairwise",
  "mean_raw": "keydiff:anchor=mean_raw",
  "median": "keydiff:anchor=median_unit",
  "dot": "keydiff:metric=dot",
  "euclid": "keydiff:metric=euclid",
  "+10 %": "keydiff:recent_frac=0.1",
  "+20 %": "keydiff:recent_frac=0.2",
}
_E2_4 = _compared("variants", 128, _VARIANTS, printed.read("E2.4"))


def _math(
  new_tokens: int, columns: tuple[Column, ...], targets: tuple[Targets, ...]
) -> Comparison:
  """Defines Math-500 with answers of at most so many tokens."""
  return Comparison(
    f"{new_tokens // 1024}K tokens",
    Setup(
      *("math500", ("math500",), (), None),
      schedule=_WHOLE,
      new_tokens=new_tokens,
    ),
    None,
    shared.lines(
      {
        "Full": "full",
        "KeyDiff": "keydiff:recent_frac=0.2",
        "SnapKV": "snapkv.keydiff",
      }
    ),
    columns,
    (
      shared.plain("flexible match", ("math500",)),
      shared.plain("exact match", ("math500",), "same_text"),
    ),
    targets,
  )


_MATH = (
  dataclasses.replace(
    _math(
      4096,
      shared.budgets(
        {
          "N = 1,024": (Tokens(1024), Tokens(64)),
          "N = 2,048": (Tokens(2048), Tokens(128)),
        }
      ),
      printed.read("E2.14_4k"),
    ),
    small=Setup(
      *("arithmetic", ("arithmetic",), (), 8), schedule=_WHOLE, new_tokens=128
    ),
    scaling="Answers have at most 128 tokens, and methods keep 64 and 128.",
  ),
  _math(
    8192,
    shared.budgets({"N = 2,048": Tokens(2048), "N = 4,096": Tokens(4096)}),
    printed.read("E2.14_8k"),
  ),
)

_COMPARED = ("Full", "Sink", "TOVA", "SnapKV", "KeyDiff")
_E2_5 = dataclasses.replace(
  _compared("heatmap", 128, _METHODS),
  paper=shared.heatmap(
    tuple(1000 + 29_000 * step // 9 for step in range(10)), 10, _in_blocks(128)
  ),
  small=shared.heatmap((512, 1024), schedule=_in_blocks(16)),
  lines=shared.lines({name: _METHODS[name] for name in _COMPARED}),
  columns=(_BUDGETS[2],),
  averages=(shared.NEEDLES_FOUND,),
)

_STORY = shared.longbench(("narrativeqa",), _LIMIT, samples=1)

PARTS: Parts = {
  "E2.1": _E2_1,
  "E2.2": _E2_2,
  "E2.3": _E2_3,
  "E2.4": _E2_4,
  "E2.5": _E2_5,
  "E2.6": Analysis(
    "retained keys",
    retained_keys.determinants,
    shared.longbench(("qasper",), _LIMIT, samples=100),
    shared.prose(1024, 2),
  ),
  "E2.7": Analysis(
    "components", retained_keys.components, _STORY, shared.prose(1024, 1)
  ),
  "E2.8": Analysis(
    "heads",
    head_statistics.measure,
    shared.longbench(("narrativeqa",), _LIMIT, samples=4),
    shared.prose(1024, 2),
  ),
  "E2.9": Analysis(
    "lengths",
    prompt_lengths.measure,
    Setup("longbench", shared.ALL_21, (), None),
    Setup("ruler", (*shared.NEEDLES, "vt", "cwe", "fwe"), (2048,), 2),
  ),
  "E2.10": Analysis(
    "costs",
    costs.measure,
    shared.at_random(2048, 4096, 6144, 8192),
    shared.at_random(2048, 4096, 6144, 8192),
    model=False,
  ),
  "E2.11": Analysis(
    "cosines", key_cosines.measure, _STORY, shared.prose(256, 1)
  ),
  "E2.12": Analysis(
    "queries", query_plane.measure, _STORY, shared.prose(1024, 1)
  ),
  # Math-500 is how the paper measures long answers.
  "E2.13": _MATH,
  "E2.14": _MATH,
}
