"""The experiments of ProtoKV (ICLR 2026, OpenReview kXhPkDaFbJ).

The paper was not available. The sources are a review note, the public reviews
and the authors' notebooks. Window, sign and truncation are this project's
choices, and all four forms of a cluster's score are reported.
"""

from kvjax.experiments.papers.analyses import deviations, stages
from kvjax.experiments.papers.data_model import Analysis, Parts
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
  per_query_head,
)
from kvjax.experiments.papers.shared import at_random, longbench, prose

PARTS: Parts = {
  "E1.1": (E1_1, per_query_head(E1_1)),
  "E1.2": (E1_2, per_query_head(E1_2)),
  "E1.3": (E1_3, per_query_head(E1_3)),
  "E1.4": (E1_4,),
  "E1.5": (E1_5,),
  "E1.6": (E1_6,),
  "E1.7": (E1_7,),
  "E1.8": (
    Analysis(
      "stages", stages.measure, at_random(32768), at_random(8192), model=False
    ),
  ),
  "E1.9": (
    Analysis(
      "deviations",
      deviations.measure,
      longbench(("narrativeqa",), LIMIT, samples=4),
      prose(1024, 2),
    ),
    E1_9,
  ),
}
