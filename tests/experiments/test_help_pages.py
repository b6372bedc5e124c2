"""What `--help` prints."""

import pathlib

import pytest
from absl import flags

from kvjax.experiments import help_pages

INPUTS = pathlib.Path(help_pages.__file__).with_name("inputs")


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
  ]
