"""A cache as JSON that describes it and arrays that fill it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.cache.packed import PackedLayer, Pages
from kvjax.cache.quantized import QuantisedLayer
from kvjax.cache.sharding import shard_cache
from kvjax.cache.sparse import IndexedLayer
from kvjax.engine.plans import Plan
from kvjax.errors import InputError
from kvjax.kernels.quantised import Quantised
from kvjax.methods import METHODS
from kvjax.options.budgets import Retention, Tokens
from kvjax.options.schedules import Schedule
from kvjax.retrieval import INDEXES, RETRIEVALS

# What a cache is made of; a new kind of layer is entered here.
LAYERS: tuple[type, ...] = (
  LayerCache,
  QuantisedLayer,
  PackedLayer,
  IndexedLayer,
)
PARTS: tuple[type, ...] = (
  Cache,
  ObservationWindow,
  Pages,
  Quantised,
  *INDEXES,
)
# What the plan is made of that a cache goes on evicting by.
PLANS: tuple[type, ...] = (Plan, Schedule, Retention, Tokens)
CHOICES: tuple[type, ...] = (*METHODS.values(), *RETRIEVALS.values())
KNOWN: tuple[type, ...] = (*LAYERS, *PARTS, *PLANS, *CHOICES)

Arrays = dict[str, Shaped[np.ndarray, "..."]]


def described(value: Any, path: str, arrays: Arrays) -> Any:
  """A tree as JSON that names its arrays; they are added to `arrays`.

  Classes are stored by name with all their fields, whatever those are.

  Args:
    value: the tree, or a part of it.
    path: of the part, in front of its arrays' names.
    arrays: gathers the arrays, on the host.

  Raises:
    InputError: the tree holds something that is not known here.
  """
  if isinstance(value, jax.Array):
    arrays[path] = array = np.asarray(value)
    return {
      "array": path,
      "dtype": str(array.dtype),
      "shape": list(array.shape),
    }
  if type(value) in KNOWN:
    fields = {
      name: described(getattr(value, name), f"{path}.{name}", arrays)
      for name in _field_names(value)
    }
    return {"class": type(value).__name__, "fields": fields}
  if isinstance(value, tuple):
    return [described(x, f"{path}.{i}", arrays) for i, x in enumerate(value)]
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise InputError(
    f"A {type(value).__name__} cannot be saved; of what a cache holds, only "
    "kvjax's own layers, methods and budgets can."
  )


def _field_names(value: Any) -> Sequence[str]:
  if isinstance(value, Quantised):
    return value._fields
  return [field.name for field in dataclasses.fields(value)]


def empty_arrays(saved: Any) -> Arrays:
  """Arrays of the shapes and dtypes that a described tree names."""
  if isinstance(saved, dict) and "array" in saved:
    dtype = jnp.dtype(saved["dtype"])
    return {saved["array"]: np.empty(saved["shape"], dtype)}
  if isinstance(saved, dict):
    saved = list(saved["fields"].values())
  arrays: Arrays = {}
  for child in saved if isinstance(saved, list) else []:
    arrays |= empty_arrays(child)
  return arrays


def restored(saved: Any, arrays: Arrays) -> Any:
  """The tree that was described, each layer placed as soon as it is whole.

  Raises:
    InputError: it holds a class that is not known here.
  """
  if isinstance(saved, list):
    return tuple(restored(child, arrays) for child in saved)
  if not isinstance(saved, dict):
    return saved
  if "array" in saved:
    return jnp.asarray(arrays[saved["array"]])
  classes = {cls.__name__: cls for cls in KNOWN}
  fields = {
    name: restored(child, arrays) for name, child in saved["fields"].items()
  }
  if saved["class"] not in classes:
    raise InputError(
      f"The cache holds a {saved['class']}, which is not known here; it was "
      "saved by another version of kvjax."
    )
  try:
    made: Any = classes[saved["class"]](**fields)
  except TypeError as error:
    raise InputError(
      f"The cache holds a {saved['class']} with other fields than are known "
      "here; it was saved by another version of kvjax."
    ) from error
  if type(made) not in LAYERS:
    return made
  made = shard_cache(made)
  offloads = isinstance(made, IndexedLayer) and made.retrieval.offload
  return made.offloaded() if offloads else made
