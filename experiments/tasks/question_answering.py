"""RULER's question answering (NVIDIA/RULER, `qa.py`).

A prompt has a real question and the paragraphs that answer it, among as many
other paragraphs as fit.
"""

import dataclasses
import random

from kvjax.errors import InputError
from kvjax.experiments.tasks import fitting
from kvjax.experiments.tasks.sample import Sample

INSTRUCTION = (
  "Answer the question based on the given documents. Only give me the answer "
  "and do not output any other words."
)
CONTEXT = (
  f"{INSTRUCTION}\n\nThe following are given documents.\n\n{{documents}}\n\n"
)
DOCUMENT = "Document {number}:\n{text}"
QUESTION = f"{INSTRUCTION}\n\nQuestion: {{question}}"
ANSWER_PREFIX = " Answer:"
MAX_NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Question:
  """A question about documents of a corpus.

  Attributes:
    text: the question.
    answers: the correct answers.
    documents: numbers of the documents in every prompt.
    related: numbers of the documents that are added first.
  """

  text: str
  answers: tuple[str, ...]
  documents: tuple[int, ...]
  related: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Questions and their distinct documents."""

  documents: tuple[str, ...]
  questions: tuple[Question, ...]


def sample(
  name: str,
  corpus: Corpus,
  number: int,
  rng: random.Random,
  length: int,
  count: fitting.Count,
) -> Sample:
  """Draws a prompt for a question, with as many documents as fit.

  Args:
    name: name of the task.
    corpus: questions and documents.
    number: number of the question.
    rng: draws other documents and the order of all; equal state gives equal
      samples.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.

  Raises:
    TooShortError: `length` is too short for the question's own documents.
    InputError: the corpus has fewer questions.
  """
  if number >= len(corpus.questions):
    raise InputError(
      f"The file of {name} has {len(corpus.questions)} questions; "
      f"--samples={number + 1} is more."
    )
  question = corpus.questions[number]
  chosen = _in_order_of_choice(corpus, question, rng)
  seed = rng.getrandbits(64)
  prompt_question = QUESTION.format(question=question.text)

  def context(documents: int) -> str:
    shown = chosen[:documents]
    random.Random(seed).shuffle(shown)
    texts = [
      DOCUMENT.format(number=place, text=corpus.documents[index])
      for place, index in enumerate(shown, start=1)
    ]
    return CONTEXT.format(documents="\n\n".join(texts))

  sample, documents = fitting.fitted(
    name,
    context,
    (prompt_question, ANSWER_PREFIX),
    question.answers,
    MAX_NEW_TOKENS,
    length,
    count,
    least=len(question.documents),
    most=len(chosen),
    metric="string_match_part",
  )
  metadata = {**sample.metadata, "documents": documents}
  return dataclasses.replace(sample, metadata=metadata)


def _in_order_of_choice(
  corpus: Corpus, question: Question, rng: random.Random
) -> list[int]:
  """Orders document numbers: the question's, related ones, others."""
  near = [*question.documents, *question.related]
  taken = set(near)
  unrelated = [i for i in range(len(corpus.documents)) if i not in taken]
  return [
    *question.documents,
    *rng.sample(question.related, len(question.related)),
    *rng.sample(unrelated, len(unrelated)),
  ]
