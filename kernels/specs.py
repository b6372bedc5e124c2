"""Named shapes at which kernels are compiled and benchmarked."""

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import Array

from kvjax import kernels


@dataclasses.dataclass(frozen=True)
class Spec:
  """An operation at the size of a real model.

  Attributes:
    name: the name of the shapes, such as "llama-3.1-8b, 32,768 tokens".
    run: the operation with its options fixed, a function of arrays only.
    arrays: draws realistic operands from a random key.
    ideal_bytes: the minimum number of bytes that must move between the
      device's memory and its cores.
    library: a baseline made of standard JAX functions.
  """

  name: str
  run: Callable[..., Any]
  arrays: Callable[[Array], tuple[Array, ...]]
  ideal_bytes: int
  library: Callable[..., Any] | None = None

  @property
  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The operands' shapes and dtypes."""
    shapes: tuple[jax.ShapeDtypeStruct, ...] = jax.eval_shape(
      self.arrays, jax.random.key(0)
    )
    return shapes


def named_specs() -> Iterator[tuple[str, Spec]]:
  """Yields the name of each operation with each of its specifications."""
  for module in pkgutil.iter_modules(kernels.__path__):
    specs = f"{kernels.__name__}.{module.name}.specs"
    if module.ispkg and importlib.util.find_spec(specs) is not None:
      for spec in importlib.import_module(specs).SPECS:
        yield module.name, spec
