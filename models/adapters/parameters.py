"""The parameters of another library's model, by their paths."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree, Shaped

from kvjax.errors import InputError

# Of NumPy, if it is on the host, or of JAX.
Stored = Shaped[Array | np.ndarray, "..."]


class Parameters:
  """The arrays of a tree by their paths, such as `layers/0/attn/kernel`.

  It remembers which were read: a parameter that is left over is one that the
  decoder would lack.
  """

  def __init__(self, tree: PyTree, package: str) -> None:
    """Lists the arrays of a tree.

    Args:
      tree: nested dictionaries and lists, or the state of an nnx module.
      package: name of the library, for messages.
    """
    if isinstance(tree, nnx.State):
      tree = nnx.to_pure_dict(tree)
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    self._arrays = {
      jax.tree_util.keystr(path, simple=True, separator="/"): array
      for path, array in found
    }
    self._package = package
    self._read: set[str] = set()

  def __contains__(self, path: str) -> bool:
    """Whether there is a parameter of this path."""
    return path in self._arrays

  def __getitem__(self, path: str) -> Stored:
    """Reads a parameter, where it is.

    Raises:
      InputError: there is none.
    """
    if path not in self._arrays:
      raise InputError(
        f"The parameters of {self._package} lack {path}; give those of a whole "
        "model."
      )
    self._read.add(path)
    array = self._arrays[path]
    return array if isinstance(array, jax.Array) else np.asarray(array)

  def paths(self) -> list[str]:
    """The paths of all parameters."""
    return list(self._arrays)

  def skip(self, start: str) -> None:
    """Leaves out parameters."""
    self._read |= {path for path in self._arrays if path.startswith(start)}

  def refuse_rest(self) -> None:
    """Refuses parameters that were not read.

    Raises:
      InputError: there are some.
    """
    rest = sorted(set(self._arrays) - self._read)
    if rest:
      raise InputError(
        f"The parameters of {self._package} hold {rest[0]}, which a model of "
        "this family does not have; adapters of LoRA are merged first, and "
        "other models are not supported."
      )


def stack(arrays: Sequence[Stored]) -> Stored:
  """Stacks arrays along a new first axis, where the first of them is."""
  stacked: Stored = arrays[0].__array_namespace__().stack(arrays)
  return stacked
