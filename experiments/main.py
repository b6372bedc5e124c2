"""The command `kvjax`, which lists and starts the programs.

  kvjax
  kvjax compare --methods=keydiff,snapkv --retention=0.25

`kvjax compare` runs the module `kvjax.experiments.compare`; `--help` lists its
flags.
"""

import ast
import pathlib
import runpy
import sys

import kvjax
from kvjax.experiments import exits
from kvjax.registry.parsing import suggest

GROUPS = {
  "Compare methods": (
    *("methods", "compare", "evaluate", "trials", "leaderboard", "reproduce"),
    *("show_kept", "retrieval_recall"),
  ),
  "Calibrate and train": (
    *("calibrate", "calibrate_queries", "train_gate", "finetune"),
    *("generate_documents", "train_reference"),
  ),
  "Measure speed": (
    *("benchmark_sweep", "benchmark_decode", "benchmark_sparse"),
    *("benchmark_scaling", "benchmark_kernels", "benchmark_compile"),
    *("benchmark_peers", "index_construction"),
  ),
  "Prepare TPUs and GPUs": (
    *("plan", "compile_check", "device_check", "tune", "benchmark_device"),
  ),
}
PROGRAMS = tuple(name for names in GROUPS.values() for name in names)


def main() -> None:
  """Starts the program in the first argument, or lists all programs."""
  with exits.quiet_when_unread():
    try:
      _start()
    except KeyboardInterrupt:  # while a program was imported
      print("Stopped.", file=sys.stderr)
      exits.leave(exits.INTERRUPTED)


def _start() -> None:
  name, *arguments = sys.argv[1:] or ["--help"]
  if name in ("--help", "-h", "help"):
    print(listing())
  elif name == "--version":
    print(f"kvjax {kvjax.__version__}")
  elif name in PROGRAMS:
    sys.argv[1:] = arguments
    module = f"kvjax.experiments.{name}"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  else:
    print(
      f"There is no program {name!r}{suggest(name, PROGRAMS)}; kvjax alone "
      "lists them.",
      file=sys.stderr,
    )
    sys.exit(exits.WRONG_INPUT)


def listing() -> str:
  """Lists the programs by subject, one per line."""
  width = max(map(len, PROGRAMS))
  parts = [
    "kvjax PROGRAM [--flag=value ...]; kvjax PROGRAM --help lists its flags"
  ]
  for subject, names in GROUPS.items():
    lines = [f"  {name:{width}}  {_summary(name)}" for name in names]
    parts.append("\n".join([f"{subject}:", *lines]))
  return "\n\n".join(parts)


def _summary(name: str) -> str:
  """Returns the first line of a program's docstring, without a slow import."""
  program = pathlib.Path(__file__).with_name(f"{name}.py")
  tree = ast.parse(program.read_text(encoding="utf-8"))
  return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
  main()
