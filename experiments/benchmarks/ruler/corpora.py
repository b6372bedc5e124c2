"""Reads SQuAD and HotpotQA from disk, for RULER's tasks."""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import SUFFIXES, RowFile, find
from kvjax.experiments.benchmarks.rows import Row
from kvjax.experiments.tasks.question_answering import Corpus, Question
from kvjax.files import read_text

# The parts that RULER uses, if a folder of the hub has several.
_WANTED = ("distractor", "validation")


class _QuestionTexts(NamedTuple):
  """A question with the texts of its documents and of related ones."""

  question: str
  answers: tuple[str, ...]
  documents: Sequence[str]
  related: Sequence[str] = ()


def squad(path: pathlib.Path) -> Corpus:
  """Reads the answerable questions of SQuAD 2.0 (Rajpurkar et al. 2018).

  A document is a paragraph; paragraphs of the same article are related.

  Args:
    path: `dev-v2.0.json`, or the rows of the hub's `squad_v2` in a `.jsonl`,
      `.parquet` or `.arrow` file, or in a folder.

  Raises:
    InputError: the file cannot be read or has another format.
  """
  rows = list(_rows(path, _squad_entries))
  articles: dict[str, dict[str, None]] = {}
  for row in rows:
    articles.setdefault(row.text("title"), {})[row.text("context")] = None
  questions = []
  for row in rows:
    document = row.text("context")
    related = [p for p in articles[row.text("title")] if p != document]
    answers = row.fields.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not all(
      isinstance(text, str) for text in texts
    ):
      raise InputError(
        f"{row.place} needs under 'answers' a list of texts called 'text'."
      )
    if texts:
      questions.append(
        _QuestionTexts(row.text("question"), tuple(texts), [document], related)
      )
  return _corpus(path, questions)


def hotpotqa(path: pathlib.Path) -> Corpus:
  """Reads the questions of HotpotQA (Yang et al. 2018) with distractors.

  A document is a title, a line break and the sentences below it.

  Args:
    path: `hotpot_dev_distractor_v1.json`, or the rows of the hub's `hotpot_qa`
      in a `.jsonl`, `.parquet` or `.arrow` file, or in a folder.

  Raises:
    InputError: the file cannot be read or has another format.
  """
  questions = []
  for row in _rows(path, _hotpotqa_entries):
    try:
      context = row.fields["context"]
      documents = [
        _document(title, sentences)
        for title, sentences in zip(
          context["title"], context["sentences"], strict=True
        )
      ]
    except (KeyError, TypeError, ValueError) as error:
      raise InputError(
        f"{row.place} needs titles and lists of sentences, as many, under "
        "'context'."
      ) from error
    distinct = list(dict.fromkeys(documents))
    questions.append(
      _QuestionTexts(row.text("question"), row.texts("answer"), distinct)
    )
  return _corpus(path, questions)


def _document(title: Any, sentences: Any) -> str:
  """Joins a title and the sentences below it.

  Raises:
    TypeError: they are no text and no list of texts.
  """
  if not isinstance(title, str) or isinstance(sentences, str):
    raise TypeError("a title is a text, and sentences are a list")
  return f"{title}\n{''.join(sentences)}"


def _corpus(path: pathlib.Path, questions: Sequence[_QuestionTexts]) -> Corpus:
  if not questions:
    raise InputError(f"{path} holds no question that has an answer.")
  # Every text holds an empty one, so that it would score 100.
  for asked in questions:
    if not all(answer.strip() for answer in asked.answers):
      raise InputError(
        f"{path} has an empty answer to {asked.question!r:.80}; leave the "
        "question out."
      )
  documents = sorted(
    {text for asked in questions for text in (*asked.documents, *asked.related)}
  )
  number = {text: index for index, text in enumerate(documents)}
  return Corpus(
    tuple(documents),
    tuple(
      Question(
        asked.question,
        asked.answers,
        tuple(number[text] for text in asked.documents),
        tuple(number[text] for text in asked.related),
      )
      for asked in questions
    ),
  )


def _rows(
  path: pathlib.Path, entries: Callable[[Any, str], Iterator[Row]]
) -> Iterator[Row]:
  """Yields rows in the hub's layout; `entries` converts the original file."""
  if path.suffix == ".json":
    text = read_text(path)
    try:
      content = files.parse_json(text)
    except ValueError as error:
      raise InputError(f"{path} is not valid JSON: {error}.") from error
    yield from entries(content, str(path))
    return
  for file in _files(path):
    yield from file.rows()


def _files(path: pathlib.Path) -> list[RowFile]:
  files = find(path)
  for name in _WANTED:
    chosen = [file for file in files if name in str(file.below(path))]
    files = chosen or files
  if not files:
    raise InputError(
      f"{path} holds no questions; give the original .json file, or a "
      f"{' or '.join(SUFFIXES)} file or a folder of them."
    )
  return files


def _squad_entries(content: Any, name: str) -> Iterator[Row]:
  place = name
  try:
    for number, article in enumerate(content["data"], start=1):
      for index, paragraph in enumerate(article["paragraphs"], start=1):
        place = f"Paragraph {index} of article {number} of {name}"
        for question in paragraph["qas"]:
          answers = [answer["text"] for answer in question["answers"]]
          fields = {
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {"text": answers},
          }
          yield Row(place, fields)
  except (KeyError, TypeError) as error:
    raise _unlike("SQuAD's dev-v2.0.json", place, error) from error


def _hotpotqa_entries(content: Any, name: str) -> Iterator[Row]:
  place = name
  try:
    for number, entry in enumerate(content, start=1):
      place = f"Entry {number} of {name}"
      titles, sentences = zip(*entry["context"], strict=True)
      context = {"title": titles, "sentences": sentences}
      yield Row(place, {**entry, "context": context})
  except (KeyError, TypeError, ValueError) as error:
    raise _unlike("hotpot_dev_distractor_v1.json", place, error) from error


def _unlike(original: str, place: str, error: Exception) -> InputError:
  lack = f": it has no {error}" if isinstance(error, KeyError) else ""
  return InputError(f"{place} is not as in {original}{lack}.")
