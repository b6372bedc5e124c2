"""The recipes of CONTRIBUTING.md: their text, their code, and how it runs."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title):
  """What stands below a heading."""
  return re.split(r"^## ", TEXT.split(f"## {title}\n")[1], flags=re.M)[0]


def blocks(text, language="python"):
  """Its code, each block with the file that is named right before it."""
  found = re.findall(
    rf"(?:^ *`(\S+)`\n\n)?^ *```{language}\n(.*?)^ *```$", text, re.M | re.S
  )
  return [(name, textwrap.dedent(code)) for name, code in found]


def run_in(folder, *arguments):
  """Runs Python in a folder, from which it also imports."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
    cwd=folder,
    capture_output=True,
    text=True,
  )
