"""The shell commands of pages, run with small settings."""

import re
import subprocess
import sys


def joined(text):
  """A page whose commands have one line each."""
  return re.sub(r" *\\\n *", " ", text)


def blocks(text):
  """The indented blocks of a page, each a list of commands."""
  prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
  found = re.findall(r"(?:^ {4}(?: {4})?\S.*\n)+", joined(prose), re.MULTILINE)
  return [[line.strip() for line in block.splitlines()] for block in found]


def commands(text):
  """The commands of a page that start programs of kvjax."""
  lines = (line for block in blocks(text) for line in block)
  return [line for line in lines if re.match(r"kvjax\b(?! [A-Z])", line)]


def write_program(path, script):
  """Writes a program of the shell."""
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(0o755)


def write_kvjax(folder, ends):
  """Writes the command, with further arguments that make it small.

  Args:
    folder: where to write it.
    ends: arguments to append, by the start of the others; the first counts.
  """
  cases = " ".join(f"'{start}'*) end='{end}';;" for start, end in ends.items())
  write_program(
    folder / "kvjax",
    f'case "$*" in {cases} esac\n'
    f'exec {sys.executable} -m kvjax.experiments.main "$@" $end $THIS_HOST',
  )


def run(command, cwd, environment):
  """Runs a command in a folder; fails with what it says."""
  done = subprocess.run(
    ["bash", "-e", "-c", command],
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
  return done.stdout
