"""Helpers of the checks of methods."""

import contextlib
import dataclasses
import operator
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.checkpoint.loading import load_cache
from kvjax.checkpoint.saving import save_cache
from kvjax.engine.decode import Decoding
from kvjax.engine.generate import generate
from kvjax.engine.rerotation import LayerRotation
from kvjax.errors import InputError
from kvjax.model import Geometry, LayerSpec, Model
from kvjax.options import bounds
from kvjax.prompts import Prompts
from kvjax.repeat_request import RepeatRequest
from kvjax.testing.tiny import (
  TinyModel,
  kept_positions,
  poison_cache,
  random_activations,
)

KV_HEADS = 3
DECODING = Decoding(8)
# For methods that let the model repeat the prompt.
REQUEST = RepeatRequest(first=(8, 9), later=(9, 8), suffix=(7,))
# Not padded further: some methods bound the tokens of a turn.
QUESTIONS = Prompts.of([[5, 6], [7], [1, 2, 3]], padded=3)
_HEADS = 6
_WINDOW = 12


def require(holds: bool, sentence: str) -> None:
  """Raises an error if a condition is false.

  Raises:
    InputError: `holds` is false; the sentence is the message.
  """
  if not holds:
    raise InputError(sentence)


@contextlib.contextmanager
def explain(sentence: str) -> Iterator[None]:
  """Turns errors of other kinds into an `InputError` that begins so.

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
  """Returns the class of an error and the first line of its message."""
  said = str(error).strip().partition("\n")[0].rstrip(".:")
  name = type(error).__name__
  return f"{name}, {said}." if said else f"{name}."


def check_value(given: Any, kind: type) -> None:
  """Refuses anything but a hashable value of this class.

  Raises:
    InputError: it has another class, or is not hashable or comparable.
  """
  name = type(given).__name__
  require(
    isinstance(given, kind),
    f"What is checked is a {kind.__module__.rpartition('.')[0]}."
    f"{kind.__name__}; {given!r} is not.",
  )
  bounds.check_value(given)
  with explain(f"{name} must be a frozen dataclass whose fields are hashable"):
    same = dataclasses.replace(given)
    require(
      hash(same) == hash(given) and same == given,
      f"Two {name} with equal fields must be equal, as those of a frozen "
      "dataclass are; these are not.",
    )


def all_activations(
  seed: int, lengths: Sequence[int], padded: int, dtype: str = "float32"
) -> Activations:
  """Draws random activations with all optional ones; padding is NaN."""
  one, other = (
    random_activations(
      draw_seed, lengths, padded, heads=_HEADS, kv_heads=KV_HEADS, dtype=dtype
    )
    for draw_seed in (seed, seed + 1000)
  )
  rows, _, _, width = other.values.shape
  inputs = other.values.swapaxes(1, 2).reshape(rows, padded, -1)
  draw = np.random.default_rng(seed + 2000)
  projection = draw.standard_normal((_HEADS, width, inputs.shape[-1]))
  # Scores of a replay are not negative, and NaN as all padding is here.
  replayed = abs(one.queries[..., 0].astype("float32"))
  model = TinyModel()
  return dataclasses.replace(
    one,
    queries_unrotated=other.queries,
    inputs=inputs,
    output_projection=jnp.asarray(projection, dtype),
    rerotate=LayerRotation(model, model.geometry.layers[0]),
    replayed=replayed,
  )


def rows_of(
  places: Sequence[tuple[Activations, int]], padded: int
) -> Activations:
  """Makes a batch from rows of other batches, with another padding."""

  def cut(x: Any, axis: int) -> Any:
    return x[(slice(None),) * axis + (slice(padded),)]

  def join(name: str, axis: int) -> Any:
    leaves = [getattr(source, name)[row] for source, row in places]
    return jnp.stack([cut(leaf, axis) for leaf in leaves])

  by_head = ("queries", "keys", "values", "keys_unrotated")
  others = ("queries_unrotated", "replayed")
  by_token = ("positions", "inputs")
  return dataclasses.replace(
    places[0][0],
    **{name: join(name, 1) for name in (*by_head, *others)},
    **{name: join(name, 0) for name in by_token},
  )


def tokens(lengths: Sequence[int]) -> list[list[int]]:
  """Draws rows of tokens without duplicates within a row.

  Equal keys would tie, and rounding would then decide.
  """
  draw = np.random.default_rng(0)
  return [draw.permutation(max(lengths))[:n].tolist() for n in lengths]


def model_for(layers: int, longest: int, hybrid: bool = True) -> TinyModel:
  """Makes a tiny model with at least `longest` different tokens.

  Args:
    layers: number of layers that attend to everything.
    longest: length of the longest row.
    hybrid: whether the second of all layers is one more, which has a window.
  """
  everywhere = LayerSpec(heads=4, kv_heads=2, key_dim=8)
  local = dataclasses.replace(everywhere, window=_WINDOW)
  windows = (local,) if hybrid else ()
  specs = (everywhere, *windows, *(everywhere,) * (layers - 1))
  geometry = Geometry(specs, max_positions=longest + 512)
  return TinyModel(geometry, vocab_size=max(64, longest))


def global_positions(
  model: TinyModel, cache: Cache, row: int
) -> dict[int, list[list[int]]]:
  """Returns the positions of a row's tokens in the layers without a window.

  Args:
    model: the model, all of whose layers have a cache.
    cache: its cache.
    row: the row.

  Returns:
    By the number of the layer, the positions of each KV head.
  """
  specs = model.geometry.layers
  return {
    layer: heads
    for layer, heads in enumerate(kept_positions(cache, row))
    if specs[layer].compressible
  }


def same(one: PyTree, other: PyTree) -> bool:
  """Whether two trees are equal bit for bit; NaN equals NaN."""
  leaves, structure = jax.tree.flatten(one)
  other_leaves, other_structure = jax.tree.flatten(other)
  return operator.eq(structure, other_structure) and all(
    np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    for a, b in zip(leaves, other_leaves, strict=True)
  )


def check_repeatable(name: str, model: TinyModel, cache: Cache) -> None:
  """Refuses answers that depend on empty slots or earlier generation.

  Raises:
    InputError: they do.
  """
  params = model.init()
  first, second, poisoned = (
    generate(model, params, given, QUESTIONS, DECODING).rows()
    for given in (cache, cache, poison_cache(cache))
  )
  require(
    first == second,
    f"A cache of {name} must give the same answer twice; it does not.",
  )
  require(
    first == poisoned,
    f"What empty slots hold must not change an answer; in a cache of {name} "
    "NaN does.",
  )


def check_saved(name: str, model: Model, cache: Cache) -> Cache:
  """Saves and loads a cache.

  Raises:
    InputError: it cannot be saved, or differs after loading.
  """
  with tempfile.TemporaryDirectory() as folder:
    save_cache(cache, f"{folder}/cache", model=model, model_id="tiny")
    loaded = load_cache(f"{folder}/cache", model=model, model_id="tiny")
  require(
    same(cache, loaded),
    f"A cache of {name} must come back from disk as it was saved; it does not.",
  )
  return loaded
