"""Flags for the texts of RULER's tasks, and their content."""

import functools
import pathlib

from absl import flags

from kvjax.experiments.benchmarks import ruler

NAMES = ("essay", "words", "squad", "hotpotqa")

_ESSAY = flags.DEFINE_string(
  "essay", None, "Text, or folder of texts, to hide RULER's needles in."
)
_WORDS = flags.DEFINE_string(
  "words", None, "File of words for RULER's cwe, or wonderwords for its lists."
)
_SQUAD = flags.DEFINE_string("squad", None, "SQuAD's dev-v2.0.json, for qa_1.")
_HOTPOTQA = flags.DEFINE_string(
  "hotpotqa", None, "HotpotQA's hotpot_dev_distractor_v1.json, for qa_2."
)


@functools.cache
def texts() -> ruler.Texts:
  """Reads the texts that the flags name, once.

  Raises:
    InputError: see `ruler.Texts.read`.
  """
  essay, squad, hotpotqa = map(_path, (_ESSAY, _SQUAD, _HOTPOTQA))
  return ruler.Texts.read(essay, _WORDS.value, squad, hotpotqa)


def _path(flag: flags.FlagHolder[str | None]) -> pathlib.Path | None:
  return None if flag.value is None else pathlib.Path(flag.value)
