"""What runs leave behind, written when all answers are there."""

import contextlib
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import rich.console

from kvjax.errors import InputError
from kvjax.experiments.reporting import (
  compared,
  curves,
  formats,
  page,
  pictures,
  records,
  rows,
  run,
)

# What a run's folder keeps when something beside it cannot be written.
ANSWERS = "answers"
_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def write_comparison(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json, table.md and score_vs_retention.png, each at once.

  Returns:
    The table for a terminal.
  """
  write_json(folder / records.SUMMARY, summary, ANSWERS)
  write_text(folder / "table.md", compared.markdown(summary), ANSWERS)
  plot = pictures.png(curves.score_vs_retention(summary))
  _write(folder / "score_vs_retention.png", plot, ANSWERS)
  return compared.terminal(summary)


def write_run(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json, beside the answers, and all that shows it.

  That is report.md, report.html, rows.csv and PNG files.

  Returns:
    The tables that a terminal has room for.

  Raises:
    InputError: the folder's samples.jsonl cannot be read.
  """
  write_json(folder / records.SUMMARY, summary, ANSWERS)
  record = records.read(folder)
  plots = pictures.pictures(record)
  for name, png in plots.items():
    _write(folder / name, png, ANSWERS)
  texts = {
    "rows.csv": formats.to_csv(rows.identified(record)),
    "report.md": run.markdown(record, list(plots)),
    "report.html": page.of_run(record, plots),
  }
  for name, text in texts.items():
    write_text(folder / name, text, ANSWERS)
  # Those of lengths or turns that the run no longer has.
  for path in folder.glob("*.png"):
    if pictures.is_picture(path.name) and path.name not in plots:
      path.unlink()
  return run.terminal(record)


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


def write_json(
  path: pathlib.Path, value: Mapping[str, Any], kept: str = ""
) -> None:
  """Writes a file at once; see `write_text`."""
  text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
  write_text(path, text, kept)


def write_text(path: pathlib.Path, text: str, kept: str = "") -> None:
  """Writes a file at once.

  Args:
    path: the file.
    text: all of it.
    kept: what is not lost if it cannot be written, such as `ANSWERS`.

  Raises:
    InputError: it cannot be written.
  """
  _write(path, text.encode(), kept)


def _write(path: pathlib.Path, content: bytes, kept: str) -> None:
  """Writes beside the file and moves it in whole."""
  part = path.with_name(f".{path.name}.part")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    part.replace(path)
  except OSError as error:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)
    again = f"; the {kept} are kept, and the same command goes on from there"
    raise InputError(
      f"{path} cannot be written: {error.strerror}{again if kept else ''}."
    ) from error
