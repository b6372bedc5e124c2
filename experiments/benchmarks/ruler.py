"""RULER (Hsieh et al. 2024): its 13 tasks, made here at any length.

Needles, variables and words need nothing from elsewhere. The questions of
`qa_1` and `qa_2` are SQuAD's and HotpotQA's, which the user has; essays and
words can be the user's too. `Choice.data` says where they come from.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.experiments import suite
from kvjax.experiments.benchmarks import corpora, essays, word_lists
from kvjax.experiments.results import Part
from kvjax.experiments.tasks import (
  common_words,
  frequent_words,
  needles,
  prose,
  question_answering,
  variable_tracking,
)
from kvjax.experiments.tasks.fitting import Count, TooShortError
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore

SQUAD, HOTPOTQA = "qa_1", "qa_2"
# In RULER's order.
TASKS = (
  *needles.TASKS,
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
# The tasks that each of `Texts.origins` tells about.
_MADE_OF = {
  "essay": [
    name for name, task in needles.TASKS.items() if task.haystack == "essay"
  ],
  "words": [common_words.NAME],
  SQUAD: [SQUAD],
  HOTPOTQA: [HOTPOTQA],
}


@dataclasses.dataclass(frozen=True)
class Texts:
  """What the tasks are made of.

  Attributes:
    essay: the prose around needles.
    words: what common words are drawn from.
    corpora: questions and documents, by the task that asks them.
    origins: where they come from: of "essay", "words" and each of `corpora`.
  """

  essay: prose.Essay
  words: Sequence[str]
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
    """Reads the user's files; what is not given ships with this program.

    Args:
      essay: see `essays.read`; by default prose of CPython's documentation.
      words: see `word_lists.read`; by default words of the same and of this
        project.
      squad: see `corpora.squad`; by default there is none.
      hotpotqa: see `corpora.hotpotqa`; by default there is none.

    Raises:
      InputError: a file cannot be read or holds something else.
    """
    origins = {"essay": prose.SOURCE, "words": f"kvjax and {prose.SOURCE}"}
    sentences: prose.Essay = "heldout"
    if essay is not None:
      sentences = essays.read(essay)
      origins["essay"] = _origin(essay, sentences)
    pool = common_words.built_in_words()
    if words is not None:
      pool = word_lists.read(words)
      origins["words"] = _origin(pathlib.Path(words), pool)
    asked = {}
    readers = [
      (SQUAD, squad, corpora.squad),
      (HOTPOTQA, hotpotqa, corpora.hotpotqa),
    ]
    for task, path, read in readers:
      if path is not None:
        asked[task] = read(path)
        origins[task] = _origin(path, asked[task].documents)
    return cls(sentences, pool, asked, origins)


class Choice(NamedTuple):
  """What is asked of what the user wants.

  Attributes:
    tasks: that can be asked.
    notes: a line for each that cannot.
    data: where the texts of those that can come from.
  """

  tasks: tuple[str, ...]
  notes: list[str]
  data: dict[str, str]


def choose(tasks: Sequence[str], texts: Texts) -> Choice:
  """Leaves out the tasks whose file is missing.

  Args:
    tasks: of `TASKS`.
    texts: what there is.

  Raises:
    InputError: a name is no task, or nothing is left.
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
  """So many samples of each task at each length.

  A sample depends on its task, length and number, on seed, texts and
  tokenizer, and on nothing else. Common words are left out at lengths for which
  the texts have too few.

  Args:
    tasks: as `choose` gives them.
    lengths: bounds on the tokens of prompt and answer.
    number: samples per task and length.
    seed: of all samples.
    count: number of tokens of a text, without special tokens.
    texts: what the samples are made of.
    on_draw: told of every sample.

  Raises:
    InputError: a length is too short for a task, or the texts are.
  """
  found: dict[Part, list[Sample]] = {}
  for length in sorted(lengths):
    least: dict[str, int] = {}
    for task in tasks:
      drawn = found[Part(task, length)] = []
      for index in range(number):
        try:
          drawn.append(draw(task, index, seed, length, count, texts))
          on_draw(task, 1)
        except TooShortError as error:
          least[task] = max(error.least, least.get(task, 0))
        except common_words.TooFewWordsError:
          found.pop(Part(task, length), None)
          break
    if least:
      needs = ", ".join(f"{task} {tokens}" for task, tokens in least.items())
      raise InputError(
        f"A length of {length} tokens is too short; these tasks need at least: "
        f"{needs}."
      )
  return found


def missing(
  tasks: Sequence[str], lengths: Sequence[int], found: Mapping[Part, object]
) -> list[str]:
  """Which tasks there are no samples of, or not at some of the lengths."""
  named: list[str] = []
  for task in tasks:
    short = [length for length in lengths if Part(task, length) not in found]
    if len(short) == len(lengths):
      named.append(task)
    else:
      named += [f"{task} at {length} tokens" for length in short]
  return named


def draw(
  task: str, number: int, seed: int, length: int, count: Count, texts: Texts
) -> Sample:
  """One sample; see `samples`.

  Raises:
    TooShortError: `length` is too short for the sample.
    InputError: the texts are.
  """
  if task in needles.TASKS:
    return suite.draw(task, number, seed, length, count, texts.essay)
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
  """Name of a file or folder, and a digest of what was read from it."""
  digest = hashlib.sha256()
  for text in texts:
    digest.update(text.encode() + b"\n")
  return f"{path.name} (sha256 {digest.hexdigest()[:12]})"
