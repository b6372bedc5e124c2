"""The axes of meshes, and which of them an axis of an array is spread over.

Rows are spread over "data", KV heads over "model". Where "model" is as large as
their number allows, an axis "group" may hold further devices: they have the
same KV heads, and other query heads that read them. Weights without KV heads,
and pages, which have the slots of heads, are spread over both. An axis
"context" shares out the tokens of prompts; in what is cached of them, its
devices count as further ones of "model".
"""

import math
from collections.abc import Iterable, Mapping

DATA, MODEL, GROUP, CONTEXT = "data", "model", "group", "context"
# Stands for the axes of weights, and so of the heads that they compute: "model"
# without "context".
HEADS = "heads"
# Those that every mesh has: of rows and of heads.
AXES = (DATA, MODEL)

# Names of mesh axes in a `PartitionSpec`.
Spread = str | tuple[str, ...] | None


def axis_size(axis: Spread, sizes: Mapping[str, int]) -> int:
  """Number of devices along some axes of a mesh; those it lacks count as 1.

  Args:
    axis: the axes.
    sizes: sizes of the mesh's axes.

  Examples:
    >>> from kvjax.kernels.mesh_axes import axis_size
    >>> axis_size(("model", "group"), {"data": 2, "model": 3, "group": 4})
    12
  """
  names = (axis,) if isinstance(axis, str) else axis or ()
  return math.prod(sizes.get(name, 1) for name in names)


def whole(axis: str, sizes: Mapping[str, int]) -> Spread:
  """Returns the axis, and for "model" also "group" and "context"."""
  if axis != MODEL:
    return axis
  more = tuple(name for name in (GROUP, CONTEXT) if name in sizes)
  return (MODEL, *more) if more else MODEL


def spread_over(
  axis: str, lengths: Iterable[int], sizes: Mapping[str, int]
) -> Spread:
  """Chooses the mesh axes that divide axes of arrays evenly.

  Args:
    axis: "data", "model", "context", or "heads" for "model" without "context".
    lengths: lengths of the arrays' axes.
    sizes: sizes of the mesh's axes.

  Returns:
    "model" with "group" and "context", or with one of them, if these divide all
    lengths, else the axis alone, or None if it does not divide them either.

  Examples:
    >>> from kvjax.kernels.mesh_axes import spread_over
    >>> sizes = {"data": 1, "model": 2, "group": 2}
    >>> [spread_over("model", [heads], sizes) for heads in (8, 2, 3)]
    [('model', 'group'), 'model', None]
    >>> spread_over("model", [8], {"data": 1, "context": 4, "model": 2})
    ('model', 'context')
  """
  if axis == HEADS:
    axis, sizes = MODEL, without_context(sizes)
  known = list(lengths)
  all_of = whole(axis, sizes)
  choices = [all_of, axis]
  if isinstance(all_of, tuple) and len(all_of) > 2:
    choices[1:1] = [(axis, name) for name in all_of[1:]]
  for names in choices:
    if all(length % axis_size(names, sizes) == 0 for length in known):
      return names
  return None


def without_context(sizes: Mapping[str, int]) -> Mapping[str, int]:
  """Sizes of the axes for weights, and for tokens that "context" shares out."""
  return {name: size for name, size in sizes.items() if name != CONTEXT}
