"""The experiments of CTkvr (arXiv 2512.15550)."""

from kvjax.experiments.papers.analyses import (
  neighbors,
  recalled_lists,
  retrieval_modules,
  throughput,
)
from kvjax.experiments.papers.ctkvr_setups import (
  E4_1,
  E4_2,
  E4_3,
  E4_7_PLACES,
  E4_7_SWEEPS,
  E4_8,
  E4_9,
)
from kvjax.experiments.papers.data_model import Analysis, Parts, Program
from kvjax.experiments.papers.shared import (
  FOUR_NEEDLES,
  at_random,
  prose,
  ruler,
)

PARTS: Parts = {
  "E4.1": (E4_1,),
  "E4.2": (E4_2,),
  "E4.3": E4_3,
  "E4.5": (
    Analysis(
      "throughput", throughput.measure, at_random(98304), at_random(2048)
    ),
    Analysis(
      "modules", retrieval_modules.measure, at_random(98304), at_random(2048)
    ),
  ),
  "E4.6": (Program("indexes", "index_construction", takes={"seed": "seed"}),),
  "E4.7": (E4_7_PLACES, E4_7_SWEEPS),
  "E4.8": (E4_8,),
  "E4.9": (E4_9,),
  "E4.10": (
    Analysis(
      "queries",
      neighbors.measure,
      ruler((16384,), 1, FOUR_NEEDLES),
      prose(1024, 2),
    ),
  ),
  "E4.11": (
    Analysis(
      "lists",
      recalled_lists.measure,
      ruler((16384,), 1, FOUR_NEEDLES),
      prose(1024, 2),
    ),
  ),
}
