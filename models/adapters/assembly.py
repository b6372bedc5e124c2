"""Puts a decoder together from the parameters of another library's model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import InputError
from kvjax.models.adapters.parameters import Stored
from kvjax.models.config import DecoderConfig
from kvjax.models.language_model import as_shapes
from kvjax.models.pretrained import Pretrained, name_dtype
from kvjax.models.sharding import LOGICAL_AXES, param_shardings
from kvjax.models.tokenizer import Tokenizer

# Finds a parameter by its name in `kvjax.models.decoder`, such as `norm.scale`;
# or one of layers, such as `mlp.up_proj.kernel`, stacked along the first axis.
Find = Callable[[str, Sequence[int]], Stored]


def assemble(
  config: DecoderConfig,
  find: Find,
  dtype: DTypeLike | None = None,
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
    dtype: as for `kvjax.models.load`; by default that of the embedding.
    mesh: as for `kvjax.models.load`; by default arrays stay where they are.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: a parameter is missing or of another shape than the config says.
  """
  if dtype is None:
    dtype = jnp.result_type(find("embed_tokens.embedding", ())).name
  dtype = name_dtype(dtype)
  model, template = as_shapes(config, dtype)
  leaves, structure = jax.tree_util.tree_flatten_with_path(template)
  places: list[Any] = [None] * len(leaves)
  if mesh is not None:
    places = jax.tree.leaves(param_shardings(template, model.geometry, mesh))
  arrays = [
    jax.device_put(_find(config, find, path, leaf), place)
    for (path, leaf), place in zip(leaves, places, strict=True)
  ]
  params = jax.tree_util.tree_unflatten(structure, arrays)
  return Pretrained(model, params, tokenizer)


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
