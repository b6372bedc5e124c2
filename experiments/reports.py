"""Writes the files of a finished run."""

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

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.reporting import (
  compared,
  formats,
  page,
  records,
  rows,
  run,
)

# The records that survive if another file of the run cannot be written.
ANSWERS = "answers"
_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def write_comparison(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json, table.md and score_vs_retention.png atomically.

  Returns:
    The table for a terminal.
  """
  # Here, as programs would otherwise start a second later, for matplotlib.
  from kvjax.experiments.reporting import curves, pictures

  write_json(folder / records.SUMMARY, summary, ANSWERS)
  write_text(folder / "table.md", compared.markdown(summary), ANSWERS)
  plot = pictures.png(curves.score_vs_retention(summary))
  write_bytes(folder / "score_vs_retention.png", plot, ANSWERS)
  return compared.terminal(summary)


def write_run(
  folder: pathlib.Path, summary: Mapping[str, Any]
) -> rich.console.Group:
  """Writes summary.json and the reports made from it.

  These are report.md, report.html, rows.csv and PNG files.

  Returns:
    The tables that fit on a terminal.

  Raises:
    InputError: the folder's samples.jsonl cannot be read.
  """
  from kvjax.experiments.reporting import pictures

  write_json(folder / records.SUMMARY, summary, ANSWERS)
  record = records.read(folder)
  plots = pictures.pictures(record)
  for name, png in plots.items():
    write_bytes(folder / name, png, ANSWERS)
  texts = {
    "rows.csv": formats.to_csv(rows.identified(record)),
    "report.md": run.markdown(record, list(plots)),
    "report.html": page.of_run(record, plots),
  }
  for name, text in texts.items():
    write_text(folder / name, text, ANSWERS)
  # Remove plots of lengths or turns that the run no longer has.
  for path in folder.glob("*.png"):
    if pictures.is_picture(path.name) and path.name not in plots:
      path.unlink()
  return run.terminal(record)


def versions() -> dict[str, str]:
  """Returns the versions of Python and of relevant packages."""
  by_name = {"python": platform.python_version()}
  for name in _PACKAGES:
    # kvjax need not be installed when it runs from a checkout.
    with contextlib.suppress(metadata.PackageNotFoundError):
      by_name[name] = metadata.version(name)
  return by_name


def device(count: int = 1) -> str:
  """Describes the device, as `CPU, 2 cores` or `4 x NVIDIA H100`."""
  kind = jax.devices()[0].device_kind
  if jax.default_backend() == "cpu":
    kind = f"CPU, {os.cpu_count()} cores"
  return kind if count == 1 else f"{count} x {kind}"


def write_json(
  path: pathlib.Path, value: Mapping[str, Any], kept: str = ""
) -> None:
  """Writes a JSON file atomically; see `write_text`."""
  text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
  write_text(path, text, kept)


def write_text(path: pathlib.Path, text: str, kept: str = "") -> None:
  """Writes a text file atomically.

  Args:
    path: the file.
    text: its content.
    kept: the records that are not lost on failure, such as `ANSWERS`.

  Raises:
    InputError: the file cannot be written.
  """
  write_bytes(path, text.encode(), kept)


def write_bytes(path: pathlib.Path, content: bytes, kept: str = "") -> None:
  """Writes a file atomically, and its folder if needed; see `write_text`."""
  again = f"; the {kept} are kept, and the same command goes on from there"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(
      f"{path} cannot be written: {error.strerror}{again if kept else ''}."
    ) from error
  files.write_bytes(path, content, again if kept else "")
