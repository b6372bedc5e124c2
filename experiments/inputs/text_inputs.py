"""Flags for the texts of RULER's tasks, and their content."""

import functools
import pathlib

from absl import flags

from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.inputs import essay_inputs

flags.adopt_module_key_flags(essay_inputs)

CORPORA = ("squad", "hotpotqa")
NAMES = (*essay_inputs.NAMES, *CORPORA)

_SQUAD = flags.DEFINE_string(
  "squad",
  None,
  "SQuAD's dev-v2.0.json, for qa_1, or rajpurkar/squad_v2 of the hub.",
)
_HOTPOTQA = flags.DEFINE_string(
  "hotpotqa",
  None,
  "HotpotQA's hotpot_dev_distractor_v1.json, for qa_2, or hotpotqa/hotpot_qa "
  "of the hub.",
)


@functools.cache
def texts() -> generator.Texts:
  """Reads the texts that the flags name, once.

  Raises:
    InputError: see `generator.Texts.read`.
  """
  squad, hotpotqa = map(_questions, (_SQUAD, _HOTPOTQA))
  return generator.Texts.read(
    essay_inputs.essay_path(), essay_inputs.WORDS.value, squad, hotpotqa
  )


def _questions(flag: flags.FlagHolder[str | None]) -> pathlib.Path | None:
  return None if flag.value is None else hub.resolve(flag.value, "*validation*")
