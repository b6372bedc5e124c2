"""The order in which the reference model learns: stages, mixtures and gates.

Retrieval starts on short rows with a small gap between key and value and only
then moves to RULER's prompts and to longer rows; each stage must pass its gate
or is extended. The model card says what came of it.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of training.

  Attributes:
    name: shown in the log.
    length: tokens per row; also the most positions the model has then seen.
    batch: rows per step.
    micro: rows per forward and backward pass; divides `batch`.
    steps: optimiser steps.
    slots: scored places per row.
    mixture: shares of the lessons.
    rates: learning rate at the first and the last step, geometric between.
    shortest: rows have a length drawn from this share of `length` up to it.
    gate: least accuracy on first symbols per lesson.
    whole_gate: least share of whole answers that are right, per lesson.
    layers: the decoder is made this deep first, and its optimiser starts anew
      with a warm-up; None goes on with what there is.
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
    """The learning rate of a step: geometric from `rates[0]` to `rates[1]`.

    Steps beyond `steps` are extensions of half as many; each runs through the
    second half of the stage's rates again.
    """
    done = step / self.steps
    if step >= self.steps:
      half = self.steps // 2
      done = 0.5 + 0.5 * ((step - self.steps) % half) / half
    first, last = self.rates
    return first * (last / first) ** done

  def passed(
    self, first: Mapping[str, float], whole: Mapping[str, float]
  ) -> bool:
    """Whether these accuracies, by lesson, pass both gates."""
    return all(
      measured[name] >= least
      for measured, gate in ((first, self.gate), (whole, self.whole_gate))
      for name, least in gate.items()
    )


_SEED = {"gapped": 0.7, "pairs": 0.3}
_SHORT_NEEDLES = {"pairs": 0.06, "gapped": 0.30, "short": 0.52, "copy": 0.12}
_NEEDLES = {
  "pairs": 0.04,
  "gapped": 0.20,
  "short": 0.20,
  "short_lists": 0.10,
  "prefix": 0.34,
  "copy": 0.12,
}
_PROMPTS = {
  "gapped": 0.08,
  "short": 0.10,
  "short_lists": 0.10,
  "prefix": 0.17,
  "full": 0.24,
  "copy": 0.09,
  "uuid_value": 0.07,
  "single_essay": 0.04,
  "multivalue": 0.03,
  "multiquery": 0.08,
}
_LISTS = {
  "listed_pairs": 0.25,
  "short_queries": 0.28,
  "short_values": 0.17,
  "short": 0.05,
  "prefix": 0.08,
  "full": 0.09,
  "copy": 0.08,
}
_ANSWERS = {
  "prefix_queries": 0.28,
  "multiquery": 0.12,
  "prefix_values": 0.22,
  "multivalue": 0.12,
  "prefix": 0.05,
  "full": 0.08,
  "uuid_value": 0.05,
  "single_essay": 0.03,
  "copy": 0.05,
}
_LENGTH = {
  "prefix_queries": 0.02,
  "prefix_values": 0.07,
  "prefix": 0.04,
  "full": 0.10,
  "multikey": 0.09,
  "multikey_essay": 0.06,
  "single_essay": 0.04,
  "single_noise": 0.03,
  "uuid_value": 0.08,
  "uuid_key": 0.12,
  "passkey": 0.08,
  "copy": 0.03,
  "multivalue": 0.16,
  "multiquery": 0.08,
}
_VALUES = {
  "four_values": 0.32,
  "prefix_four_values": 0.24,
  "prefix_queries": 0.04,
  "multiquery": 0.07,
  "prefix": 0.03,
  "full": 0.08,
  "multikey_essay": 0.05,
  "single_essay": 0.03,
  "uuid_value": 0.09,
  "copy": 0.05,
}
_LONG = {
  "prefix_four_values": 0.05,
  "four_values": 0.13,
  "multivalue": 0.04,
  "prefix": 0.04,
  "full": 0.10,
  "multikey": 0.09,
  "multikey_essay": 0.06,
  "single_essay": 0.04,
  "single_noise": 0.03,
  "uuid_value": 0.08,
  "uuid_key": 0.13,
  "passkey": 0.08,
  "copy": 0.03,
  "multiquery": 0.10,
}
_LONG_VALUES = {
  "four_values": 0.30,
  "prefix_four_values": 0.10,
  "multiquery": 0.08,
  "full": 0.04,
  "multikey": 0.08,
  "multikey_essay": 0.03,
  "uuid_value": 0.08,
  "uuid_key": 0.15,
  "passkey": 0.10,
  "copy": 0.04,
}
_LONG_NEEDLES = {
  "four_values": 0.08,
  "prefix": 0.06,
  "full": 0.16,
  "multikey": 0.14,
  "multikey_essay": 0.07,
  "single_essay": 0.04,
  "single_noise": 0.04,
  "uuid_value": 0.10,
  "uuid_key": 0.14,
  "passkey": 0.06,
  "copy": 0.02,
  "multiquery": 0.09,
}
_LONG_STRINGS = {
  "recall": 0.24,
  "uuid_value": 0.12,
  "uuid_key": 0.20,
  "passkey": 0.12,
  "multikey": 0.08,
  "multikey_essay": 0.04,
  "single_essay": 0.02,
  "single_noise": 0.02,
  "full": 0.06,
  "multiquery": 0.10,
}
_LONG_ALL = {
  "recall": 0.17,
  "multiquery": 0.18,
  "uuid_key": 0.20,
  "uuid_value": 0.10,
  "passkey": 0.07,
  "multikey": 0.12,
  "full": 0.06,
  "multikey_essay": 0.02,
  "single_essay": 0.02,
  "single_noise": 0.02,
  "four_values": 0.04,
}
_DEEPER = {
  "recall": 0.20,
  "copy": 0.04,
  "four_values": 0.20,
  "prefix_four_values": 0.10,
  "multivalue": 0.06,
  "multiquery": 0.08,
  "multikey": 0.08,
  "uuid_key": 0.12,
  "uuid_value": 0.06,
  "passkey": 0.06,
}
_DEEPER_ALL = {
  "recall": 0.18,
  "four_values": 0.16,
  "multivalue": 0.04,
  "multiquery": 0.12,
  "multikey": 0.12,
  "multikey_essay": 0.02,
  "uuid_key": 0.18,
  "uuid_value": 0.06,
  "passkey": 0.06,
  "full": 0.04,
  "single_essay": 0.01,
  "single_noise": 0.01,
}
_MANY = {
  "recall": 0.10,
  "many_keys": 0.24,
  "multikey": 0.06,
  "many_uuids": 0.20,
  "passkey": 0.08,
  "many_values": 0.10,
  "four_values": 0.06,
  "many_queries": 0.10,
  "full": 0.04,
  "single_essay": 0.01,
  "single_noise": 0.01,
}
_LAST = {
  "recall": 0.16,
  "many_keys": 0.26,
  "multikey": 0.06,
  "many_uuids": 0.28,
  "passkey": 0.04,
  "four_values": 0.10,
  "many_queries": 0.06,
  "full": 0.02,
  "single_essay": 0.01,
  "single_noise": 0.01,
}
_STRINGS = {
  "recall": 0.12,
  "many_keys": 0.28,
  "multikey": 0.04,
  "many_uuids": 0.32,
  "passkey": 0.06,
  "four_values": 0.08,
  "many_queries": 0.06,
  "full": 0.02,
  "single_essay": 0.01,
  "single_noise": 0.01,
}
_GATE = {
  "multikey": 0.97,
  "single_essay": 0.97,
  "uuid_value": 0.97,
  "uuid_key": 0.95,
}

STAGES: tuple[Stage, ...] = (
  Stage("seed-16", 16, 128, 32, 400, 12, _SEED, (2e-3, 2e-3)),
  Stage(
    "seed-32",
    *(32, 64, 16, 400, 20),
    _SEED,
    (2e-3, 2e-3),
    gate={"gapped": 0.7},
  ),
  Stage(
    "gap", *(64, 32, 8, 500, 40), _SEED, (2e-3, 2e-3), gate={"gapped": 0.75}
  ),
  Stage("needles-64", *(64, 32, 8, 400, 48), _SHORT_NEEDLES, (2e-3, 2e-3)),
  Stage(
    "needles-128",
    *(128, 32, 4, 700, 72),
    _NEEDLES,
    (2e-3, 1.6e-3),
    gate={"short": 0.95},
  ),
  Stage(
    "prompts",
    *(256, 16, 2, 1000, 128),
    _PROMPTS,
    (1.6e-3, 1.2e-3),
    gate={"full": 0.97},
  ),
  Stage(
    "lists",
    *(128, 32, 4, 800, 96),
    _LISTS,
    (1.4e-3, 1.2e-3),
    gate={"short_queries": 0.9, "short_values": 0.9},
  ),
  Stage(
    "answers",
    *(256, 16, 2, 800, 160),
    _ANSWERS,
    (1.3e-3, 1.1e-3),
    gate={"multiquery": 0.9},
  ),
  Stage(
    "length-512",
    *(512, 8, 1, 1000, 160),
    _LENGTH,
    (1.2e-3, 8e-4),
    gate=_GATE,
  ),
  Stage(
    "values",
    *(256, 16, 2, 600, 128),
    _VALUES,
    (1e-3, 8e-4),
    gate={"four_values": 0.9},
  ),
  Stage(
    "length-1024",
    *(1024, 4, 1, 900, 224),
    _LONG,
    (8e-4, 4e-4),
    shortest=0.5,
    gate=_GATE,
  ),
  Stage(
    "values-1024",
    *(1024, 4, 1, 400, 224),
    _LONG_VALUES,
    (5e-4, 3e-4),
    shortest=0.4,
  ),
  Stage(
    "length-2048",
    *(2048, 2, 1, 700, 320),
    _LONG_NEEDLES,
    (6e-4, 3e-4),
    shortest=0.4,
  ),
  Stage(
    "strings-2048",
    *(2048, 2, 1, 700, 320),
    _LONG_STRINGS,
    (6e-4, 2e-4),
    shortest=0.5,
    gate=_GATE,
  ),
  Stage(
    "all-2048",
    *(2048, 2, 1, 1400, 320),
    _LONG_ALL,
    (6e-4, 2e-5),
    shortest=0.5,
  ),
  Stage(
    "deeper-512",
    *(512, 8, 1, 700, 224),
    _DEEPER,
    (1e-3, 7e-4),
    shortest=0.5,
    layers=6,
  ),
  Stage(
    "deeper-1024",
    *(1024, 4, 1, 800, 256),
    _DEEPER_ALL,
    (8e-4, 5e-4),
    shortest=0.5,
  ),
  Stage(
    "deeper-2048",
    *(2048, 4, 1, 400, 320),
    _DEEPER_ALL,
    (6e-4, 9.72e-5),
    shortest=0.5,
  ),
  Stage(
    "many-2048",
    *(2048, 4, 1, 700, 512),
    _MANY,
    (4e-4, 1e-5),
    shortest=0.5,
  ),
  Stage(
    "last-2048",
    *(2048, 4, 1, 600, 512),
    _LAST,
    (5e-4, 1e-5),
    shortest=0.7,
  ),
  Stage(
    "longer-2048",
    *(2048, 4, 1, 600, 512),
    _STRINGS,
    (6e-4, 3e-4),
    shortest=0.7,
    layers=6,
  ),
  Stage(
    "end-2048",
    *(2048, 4, 1, 400, 512),
    _STRINGS,
    (3e-4, 1e-5),
    shortest=0.7,
  ),
)
