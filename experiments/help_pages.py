"""What `--help` prints: what a program does, and its flags by subject."""

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

_WIDTH = 80
# The modules that define the flags of several programs, in this order.
SUBJECTS = {
  "method_inputs": "Methods and budgets",
  "budget_inputs": "Budgets",
  "plugin_inputs": "Methods and models of your own",
  "benchmark_inputs": "Benchmark",
  "needle_inputs": "Tasks",
  "essay_inputs": "Prose and keys of needles",
  "text_inputs": "Texts of RULER's tasks",
  "document_inputs": "Documents",
  "run_inputs": "Model and device",
  "dry_run_inputs": "Cost",
  "speed_inputs": "Speed",
  "host_inputs": "Several hosts",
}
_LOGGING = "--verbosity=0 logs what the program does, and JAX's own messages."
_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z-])")
_TIMES = re.compile(r"\b(minutes?|hours?)\b")
_KINDS = {"int": "N", "float": "X", "comma separated list of strings": "A,B"}


def asked(arguments: Sequence[str]) -> bool:
  """Says whether the arguments, without the program's name, ask for help."""
  own = arguments[: [*arguments, "--"].index("--")]
  return not {"--help", "-help", "-h"}.isdisjoint(own)


def page(program: str, text: str) -> str:
  """Formats the help of a program.

  Args:
    program: name of the program's module in absl's registry, `sys.argv[0]`.
    text: what it does, its module's docstring.
  """
  groups: dict[str, list[flags.Flag[Any]]] = {}
  for flag in flags.FLAGS.get_key_flags_for_module(program):
    module = flags.FLAGS.find_module_defining_flag(flag.name) or program
    subject = SUBJECTS.get(module.rpartition(".")[2], "Flags")
    groups.setdefault(subject, []).append(flag)
  parts = [text.strip()]
  for subject in ("Flags", *SUBJECTS.values()):
    if found := groups.get(subject):
      found = sorted(found, key=lambda flag: flag.name)
      parts.append("\n".join([f"{subject}:", *map(_entry, found)]))
  return "\n\n".join([*parts, _LOGGING])


def own_flags() -> frozenset[str]:
  """Names of the flags on the help page of the running program."""
  own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  return frozenset(flag.name for flag in own)


def duration(text: str) -> str:
  """Returns the sentences of a program's help that say how long it takes."""
  sentences = [
    sentence
    for paragraph in text.split("\n\n")
    for sentence in _SENTENCES.split(" ".join(paragraph.split()))
  ]
  return " ".join(filter(_TIMES.search, sentences))


def _entry(flag: flags.Flag[Any]) -> str:
  text = (flag.help or "").strip()
  if isinstance(flag, flags.EnumFlag):  # absl begins it with the values.
    text = text.partition(">: ")[2]
  default = flag.default_as_str
  if default is not None and default != "'false'":
    default = default.strip("'")
    if len(default) > _WIDTH // 2:
      default = default.replace(",", ", ")  # Lines end between names.
    text += f" Default: {default}."
  wrapped = textwrap.wrap(
    f"{_form(flag)}: {text}",
    _WIDTH,
    initial_indent="  ",
    subsequent_indent=" " * 6,
    break_on_hyphens=False,
  )
  return "\n".join(wrapped)


def _form(flag: flags.Flag[Any]) -> str:
  """Returns how a flag is written, as `--[no]dry_run` or `--batch=N`."""
  if flag.boolean:
    return f"--[no]{flag.name}"
  if isinstance(flag, flags.EnumFlag):
    return f"--{flag.name}={'|'.join(flag.parser.enum_values)}"
  return f"--{flag.name}={_KINDS.get(flag.flag_type(), 'TEXT')}"
