"""Puts a decoder together from the parameters of another library's model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree, Shaped

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.models.pretrained import DTYPES, Pretrained
from kvjax.models.sharding import LOGICAL_AXES, param_shardings
from kvjax.models.tokenizer import Tokenizer

# Of NumPy, if it is on the host, or of JAX.
Stored = Shaped[Array | np.ndarray, "..."]
# Finds a parameter by its name in `kvjax.models.decoder`, such as `norm.scale`;
# or one of layers, such as `mlp.up_proj.kernel`, stacked along the first axis.
Find = Callable[[str, Sequence[int]], Stored]


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


def assemble(
  config: DecoderConfig,
  find: Find,
  dtype: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of arrays, one parameter at a time.

  An array that has the shape and the dtype of a parameter is not copied. Those
  on the host go to their devices once.

  Args:
    config: configuration of the decoder.
    find: returns parameters in the order of axes of `kvjax.models.decoder`:
      matrices are [inputs, outputs], and heads may be an axis of their own.
    dtype: one of `kvjax.models.pretrained.DTYPES`; by default that of the
      embedding.
    mesh: as for `kvjax.models.load`; by default arrays stay where they are.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: a parameter is missing or of another shape than the config says.
  """
  if dtype is None:
    dtype = jnp.result_type(find("embed_tokens.embedding", ())).name
  if dtype not in DTYPES:
    raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
  model, template = from_decoder(
    nnx.eval_shape(
      lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    )
  )
  leaves, structure = jax.tree_util.tree_flatten_with_path(template)
  places: list[Any] = [None] * len(leaves)
  if mesh is not None:
    places = jax.tree.leaves(param_shardings(template, model.geometry, mesh))
  arrays = [
    jax.device_put(_find(config, find, path, leaf), place)
    for (path, leaf), place in zip(leaves, places, strict=True)
  ]
  params = jax.tree_util.tree_unflatten(structure, arrays)
  return Pretrained(model, params, config, tokenizer)


def _find(
  config: DecoderConfig, find: Find, path: tuple[Any, ...], leaf: Any
) -> Stored:
  """Finds the array of a parameter, in its shape and dtype."""
  parts = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
  layers: Sequence[int] = ()
  if parts[0] == "layers":
    layers = config.layers_of(int(parts[1]))
    parts = parts[2:]
  name = ".".join(parts)
  array = find(name, layers)
  if array.shape not in (leaf.shape, _split_heads(config, name, leaf.shape)):
    raise InputError(
      f"The parameter {name} has the shape {array.shape}, where the config "
      f"asks for {leaf.shape}."
    )
  return array.reshape(leaf.shape).astype(leaf.dtype, copy=False)


def _split_heads(
  config: DecoderConfig, name: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
  """The shape of a projection with heads and their channels as two axes."""
  axes = LOGICAL_AXES[".".join(name.split(".")[-2:])]
  for number, axis in enumerate(reversed(axes), 1):
    if axis in ("heads", "kv_heads"):
      before, after = shape[:-number], shape[len(shape) - number + 1 :]
      return *before, shape[-number] // config.head_dim, config.head_dim, *after
  return shape
