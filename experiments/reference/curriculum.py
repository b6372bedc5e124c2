"""The curriculum of the bundled model: stages, mixtures and gates.

Retrieval starts on short rows with a small gap between key and value, and then
moves to RULER's prompts and to longer rows. A stage that misses its gate is
extended. The model card reports the results.
"""

import dataclasses
from collections.abc import Mapping

from kvjax.experiments.reference import mixtures


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of training.

  Attributes:
    name: name in the log.
    length: tokens per row, and the largest position trained on.
    batch: rows per step.
    micro: rows per forward and backward pass; divides `batch`.
    steps: optimizer steps.
    slots: scored places per row.
    mixture: shares of the lessons.
    rates: learning rate of the first and last step, geometric in between.
    shortest: the minimum length of a row, as a share of `length`.
    gate: minimum accuracy on first symbols per lesson.
    whole_gate: minimum share of correct complete answers per lesson.
    layers: deepens the decoder to this number of layers first and restarts the
      optimizer with a warm-up; None continues with the current decoder.
  """

  name: str
  length: int
  batch: int
  micro: int
  steps: int
  slots: int
  mixture: Mapping[str, float]
  rates: tuple[float, float]
  shortest: float = 1.0
  gate: Mapping[str, float] = dataclasses.field(default_factory=dict)
  whole_gate: Mapping[str, float] = dataclasses.field(default_factory=dict)
  layers: int | None = None

  def rate(self, step: int) -> float:
    """Computes the learning rate, geometric from `rates[0]` to `rates[1]`.

    Steps beyond `steps` belong to extensions of half as many steps. Each
    repeats the rates of the second half of the stage.
    """
    done = step / self.steps
    if step >= self.steps:
      half = self.steps // 2
      done = 0.5 + 0.5 * ((step - self.steps) % half) / half
    first, last = self.rates
    return first * (last / first) ** done

  def passed(
    self, first: Mapping[str, float], complete: Mapping[str, float]
  ) -> bool:
    """Returns whether accuracies by lesson pass both gates."""
    return all(
      measured[name] >= least
      for measured, gate in ((first, self.gate), (complete, self.whole_gate))
      for name, least in gate.items()
    )


_GATE = {
  "multikey": 0.97,
  "single_essay": 0.97,
  "uuid_value": 0.97,
  "uuid_key": 0.95,
}

STAGES: tuple[Stage, ...] = (
  Stage("seed-16", 16, 128, 32, 400, 12, mixtures.SEED, (2e-3, 2e-3)),
  Stage(
    "seed-32",
    *(32, 64, 16, 400, 20),
    mixtures.SEED,
    (2e-3, 2e-3),
    gate={"gapped": 0.7},
  ),
  Stage(
    "gap",
    *(64, 32, 8, 500, 40),
    mixtures.SEED,
    (2e-3, 2e-3),
    gate={"gapped": 0.75},
  ),
  Stage(
    "needles-64", *(64, 32, 8, 400, 48), mixtures.SHORT_NEEDLES, (2e-3, 2e-3)
  ),
  Stage(
    "needles-128",
    *(128, 32, 4, 700, 72),
    mixtures.NEEDLES,
    (2e-3, 1.6e-3),
    gate={"short": 0.95},
  ),
  Stage(
    "prompts",
    *(256, 16, 2, 1000, 128),
    mixtures.PROMPTS,
    (1.6e-3, 1.2e-3),
    gate={"full": 0.97},
  ),
  Stage(
    "lists",
    *(128, 32, 4, 800, 96),
    mixtures.LISTS,
    (1.4e-3, 1.2e-3),
    gate={"short_queries": 0.9, "short_values": 0.9},
  ),
  Stage(
    "answers",
    *(256, 16, 2, 800, 160),
    mixtures.ANSWERS,
    (1.3e-3, 1.1e-3),
    gate={"multiquery": 0.9},
  ),
  Stage(
    "length-512",
    *(512, 8, 1, 1000, 160),
    mixtures.LENGTH,
    (1.2e-3, 8e-4),
    gate=_GATE,
  ),
  Stage(
    "values",
    *(256, 16, 2, 600, 128),
    mixtures.VALUES,
    (1e-3, 8e-4),
    gate={"four_values": 0.9},
  ),
  Stage(
    "length-1024",
    *(1024, 4, 1, 900, 224),
    mixtures.LONG,
    (8e-4, 4e-4),
    shortest=0.5,
    gate=_GATE,
  ),
  Stage(
    "values-1024",
    *(1024, 4, 1, 400, 224),
    mixtures.LONG_VALUES,
    (5e-4, 3e-4),
    shortest=0.4,
  ),
  Stage(
    "length-2048",
    *(2048, 2, 1, 700, 320),
    mixtures.LONG_NEEDLES,
    (6e-4, 3e-4),
    shortest=0.4,
  ),
  Stage(
    "strings-2048",
    *(2048, 2, 1, 700, 320),
    mixtures.LONG_STRINGS,
    (6e-4, 2e-4),
    shortest=0.5,
    gate=_GATE,
  ),
  Stage(
    "all-2048",
    *(2048, 2, 1, 1400, 320),
    mixtures.LONG_ALL,
    (6e-4, 2e-5),
    shortest=0.5,
  ),
  Stage(
    "deeper-512",
    *(512, 8, 1, 700, 224),
    mixtures.DEEPER,
    (1e-3, 7e-4),
    shortest=0.5,
    layers=6,
  ),
  Stage(
    "deeper-1024",
    *(1024, 4, 1, 800, 256),
    mixtures.DEEPER_ALL,
    (8e-4, 5e-4),
    shortest=0.5,
  ),
  Stage(
    "deeper-2048",
    *(2048, 4, 1, 400, 320),
    mixtures.DEEPER_ALL,
    (6e-4, 9.72e-5),
    shortest=0.5,
  ),
  Stage(
    "many-2048",
    *(2048, 4, 1, 700, 512),
    mixtures.MANY,
    (4e-4, 1e-5),
    shortest=0.5,
  ),
  Stage(
    "last-2048",
    *(2048, 4, 1, 600, 512),
    mixtures.LAST,
    (5e-4, 1e-5),
    shortest=0.7,
  ),
  Stage(
    "longer-2048",
    *(2048, 4, 1, 600, 512),
    mixtures.STRINGS,
    (6e-4, 3e-4),
    shortest=0.7,
    layers=6,
  ),
  Stage(
    "end-2048",
    *(2048, 4, 1, 400, 512),
    mixtures.STRINGS,
    (3e-4, 1e-5),
    shortest=0.7,
  ),
)
