"""Flags for the texts of RULER's tasks, and their content."""

import functools
import pathlib

from absl import flags

from kvjax.experiments.benchmarks import hub, ruler

NAMES = ("essay", "words", "squad", "hotpotqa")

_ESSAY = flags.DEFINE_string(
  "essay", None, "Text, or folder of texts, to hide RULER's needles in."
)
_WORDS = flags.DEFINE_string(
  "words", None, "File of words for RULER's cwe, or wonderwords for its lists."
)
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
def texts() -> ruler.Texts:
  """Reads the texts that the flags name, once.

  Raises:
    InputError: see `ruler.Texts.read`.
  """
  essay = None if _ESSAY.value is None else pathlib.Path(_ESSAY.value)
  squad, hotpotqa = map(_questions, (_SQUAD, _HOTPOTQA))
  return ruler.Texts.read(essay, _WORDS.value, squad, hotpotqa)


def _questions(flag: flags.FlagHolder[str | None]) -> pathlib.Path | None:
  return None if flag.value is None else hub.resolve(flag.value, "*validation*")
