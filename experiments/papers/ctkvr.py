"""The experiments of CTkvr (arXiv 2512.15550)."""

import dataclasses

from kvjax.experiments.papers import printed, shared
from kvjax.experiments.papers.analyses import (
  neighbors,
  recalled_lists,
  retrieval_modules,
  throughput,
)
from kvjax.experiments.papers.data_model import (
  Analysis,
  Average,
  Column,
  Comparison,
  Line,
  Parts,
  Place,
  Program,
  Setup,
  Way,
)
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC
from kvjax.options.budgets import Retention, Tokens

_FULL = Line("Full", Way("full"), Way("full"))
_512, _1024 = Tokens(512), Tokens(1024)
_CTKVR = (
  shared.fixed("CTkvr 512", "ctkvr.512", None, Tokens(32), "ctkvr"),
  shared.fixed("CTkvr 1024", "ctkvr.1024", None, Tokens(64), "ctkvr"),
)
# Section 4.1.2: 1,024 tokens for every other method.
_OTHERS = (
  shared.fixed("SnapKV", "snapkv", _1024, Tokens(64)),
  shared.fixed("Quest", "quest", _1024, Tokens(64)),
  shared.fixed("MagicPIG", "magicpig.8x75", _1024, Tokens(64)),
  shared.fixed("ShadowKV", "shadowkv", _1024, Tokens(64)),
  shared.fixed("Flat", "flat", _1024, Tokens(64)),
)
_SHARE = shared.fixed(
  "CTkvr, 4 % of n", "ctkvr", Retention(0.04), Retention(0.04)
)
_SCALING = (
  "Prompts and keys retrieved are a sixteenth of the paper's: 64 keys for "
  "1,024. Resident tokens, pages and hashes are not scaled."
)

_LENGTHS = shared.lengths(
  {
    "8K": (8192, None),
    "16K": (16384, 1024),
    "32K": (32768, 2048),
    "64K": (65536, None),
    "128K": (131072, None),
  }
)
_EVERY = tuple(2**power for power in range(13, 18))
_SMALL = Setup("ruler", shared.FOUR_NEEDLES, (1024, 2048), 2)
_E4_1 = Comparison(
  "RULER",
  shared.ruler(_EVERY, 96),
  _SMALL,
  (
    _FULL,
    *_OTHERS,
    *_CTKVR,
    _SHARE,
    shared.fixed("SqueezedAttention 512", "squeezed", _512),
  ),
  _LENGTHS,
  (shared.MEAN_13,),
  printed.read("E4.1"),
  quoted=("RetrievalAttention 1024",),
  scaling=_SCALING,
)

_SINGLE, _MULTI, _SUMMARIES, _CODE = (
  shared.of_category(name)
  for name in ("single-document", "multi-document", "summaries", "code")
)
_FEW_SHOT = ("trec", "triviaqa")
_FIVE = Average(
  "mean of 5 categories", (_SINGLE, _MULTI, _SUMMARIES, _FEW_SHOT, _CODE)
)
_ENGLISH_13 = tuple(_FIVE.tasks)
_ONE = (Column("score", Place(), Place()),)
_E4_2 = Comparison(
  "LongBench",
  shared.longbench(_ENGLISH_13, shared.LIMIT_32K),
  shared.four_needles(),
  (_FULL, *_OTHERS, *_CTKVR),
  _ONE,
  (_FIVE, shared.plain("plain mean of 13", _ENGLISH_13), *shared.code_scores()),
  printed.read("E4.2"),
  scaling=_SCALING,
)


def _heatmap(
  name: str, least: int, most: int, small: Setup | None
) -> Comparison:
  """Defines a heatmap of fifteen lengths and ten depths."""
  lengths_of_grid = tuple(least + (most - least) * i // 14 for i in range(15))
  return Comparison(
    name,
    shared.heatmap(lengths_of_grid, 10),
    small,
    (_FULL, *_CTKVR),
    _ONE,
    (shared.NEEDLES_FOUND,),
    scaling=_SCALING,
  )


_E4_3 = (
  _heatmap("16K to 200K", 16000, 200_000, shared.heatmap((1024, 2048))),
  _heatmap("200K to 1M", 200_000, 1_000_000, None),
)

_CHOICES = ("init", "random", "equi", "final")
_E4_7_PLACES = Comparison(
  "places of centroids",
  shared.ruler((65536,), 96),
  Setup("ruler", shared.FOUR_NEEDLES, (2048,), 2),
  tuple(
    shared.fixed(choice, f"ctkvr:choice={choice}", _1024, Tokens(64))
    for choice in _CHOICES
  ),
  _ONE,
  (shared.MEAN_13,),
  printed.read("E4.7_places"),
  scaling=_SCALING,
)


def _centroids(number: int) -> Line:
  small = f"ctkvr:centroids={max(number // 16, 1)}"
  return shared.fixed(
    f"C = {number}",
    f"ctkvr:centroids={number}",
    _512,
    Tokens(32) if number in (80, 320, 1280, 1920) else None,
    small,
  )


_KEY_3 = ("niah_multikey_3",)
_E4_7_SWEEPS = Comparison(
  "sweeps",
  shared.ruler((98304,), 96, _KEY_3),
  Setup("ruler", _KEY_3, (2048,), 4),
  (
    _FULL,
    *map(_centroids, (20, 40, 80, 160, 320, 640, 1280, 1920)),
    *(
      shared.fixed(f"C' = {number}", f"ctkvr:probes={number}", _512, Tokens(32))
      for number in (2, 4, 6, 8)
    ),
    *(
      shared.fixed(
        f"rho = {ratio} rho'", f"ctkvr:list_ratio={ratio}", _512, Tokens(32)
      )
      for ratio in (1, 5)
    ),
    *(
      shared.fixed(
        f"rho' = {number}", "ctkvr", Tokens(number), Tokens(number // 16)
      )
      for number in (256, 1024, 2048)
    ),
  ),
  _ONE,
  (shared.plain(*_KEY_3, _KEY_3),),
  printed.read("E4.7_sweeps"),
  scaling=f"{_SCALING} There are a sixteenth as many centroids.",
)

_TURNS = ("niah_multiturn_conversation",)


def _updating(name: str, method: str) -> Line:
  """Defines a line with as many centroids as the paper has at 8K."""
  return shared.fixed(name, method, _512, Tokens(32), f"{method}:centroids=512")


_E4_8 = Comparison(
  "conversations",
  Setup("multiturn", _TURNS, (65536,), 50),
  Setup("multiturn", _TURNS, (2048,), 4),
  (
    _FULL,
    _updating("DCU off", "ctkvr:update=false"),
    _updating("DCU on", "ctkvr"),
  ),
  tuple(
    Column(f"round {turn}", Place(turn=turn - 1), Place(turn=turn - 1))
    for turn in (1, 2, 4, 6, 8)
  ),
  (shared.plain("needles found", _TURNS),),
  printed.read("E4.8"),
  protocol=QUERY_AGNOSTIC,
  scaling="Prompts are a thirty-second of the paper's, keys retrieved a "
  "sixteenth: 32 for 512. There are 512 centroids, not the 103 that are a "
  "sixteenth of the tokens: questions are as long as the paper's, and two of "
  "them would push all of these out.",
)

_E4_9 = dataclasses.replace(
  _E4_1,
  lines=(
    _FULL,
    _SHARE,
    shared.fixed("MagicPIG (8,75)", "magicpig.8x75", _1024, Tokens(64)),
    shared.fixed("MagicPIG (9,120)", "magicpig", _1024, Tokens(64)),
    shared.fixed("MagicPIG (10,150)", "magicpig.10x150", _1024, Tokens(64)),
  ),
  averages=(shared.MEAN_13,),
  targets=printed.read("E4.9"),
  quoted=(),
)

# Setups of analyses, the paper's and the small one.
_RANDOM = (shared.at_random(98304), shared.at_random(2048))
_NEEDLES = (
  shared.ruler((16384,), 1, shared.FOUR_NEEDLES),
  shared.prose(1024, 2),
)

PARTS: Parts = {
  "E4.1": _E4_1,
  "E4.2": _E4_2,
  "E4.3": _E4_3,
  "E4.5": (
    Analysis("throughput", throughput.measure, *_RANDOM),
    Analysis("modules", retrieval_modules.measure, *_RANDOM),
  ),
  "E4.6": Program("indexes", "index_construction", takes={"seed": "seed"}),
  "E4.7": (_E4_7_PLACES, _E4_7_SWEEPS),
  "E4.8": _E4_8,
  "E4.9": _E4_9,
  "E4.10": Analysis("queries", neighbors.measure, *_NEEDLES),
  "E4.11": Analysis("lists", recalled_lists.measure, *_NEEDLES),
}
