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
from kvjax.experiments.papers.data_model import Analysis, Parts, Setup
from kvjax.experiments.papers.shared import (
  ALL_21,
  NEEDLES,
  at_random,
  longbench,
  prose,
)

# The paper does not state its truncation; this is usual for long models.
LIMIT = 31500

PARTS: Parts = {
  "E2.6": (
    Analysis(
      "retained keys",
      retained_keys.determinants,
      longbench(("qasper",), LIMIT, samples=100),
      prose(1024, 2),
    ),
  ),
  "E2.7": (
    Analysis(
      "components",
      retained_keys.components,
      longbench(("narrativeqa",), LIMIT, samples=1),
      prose(1024, 1),
    ),
  ),
  "E2.8": (
    Analysis(
      "heads",
      head_statistics.measure,
      longbench(("narrativeqa",), LIMIT, samples=4),
      prose(1024, 2),
    ),
  ),
  "E2.9": (
    Analysis(
      "lengths",
      prompt_lengths.measure,
      Setup("longbench", ALL_21, (), None),
      Setup("ruler", (*NEEDLES, "vt", "cwe", "fwe"), (2048,), 2),
    ),
  ),
  "E2.10": (
    Analysis(
      "costs",
      costs.measure,
      at_random(2048, 4096, 6144, 8192),
      at_random(2048, 4096, 6144, 8192),
      model=False,
    ),
  ),
  "E2.11": (
    Analysis(
      "cosines",
      key_cosines.measure,
      longbench(("narrativeqa",), LIMIT, samples=1),
      prose(256, 1),
    ),
  ),
  "E2.12": (
    Analysis(
      "queries",
      query_plane.measure,
      longbench(("narrativeqa",), LIMIT, samples=1),
      prose(1024, 1),
    ),
  ),
  "E2.13": (
    Analysis("texts", long_answers.measure, prose(512, 8), prose(512, 8)),
  ),
}
