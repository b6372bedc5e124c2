"""Answers a question about a text from full and compressed caches."""

import pathlib
import re
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.metrics.string_match import clean
from kvjax.experiments.report import wording
from kvjax.experiments.run.answering import Reply, Seconds
from kvjax.experiments.run.answering import replies as generate_replies
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.comparison import OnAnswers
from kvjax.experiments.run.prompting import (
  QUERY_AGNOSTIC,
  QUERY_AWARE_KVPRESS,
  Prompt,
  Protocol,
  Shape,
  check_context_length,
)
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

_MAX_NEW_TOKENS = 128
_FEWEST_REPEATS = 2
# After a line, or a sentence and its space.
_SENTENCES = re.compile(r"(?<=\n)|(?<=[.!?] )")


def read_text(path: pathlib.Path) -> str:
  """Reads the text of a file, ending in one line break.

  Raises:
    InputError: the file does not exist or has no text.
  """
  text = files.read_text(path)
  if not text.strip():
    raise InputError(f"{path} is empty; give a file with some text.")
  return text.rstrip("\n") + "\n"


def answer_question(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  text: str,
  question: str,
  protocol: Protocol = QUERY_AGNOSTIC,
  on_answers: OnAnswers = lambda task, new: None,
) -> tuple[Prompt, list[Reply]]:
  """Generates each candidate's answer to a question about a text.

  Args:
    lm: the model.
    candidates: methods and budgets.
    text: the text.
    question: the question.
    protocol: whether the question is known before compression.
    on_answers: called on progress.

  Raises:
    InputError: text, question and answer are longer than the model's context.
  """
  sample = Sample(text, question, "", (), "text", _MAX_NEW_TOKENS, {})
  if protocol == QUERY_AWARE_KVPRESS:
    sample = sample.with_question_in_context()
  prompt = Prompt.of_sample(lm.text, sample)
  check_context_length(lm, [prompt])
  shape = Shape.of([prompt], 1, protocol)
  by_candidate: dict[Candidate, Reply] = {}
  for group in generate_replies(lm, candidates, [[prompt]], shape, Seconds()):
    by_candidate |= {reply.candidate: reply for reply in group}
    on_answers("answering", len(group))
  return prompt, [by_candidate[candidate] for candidate in candidates]


def to_terminal(
  prompt: Prompt, question: str, replies: Sequence[Reply]
) -> rich.console.Group:
  """Formats the question and a line per reply.

  If some layers have a window, tokens are kept in the global ones, and in all.
  """
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  table.add_column("method", overflow="fold")
  hybrid = any(reply.global_tokens is not None for reply in replies)
  kept = ("kept, global", "kept, all") if hybrid else ("kept",)
  unit, size = wording.unit(reply.cache_bytes for reply in replies)
  for name in ("budget", *kept, "read", unit):
    table.add_column(name, justify="right", no_wrap=True)
  table.add_column("answer", overflow="fold")
  for reply in replies:
    table.add_row(
      reply.candidate.method,
      f"{100 * reply.retention:.3g} %",
      *([] if reply.global_tokens is None else [f"{reply.global_tokens:.0f}"]),
      f"{reply.kept_tokens:.0f}",
      f"{reply.read_tokens:.0f}",
      f"{reply.cache_bytes / size:.1f}",
      rich.text.Text(without_repeats(clean(reply.text)) or "(nothing)"),
      end_section=True,
    )
  title = (
    f"{question} ({len(prompt.context)} tokens of context, greedy decoding)"
  )
  return rich.console.Group(rich.text.Text(title), table)


def without_repeats(answer: str) -> str:
  """Cuts an answer where it only repeats itself, as small models do.

  Lines and sentences are compared. The last one may be cut short, where tokens
  ran out. One that is repeated once may be meant, and stays.
  """
  parts = _SENTENCES.split(answer)
  said = [(part.strip(), end) for end, part in enumerate(parts, 1)]
  said = [(part, end) for part, end in said if part]
  last_new = max(
    (
      index
      for index, (part, _) in enumerate(said)
      if not any(earlier.startswith(part) for earlier, _ in said[:index])
    ),
    default=0,
  )
  repeated = len(said) - last_new - 1
  if repeated < _FEWEST_REPEATS:
    return answer
  return "".join(parts[: said[last_new][1]]).rstrip() + "\n(and so on)"
