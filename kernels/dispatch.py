"""Chooses the program that computes an operation: XLA's or a Pallas kernel."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from kvjax.kernels.mesh_axes import (
  AXES,
  CONTEXT,
  DATA,
  GROUP,
  MODEL,
  Spread,
  axis_size,
  spread_over,
  without_context,
)
from kvjax.kernels.programs import Platform, Programs

Implementation = Literal["xla", "pallas"]

# The operations that have kernels, which are packages of this one.
OPERATIONS = (
  "attention_mass",
  "gather",
  "paged_attention",
  "prompt_attention",
  "select",
  "sketch",
  "sparse_decode",
)


# A user context is part of JAX's compilation cache key, so a program that was
# compiled under one choice is never reused under another.
_implementation = jax.make_user_context(default_value=None)
_platform = jax.make_user_context(default_value=None)
_overrides = jax.make_user_context(default_value=())


@contextlib.contextmanager
def use(
  implementation: Implementation | None = None,
  platform: Platform | None = None,
  overrides: Mapping[str, Implementation] | None = None,
) -> Iterator[None]:
  """Chooses the programs for everything that is traced within the context.

  Args:
    implementation: "xla"; "pallas", which raises where a kernel declines; None
      uses the platform's kernels and falls back to XLA. Where a platform has no
      kernel of an operation, all are XLA.
    platform: the target to compile for; None is that of JAX's default device.
    overrides: implementations of some of `OPERATIONS` by name, in place of
      `implementation`.

  Raises:
    ValueError: there is no such implementation, platform or operation.

  Examples:
    >>> import jax.numpy as jnp
    >>> from kvjax import kernels
    >>> from kvjax.kernels.select import largest
    >>> with kernels.use("pallas", overrides={"select": "xla"}):
    ...   slots = largest(jnp.array([[0.5, 2.0, 1.0]]), jnp.array([2]), 2)
    >>> slots.tolist()
    [[1, 2]]
  """
  chosen = tuple(sorted((overrides or {}).items()))
  for name, value in chosen:
    _check_known(name, OPERATIONS)
    _check_known(value, get_args(Implementation))
  if implementation is not None:
    _check_known(implementation, get_args(Implementation))
  if platform is not None:
    _check_known(platform, get_args(Platform))
  # Pairs rather than a mapping: what is in use must not change, and is hashed.
  with _implementation(implementation), _platform(platform), _overrides(chosen):
    yield


def _check_known(name: str, known: Sequence[str]) -> None:
  if name not in known:
    raise ValueError(f"{name!r} is none of {', '.join(known)}.")


def uses_as_here() -> contextlib.AbstractContextManager[None]:
  """Returns a context of what is in use in this thread, to enter in another."""
  return use(_implementation.value, _platform.value, dict(_overrides.value))


def target_platform() -> str:
  """Returns the platform to compile for: "cpu", "gpu" or "tpu".

  It is that of `use`, or else of `jax.default_device`.
  """
  device = jax.config.jax_default_device
  if _platform.value is not None:
    return _platform.value
  if device is None:
    return jax.default_backend()
  return device if isinstance(device, str) else device.platform


def dispatch(
  programs: Programs,
  operands: Sequence[PyTree[Array]],
  spread: Sequence[str],
  result: PyTree[str],
  **options: Any,
) -> Any:
  """Computes an operation, by default with the platform's kernel.

  The compiler cannot partition a kernel. On a mesh, each device therefore runs
  the kernel on its own rows and heads.

  Args:
    programs: the operation's programs; they take `operands`, then `options` by
      name.
    operands: arrays, trees of arrays with the same leading axes, or None for
      absent operands.
    spread: the leading axes of each operand: "BK" for rows and KV heads, "BN"
      for rows and query heads, "B" for rows, "K" or "N" for heads, "" for none.
    result: the leading axes of each output, in the structure of the result; a
      text stands for all outputs of a tree.
    **options: static options.

  Raises:
    NotImplementedError: "pallas" is in use and the kernel declines.
  """
  own = dict(_overrides.value).get(programs.operation)
  chosen = own or _implementation.value
  platform = target_platform()
  run = functools.partial(programs.xla, **options)
  kernel = programs.kernel(platform)
  if (
    chosen == "xla"
    or kernel is None
    or (chosen is None and platform not in ("gpu", "tpu"))
  ):
    return run(*operands)
  kernel = functools.partial(kernel, **options)
  try:
    if platform == "gpu":
      _check_gpu(programs.gpus)
    program: Callable[..., Any] = functools.partial(
      on_mesh, kernel, spread=tuple(spread), result=result
    )
    if platform not in programs.differentiable:
      program = _with_gradient(program, run)
    return program(operands)
  # Kernels decline while they are traced, so nothing has run yet.
  except NotImplementedError:
    if chosen == "pallas":
      raise
    return run(*operands)


def _with_gradient(
  program: Callable[..., Any], run: Callable[..., Any]
) -> Callable[..., Any]:
  """Gives a program without gradients those of an equal one.

  Args:
    program: the program, which takes operands only.
    run: the equal program.
  """
  compute = jax.custom_vjp(program)

  def forward(operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    return program(operands), operands

  def backward(operands: Sequence[Any], cotangent: Any) -> tuple[Any]:
    return (jax.vjp(run, *operands)[1](cotangent),)

  compute.defvjp(forward, backward)
  return compute


def _check_gpu(gpus: range) -> None:
  """Declines GPUs without a kernel's instructions.

  Compiling for a GPU that is not attached is always allowed, since there is
  nothing to check.

  Args:
    gpus: see `Programs`.

  Raises:
    NotImplementedError: the attached GPU is of another kind.
  """
  # `platform` may name a GPU on a machine that has none.
  if jax.default_backend() != "gpu":
    return
  capability = jax.devices()[0].compute_capability
  major = capability.partition(".")[0]
  # AMD's have names such as gfx942.
  if not major.isdigit() or int(major) not in gpus:
    oldest = "at least " if len(gpus) > 1 else ""
    raise NotImplementedError(
      f"The kernel needs compute capability {oldest}{gpus[0]}; this GPU has "
      f"{capability}."
    )


def on_mesh(
  kernel: Callable[..., Any],
  operands: Sequence[PyTree[Array]],
  spread: Sequence[str],
  result: PyTree[str],
  combine: Callable[[Any, Spread], Any] | None = None,
) -> Any:
  """Runs a program on each device's shard of the operands.

  Devices do not wait for each other, so that conditions in the program are
  each device's own.

  Args:
    kernel: the program, which treats rows and KV heads independently.
    operands: see `dispatch`.
    spread: see `dispatch`; the letter "S" stands for tokens of prompts.
    result: see `dispatch`.
    combine: joins the results of devices along a mesh axis, if the letter "R"
      in `spread`, for pages, shares out what all heads read.
  """
  mesh = jax.sharding.get_abstract_mesh()
  # Inside an outer shard_map the axes are manual: operands are shards already.
  if mesh.size <= 1 or not set(AXES) <= set(mesh.auto_axes):
    return kernel(*operands)
  sizes = [
    (letter, size)
    for operand, letters in zip(operands, spread, strict=True)
    for array in jax.tree.leaves(operand)
    # Only leading axes have letters, and some arrays lack even these.
    for letter, size in zip(letters, array.shape, strict=False)
  ]
  axes, split = _axes(sizes, mesh.shape)

  def spec(letters: str) -> PartitionSpec:
    # Letters without a mesh axis, such as L, map to None: replicated.
    names = [axes.get(letter) for letter in letters]
    if split and "N" in letters:
      place = letters.index("N")
      names[place : place + 1] = [MODEL, GROUP]
    return PartitionSpec(*names)

  def specs(operand: PyTree[Array], letters: str) -> PyTree[PartitionSpec]:
    # Some arrays of a tree, such as cursors, lack its leading axes.
    return jax.tree.map(lambda x: spec(letters[: x.ndim]), operand)

  shared = axes.get("R")

  def run(*shards: Any) -> Any:
    found = kernel(*map(_join_heads, shards, spread, splits))
    if combine is not None and axis_size(shared, mesh.shape) > 1:
      found = combine(found, shared)
    own = split // mesh.shape[MODEL]
    return jax.tree.map(
      lambda letters, made: _split_heads(made, letters, own), result, found
    )

  splits = [split] * len(operands)
  made = jax.shard_map(
    run,
    in_specs=tuple(map(specs, operands, spread)),
    out_specs=jax.tree.map(spec, result),
    # A pallas_call does not say over which mesh axes its results vary.
    check_vma=False,
  )(*map(_split_heads, operands, spread, splits))
  return jax.tree.map(
    lambda letters, each: _join_heads(each, letters, split), result, made
  )


def _split_heads(
  tree: PyTree[Array], letters: str, kv_heads: int
) -> PyTree[Array]:
  """Splits the axis of query heads by KV heads; by 0, arrays stay as they are.

  Args:
    tree: arrays with the same leading axes.
    letters: the leading axes.
    kv_heads: number of KV heads.
  """

  def split(x: Array) -> Array:
    return x.reshape(*x.shape[:place], kv_heads, -1, *x.shape[place + 1 :])

  place = letters.find("N")
  return jax.tree.map(split, tree) if kv_heads and place >= 0 else tree


def _join_heads(
  tree: PyTree[Array], letters: str, kv_heads: int
) -> PyTree[Array]:
  """Joins what `_split_heads` has split."""

  def join(x: Array) -> Array:
    return x.reshape(*x.shape[:place], -1, *x.shape[place + 2 :])

  place = letters.find("N")
  return jax.tree.map(join, tree) if kv_heads and place >= 0 else tree


def _axes(
  sizes: Sequence[tuple[str, int]], mesh: Mapping[str, int]
) -> tuple[dict[str, Spread], int]:
  """Chooses the mesh axes of all letters.

  A letter is spread only if all operands divide evenly, and is replicated
  otherwise. Contiguous shards of KV heads and of query heads keep query head j
  on the device of its KV head, j // (N / K).

  Args:
    sizes: letters, and lengths of the axes of operands that they stand for.
    mesh: sizes of the mesh's axes.

  Returns:
    The axes of each letter. Then K if query heads are also spread over "group",
    each device having the same share of every KV head's; otherwise 0.
  """

  def lengths(*letters: str) -> list[int]:
    return [size for letter, size in sizes if letter in letters]

  kv_heads, queries = lengths("K"), lengths("N")
  tokens = lengths("S")
  split_tokens = None
  if tokens and CONTEXT in mesh:
    split_tokens = spread_over(CONTEXT, tokens, mesh)
  if split_tokens is not None:
    # Its devices have the same heads then.
    mesh = without_context(mesh)
  axes = {
    "S": split_tokens,
    "B": spread_over(DATA, lengths("B"), mesh),
    "R": spread_over(MODEL, lengths("R"), mesh),
    "K": spread_over(MODEL, [*kv_heads, *queries], mesh),
  }
  axes["N"] = axes["K"]
  if axes["K"] != MODEL or not queries or len({*kv_heads}) != 1:
    return axes, 0
  groups = mesh.get(GROUP, 1)
  splits = all(n // kv_heads[0] % groups == 0 for n in queries)
  return axes, kv_heads[0] if groups > 1 and splits else 0
