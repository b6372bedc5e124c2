"""Families of models that other packages and plug-ins load."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.errors import InputError
from kvjax.model import Model, check_model
from kvjax.models.families import FAMILIES
from kvjax.registry.registry import load_plugins, same_definition

# Makes a model and its weights of a directory, a dtype and a mesh.
Load = Callable[
  [pathlib.Path, str, jax.sharding.Mesh | None], tuple[Model, PyTree]
]

LOADS: dict[str, Load] = {}

# What is said of such a model where it cannot be used.
NO_DECODER = (
  "is a model of another package, and this works with those of the families "
  "that kvjax has itself"
)

_NAME = re.compile(r"[\w.-]+")


def register(model_type: str, load: Load) -> None:
  """Registers a family of models, for `kvjax.load` and the flag `--model`.

  They then take a directory whose config.json has this `model_type`. Its
  tokenizer, chat template and generation_config.json are read as those of any
  other model.

  Args:
    model_type: the field of config.json.
    load: makes the model and its weights. Its arguments are the directory, the
      dtype of weights and cache, "bfloat16" or "float32", and the mesh over
      which the weights are sharded or replicated, or None.

  Raises:
    InputError: kvjax or another function loads this `model_type` already, or
      it is no name.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> def load(directory, dtype, mesh):
    ...   model = TinyModel(dtype=dtype)
    ...   return model, model.init()
    >>> kvjax.models.register("tiny_example", load)
  """
  if not isinstance(model_type, str) or not _NAME.fullmatch(model_type):
    raise InputError(
      "A model_type has letters, digits, underscores, dots and hyphens; "
      f"{model_type!r} does not fit."
    )
  if not callable(load):
    raise InputError(
      "A family of models is registered with the function that loads one, not "
      f"with {load!r}."
    )
  taken = LOADS.get(model_type)
  if model_type in FAMILIES or (
    taken is not None and not same_definition(taken, load)
  ):
    raise InputError(
      f"Models of the model_type {model_type!r} are loaded by "
      f"{'kvjax itself' if taken is None else 'another function'} already; "
      "register yours under another name."
    )
  LOADS[model_type] = load


def find(model_type: Any) -> Load | None:
  """Returns what loads models of this `model_type`, unless kvjax does."""
  if not isinstance(model_type, str) or model_type in FAMILIES:
    return None
  load_plugins()
  return LOADS.get(model_type)


def run(
  load: Load,
  directory: pathlib.Path,
  dtype: str,
  mesh: jax.sharding.Mesh | None,
) -> tuple[Model, PyTree]:
  """Loads a model of another family.

  Raises:
    InputError: the function returns something else than a model and weights.
  """
  loaded = load(directory, dtype, mesh)
  given = loaded if isinstance(loaded, tuple) else (loaded,)
  if len(given) != 2 or not isinstance(given[0], Model):
    kinds = " and ".join(f"a {type(each).__name__}" for each in given)
    raise InputError(
      "What loads a family of models returns a kvjax.Model and its weights; "
      f"for {directory} it returns {kinds or 'nothing'}."
    )
  model, params = given
  check_model(model)
  leaves = jax.tree.leaves(params)
  if not leaves or not all(
    isinstance(x, jax.Array | np.ndarray) for x in leaves
  ):
    raise InputError(
      "The weights of a model are a pytree of arrays; what loads "
      f"{directory} returns a {type(params).__name__} without any, or with "
      "other leaves."
    )
  return model, params
