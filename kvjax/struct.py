"""Frozen dataclasses that are pytrees."""

import dataclasses
from collections.abc import Mapping
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def static(**kwargs: Any) -> Any:
  """Declares a field that is part of the tree's structure, not a child."""
  return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def struct[T](cls: type[T]) -> type[T]:
  """Makes `cls` a frozen dataclass registered as a pytree.

  Unflattening bypasses `__init__`: JAX fills trees with tracers, `None` and
  sentinels, which a runtime type checker on the constructor would refuse. Its
  `repr` shows arrays by dtype and shape, as a cache has millions of numbers.
  Equality is for trees of shapes, which programs are known by; arrays have no
  single truth value to compare by.
  """
  cls = dataclasses.dataclass(frozen=True, repr=False)(cls)
  cls.__repr__ = _repr  # type: ignore[method-assign]
  fields = dataclasses.fields(cls)  # type: ignore[arg-type]
  children = tuple(f.name for f in fields if not f.metadata.get("static"))
  aux = tuple(f.name for f in fields if f.metadata.get("static"))

  def flatten_with_keys(tree: T) -> tuple[Any, Any]:
    keyed = [(jax.tree_util.GetAttrKey(n), getattr(tree, n)) for n in children]
    return keyed, tuple(getattr(tree, n) for n in aux)

  def flatten(tree: T) -> tuple[Any, Any]:
    return (
      tuple(getattr(tree, n) for n in children),
      tuple(getattr(tree, n) for n in aux),
    )

  def unflatten(aux_values: Any, child_values: Any) -> T:
    tree = object.__new__(cls)
    for name, value in zip(children, child_values, strict=True):
      object.__setattr__(tree, name, value)
    for name, value in zip(aux, aux_values, strict=True):
      object.__setattr__(tree, name, value)
    return tree

  jax.tree_util.register_pytree_with_keys(
    cls, flatten_with_keys, unflatten, flatten
  )
  _add(cls)
  return cls


def _add(cls: type) -> None:
  """Adds a class to `STRUCTS`; one may be defined again, as by a cell."""
  known = STRUCTS.get(class_name(cls), cls)
  if known.__module__ != cls.__module__:
    raise TypeError(
      f"{known.__module__} has a struct {cls.__qualname__}, too; saved caches "
      "name it so: give one of them another name."
    )
  STRUCTS[class_name(cls)] = cls


def _repr(tree: Any) -> str:
  names = [field.name for field in dataclasses.fields(tree)]
  shown = ", ".join(f"{name}={_shown(getattr(tree, name))}" for name in names)
  return f"{type(tree).__qualname__}({shown})"


def _shown(value: Any) -> str:
  if type(value) is tuple:
    comma = "," if len(value) == 1 else ""
    return f"({', '.join(map(_shown, value))}{comma})"
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
  return repr(value)


# All structs by name: the classes that a saved cache may contain.
STRUCTS: dict[str, type] = {}


def class_name(cls: type) -> str:
  """Name of a class in saved files.

  One of kvjax has no module in its name, so that it may move to another. Those
  of others have, since two packages may have classes of one name.
  """
  full = f"{cls.__module__}:{cls.__qualname__}"
  return current_name(full)


def current_name(name: str) -> str:
  """Name of a class that a file may call by the module of kvjax it was in."""
  return name.partition(":")[2] if name.startswith("kvjax.") else name


def make[T](cls: type[T], fields: Mapping[str, Any]) -> T:
  """Creates an instance with these fields, without shape checks."""
  made: T = object.__new__(cls)
  for name, value in fields.items():
    object.__setattr__(made, name, value)
  return made


def replace[T](tree: T, **changes: Any) -> T:
  """Copies a struct with some fields replaced, without shape checks.

  `dataclasses.replace` calls the constructor, whose shapes the tests check at
  run time. A stack of layers, with its additional leading axis, would fail.
  """
  names = [field.name for field in dataclasses.fields(tree)]  # type: ignore[arg-type]
  old = {name: getattr(tree, name) for name in names}
  return make(type(tree), old | changes)


def tree_bytes(tree: PyTree) -> int:
  """Bytes of the arrays of a tree (or of their shapes), without padding."""
  return sum(
    leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
  )
