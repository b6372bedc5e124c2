"""Conversion of a cache to a JSON description and arrays, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from kvjax.allocation.base import Uniform
from kvjax.cache.cache import Cache
from kvjax.cache.sharding import put_stack
from kvjax.engine.compression_plan import Plan
from kvjax.errors import InputError
from kvjax.hosts import read, spread
from kvjax.kernels.quantized import Quantized
from kvjax.options.budgets import Retention, Tokens
from kvjax.options.schedules import Schedule
from kvjax.registry.registry import METHODS, RETRIEVALS, recipe_of
from kvjax.registry.wrappers import WRAPPERS
from kvjax.struct import STRUCTS, class_name, current_name, make

# Classes that are saved by their fields, besides `STRUCTS` and registered
# methods: plans that evict while decoding, and quantized keys and values.
_PARTS: tuple[type, ...] = (
  Plan,
  Uniform,
  Schedule,
  Retention,
  Tokens,
  Quantized,
)

Arrays = dict[str, Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]]


def describe(value: Any, path: str, arrays: Arrays) -> Any:
  """Describes a tree as JSON and adds its arrays to `arrays`.

  Classes are stored by name, with all their fields.

  Args:
    value: the tree, or a part of it.
    path: path of the part, which prefixes the names of its arrays.
    arrays: collects the arrays, on the host unless several have parts of them.

  Raises:
    InputError: the tree contains something of an unknown class.
  """
  if isinstance(value, jax.Array | np.ndarray):
    # Orbax writes the parts that each host has of an array.
    array = value if spread(value) else read(value)
    arrays[path] = array
    return {
      "array": path,
      "dtype": str(array.dtype),
      "shape": list(array.shape),
    }
  # Before tuples, since `Quantized` is one.
  if class_name(type(value)) in _known():
    fields = {
      name: describe(getattr(value, name), f"{path}.{name}", arrays)
      for name in _field_names(value)
    }
    return {"class": class_name(type(value)), "fields": fields}
  # Not tuples with names: nothing would say whose they were.
  if type(value) is tuple:
    return [describe(x, f"{path}.{i}", arrays) for i, x in enumerate(value)]
  if type(value) is list:
    return {"list": describe(tuple(value), path, arrays)}
  if type(value) is dict and all(type(key) is str for key in value):
    # By number, as a key may be no name of a file.
    items = enumerate(value.items())
    return {
      "dict": {k: describe(x, f"{path}.{i}", arrays) for i, (k, x) in items}
    }
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  name = type(value).__name__
  raise InputError(
    f"A value of class {name} cannot be saved; a cache holds layers, budgets, "
    f'registered methods, as after kvjax.register("mine", {name}), and arrays '
    "in tuples, lists and dictionaries whose keys are texts."
  )


def _known() -> Mapping[str, type]:
  """Classes by their names in files, including registered methods."""
  classes = [
    *_PARTS,
    *(type(recipe_of(made).method) for made in METHODS.all_made()),
    *(type(made) for made in RETRIEVALS.all_made()),
    *(wrapper.outer for wrapper in WRAPPERS.values()),
  ]
  return STRUCTS | {class_name(cls): cls for cls in classes}


def _field_names(value: Any) -> Sequence[str]:
  if isinstance(value, Quantized):
    return value._fields
  return [field.name for field in dataclasses.fields(value)]


def abstract_arrays(saved: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes of the arrays of a described tree."""
  if isinstance(saved, dict) and "array" in saved:
    shape, dtype = tuple(saved["shape"]), jnp.dtype(saved["dtype"])
    return {saved["array"]: jax.ShapeDtypeStruct(shape, dtype)}
  if isinstance(saved, dict) and "list" in saved:
    saved = saved["list"]
  elif isinstance(saved, dict):
    saved = list(saved["dict" if "dict" in saved else "fields"].values())
  arrays: dict[str, jax.ShapeDtypeStruct] = {}
  for child in saved if isinstance(saved, list) else []:
    arrays |= abstract_arrays(child)
  return arrays


def restore(
  saved: Any,
  arrays: Mapping[str, Shaped[np.ndarray, "..."] | Shaped[jax.Array, "..."]],
) -> Any:
  """Restores a tree from its description and arrays; shards its layers.

  Raises:
    InputError: it contains an unknown class.
  """
  if isinstance(saved, list):
    return tuple(restore(child, arrays) for child in saved)
  if not isinstance(saved, dict):
    return saved
  if "array" in saved:
    return arrays[saved["array"]]
  if "list" in saved:
    return list(restore(saved["list"], arrays))
  if "dict" in saved:
    return {key: restore(x, arrays) for key, x in saved["dict"].items()}
  fields = {
    name: restore(child, arrays) for name, child in saved["fields"].items()
  }
  cls = _known().get(current_name(saved["class"]))
  if cls is None:
    raise InputError(
      f"The cache holds a {saved['class']}, which is not known here; it was "
      "saved by another version of kvjax, or with a method that is not "
      "registered."
    )
  made = _make(cls, fields)
  if isinstance(made, Cache):
    stacks = tuple(put_stack(stack).offload() for stack in made.stacks)
    return dataclasses.replace(made, stacks=stacks)
  return made


def _make(cls: type, fields: dict[str, Any]) -> Any:
  """Makes an instance if these are its fields."""
  if class_name(cls) in STRUCTS:
    names = {field.name for field in dataclasses.fields(cls)}
    if names == fields.keys():
      # Without the constructor, whose shapes are those of a single layer.
      return make(cls, fields)
  else:
    try:
      return cls(**fields)
    except TypeError:
      pass
  raise InputError(
    f"The cache holds a {cls.__name__} with other fields than are known here; "
    "it was saved by another version of kvjax."
  )
