"""The parameters in a checkpoint of MaxText."""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from kvjax import files
from kvjax.errors import InputError


def restore(directory: pathlib.Path) -> PyTree:
  """Reads the parameters of a checkpoint to the host.

  Raises:
    InputError: there is none, or it cannot be read.
  """
  folder = (directory / "items").resolve()
  folder = folder if folder.is_dir() else directory.resolve()
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      tree = checkpointer.metadata(folder).item_metadata.tree
      wanted = {"params": tree["params"]}
      to_host = ocp.RestoreArgs(restore_type=np.ndarray)
      restored: PyTree = checkpointer.restore(
        folder,
        ocp.args.PyTreeRestore(
          wanted, jax.tree.map(lambda _: to_host, wanted), partial_restore=True
        ),
      )
      return restored
  except (OSError, KeyError, ValueError, AttributeError, TypeError) as error:
    raise InputError(
      f"{directory} is no checkpoint of MaxText that orbax can read "
      f"({files.reason(error)}); give the folder of a step."
    ) from error
