"""Which program computes an operation: XLA's or a Pallas kernel."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

Implementation = Literal["xla", "pallas"]
Platform = Literal["cpu", "gpu", "tpu"]

# The axes of a mesh: rows of a batch are spread over the first, KV heads and
# the query heads that read them over the second.
AXES = ("data", "model")

# Both are part of the key of every compiled program.
_implementation = jax.make_user_context(default_value=None)
_platform = jax.make_user_context(default_value=None)


class Programs(NamedTuple):
  """The programs of an operation, which compute the same.

  A kernel raises NotImplementedError, while it is traced, where it does not
  serve; XLA's program always serves.
  """

  xla: Callable[..., Any]
  tpu: Callable[..., Any]
  gpu: Callable[..., Any]


@contextlib.contextmanager
def use(
  implementation: Implementation | None = None,
  platform: Platform | None = None,
) -> Iterator[None]:
  """Chooses the programs of what is traced within it.

  Args:
    implementation: "xla"; "pallas", which refuses where a kernel declines;
      None takes the platform's kernels where they serve.
    platform: what is compiled for; None is where JAX runs.
  """
  with _implementation(implementation), _platform(platform):
    yield


def target_platform() -> str:
  """What is compiled for: "cpu", "gpu" or "tpu"."""
  return _platform.value or jax.default_backend()


def dispatch(
  programs: Programs,
  implementation: Implementation | None,
  operands: Sequence[PyTree[Array]],
  spread: Sequence[str],
  result: PyTree[str],
  **options: Any,
) -> Any:
  """Computes an operation, by default with the kernel of the platform.

  The compiler cannot split a kernel, so that on a mesh one runs on each
  device's rows and heads.

  Args:
    programs: of the operation; they take `operands`, then `options` by name.
    implementation: as in `use`, which decides where it is None.
    operands: arrays, trees of arrays with the same leading axes, or None for
      what is not given.
    spread: of each operand, what its leading axes are: "BK" rows and heads,
      "B" rows, "K" heads, "" neither. Query heads are heads too.
    result: the same for what is answered, in its structure.
    **options: static.

  Raises:
    NotImplementedError: "pallas" is asked for and the kernel declines.
  """
  chosen = implementation or _implementation.value
  platform = target_platform()
  run = functools.partial(programs.xla, **options)
  if chosen == "xla" or (chosen is None and platform == "cpu"):
    return run(*operands)
  kernel = programs.gpu if platform == "gpu" else programs.tpu
  kernel = functools.partial(kernel, **options)
  try:
    if platform == "gpu":
      _check_gpu()
    return _on_mesh(kernel, operands, spread, result)
  except NotImplementedError:
    if chosen == "pallas":
      raise
    return run(*operands)


def _check_gpu() -> None:
  """Declines for a GPU of another kind; one that is not here is taken on trust.

  Raises:
    NotImplementedError: the kernels' instructions are Hopper's.
  """
  if jax.default_backend() != "gpu":
    return
  capability = jax.devices()[0].compute_capability
  if not capability.startswith("9."):
    raise NotImplementedError(
      f"The GPU kernels need compute capability 9; this GPU has {capability}."
    )


def _on_mesh(
  kernel: Callable[..., Any],
  operands: Sequence[PyTree[Array]],
  spread: Sequence[str],
  result: PyTree[str],
) -> Any:
  """Runs a kernel on every device's share of the operands."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size <= 1 or not set(AXES) <= set(mesh.auto_axes):
    return kernel(*operands)
  sizes = [
    (letter, size)
    for operand, letters in zip(operands, spread, strict=True)
    for array in jax.tree.leaves(operand)
    for letter, size in zip(letters, array.shape, strict=False)
  ]
  # An axis that does not divide evenly stays whole.
  axes = {
    letter: axis
    for letter, axis in zip("BK", AXES, strict=True)
    if all(size % mesh.shape[axis] == 0 for of, size in sizes if of == letter)
  }

  def spec(letters: str) -> PartitionSpec:
    return PartitionSpec(*map(axes.get, letters))

  return jax.shard_map(
    kernel,
    in_specs=tuple(
      jax.tree.map(functools.partial(_given, spec(letters)), operand)
      for operand, letters in zip(operands, spread, strict=True)
    ),
    out_specs=jax.tree.map(spec, result),
    check_vma=False,
  )(*operands)


def _given(spec: PartitionSpec, _: Array) -> PartitionSpec:
  return spec
