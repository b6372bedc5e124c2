"""What a comparison leaves behind, written when all answers are there."""

import contextlib
import json
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax

from experiments import plots, tables

_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def write(folder: pathlib.Path, summary: Mapping[str, Any]) -> None:
  """Writes summary.json, table.md and score_vs_retention.png, each at once."""
  write_json(folder / "summary.json", summary)
  write_text(folder / "table.md", tables.to_markdown(summary))
  _put(
    folder / "score_vs_retention.png",
    lambda part: plots.score_vs_retention(summary, part),
  )


def versions() -> dict[str, str]:
  """Of Python and of the packages that shape the numbers."""
  found = {"python": platform.python_version()}
  for name in _PACKAGES:
    # Run from a checkout, kvjax itself need not be installed.
    with contextlib.suppress(metadata.PackageNotFoundError):
      found[name] = metadata.version(name)
  return found


def device(count: int = 1) -> str:
  """In words: `CPU, 2 cores` or `4 x NVIDIA H100`."""
  kind = jax.devices()[0].device_kind
  if jax.default_backend() == "cpu":
    kind = f"CPU, {os.cpu_count()} cores"
  return kind if count == 1 else f"{count} x {kind}"


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes a file at once."""
  write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file at once."""
  _put(path, lambda part: part.write_text(text, encoding="utf-8"))


def _put(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
  """Writes beside the file and moves it in whole."""
  part = path.with_name(f".{path.name}.part")
  write(part)
  part.replace(path)
