"""RULER (Hsieh et al. 2024): its 13 tasks, generated at any length.

Needles, variables and words need no external data. The questions of `qa_1` and
`qa_2` come from the user's SQuAD and HotpotQA files; essays and words can also
come from the user. `Choice.data` records the sources.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import essays
from kvjax.experiments.benchmarks.ruler import corpora, word_lists
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import (
  common_words,
  frequent_words,
  niah,
  prose,
  question_answering,
  suite,
  variable_tracking,
)
from kvjax.experiments.tasks.fitting import Count, TooShortError
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords

SQUAD, HOTPOTQA = "qa_1", "qa_2"
# In RULER's order.
TASKS = (
  *niah.TASKS,
  variable_tracking.NAME,
  common_words.NAME,
  frequent_words.NAME,
  SQUAD,
  HOTPOTQA,
)

_FILES = {
  SQUAD: "SQuAD's dev-v2.0.json by --squad=FILE",
  HOTPOTQA: "HotpotQA's hotpot_dev_distractor_v1.json by --hotpotqa=FILE",
}
# The tasks that use each of `Texts.origins`.
_MADE_OF = {
  "essay": [
    name for name, task in niah.TASKS.items() if task.haystack == "essay"
  ],
  "words": [common_words.NAME],
  "keys": [name for name, task in niah.TASKS.items() if task.keys == "words"],
  SQUAD: [SQUAD],
  HOTPOTQA: [HOTPOTQA],
}


@dataclasses.dataclass(frozen=True)
class Texts:
  """The texts of the tasks.

  Attributes:
    essay: the prose around needles.
    words: the word list of common words.
    key_words: the words of needles' keys.
    corpora: questions and documents by task.
    origins: sources of "essay", "words", "keys" (unless they are built in) and
      each of `corpora`.
  """

  essay: prose.Essay
  words: Sequence[str]
  key_words: KeyWords
  corpora: Mapping[str, question_answering.Corpus]
  origins: Mapping[str, str]

  @classmethod
  def read(
    cls,
    essay: pathlib.Path | None = None,
    words: str | None = None,
    squad: pathlib.Path | None = None,
    hotpotqa: pathlib.Path | None = None,
  ) -> "Texts":
    """Reads the user's files, with built-in texts as defaults.

    Args:
      essay: see `essays.read`, or `essays.TRAINING`; the default is the
        held-out chapters of CPython's documentation.
      words: see `word_lists.read`; the default is words of the same and of this
        project. Keys of needles are of this project's words unless it is
        `word_lists.PACKAGE`.
      squad: see `corpora.squad`; no default.
      hotpotqa: see `corpora.hotpotqa`; no default.

    Raises:
      InputError: a file cannot be read or has another format.
    """
    origins = {"essay": prose.SOURCE, "words": f"kvjax and {prose.SOURCE}"}
    sentences: prose.Essay = "heldout"
    if essay is not None and essays.is_training(essay):
      sentences = "train"
      origins["essay"] = f"{prose.SOURCE}, chapters of training"
    elif essay is not None:
      sentences = essays.read(essay)
      origins["essay"] = _origin(essay, sentences)
    pool, key_words = common_words.built_in_words(), BUILT_IN
    if words == word_lists.PACKAGE:
      key_words = word_lists.key_words()
      pairs = (*key_words.adjectives, *key_words.nouns)
      origins["keys"] = _origin(pathlib.Path(words), pairs)
    if words is not None:
      pool = word_lists.read(words)
      origins["words"] = _origin(pathlib.Path(words), pool)
    question_corpora = {}
    readers = [
      (SQUAD, squad, corpora.squad),
      (HOTPOTQA, hotpotqa, corpora.hotpotqa),
    ]
    for task, path, read in readers:
      if path is not None:
        question_corpora[task] = read(path)
        origins[task] = _origin(path, question_corpora[task].documents)
    return cls(sentences, pool, key_words, question_corpora, origins)

  @property
  def needle_origins(self) -> dict[str, str]:
    """Sources of the prose around needles and, if not built in, their keys."""
    return {n: self.origins[n] for n in ("essay", "keys") if n in self.origins}


class Choice(NamedTuple):
  """The requested tasks that can run.

  Attributes:
    tasks: tasks that can run.
    notes: one line for each task that cannot.
    data: sources of the texts of the tasks that can.
  """

  tasks: tuple[str, ...]
  notes: list[str]
  data: dict[str, str]


def choose(tasks: Sequence[str], texts: Texts) -> Choice:
  """Drops the tasks whose file is missing.

  Raises:
    InputError: a name is no task, or no task remains.
  """
  suite.check_tasks(tasks, TASKS)
  missing = [t for t in tasks if t in _FILES and t not in texts.corpora]
  chosen = tuple(dict.fromkeys(t for t in tasks if t not in missing))
  if not chosen:
    files = " and ".join(_FILES[task] for task in missing)
    raise InputError(f"{' and '.join(missing)} cannot be asked: give {files}.")
  data = {
    name: origin
    for name, origin in texts.origins.items()
    if not set(_MADE_OF[name]).isdisjoint(chosen)
  }
  notes = [f"{task} is left out: give {_FILES[task]}." for task in missing]
  return Choice(chosen, notes, data)


def samples(
  tasks: Sequence[str],
  lengths: Sequence[int],
  number: int,
  seed: int,
  count: Count,
  texts: Texts,
  on_draw: OnDraw = ignore,
) -> dict[Part, list[Sample]]:
  """Draws samples of each task at each length.

  A sample depends only on its task, length and number, and on seed, texts and
  tokenizer. Common words are left out at lengths for which the texts have too
  few words.

  Args:
    tasks: tasks of `choose`.
    lengths: maximum tokens of prompt and answer.
    number: samples per task and length.
    seed: seed of all samples.
    count: counts the tokens of a text, without special tokens.
    texts: texts of the samples.
    on_draw: called for every sample.

  Raises:
    InputError: a length, or a text, is too short for a task.
  """
  by_part: dict[Part, list[Sample]] = {}
  for length in sorted(lengths):
    minimum_lengths: dict[str, int] = {}
    for task in tasks:
      drawn = by_part[Part(task, length)] = []
      for index in range(number):
        try:
          drawn.append(draw(task, index, seed, length, count, texts))
          on_draw(task, 1)
        except TooShortError as error:
          minimum_lengths[task] = max(error.least, minimum_lengths.get(task, 0))
        except common_words.TooFewWordsError:
          by_part.pop(Part(task, length), None)
          break
    if minimum_lengths:
      needs = ", ".join(
        f"{task} {tokens}" for task, tokens in minimum_lengths.items()
      )
      raise InputError(
        f"A length of {length} tokens is too short; these tasks need at least: "
        f"{needs}."
      )
  return by_part


def missing(
  tasks: Sequence[str], lengths: Sequence[int], by_part: Mapping[Part, object]
) -> list[str]:
  """Lists tasks without samples, or without samples at some lengths."""
  missing_tasks: list[str] = []
  for task in tasks:
    short = [length for length in lengths if Part(task, length) not in by_part]
    if len(short) == len(lengths):
      missing_tasks.append(task)
    else:
      missing_tasks += [f"{task} at {length} tokens" for length in short]
  return missing_tasks


def draw(
  task: str, number: int, seed: int, length: int, count: Count, texts: Texts
) -> Sample:
  """Draws one sample; see `samples`.

  Raises:
    TooShortError: `length` is too short for the sample.
    InputError: the texts are too short.
  """
  if task in niah.TASKS:
    return suite.draw(
      task, number, seed, length, count, texts.essay, texts.key_words
    )
  rng = suite.draws(task, number, seed)
  if task == variable_tracking.NAME:
    return variable_tracking.sample(rng, length, count)
  if task == common_words.NAME:
    return common_words.sample(rng, length, count, texts.words)
  if task == frequent_words.NAME:
    return frequent_words.sample(rng, length, count)
  corpus = texts.corpora[task]
  return question_answering.sample(task, corpus, number, rng, length, count)


def _origin(path: pathlib.Path, texts: Iterable[str]) -> str:
  """Names a file or folder, with a digest of its content."""
  digest = hashlib.sha256()
  for text in texts:
    digest.update(text.encode() + b"\n")
  return f"{path.name} (sha256 {digest.hexdigest()[:12]})"
