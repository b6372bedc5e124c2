"""What `--help` prints."""

import ast
import pathlib
import re

import pytest
from absl import flags

from kvjax.experiments import help_pages, main

INPUTS = pathlib.Path(help_pages.__file__).with_name("inputs")
_NUMBERS = (
  r"\d+|an?|half an|a few|one|two|three|four|five|six|seven|eight|nine|ten|"
  "eleven|twelve"
)
_MEASURED = re.compile(rf"\b({_NUMBERS}) (seconds?|minutes?|hours?)\b")
# What takes as long as it is asked to, and what no device has run as a whole.
_UNMEASURED = {
  "evaluate": "It says what a run takes once it has answered two contexts.",
  "trials": "They are that many evaluations.",
  "calibrate": "It says so too; methods and tasks are the user's.",
  "tune": "It has not been timed on a device.",
  "benchmark_device": "Its steps have run one by one.",
}
PROGRAMS = [INPUTS.with_name(f"{name}.py") for name in main.PROGRAMS]


def test_every_module_of_flags_has_a_subject():
  defining = {
    path.stem
    for path in INPUTS.glob("*.py")
    if "flags.DEFINE" in path.read_text(encoding="utf-8")
  }
  assert defining == help_pages.SUBJECTS.keys()


@pytest.mark.parametrize(
  ("arguments", "asked"),
  [
    (["--help"], True),
    (["--methods=snapkv", "-h"], True),
    ([], False),
    (["--methods=help"], False),
    # The rest is for another program, as that of `kvjax trials`.
    (["--trials=2", "--", "--help"], False),
  ],
)
def test_help_is_given_to_those_who_ask(arguments, asked):
  assert help_pages.asked(arguments) == asked


def test_of_a_help_the_sentences_say_how_long_it_takes():
  text = """Does it.

  kvjax does --it

does it at 8 tokens. It takes half an hour, and
2 GB. --fast takes a minute. Seconds count."""
  said = "It takes half an hour, and 2 GB. --fast takes a minute."
  assert help_pages.duration(text) == said
  assert help_pages.duration("Takes no time.") == ""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_long_it_takes_and_so_does_its_start(path):
  source = path.read_text(encoding="utf-8")
  said = help_pages.duration(ast.get_docstring(ast.parse(source)) or "")
  estimating = path.stem in {"compare", "evaluate", "reproduce", "calibrate"}
  quick = re.search(r"It\s+takes (a few|less than ten) seconds", source)
  assert bool(said) != bool(quick)
  measured = _MEASURED.search(said or quick.group())
  assert bool(measured) != (path.stem in _UNMEASURED)
  assert ("cli.announce()" in source) == bool(said and not estimating)


def test_a_flag_is_shown_with_its_form_and_its_default(monkeypatch):
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  for define, name, default in (
    (flags.DEFINE_integer, "rows", 3),
    (flags.DEFINE_float, "tau", None),
    (flags.DEFINE_list, "names", ["a", "b"]),
    (flags.DEFINE_bool, "all", True),
    (flags.DEFINE_bool, "dry", False),
  ):
    define(
      name, default, f"Some {name}.", flag_values=values, module_name="program"
    )
  flags.DEFINE_enum(
    "side",
    "left",
    ["left", "right"],
    "A side.",
    flag_values=values,
    module_name="program",
  )
  for name in values:
    values.register_key_flag_for_module("program", values[name])
  text = help_pages.page("program", "Does it.\n")
  assert text.splitlines() == [
    "Does it.",
    "",
    "Flags:",
    "  --[no]all: Some all. Default: true.",
    "  --[no]dry: Some dry.",
    "  --names=A,B: Some names. Default: a,b.",
    "  --rows=N: Some rows. Default: 3.",
    "  --side=left|right: A side. Default: left.",
    "  --tau=X: Some tau.",
    "",
    help_pages._LOGGING,
  ]


@pytest.mark.parametrize(
  ("program", "flag"),
  [
    ("benchmark_decode", "batch"),
    ("benchmark_sweep", "batch"),
    ("train_gate", "batch"),
    ("calibrate_queries", "batch"),
    ("calibrate_queries", "seed"),
  ],
)
def test_programs_have_no_flags_that_they_do_not_read(refusal, program, flag):
  said = refusal(f"kvjax.experiments.{program}", f"--{flag}=3")
  assert said == f"There is no flag --{flag}; --help lists the flags.\n"
