"""How much haystacks of prose repeat themselves.

A haystack that is longer than its text starts over, which makes it easier to
compress than a real document of its length.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvjax.experiments.benchmarks import essays
from kvjax.experiments.run.results import Samples
from kvjax.experiments.tasks import prose

# A share of distinct sentences below which haystacks are said to repeat. Prose
# has a few sentences twice.
_FEW = 0.9


class Repetition(NamedTuple):
  """The repetition of a run's haystacks.

  Attributes:
    about: the share of distinct sentences in words, for each length with
      haystacks of prose.
    notes: one line for each length whose haystacks repeat themselves.
  """

  about: Mapping[str, str]
  notes: Sequence[str]


def of(samples: Samples) -> Repetition:
  """Measures the repetition of haystacks of prose, by length."""
  contexts: dict[int, dict[str, None]] = {}
  for part, drawn in samples.items():
    for sample in drawn:
      if sample.metadata.get("haystack") == "essay":
        contexts.setdefault(part.length, {})[sample.context] = None
  shares = {length: distinct_share(texts) for length, texts in contexts.items()}
  return Repetition(
    # By length, as runs of other lengths add theirs.
    {
      f"distinct sentences in haystacks of {length} tokens": (
        f"{100 * share:.0f} %"
      )
      for length, share in shares.items()
    },
    [
      f"At {length} tokens the prose repeats itself: {100 * share:.0f} % of a "
      "haystack's sentences are distinct. Give a longer text by --essay=FILE "
      f"or --essay={essays.KING_JAMES}."
      for length, share in shares.items()
      if share < _FEW
    ],
  )


def distinct_share(contexts: Iterable[str]) -> float:
  """Computes the share of distinct sentences of a text, mean over texts."""
  texts = map(prose.split_sentences, contexts)
  return statistics.fmean(len(set(text)) / len(text) for text in texts)
