"""The experiments of Compactor (Chari and Van Durme, arXiv 2507.08143 v1)."""

from kvjax.experiments.papers import compactor_programs as programs
from kvjax.experiments.papers.analyses import latency, unmasked_attention
from kvjax.experiments.papers.compactor_setups import E3_1, E3_2, E3_3, E3_4
from kvjax.experiments.papers.data_model import Analysis, Parts
from kvjax.experiments.papers.shared import at_random, prose, ruler

PARTS: Parts = {
  "E3.1": (E3_1,),
  "E3.2": (E3_2,),
  "E3.3": (E3_3,),
  "E3.4": (E3_4,),
  "E3.5": (programs.CURVES,),
  "E3.6": programs.ZERO_SHOT,
  "E3.7": programs.FINETUNED,
  "E3.8": (
    Analysis(
      "latency",
      latency.scorers,
      at_random(10_000, 100_000, 1_000_000),
      at_random(1024, 2048, 4096),
      model=False,
    ),
  ),
  "E3.9": (
    Analysis(
      "attention",
      unmasked_attention.measure,
      ruler((4096,), 1, ("niah_single_2",)),
      prose(512, 1),
    ),
  ),
}
