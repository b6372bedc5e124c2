"""Where the user's machine keeps what was made or fetched once."""

import os
import pathlib


def folder(name: str) -> pathlib.Path:
  """A folder for one kind of things: `~/.cache/kvjax/NAME`.

  XDG_CACHE_HOME, where it is set, stands for `~/.cache`. The folder need not
  be there.
  """
  caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(caches) / "kvjax" / name
