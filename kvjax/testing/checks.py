"""What the contracts of methods have in common."""

import contextlib
import dataclasses
import operator
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.checkpoint.saving import load_cache, save_cache
from kvjax.engine.decode import Decoding
from kvjax.engine.generate import generate
from kvjax.errors import InputError
from kvjax.model import Geometry, Model
from kvjax.prompts import Prompts
from kvjax.testing.tiny import TinyModel, poisoned, random_activations

KV_HEADS = 3
DECODING = Decoding(8)
# Not padded further: some methods bound the tokens of a turn.
QUESTIONS = Prompts.of([[5, 6], [7], [1, 2, 3]], padded=3)
_HEADS = 6


def require(holds: bool, sentence: str) -> None:
  """Refuses what does not hold.

  Raises:
    InputError: it does not; the sentence is the message.
  """
  if not holds:
    raise InputError(sentence)


@contextlib.contextmanager
def explained(sentence: str) -> Iterator[None]:
  """Says what failed, in front of an error of any kind but our own.

  Raises:
    InputError: the error, in one sentence.
  """
  try:
    yield
  except InputError:
    raise
  except Exception as error:
    raise InputError(f"{sentence}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
  """The kind of an error, and the first line of what it says."""
  said = str(error).strip().partition("\n")[0].rstrip(".:")
  name = type(error).__name__
  return f"{name}, {said}." if said else f"{name}."


def check_value(given: Any, kind: type) -> None:
  """Refuses what is no hashable value of this kind.

  Raises:
    InputError: see there.
  """
  name = type(given).__name__
  require(
    isinstance(given, kind),
    f"What is checked is a {kind.__module__.rpartition('.')[0]}."
    f"{kind.__name__}; {given!r} is not.",
  )
  with explained(
    f"{name} must be a frozen dataclass whose fields are hashable"
  ):
    same = dataclasses.replace(given)
    require(
      hash(same) == hash(given) and same == given,
      f"Two {name} with equal fields must be equal, as those of a frozen "
      "dataclass are; these are not.",
    )


def all_activations(
  seed: int, lengths: Sequence[int], padded: int
) -> Activations:
  """Random projections with every optional one; the padding holds NaN."""
  one, other = (
    random_activations(own, lengths, padded, heads=_HEADS, kv_heads=KV_HEADS)
    for own in (seed, seed + 1000)
  )
  rows, _, _, width = other.values.shape
  inputs = other.values.swapaxes(1, 2).reshape(rows, padded, -1)
  draw = np.random.default_rng(seed + 2000)
  projection = draw.standard_normal((_HEADS, width, inputs.shape[-1]))
  return dataclasses.replace(
    one,
    queries_unrotated=other.queries,
    inputs=inputs,
    output_projection=jax.numpy.asarray(projection, "float32"),
  )


def rows_of(
  places: Sequence[tuple[Activations, int]], padded: int
) -> Activations:
  """A batch of rows of others, padded to another width."""

  def cut(x: Any, axis: int) -> Any:
    return x[(slice(None),) * axis + (slice(padded),)]

  def join(name: str, axis: int) -> Any:
    leaves = [getattr(source, name)[row] for source, row in places]
    return jax.numpy.stack([cut(leaf, axis) for leaf in leaves])

  by_head = ("queries", "keys", "values", "keys_unrotated", "queries_unrotated")
  by_token = ("positions", "inputs")
  return dataclasses.replace(
    places[0][0],
    **{name: join(name, 1) for name in by_head},
    **{name: join(name, 0) for name in by_token},
  )


def tokens(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
  """Rows of tokens, none of which comes twice in a row.

  Equal keys would tie, and ties fall as rounding falls.
  """
  draw = np.random.default_rng(seed)
  return [draw.permutation(max(lengths))[:n].tolist() for n in lengths]


def model_for(layers: int, longest: int) -> TinyModel:
  """A model with a token for each of so many places."""
  geometry = Geometry.uniform(
    layers=layers, heads=4, kv_heads=2, head_dim=8, max_positions=longest + 512
  )
  return TinyModel(geometry, vocab_size=max(64, longest))


def same(one: PyTree, other: PyTree) -> bool:
  """Whether two trees are equal, bit by bit; NaN equals NaN."""
  leaves, structure = jax.tree.flatten(one)
  others, other_structure = jax.tree.flatten(other)
  return operator.eq(structure, other_structure) and all(
    np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    for a, b in zip(leaves, others, strict=True)
  )


def check_asked(name: str, model: TinyModel, cache: Cache) -> None:
  """Refuses answers that empty slots change, or asking before.

  Raises:
    InputError: they do.
  """
  params = model.init()
  once, again, dirty = (
    generate(model, params, asked, QUESTIONS, DECODING).rows()
    for asked in (cache, cache, poisoned(cache))
  )
  require(
    once == again,
    f"A cache of {name} must answer alike when it is asked again; it does not.",
  )
  require(
    once == dirty,
    f"What empty slots hold must not change an answer; in a cache of {name} "
    "NaN does.",
  )


def check_saved(name: str, model: Model, cache: Cache) -> Cache:
  """The cache after it has been saved and loaded.

  Raises:
    InputError: it cannot be saved, or is not the same.
  """
  with tempfile.TemporaryDirectory() as folder:
    save_cache(cache, f"{folder}/cache", model=model, model_id="tiny")
    loaded = load_cache(f"{folder}/cache", model=model, model_id="tiny")
  require(
    same(cache, loaded),
    f"A cache of {name} must come back from disk as it was saved; it does not.",
  )
  return loaded
