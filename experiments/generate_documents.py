"""Writes generated documents to fine-tune a model on.

  kvjax generate_documents

writes lists of findings in a few fixed phrases, like those of inspections and
logs. OUTPUT/learnt has the documents to fine-tune on, OUTPUT/other as many of
the same kind that the model never sees. The bundled model knows the words but
not the phrases. It takes less than ten seconds.
"""

import random

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.run import outputs

_OUTPUT = flags.DEFINE_string(
  "output", "results/reports", "Parent folder of the two document folders."
)

_DOCUMENTS, _FINDINGS = 12, 50
_KINDS = "function class method module string list number statement".split()
_ORDER = "first second third last".split()
_PLACES = "file line block section".split()
_RESULTS = (
  *("It returns a new object.", "It has no name and is not used."),
  "It raises an exception when the value is empty.",
  "It was changed and must be called again.",
)


def document(rng: random.Random) -> str:
  """Draws a report: findings of two sentences each."""
  return " ".join(_finding(rng) for _ in range(_FINDINGS))


def _finding(rng: random.Random) -> str:
  kind, which, place, result = map(
    rng.choice, (_KINDS, _ORDER, _PLACES, _RESULTS)
  )
  return f"The {kind} in the {which} {place} was looked at. {result}"


def main() -> None:
  """Writes both folders."""
  output = outputs.folder(_OUTPUT.value)
  for part in ("learnt", "other"):
    for number in range(_DOCUMENTS):
      text = document(random.Random(f"{part} {number}"))
      outputs.write_text(output / part / f"{number:02}.txt", text)
  print(f"{_DOCUMENTS} documents in {output / 'learnt'}, others in other.")


if __name__ == "__main__":
  cli.run(main)
