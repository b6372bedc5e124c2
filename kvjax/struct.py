"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any, dataclass_transform

import jax


def static(**kwargs: Any) -> Any:
  """A field that is part of the tree's structure instead of a child."""
  return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def struct[T](cls: type[T]) -> type[T]:
  """Makes `cls` a frozen dataclass registered as a pytree.

  Unflattening bypasses `__init__`: JAX fills trees with tracers, `None` and
  sentinels, which a runtime type checker on the constructor would refuse.
  """
  cls = dataclasses.dataclass(frozen=True)(cls)
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
  return cls
