"""The experiments of ProtoKV (ICLR 2026, OpenReview kXhPkDaFbJ).

The paper was not available. The sources are a review note, the public reviews
and the authors' notebooks. Window, sign and truncation are this project's
choices, and all four forms of a cluster's score are reported.
"""

from kvjax.experiments.papers.analyses import deviations, stages
from kvjax.experiments.papers.data_model import Analysis, Experiment
from kvjax.experiments.papers.protokv_setups import (
  E1_1,
  E1_2,
  E1_3,
  E1_4,
  E1_5,
  E1_6,
  E1_7,
  E1_9,
  LIMIT,
  LLAMA,
  per_query_head,
)
from kvjax.experiments.papers.shared import (
  CODE_SCORES,
  ON_NEEDLES,
  at_random,
  longbench,
  prose,
)

_PAPER = "ProtoKV"
_MODELS = "LLaMA-2-7B-chat, LLaMA-3-8B-Instruct, Mistral-7B-Instruct"

EXPERIMENTS = (
  Experiment(
    "E1.1",
    _PAPER,
    "LongBench at four budgets, against seven methods",
    _MODELS,
    "LongBench",
    f"{ON_NEEDLES}, two budgets, KV and query heads",
    10,
    (E1_1, per_query_head(E1_1)),
    (
      "With B from 64 to 512 ProtoKV is 0.35 to 4.27 points above the best "
      "baseline, 2.11 on average.",
    ),
    (
      "The numbers of B = 512 are those of clustering at prefill. Therefore "
      "ClusterKV and SqueezeAtt evict after the prefill here: they rank their "
      "clusters by the queries of ProtoKV's window instead of a decoded "
      "token's. Inferred: these forms are not described.",
      "Prompts are cut to 7,950 tokens, as for LLaMA-3; --length=3950 is "
      "LLaMA-2's limit and 31500 Mistral's.",
      CODE_SCORES,
    ),
  ),
  Experiment(
    "E1.2",
    _PAPER,
    "RULER's needles and questions within 8K tokens",
    LLAMA,
    "SQuAD and HotpotQA for QA",
    "eight needle tasks of 1,024 tokens, KV and query heads",
    6,
    (E1_2, per_query_head(E1_2)),
  ),
  Experiment(
    "E1.3",
    _PAPER,
    "needle heatmap up to 8K tokens at B = 128",
    LLAMA,
    "",
    "512 and 1,024 tokens, five depths, KV and query heads",
    5,
    (E1_3, per_query_head(E1_3)),
  ),
  Experiment(
    "E1.4",
    _PAPER,
    "clusters against single deviating tokens (SATKV)",
    LLAMA,
    "LongBench",
    ON_NEEDLES,
    2,
    (E1_4,),
  ),
  Experiment(
    "E1.5",
    _PAPER,
    "chunks alone, hashes alone, layer and head budgets",
    LLAMA,
    "LongBench",
    ON_NEEDLES,
    4,
    (E1_5,),
    (
      "LSH-Clustering loses more than Chunk-Clustering; +LA and +HA gain 1 to "
      "4 points.",
    ),
  ),
  Experiment(
    "E1.6",
    _PAPER,
    "sweeps of P_tot, u, p and kappa",
    LLAMA,
    "LongBench",
    ON_NEEDLES,
    5,
    (E1_6,),
    (
      "About 500 prototypes are best, of which 2 to 4 are SAT prototypes; p is "
      "best between 20 and 40, and kappa matters little.",
    ),
  ),
  Experiment(
    "E1.7",
    _PAPER,
    "K-means prototypes by number of iterations",
    LLAMA,
    "LongBench",
    ON_NEEDLES,
    3,
    (E1_7,),
    ("K-means needs more than 20 iterations to pass the baseline.",),
  ),
  Experiment(
    "E1.8",
    _PAPER,
    "time of each stage by number of prototypes",
    LLAMA,
    "",
    "random keys of one head, 8,192 tokens",
    2,
    (
      Analysis(
        "stages",
        stages.measure,
        at_random(32768),
        at_random(8192),
        model=False,
      ),
    ),
    (
      "Scoring takes about as long as SnapKV's; methods that cluster by "
      "iteration take up to 3.9 times as long.",
    ),
  ),
  Experiment(
    "E1.9",
    _PAPER,
    "what deviating tokens are, and what deleting them costs",
    LLAMA,
    "LongBench (narrativeqa)",
    f"prompts of 1,024 tokens; {ON_NEEDLES}",
    4,
    (
      Analysis(
        "deviations",
        deviations.measure,
        longbench(("narrativeqa",), LIMIT, samples=4),
        prose(1024, 2),
      ),
      E1_9,
    ),
    (
      "Gamma rises with beta.",
      "The most deviating tenth gets more than 60 % of the attention in deep "
      "layers; ordinary tokens together get about 40 %.",
    ),
    (
      "The last eight tokens are never deleted, except at random. Sinks are "
      "the first five, as in the attention by deviation.",
    ),
  ),
)
