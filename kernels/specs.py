"""Named shapes at which kernels are compiled and timed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Spec:
  """A use of an operation at the size of a real model.

  Attributes:
    name: of the shapes, such as "llama-3.1-8b, 32,768 tokens".
    run: the operation with its options, a function of arrays alone.
    arrays: draws operands as they are in use, from a random key.
    ideal_bytes: the fewest bytes that must move between the device's memory
      and its cores.
  """

  name: str
  run: Callable[..., Any]
  arrays: Callable[[Array], tuple[Array, ...]]
  ideal_bytes: int

  @property
  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The operands' shapes and dtypes."""
    shapes: tuple[jax.ShapeDtypeStruct, ...] = jax.eval_shape(
      self.arrays, jax.random.key(0)
    )
    return shapes
