"""What binaries set up before they parse their flags."""

import sys
import types
import warnings

import pytest
from absl import app, flags

from kvjax import InputWarning
from kvjax.experiments import cli


@pytest.fixture
def settings(monkeypatch):
  """Stands for JAX's, which all tests share."""
  config = types.SimpleNamespace(jax_compilation_cache_dir=None)
  config.update = lambda name, value: setattr(config, name, value)
  monkeypatch.setattr(cli, "jax", types.SimpleNamespace(config=config))
  return config


def test_programs_are_kept_in_the_users_cache_folder(
  settings, monkeypatch, tmp_path
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  cli._cache_programs()
  kept = tmp_path / "kvjax" / "programs"
  assert settings.jax_compilation_cache_dir == str(kept)
  assert settings.jax_compilation_cache_max_size == 2**31
  assert settings.jax_persistent_cache_min_compile_time_secs == 0.1
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/ann")
  settings.jax_compilation_cache_dir = None
  cli._cache_programs()
  kept = "/home/ann/.cache/kvjax/programs"
  assert settings.jax_compilation_cache_dir == kept


def test_where_jax_is_told_it_stays(settings):
  settings.jax_compilation_cache_dir = "gs://bucket/programs"
  cli._cache_programs()
  assert settings.jax_compilation_cache_dir == "gs://bucket/programs"
  assert not hasattr(settings, "jax_compilation_cache_max_size")


def test_a_warning_about_the_input_is_shown_as_a_sentence(
  settings, parsed, monkeypatch
):
  monkeypatch.setattr(app, "run", lambda main, flags_parser: main(["program"]))
  monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
  cli.run(lambda: None)
  place = ("program.py", 3, "code")
  odd = InputWarning("A field is odd.")
  shown = warnings.formatwarning(odd, InputWarning, *place)
  assert shown == "A field is odd.\n"
  other = warnings.formatwarning(UserWarning("Ouch."), UserWarning, *place)
  assert other.startswith("program.py:3: UserWarning: Ouch.")


def test_a_program_announces_its_time_in_the_words_of_its_help(
  monkeypatch, capsys
):
  text = "Does it.\n\nIt prints. It takes three\nminutes."
  monkeypatch.setattr(sys.modules["__main__"], "__doc__", text)
  cli.announce()
  assert capsys.readouterr().err == "It takes three minutes.\n"
  monkeypatch.setattr(sys.modules["__main__"], "__doc__", None)
  cli.announce()
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
  ("given", "help_says", "said"),
  [
    (["--rounds=9"], "It takes a minute.", "With the default flags, it takes"),
    (["--output=a"], "It takes a minute.", "It takes a minute.\n"),
    (["--seed=3"], "It takes a minute.", "It takes a minute.\n"),
    # As it is without.
    (["--rounds=5"], "It takes a minute.", "It takes a minute.\n"),
    # There is no default.
    (["--slice=4"], "It takes a minute.", "It takes a minute.\n"),
    # This says itself of how much it speaks.
    (
      ["--rounds=9"],
      "Ten rounds take a minute.",
      "Ten rounds take a minute.\n",
    ),
  ],
  ids=["sizes", "output", "seed", "same", "none", "explicit"],
)
def test_what_the_default_flags_take_is_said_of_these(
  monkeypatch, capsys, given, help_says, said
):
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  for name, default in {
    "rounds": "5",
    "output": "",
    "seed": "0",
    "slice": None,
  }.items():
    flags.DEFINE_string(name, default, "Some.", flag_values=values)
    values.register_key_flag_for_module(sys.argv[0], values[name])
  values([sys.argv[0], *given])
  monkeypatch.setattr(sys.modules["__main__"], "__doc__", help_says)
  cli.announce()
  assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
  ("argument", "said"),
  [
    ("--samples=2.5", "--samples takes a whole number, not '2.5'"),
    ("--samples=", "--samples takes a whole number, not ''"),
    ("--dry_run=maybe", "--dry_run takes true or false, not 'maybe'"),
    ("--batch=0", "flag --batch=0: 0 is not a positive integer"),
    ("--a\x1b[2J", "There is no flag --a\\x1b[2J"),
  ],
  ids=["fraction", "nothing", "word", "range", "unknown"],
)
def test_values_are_refused_without_words_of_python(refusal, argument, said):
  told = refusal("kvjax.experiments.evaluate", argument)
  assert told == f"{said}; --help lists the flags.\n"
