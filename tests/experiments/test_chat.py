"""A conversation about a compressed text, against the engine's own calls."""

import dataclasses
import inspect
import threading

import jax
import numpy as np
import pytest

import kvjax
from kvjax import InputError, InputWarning
from kvjax.engine import generate as generating
from kvjax.models import chat as chats

TEXT = "The door is red. The roof is blue. The gate is green. " * 4
QUESTIONS = ("What is red?", "What is blue? Say it.", "And the gate?")


def whole(lm, turns, question, tokens):
  """Answers a question after the turns, from one prefill of everything."""
  before, suffix = lm.text.split_chat(TEXT)
  ids, between = lm.text.encode(before), ""
  for asked, answer in turns:
    ids += lm.text.encode(f"{between}{asked}{suffix}")
    ids += answer
    between = lm.text.between_turns()
  ids += lm.text.encode(f"{between}{question}{suffix}")
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  contexts = kvjax.Prompts.of([ids])
  cache, logits = kvjax.prefill(lm.model, lm.params, contexts, plan)
  decoding = kvjax.Decoding(tokens, lm.text.eos_ids)
  (row,) = kvjax.generate(lm.model, lm.params, cache, logits, decoding).rows()
  return row


def test_turns_are_those_of_one_prompt(tiny):
  chat = tiny.compress(TEXT, "full", 1.0)
  turns = []
  for question in QUESTIONS:
    expected = whole(tiny, turns, question, 8)
    assert chat.ask(question, 8) == tiny.text.decode(expected)
    turns.append((question, expected))


def test_a_stream_is_the_answer_in_pieces(tiny):
  chat, other = (tiny.compress(TEXT, "keydiff", 0.5) for _ in range(2))
  for question in QUESTIONS:
    pieces = list(chat.ask(question, 8, stream=True))
    assert all(pieces)
    assert len(pieces) > 2
    assert "".join(pieces) == other.ask(question, 8)


def test_a_stream_that_nobody_reads_ends_before_the_next_question(tiny):
  chat, other = (tiny.compress(TEXT, "keydiff", 0.5) for _ in range(2))
  pieces = chat.ask(QUESTIONS[0], 8, stream=True)
  next(pieces)
  other.ask(QUESTIONS[0], 8)
  assert chat.ask(QUESTIONS[1], 8) == other.ask(QUESTIONS[1], 8)


def test_streams_that_are_read_late_or_in_turns_are_whole(tiny):
  chat, other = (tiny.compress(TEXT, "keydiff", 0.5) for _ in range(2))
  expected = [other.ask(question, 8) for question in QUESTIONS]
  first, second, third = (
    chat.ask(question, 8, stream=True) for question in QUESTIONS
  )
  begun = next(second)
  assert "".join(third) == expected[2]
  assert begun + "".join(second) == expected[1]
  assert "".join(first) == expected[0]


@pytest.mark.parametrize("how", ["closed", "interrupted"])
def test_an_answer_that_is_broken_off_stays_whole(tiny, how):
  chat, other = (tiny.compress(TEXT, "keydiff", 0.5) for _ in range(2))
  pieces = chat.ask(QUESTIONS[0], 8, stream=True)
  next(pieces)
  if how == "closed":
    pieces.close()
  else:
    with pytest.raises(KeyboardInterrupt):
      pieces.throw(KeyboardInterrupt())
  other.ask(QUESTIONS[0], 8)
  assert chat.ask(QUESTIONS[1], 8) == other.ask(QUESTIONS[1], 8)


def test_a_chat_whose_answer_failed_says_so(tiny, monkeypatch):
  chat = tiny.compress(TEXT, "keydiff", 0.5)

  def fail(model, params, cache, *arguments):
    jax.tree.map(lambda leaf: leaf.delete(), cache)  # It was donated.
    raise RuntimeError("out of memory")

  monkeypatch.setattr("kvjax.engine.stream.generate_from", fail)
  with pytest.raises(RuntimeError, match="out of memory"):
    chat.ask(QUESTIONS[0], 8)
  monkeypatch.undo()
  for _ in range(2):
    with pytest.raises(InputError, match="ended with an error, and its cache"):
      chat.ask(QUESTIONS[0], 8)


@pytest.mark.parametrize("keep", [True, False])
def test_an_answer_may_fail_before_the_cache_is_lost(tiny, monkeypatch, keep):
  chat, other = (tiny.compress(TEXT, "keydiff", 0.5) for _ in range(2))
  failures = threading.Semaphore(0)

  def fail(model, params, cache, request, listener):
    listener(0, np.array([5]))
    failures.release()
    raise RuntimeError("out of memory")

  with monkeypatch.context() as patch:
    patch.setattr("kvjax.engine.stream.generate_from", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
      chat.ask(QUESTIONS[0], 8, keep=keep)
    unread = chat.ask(QUESTIONS[0], 8, keep=keep, stream=True)
    # The answer is made by a thread, which may begin later.
    for _ in range(2):
      assert failures.acquire(timeout=60)
  assert chat.ask(QUESTIONS[0], 8) == other.ask(QUESTIONS[0], 8)
  # Its reader learns of it.
  with pytest.raises(RuntimeError, match="out of memory"):
    list(unread)
  with pytest.raises(InputError, match="Seeds must be whole numbers of 32"):
    chat.ask(QUESTIONS[1], 8, keep=keep, seed=2**31)
  assert chat.ask(QUESTIONS[1], 8) == other.ask(QUESTIONS[1], 8)


@pytest.mark.parametrize("method", ["keydiff", "streaming"])
def test_a_share_is_evicted_in_every_turn(tiny, method):
  """Shares grow with the conversation, and so does the room."""
  chat = tiny.compress(TEXT, method, 0.9, schedule=kvjax.Schedule(every=8))
  for question in QUESTIONS * 2:
    chat.ask(question, 8)
  assert chat.cache.nbytes > 0


def test_another_method_may_evict_while_answering(tiny):
  """What is kept while answering is what the later plan keeps."""
  later = kvjax.get_plan("streaming", 16, schedule=kvjax.Schedule(every=8))
  chat = tiny.compress(TEXT, "keydiff", 0.9, decoding=later)
  plan = kvjax.get_plan("keydiff", 0.9, decoding=later)
  other = kvjax.models.Chat(tiny, TEXT, plan)
  assert chat.ask(QUESTIONS[0], 8) == other.ask(QUESTIONS[0], 8)
  assert (chat.cache.layers[0].positions >= 0).sum(-1).max() <= 16 + 8


def test_too_much_is_refused_before_anything_is_allocated(tiny):
  chat = tiny.compress(TEXT, "full", 1.0)
  size = chat.cache.nbytes
  for stream in (False, True):
    with pytest.raises(InputError, match="this model's context is 512"):
      chat.ask(QUESTIONS[0], 300_000, stream=stream)
  assert chat.cache.nbytes == size
  assert chat.ask(QUESTIONS[0], 8)


def test_a_template_of_one_message_answers_one_question(tiny, monkeypatch):
  def refuse(tokenizer):
    raise InputError("The template takes one message.")

  monkeypatch.setattr(type(tiny.tokenizer), "between_turns", refuse)
  chat = tiny.compress(TEXT, "keydiff", 0.5)
  assert chat.ask(QUESTIONS[0], 8)
  with pytest.raises(InputError, match="takes one message"):
    chat.ask(QUESTIONS[1], 8)


def test_what_does_not_stay_changes_nothing(tiny):
  chat = tiny.compress(TEXT, "lagkv", 0.5)
  first = chat.ask(QUESTIONS[0], 8, keep=False)
  size = chat.cache.nbytes
  assert chat.ask(QUESTIONS[1], 8, keep=False)
  assert chat.ask(QUESTIONS[0], 8, keep=False) == first
  assert chat.cache.nbytes == size


def test_turns_of_one_size_compile_once(tiny):
  chat = tiny.compress(TEXT, "keydiff", 0.5)
  chat.ask(QUESTIONS[0], 8)
  programs = generating._generate_and_keep._cache_size()
  for question in QUESTIONS * 2:
    chat.ask(question, 8)
  assert generating._generate_and_keep._cache_size() == programs


def test_room_is_doubled_when_it_is_full(tiny, monkeypatch):
  monkeypatch.setattr(chats, "_FIRST_ROOM", 64)
  chat = tiny.compress(TEXT, "full", 1.0)
  start = chat.cache.layer(0).capacity
  rooms = []
  for question in QUESTIONS:
    chat.ask(question, 8)
    rooms.append(chat.cache.layer(0).capacity - start)
  assert rooms[0] == 64
  assert rooms[-1] in (128, 256)
  turns = []
  for question in QUESTIONS[:2]:
    turns.append((question, whole(tiny, turns, question, 8)))
  answer = tiny.text.decode(whole(tiny, turns, QUESTIONS[2], 8))
  again = tiny.compress(TEXT, "full", 1.0)
  assert [again.ask(question, 8) for question in QUESTIONS][-1] == answer


@pytest.mark.parametrize(
  "method", ["kvzip", "ada/snapkv", "ctkvr", "streaming"]
)
def test_methods_of_all_kinds_chat(tiny, method):
  chat = tiny.compress(TEXT, method, 0.5)
  first, size = chat.ask(QUESTIONS[0], 8, keep=False), chat.cache.nbytes
  assert chat.ask(QUESTIONS[0], 8) == first
  assert chat.cache.nbytes > size


def test_prompts_and_questions_are_what_a_chat_feeds(tiny):
  """By hand, as `split_chat` says; rows of a batch as alone."""
  before, suffix = tiny.text.split_chat(TEXT)
  request = kvjax.RepeatRequest.of(tiny.text)
  alone, both = tiny.prompts(TEXT), tiny.prompts([TEXT, "Tea is at five."])
  assert alone.rows() == [tiny.text.encode(before)] == both.rows()[:1]
  assert alone.repeat_request == both.repeat_request == request
  asked = [tiny.text.encode(question + suffix) for question in QUESTIONS]
  assert tiny.questions(QUESTIONS).rows() == asked
  assert tiny.questions(QUESTIONS[0]).rows() == asked[:1]


def test_answers_end_as_the_model_ends_them(tiny):
  warm = kvjax.Sampling(temperature=2.0)
  stops = tiny.text.eos_ids
  assert tiny.decoding(5) == kvjax.Decoding(5, stops)
  assert tiny.decoding(5, warm) == kvjax.Decoding(5, stops, warm)


@pytest.mark.parametrize("given", ["", [], ["a text", " "], None, [5]])
def test_what_is_no_text_is_refused(tiny, given):
  for encode in (tiny.prompts, tiny.questions):
    unchecked = inspect.unwrap(encode.__func__)
    with pytest.raises(
      InputError, match=r"not empty; .* is not one|no prompts"
    ):
      unchecked(tiny, given)


def test_answers_are_drawn_by_seed(tiny):
  chat = tiny.compress(TEXT, "keydiff", 0.5)
  warm = kvjax.Sampling(temperature=2.0)

  def draw(seed):
    return chat.ask(QUESTIONS[0], 8, keep=False, sampling=warm, seed=seed)

  assert draw(1) == draw(1)
  assert len({draw(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (("keydif", 0.5), "keydif"),
    (("keydiff", 1.5), "1.5"),
    (("keydiff", 1), "A budget of 1 is one token, .* give 1.0 to keep every"),
    (("keydiff", True), "A budget is a share such as 0.5 or tokens such as"),
  ],
)
def test_what_is_wrong_is_said(tiny, arguments, sentence):
  with pytest.raises(InputError, match=sentence):
    tiny.compress(TEXT, *arguments)


NO_TEXTS = [None, ["a", "b"], b"bytes", "", " \n"]


@pytest.mark.parametrize("text", NO_TEXTS)
def test_texts_and_questions_have_something_in_them(untyped, tiny, text):
  with pytest.raises(
    InputError, match=r"A text to compress is .* is not one\."
  ):
    tiny.compress(text)
  chat = tiny.compress(TEXT)
  with pytest.raises(InputError, match=r"A question is a text .* is not one\."):
    chat.ask(text, 10)


def test_a_number_is_no_sampling(untyped, tiny):
  chat = tiny.compress(TEXT)
  with pytest.raises(InputError, match=r"kvjax\.Sampling.*; 0\.7 is not one"):
    chat.ask(QUESTIONS[0], 10, sampling=0.7)


def test_a_method_of_one_s_own_needs_no_name(tiny):
  method = kvjax.get_method("keydiff")
  answers = [
    tiny.compress(TEXT, given, 20).ask(QUESTIONS[0], max_new_tokens=4)
    for given in (method, "keydiff")
  ]
  assert answers[0] == answers[1]


def test_a_plan_is_no_method(untyped, tiny):
  with pytest.raises(
    InputError, match=r"kvjax\.models\.Chat\(lm, text, plan\)"
  ):
    tiny.compress(TEXT, kvjax.get_plan("keydiff", 0.5), 0.5)


def test_the_path_of_a_file_is_warned_of(tiny, tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text(TEXT)
  with pytest.warns(InputWarning, match="is the path of a file, and the path"):
    tiny.compress(str(path))


def test_a_model_without_a_tokenizer_cannot_chat(tiny):
  mute = dataclasses.replace(tiny, tokenizer=None)
  with pytest.raises(InputError, match="has no tokenizer"):
    mute.compress(TEXT)
