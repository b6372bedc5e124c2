"""A conversation about a text whose KV cache is compressed."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import jax

import kvjax
from kvjax.engine.capacity import check_prompts, missing_slots, prepare_decoding
from kvjax.engine.sampling import Sampling
from kvjax.errors import InputError, warn
from kvjax.hosts import read
from kvjax.models.text_stream import TextStream

if TYPE_CHECKING:
  from kvjax.models.pretrained import Pretrained

# Room for turns grows by doubling, so that few sizes are compiled.
_FIRST_ROOM = 512


class _Answer:
  """The tokens of an answer, for the one who reads it and for the next turn.

  Attributes:
    stream: where they come from; it has the cache until it ends.
    ids: those that have come.
    error: what ended it, if it failed.
  """

  def __init__(self, stream: kvjax.Stream):
    self.stream = stream
    self.ids: list[int] = []
    self.error: Exception | None = None

  def more(self) -> bool:
    """Waits for the next token; False at the end, also if the answer failed."""
    try:
      for (token,) in self.stream:
        if token >= 0:
          self.ids.append(int(token))
          return True
    except Exception as error:
      self.error = error
    return False


class Chat:
  """Questions and answers about a text; made by `Pretrained.compress`.

  Question and answer stay in the cache, so that later questions may refer to
  them. A plan that evicts while decoding compresses the cache again in every
  turn.
  """

  def __init__(self, lm: "Pretrained", text: str, plan: kvjax.Plan):
    """Prefills the text and compresses it.

    Raises:
      InputError: the text is none, empty, or longer than the model's context,
        or the model has no tokenizer.
    """
    check_text("text to compress", text)
    _warn_of_path(text)
    self._lm = lm
    contexts = lm.prompts(text)
    self._cache, _ = kvjax.prefill(lm.model, lm.params, contexts, plan)
    self._room = 0
    self._has_turns = False
    self._pending: _Answer | None = None

  @property
  def cache(self) -> kvjax.Cache:
    """The cache of the text and of all turns so far.

    The next `ask` that keeps its turn takes over these buffers: for a cache
    that lasts, save it with `kvjax.save_cache` or copy it with
    `jax.tree.map(jnp.copy, chat.cache)`.
    """
    self._finish()
    return self._cache

  @overload
  def ask(
    self,
    question: str,
    max_new_tokens: int = ...,
    *,
    stream: Literal[False] = ...,
    keep: bool = ...,
    sampling: Sampling | None = ...,
    seed: int = ...,
  ) -> str: ...

  @overload
  def ask(
    self,
    question: str,
    max_new_tokens: int = ...,
    *,
    stream: Literal[True],
    keep: bool = ...,
    sampling: Sampling | None = ...,
    seed: int = ...,
  ) -> Iterator[str]: ...

  def ask(
    self,
    question: str,
    max_new_tokens: int = 256,
    *,
    stream: bool = False,
    keep: bool = True,
    sampling: Sampling | None = None,
    seed: int = 0,
  ) -> str | Iterator[str]:
    """Answers a question.

    Args:
      question: the question.
      max_new_tokens: maximum number of tokens of the answer.
      stream: whether to return an iterator over parts of the answer, each as
        soon as it is decoded, instead of the whole.
      keep: whether question and answer stay in the cache.
      sampling: how tokens are drawn; the model's default if None.
      seed: seed of the draws.

    Raises:
      InputError: text, turns and answer are longer than the model's context,
        the question is none or empty, the sampling is no `kvjax.Sampling`, or
        the seed does not fit 32 bits.
    """
    check_text("question", question)
    lm = self._lm
    # Checked before anything changes.
    decoding = lm.decoding(
      max_new_tokens, lm.sampling if sampling is None else sampling
    )
    self._finish()
    between = lm.text.between_turns() if self._has_turns else ""
    prompts = lm.questions(f"{between}{question}")
    width = check_prompts(lm.model, self._cache, prompts, decoding)
    if keep:
      self._reserve(width, decoding)
    # The thread of the stream goes on if this one is interrupted.
    tokens = kvjax.stream(
      lm.model,
      lm.params,
      self._cache,
      prompts,
      decoding,
      keep=keep,
      seeds=[seed],
    )
    self._pending = answer = _Answer(tokens)
    pieces = self._pieces(answer)
    return pieces if stream else "".join(pieces)

  def _pieces(self, answer: _Answer) -> Iterator[str]:
    """Decodes tokens as they come, or have come while others were asked for."""
    read = 0
    stream = TextStream(self._lm.text.decode)
    while len(answer.ids) > read or answer.more():
      text = stream.step(answer.ids[read])
      read += 1
      if text:
        yield text
    if answer.error is not None:
      raise answer.error
    if answer is self._pending:
      self._finish()
    # A last character may have remained incomplete.
    if rest := stream.rest():
      yield rest

  def _finish(self) -> None:
    """Waits for the last answer, read or not, and takes over its cache.

    Raises:
      InputError: the answer failed, and its cache with it.
    """
    answer = self._pending
    if answer is None:
      return
    while answer.more():
      pass
    generated = answer.stream.generated
    # A turn donates the cache, and one that fails does not return it.
    lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache))
    if generated is None and lost:
      raise InputError(
        "The last answer ended with an error, and its cache is lost; compress "
        "the text again."
      )
    self._pending = None
    if generated is not None and generated.cache is not None:
      self._cache = generated.cache
      self._has_turns = True

  def _reserve(self, width: int, decoding: kvjax.Decoding) -> None:
    """Makes room for a turn."""
    model, cache = self._lm.model, self._cache
    processed = read(cache.next_positions)
    prepared = prepare_decoding(model, cache, processed, width, decoding)
    missing = missing_slots(cache, prepared, width, decoding.rounded)
    room = self._room
    while room - self._room < missing:
      room = max(2 * room, _FIRST_ROOM)
    if room > self._room:
      self._cache = kvjax.reserve(cache, room - self._room)
      self._room = room


def check_text(name: str, given: Any) -> None:
  """Refuses anything but a text with something in it."""
  if not isinstance(given, str) or not given.strip():
    raise InputError(
      f"A {name} is a text that is not empty; {given!r:.80} is not one."
    )


def _warn_of_path(text: str) -> None:
  """Warns of a text that is the path of a file."""
  if "\n" not in text and os.path.isfile(text):
    warn(
      f"{text!r} is the path of a file, and the path, not what the file "
      "holds, is compressed; pass the file's content."
    )
