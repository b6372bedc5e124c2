"""Named shapes at which kernels are compiled and timed."""

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
  """A use of an operation at the size of a real model.

  Attributes:
    name: of the shapes, such as "llama-3.1-8b, 32,768 tokens".
    run: the operation with its options, a function of arrays alone.
    arrays: draws operands as they are in use, from a random key.
    ideal_bytes: the fewest bytes that must move between the device's memory
      and its cores.
    library: the same by one function of JAX or a few, to be compared with.
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
  """Every operation by name with each of its specifications."""
  for module in pkgutil.iter_modules(kernels.__path__):
    specs = f"{kernels.__name__}.{module.name}.specs"
    if module.ispkg and importlib.util.find_spec(specs) is not None:
      for spec in importlib.import_module(specs).SPECS:
        yield module.name, spec
