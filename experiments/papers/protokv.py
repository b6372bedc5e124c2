"""The experiments of ProtoKV (ICLR 2026, OpenReview kXhPkDaFbJ).

The paper was not available. The sources are a review note, the public reviews
and the authors' notebooks. Window, sign and truncation are this project's
choices, and all four forms of a cluster's score are reported.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from kvjax.experiments.papers import printed, shared
from kvjax.experiments.papers.analyses import deviations, stages
from kvjax.experiments.papers.data_model import (
  Analysis,
  Column,
  Comparison,
  Parts,
  Setup,
  Targets,
)
from kvjax.options.budgets import Retention, Tokens

# The limit of LLaMA-3-8B; LLaMA-2-7B has 3950 and Mistral-7B 31500.
_LIMIT = 7950

_SCORES = {
  "ProtoKV": "protokv",
  "ProtoKV, literal": "protokv.paper",
  "ProtoKV, qk_sum": "protokv:score=qk_sum",
  "ProtoKV, qk_mean": "protokv:score=qk_mean",
  "ProtoKV, attn_mean": "protokv:score=attn_mean",
}
# As in KVCache-Factory, whose harness the paper seems to use.
_BASELINES = {
  "StreamingLLM": "streaming",
  "H2O": "h2o",
  "SnapKV": "snapkv.factory",
  "PyramidKV": "pyramid/snapkv.factory",
  "ChunkKV": "chunkkv",
}

_SCALING = (
  "Budgets keep their ratios but begin at a sixteenth of the prompt, where the "
  "paper's begin at less than a hundredth: less leaves no needle whole in "
  "1,024 tokens. ProtoKV has 500 prototypes from 8,000 tokens on, and one for "
  "16 tokens of shorter prompts."
)
_BUDGETS = shared.budgets(
  {
    "B = 64": (Tokens(64), Retention(1 / 16)),
    "B = 128": (Tokens(128), Retention(1 / 8)),
    "B = 256": (Tokens(256), Retention(1 / 4)),
    "B = 512": (Tokens(512), Retention(1 / 2)),
  }
)
_B128, _B256, _B512 = _BUDGETS[1], _BUDGETS[2], _BUDGETS[3]


def _on_longbench(
  name: str,
  methods: Mapping[str, Sequence[str]],
  columns: tuple[Column, ...],
  targets: tuple[Targets, ...] = (),
  *,
  samples: int = 2,
) -> Comparison:
  """Defines a comparison on all English datasets."""
  return Comparison(
    name,
    shared.longbench(shared.ENGLISH_16, _LIMIT),
    shared.four_needles(samples=samples),
    shared.lines(methods),
    columns,
    (shared.plain("mean of 16", shared.ENGLISH_16), *shared.code_scores()),
    targets,
    scaling=_SCALING,
  )


def _per_query_head(one: Comparison) -> Comparison:
  """Lets each query head select tokens, as in the original code."""
  return dataclasses.replace(
    one, name=f"{one.name}, each query head", heads="query"
  )


_E1_1 = dataclasses.replace(
  _on_longbench(
    "LongBench",
    {
      "FullKV": "full",
      **_BASELINES,
      "ClusterKV": "protokv.clusterkv",
      "SqueezeAtt": "protokv.squeezed",
      **_SCORES,
    },
    # All four would take too long.
    shared.small_at(_BUDGETS, 1, 3),
    printed.read("E1.1"),
  ),
  quoted=("SentenceKV",),
)

_GROUPS = (
  shared.plain("NIAH", shared.NEEDLES),
  shared.plain("QA", ("qa_1", "qa_2")),
)
_E1_2 = Comparison(
  "RULER",
  shared.ruler((8000,), 100, (*shared.NEEDLES, "qa_1", "qa_2")),
  Setup("ruler", shared.NEEDLES, (1024,), 1),
  shared.lines({"FullKV": "full", "SnapKV": "snapkv.factory", **_SCORES}),
  (_B128, _B512),
  _GROUPS,
  printed.read("E1.2"),
  scaling=_SCALING,
)

_E1_3 = Comparison(
  "heatmap",
  shared.heatmap(tuple(range(1000, 8001, 1000)), 10),
  shared.heatmap((512, 1024)),
  shared.lines(
    {
      "FullKV": "full",
      "StreamingLLM": "streaming",
      "H2O": "h2o",
      "SnapKV": "snapkv.factory",
      **_SCORES,
    }
  ),
  (_B128,),
  (shared.NEEDLES_FOUND,),
  printed.read("E1.3"),
  scaling=_SCALING,
)

_NARRATIVE = shared.plain("narrativeqa", ("narrativeqa",))
_E1_4 = Comparison(
  "single tokens",
  shared.longbench(("narrativeqa",), _LIMIT),
  shared.four_needles(),
  shared.lines(
    {"FullKV": "full", "SnapKV": "snapkv.factory", "SATKV": "protokv.sat"}
  ),
  (_B256,),
  (_NARRATIVE,),
  printed.read("E1.4"),
  scaling=_SCALING,
)

_E1_5 = _on_longbench(
  "variants",
  {
    "FullKV": "full",
    "ProtoKV": "protokv",
    "Chunk-Clustering": "protokv.chunk",
    # 512 buckets, and 64.
    "LSH-Clustering": ("protokv.lsh", "protokv.lsh:bits=6"),
    "ProtoKV + LA": "pyramid/protokv",
    "ProtoKV + HA": "ada/protokv",
  },
  (_B256, _B512),
  samples=4,
)

_SWEEPS = {
  "FullKV": "full",
  **{
    f"P_tot = {count}": (
      f"protokv:prototypes={count}:tokens_per_prototype=1",
      f"protokv:prototypes={count // 8}:tokens_per_prototype=1",
    )
    for count in (100, 200, 500, 1000)
  },
  **{f"u = {2**bits}": f"protokv:bits={bits}" for bits in range(5)},
  **{
    f"p = {count}": f"protokv:anchors={count}"
    for count in (10, 20, 40, 70, 100)
  },
  **{
    f"kappa = {reach}": f"protokv:neighbors={reach}" for reach in (1, 2, 5, 10)
  },
}
_E1_6 = _on_longbench("sweeps", _SWEEPS, (_B512,))

_E1_7 = _on_longbench(
  "K-means",
  {
    "FullKV": "full",
    "SnapKV": "snapkv.factory",
    "ProtoKV": "protokv",
    **{
      f"K-means, {count} iterations": f"protokv.kmeans:iterations={count}"
      for count in (1, 5, 10, 20, 50)
    },
  },
  (_B512,),
)

# What is kept when these are deleted.
_DEVIATING, _ATTENDED = "protokv.sat:sign=literal", "snapkv.factory:keep=least"
_NO_SINKS = "sinks=5"
_E1_9 = Comparison(
  "deletion",
  shared.longbench(("narrativeqa",), _LIMIT),
  shared.four_needles(),
  shared.lines(
    {
      "full": "full",
      "the most deviating are deleted": _DEVIATING,
      "the most deviating, no sinks": f"{_DEVIATING}:{_NO_SINKS}",
      "the least deviating are deleted": "protokv.sat",
      "the most attended are deleted": _ATTENDED,
      "the most attended, no sinks": f"{_ATTENDED}:{_NO_SINKS}",
      "the least attended are deleted": "snapkv.factory",
      "at random": "random",
    }
  ),
  shared.budgets(
    {
      "10 % deleted": Retention(0.9),
      "25 % deleted": Retention(0.75),
      "50 % deleted": Retention(0.5),
    }
  ),
  (_NARRATIVE,),
)

PARTS: Parts = {
  "E1.1": (_E1_1, _per_query_head(_E1_1)),
  "E1.2": (_E1_2, _per_query_head(_E1_2)),
  "E1.3": (_E1_3, _per_query_head(_E1_3)),
  "E1.4": _E1_4,
  "E1.5": _E1_5,
  "E1.6": _E1_6,
  "E1.7": _E1_7,
  "E1.8": Analysis(
    "stages",
    stages.measure,
    shared.at_random(32768),
    shared.at_random(8192),
    model=False,
  ),
  "E1.9": (
    Analysis(
      "deviations",
      deviations.measure,
      shared.longbench(("narrativeqa",), _LIMIT, samples=4),
      shared.prose(1024, 2),
    ),
    _E1_9,
  ),
}
