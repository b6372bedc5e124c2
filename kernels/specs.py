"""Named shapes at which kernels are compiled and timed, and their options."""

import dataclasses
import importlib
import importlib.util
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array

from kvjax import kernels
from kvjax.kernels.programs import Platform


def _everything(result: Any) -> Any:
  return result


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
    compared: what of a result all programs must agree on.
    platforms: those whose kernel serves it; on others it is XLA's program.
  """

  name: str
  run: Callable[..., Any]
  arrays: Callable[[Array], tuple[Array, ...]]
  ideal_bytes: int
  library: Callable[..., Any] | None = None
  compared: Callable[[Any], Any] = _everything
  platforms: tuple[Platform, ...] = ("tpu", "gpu")

  @property
  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The operands' shapes and dtypes."""
    shapes: tuple[jax.ShapeDtypeStruct, ...] = jax.eval_shape(
      self.arrays, jax.random.key(0)
    )
    return shapes


@dataclasses.dataclass(frozen=True)
class Choices:
  """The options of a kernel that are chosen for a kind of device.

  With every candidate, the kernel serves all that it serves with others, and
  its results are equal but for the order of sums.

  Attributes:
    kernel: its name in the table; see `kvjax.kernels.tuning`.
    candidates: the values of each option.
    spec: what is timed.
  """

  kernel: str
  candidates: Mapping[str, tuple[int, ...]]
  spec: Spec

  @property
  def operation(self) -> str:
    """Name of the kernel's operation."""
    return self.kernel.partition("/")[0]

  @property
  def platform(self) -> str:
    """Platform of the kernel: "tpu" or "gpu"."""
    return self.kernel.partition("/")[2]

  def combinations(self) -> Iterator[dict[str, int]]:
    """Yields a value of each option, in all combinations."""
    for values in itertools.product(*self.candidates.values()):
      yield dict(zip(self.candidates, values, strict=True))


def named_specs() -> Iterator[tuple[str, Spec]]:
  """Yields the name of each operation with each of its specifications."""
  for name, module in _modules():
    for spec in module.SPECS:
      yield name, spec


def all_choices() -> Iterator[Choices]:
  """Yields the choices of every kernel that has some."""
  for _, module in _modules():
    yield from module.CHOICES


def _modules() -> Iterator[tuple[str, Any]]:
  """Yields the name of each operation with its specs.py."""
  for module in pkgutil.iter_modules(kernels.__path__):
    specs = f"{kernels.__name__}.{module.name}.specs"
    if module.ispkg and importlib.util.find_spec(specs) is not None:
      yield module.name, importlib.import_module(specs)
