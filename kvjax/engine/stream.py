"""Tokens as soon as they are decoded."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.contexts import in_these_contexts
from kvjax.engine.capacity import check_caches
from kvjax.engine.decode import Decoding
from kvjax.engine.generate import Generated, generate_from
from kvjax.engine.turn import Request, Seeds, check_request
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.prompts import Prompts


class Stream(Iterator[Int[np.ndarray, " B"]]):
  """Iterates over every row's next token; -1 after a row's end.

  Attributes:
    generated: all tokens, and the cache if the turn stays in it; None until the
      iteration has ended.
  """

  def __init__(self) -> None:
    self.generated: Generated | None = None
    self._ended = False
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def __next__(self) -> Int[np.ndarray, " B"]:
    # Nothing follows a result or an error: another wait would never end.
    if self._ended:
      raise StopIteration
    item: Any = self._queue.get()
    self._ended = isinstance(item, Generated | BaseException)
    if isinstance(item, BaseException):
      raise item
    if isinstance(item, Generated):
      self.generated = item
      raise StopIteration
    token: Int[np.ndarray, " B"] = item
    return token


def stream(
  model: Model,
  params: PyTree,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  keep: bool = False,
  seeds: Seeds | None = None,
) -> Stream:
  """Yields every row's next token as soon as it is decoded; -1 after its end.

  Arguments and errors are those of `kvjax.generate` for a single cache; wrong
  arguments are refused before decoding starts.

  Decoding is one compiled program nevertheless, which continues whether or not
  its tokens are consumed; a program that leaves early ends once it has. What
  `generate` returns is in `Stream.generated` at the end.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> questions = kvjax.Prompts.of([[7], [8, 9]])
    >>> decoding = kvjax.Decoding(max_new_tokens=2)
    >>> answer = kvjax.stream(model, params, cache, questions, decoding)
    >>> for tokens in answer:
    ...   print(tokens.shape)
    (2,)
    (2,)
    >>> answer.generated.tokens.shape
    (2, 2)
  """
  check_caches(cache)
  if not isinstance(cache, Cache):
    raise InputError(
      "A stream is of a single cache; join caches of one kind with "
      "kvjax.stack first."
    )
  # In this thread, or nobody would learn of an error who does not iterate.
  turn = check_request(model, cache, Request(prompts, decoding, keep, seeds))
  streamed = Stream()
  put = streamed._queue.put

  def run() -> None:
    try:
      put(
        generate_from(model, params, cache, turn, lambda _, token: put(token))
      )
    except BaseException as error:  # raised again in the consumer's thread
      put(error)

  # Not a daemon: the interpreter must not end while XLA calls back into it.
  threading.Thread(target=in_these_contexts(run)).start()
  return streamed
