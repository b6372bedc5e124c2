"""Answers about a text of the user's, from several caches."""

import pytest
import rich.console

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.run import side_by_side
from kvjax.experiments.run.candidates import candidates

CHOSEN = candidates(["full", "streaming"], [kvjax.Retention(0.5)])
SENTENCE = " The grass is green and the sky is blue."


def test_a_text_is_answered_side_by_side(tiny, tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text("Ann called." + SENTENCE * 3)
  text = side_by_side.read_text(path)
  prompt, found = side_by_side.answer_question(
    tiny, CHOSEN, text, "Who [called]?"
  )
  assert text.endswith("blue.\n")
  assert [reply.candidate for reply in found] == list(CHOSEN)
  assert found[0].kept_tokens == len(prompt.context)
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(side_by_side.to_terminal(prompt, "Who [called]?", found))
  shown = capture.get()
  assert "Who [called]?" in shown
  assert all(name in shown for name in ("full", "streaming", "50 %"))


def test_of_a_hybrid_it_says_which_layers_keep_how_much(hybrid):
  text = "Ann called." + SENTENCE * 3
  prompt, found = side_by_side.answer_question(hybrid, CHOSEN, text, "Who?")
  tokens = len(prompt.context)
  kept = [tokens, -(-tokens // 2)]
  assert [reply.global_tokens for reply in found] == kept
  console = rich.console.Console(width=100)
  with console.capture() as capture:
    console.print(side_by_side.to_terminal(prompt, "Who?", found))
  shown = capture.get()
  assert "kept, global" in shown
  assert "kept, all" in shown
  for count in kept:
    assert f" {count} " in shown
    assert f" {(count + 6) / 2:.0f} " in shown


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    (None, "cannot be read: No such file"),
    (b"", "is empty"),
    (b" \n\t", "is empty"),
    (b"\xff\xfe", "is not text in UTF-8"),
  ],
)
def test_a_file_without_text_is_refused(tmp_path, content, sentence):
  path = tmp_path / "notes.txt"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(InputError, match=sentence):
    side_by_side.read_text(path)


def test_a_text_longer_than_the_context_is_refused(tiny):
  with pytest.raises(InputError, match=r"Context \(\d+ tokens\).* is 512"):
    side_by_side.answer_question(tiny, CHOSEN, SENTENCE * 80, "Why?")


@pytest.mark.parametrize(
  ("answer", "shown"),
  [
    ("It is 4.\nIt is 1.\nIt is 4.\nIt is 1.\nIt i", "It is 4.\nIt is 1."),
    ("Yes.\nYes.\nYes.", "Yes."),
    ("It is 4.2. No? It is 4.2. No? It is 4.2. N", "It is 4.2. No?"),
    ("It is 4.\nNo. It is 4.\nNo. It", "It is 4.\nNo."),
  ],
)
def test_an_answer_that_repeats_itself_is_cut(answer, shown):
  assert side_by_side.without_repeats(answer) == f"{shown}\n(and so on)"


@pytest.mark.parametrize(
  "answer",
  [
    "",
    "Yes.",
    "Row, row\nRow, row\nyour boat",
    "a\nb\na",
    "a\nb\na\nb\nc",
    "No. No. Not that. It is 4.2.",
    "Yes.\n\nYes.",
    "a\n\nb\n\na",
  ],
)
def test_other_answers_are_shown_whole(answer):
  assert side_by_side.without_repeats(answer) == answer
