"""KeyDiff's experiments that are no benchmarks (arXiv 2504.15364).

Figures and tables are numbered as in the paper's fourth version.
"""

from kvjax.experiments.papers.analyses import (
  costs,
  head_statistics,
  key_cosines,
  long_answers,
  prompt_lengths,
  query_plane,
  retained_keys,
)
from kvjax.experiments.papers.data_model import Analysis, Experiment, Setup
from kvjax.experiments.papers.shared import (
  ALL_21,
  NEEDLES,
  at_random,
  longbench,
  prose,
)

PAPER = "KeyDiff"
MODELS = "Llama-3.1-8B, Llama-3.2-3B, Qwen2.5-7B and Qwen2.5-3B Instruct"
SMALL_MODEL = "Llama-3.2-3B-Instruct"
# The paper does not state its truncation; this is usual for long models.
LIMIT = 31500

EXPERIMENTS = (
  Experiment(
    "E2.6",
    PAPER,
    "how far apart the retained keys are: log determinants",
    SMALL_MODEL,
    "LongBench (qasper, 100 prompts)",
    "two prompts of 1,024 tokens",
    3,
    (
      Analysis(
        "retained keys",
        retained_keys.determinants,
        longbench(("qasper",), LIMIT, samples=100),
        prose(1024, 2),
      ),
    ),
    ("KeyDiff's are the highest (Figure 12).",),
  ),
  Experiment(
    "E2.7",
    PAPER,
    "retained keys among all keys: principal components",
    SMALL_MODEL,
    "LongBench (narrativeqa, first sample)",
    "one prompt of 1,024 tokens",
    3,
    (
      Analysis(
        "components",
        retained_keys.components,
        longbench(("narrativeqa",), LIMIT, samples=1),
        prose(1024, 1),
      ),
    ),
    (
      "KeyDiff's spread over all of the keys, those of Sink and TOVA are close "
      "together (Figures 5, 8, 9 and 10; N = 4K).",
    ),
  ),
  Experiment(
    "E2.8",
    PAPER,
    "why: keys unlike the mean key get the attention",
    SMALL_MODEL,
    "LongBench (narrativeqa)",
    "two prompts of 1,024 tokens",
    1,
    (
      Analysis(
        "heads",
        head_statistics.measure,
        longbench(("narrativeqa",), LIMIT, samples=4),
        prose(1024, 2),
      ),
    ),
    (
      "Most keys are alike to their mean, and so are queries (Figure 13); mean "
      "key and mean query point apart in all heads (Figure 14); norms hardly "
      "differ (Figure 15); the key with KeyDiff's highest score points along "
      "the mean query (Figure 16).",
      "Spearman's correlation of negative cosines and attention is .94 on "
      "average over the layers of Llama-3.2-3B, .8950 in the lowest and .9658 "
      "in the highest (Table 3, prompts of musique).",
    ),
  ),
  Experiment(
    "E2.9",
    PAPER,
    "prompt lengths, and what budgets keep of them",
    MODELS,
    "LongBench",
    "RULER's tasks of 2,048 tokens, budgets of an eighth",
    1,
    (
      Analysis(
        "lengths",
        prompt_lengths.measure,
        Setup("longbench", ALL_21, (), None),
        Setup("ruler", (*NEEDLES, "vt", "cwe", "fwe"), (2048,), 2),
      ),
    ),
    (
      "N = 2K, 4K, 6K and 8K keep 0.31, 0.53, 0.67 and 0.77 of the prompts, "
      "as means of min(1, N / length).",
    ),
  ),
  Experiment(
    "E2.10",
    PAPER,
    "operations and memory of an eviction",
    MODELS,
    "",
    "the same: counts for random keys of one head",
    1,
    (
      Analysis(
        "costs",
        costs.measure,
        at_random(2048, 4096, 6144, 8192),
        at_random(2048, 4096, 6144, 8192),
        model=False,
      ),
    ),
    ("Time and memory of an eviction grow with N plus the block.",),
  ),
  Experiment(
    "E2.11",
    PAPER,
    "keys unlike the others get the attention: two heads",
    SMALL_MODEL,
    "LongBench (narrativeqa, first sample)",
    "one prompt of 256 tokens",
    1,
    (
      Analysis(
        "cosines",
        key_cosines.measure,
        longbench(("narrativeqa",), LIMIT, samples=1),
        prose(256, 1),
      ),
    ),
    (
      "Among the first 64 tokens, keys with a low cosine with the others get "
      "the attention, whatever the query (Figure 2: layers 2 and 11, head 1).",
    ),
  ),
  Experiment(
    "E2.12",
    PAPER,
    "keys, queries and the anchor in one plane: four heads",
    SMALL_MODEL,
    "LongBench (narrativeqa, first sample)",
    "one prompt of 1,024 tokens",
    1,
    (
      Analysis(
        "queries",
        query_plane.measure,
        longbench(("narrativeqa",), LIMIT, samples=1),
        prose(1024, 1),
      ),
    ),
    (
      "The keys that KeyDiff selects, unlike the anchor, are those most "
      "aligned with the queries, in all layers and heads (Figures 4 and 11).",
    ),
  ),
  Experiment(
    "E2.13",
    PAPER,
    "eviction while a model writes long answers",
    "DeepSeek-R1-Distill-Llama-8B and -Qwen-7B",
    "",
    "the same: eight texts of 256 tokens after 64 of prose",
    2,
    (Analysis("texts", long_answers.measure, prose(512, 8), prose(512, 8)),),
    (
      "Math-500 with Llama, at most 4K tokens (Table 4, flexible and exact "
      "match): full .711 .537; KeyDiff .695 .531 with N = 1,024 and .720 .546 "
      "with 2,048; SnapKV .689 .529 and .714 .544.",
      "At most 8K tokens: full .840 .628; KeyDiff .819 .617 with N = 2,048 and "
      ".844 .634 with 4,096; SnapKV .805 .610 and .828 .627.",
      "With Qwen, at most 4K tokens (Table 6): full .764 .579; KeyDiff .666 "
      ".512 with N = 1,024 and .749 .570 with 2,048; SnapKV .692 .533 and .749 "
      ".566.",
    ),
    (
      "This measures texts that the model writes. kvjax evaluate "
      "--benchmark=math500 asks Math-500 and checks the answers.",
    ),
  ),
)
