"""The user's cache directory."""

import os
import pathlib


def folder(name: str) -> pathlib.Path:
  """Returns the path `~/.cache/kvjax/NAME`, which need not exist.

  XDG_CACHE_HOME, if set, replaces `~/.cache`.
  """
  caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(caches) / "kvjax" / name
