"""The interchangeable programs of an operation: XLA's and its kernels."""

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Platform = Literal["cpu", "gpu", "tpu"]
_KERNELS: tuple[Platform, ...] = ("tpu", "gpu")

# Compute capabilities, without the digit after the point. Our kernels for GPUs
# use instructions that only Hopper has.
HOPPER = range(9, 10)


class Programs(NamedTuple):
  """The interchangeable programs of one operation.

  A kernel raises NotImplementedError during tracing for inputs that it does
  not support. XLA's program supports all inputs that the operation has, and
  gives kernels the gradients that they lack.

  Attributes:
    xla: the program that runs everywhere.
    tpu: the kernel for TPUs; None if XLA's program is as fast there.
    gpu: the kernel for GPUs, likewise.
    gpus: major compute capabilities of the GPUs that have its instructions.
    differentiable: platforms whose kernel has gradients of its own.
  """

  xla: Callable[..., Any]
  tpu: Callable[..., Any] | None
  gpu: Callable[..., Any] | None
  gpus: range = HOPPER
  differentiable: tuple[Platform, ...] = ()

  @property
  def operation(self) -> str:
    """Name of the operation: the package of XLA's program."""
    return self.xla.__module__.rpartition(".")[0].rpartition(".")[2]

  @classmethod
  def of(
    cls,
    xla: Callable[..., Any],
    gpus: range = HOPPER,
    differentiable: tuple[Platform, ...] = (),
    platforms: tuple[Platform, ...] = ("tpu", "gpu"),
  ) -> "Programs":
    """Finds the kernels by the name of XLA's program.

    Those of `xla.select_xla` are `tpu.select_tpu` and `gpu.select_gpu`, in the
    modules of the same package. They are imported when they are first used:
    Pallas takes longer to import than the rest of kvjax.

    Args:
      xla: XLA's program.
      gpus: see the class.
      differentiable: see the class.
      platforms: those that have a kernel.
    """
    tpu, gpu = (
      _kernel(xla, platform) if platform in platforms else None
      for platform in _KERNELS
    )
    return cls(xla, tpu, gpu, gpus, differentiable)

  def kernel(self, platform: str) -> Callable[..., Any] | None:
    """Returns the kernel for GPUs, or else that for TPUs; None if none is."""
    # Of a CPU, which can only interpret them, those for TPUs.
    return self.gpu if platform == "gpu" else self.tpu


def _kernel(xla: Callable[..., Any], platform: Platform) -> Callable[..., Any]:
  """Returns a platform's kernel, which is imported by its first call."""
  package = xla.__module__.rpartition(".")[0]
  name = xla.__name__.replace("_xla", f"_{platform}")

  def kernel(*operands: Any, **options: Any) -> Any:
    module = importlib.import_module(f"{package}.{platform}")
    return vars(module)[name](*operands, **options)

  kernel.__name__ = name
  return kernel
