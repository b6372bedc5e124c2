"""The list of methods."""

import dataclasses
import re
from typing import Literal

import pytest
from made_up_gates import write_kvzap

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import methods
from kvjax.registry.names import get_recipe, get_retrieval
from kvjax.registry.parsing import owners_of
from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.registry.wrappers import WRAPPERS


def test_every_name_is_listed_in_lines_of_a_terminal():
  text = methods.listing()
  words = text.replace(",", " ").replace(";", " ").split()
  for names in (METHODS, RETRIEVALS):
    assert {*names, *names.presets} <= {*words}
  assert {f"{name}/" for name in WRAPPERS} <= {*words}
  assert max(map(len, text.splitlines())) <= 80
  snapkv = next(line for line in text.splitlines() if "  snapkv " in line)
  assert "SnapKV; arXiv 2404.14469; snapkv.orig" in snapkv


def test_it_is_a_program(run_binary):
  done = run_binary("kvjax.experiments.main", "methods")
  assert done.returncode == 0, done.stderr
  assert done.stdout == methods.listing() + "\n"
  one = run_binary("kvjax.experiments.main", "methods", "snapkv", "ctkvr.512")
  assert one.returncode == 0, one.stderr
  pages = [methods.page("snapkv"), methods.page("ctkvr.512")]
  assert one.stdout == "\n\n".join(pages) + "\n"
  wrong = run_binary("kvjax.experiments.main", "methods", "snapkw")
  assert wrong.returncode == 2
  assert "no method 'snapkw' (did you mean snapkv" in wrong.stderr


def test_a_page_has_options_values_and_presets():
  first, second, *lines = methods.page("snapkv").splitlines()
  assert "SnapKV; arXiv 2404.14469" in first
  assert second.strip().startswith("Keeps the observation window")
  rows = [line.split() for line in lines]
  assert ["window", "32"] in rows
  at = rows.index(["pooling", "avg", "(or", "max)"])
  assert rows[at + 1][:3] == ['"avg"', "divides", "by"]
  assert ["paper_postproc", "false"] in rows
  assert "Presets: snapkv.orig, snapkv.longbench" in " ".join(lines)
  # Those of the allocation, too; and a preset has its own.
  assert ["alpha", "0.2"] in map(str.split, methods.page("adakv").splitlines())
  preset = methods.page("key_norm.lagkv").splitlines()
  assert ["skip_layers", "0+1"] in map(str.split, preset)
  for name in (*METHODS, *RETRIEVALS):
    assert max(map(len, methods.page(name).splitlines())) <= 80
  # Names as --methods takes them, and prefixes alone.
  for name, row in [
    ("snapkv:window=8", ["window", "8"]),
    ("ada:alpha=0.5/snapkv", ["alpha", "0.5"]),
    ("quest:page=4", ["page", "4"]),
    ("ada", ["alpha", "0.2"]),
    ("pyramid/", ["beta", "20.0"]),
  ]:
    assert row in map(str.split, methods.page(name).splitlines())
  with pytest.raises(InputError, match=r"as in ada:alpha=0\.5/snapkv"):
    methods.page("ada:alpha=0.5/")
  with pytest.raises(InputError, match="'snapkv' has no option 'windo'"):
    methods.page("snapkv:windo=8")
  with pytest.raises(InputError, match=r"no method 'ctkv' .did you mean ctkvr"):
    methods.page("ctkv")


def pairs(lines):
  return zip(*2 * [iter(lines)], strict=True)


def test_every_option_has_a_meaning():
  """As its class says, or one that this extends; presets and prefixes, too."""
  made = [
    *map(get_recipe, [*METHODS, *METHODS.presets]),
    *map(get_retrieval, [*RETRIEVALS, *RETRIEVALS.presets]),
  ]
  options = {
    (type(owner), option)
    for one in made
    for option, owner in owners_of(one).items()
  }
  for prefix in WRAPPERS.values():
    owners = methods._owners_of_prefix(prefix.outer)
    options |= {(owner, option) for option, owner in owners.items()}
  assert len(options) > 100
  assert {one for one in options if not methods._meaning(*one)} == set()


@dataclasses.dataclass(frozen=True)
class Farther(kvjax.methods.SnapKV):
  """Another window.

  Attributes:
    window: how far it
      looks: to the end.
    reach: the end.
  """

  reach: int = 3


def test_the_meaning_is_the_whole_paragraph_of_the_nearest_class():
  lines = methods._options(owners_of(Farther()))
  said = {" ".join(x.split()): " ".join(y.split()) for x, y in pairs(lines)}
  assert said["window 32"] == "how far it looks: to the end."
  assert said["reach 3"] == "the end."
  assert said["kernel 5"].endswith("with stride 1; 1 for none.")


@dataclasses.dataclass(frozen=True)
class Newest(kvjax.methods.HeadwiseMethod):
  """Keeps the newest tokens of a test.

  And nothing else.
  """

  def score_head(self, head):
    return head.positions.astype("float32")


@dataclasses.dataclass(frozen=True)
class Mute(Newest):
  factor: Literal[1, 2] = 1


def test_choices_may_be_numbers():
  lines = " ".join(methods._options(owners_of(Mute())))
  assert "1 (or 2)" in lines
  with pytest.raises(InputError, match="must be one of 1, 2; 3 is not"):
    Mute(factor=3)


def test_a_page_of_a_method_with_a_file(tmp_path):
  gate = write_kvzap(tmp_path / "gate", 32, 2, 2)
  said = methods.page(f"ada/kvzap:gate={gate}:level=head")
  assert "2601.07891" in said
  assert re.search(r"^ +level +head \(or .*\)$", said, re.M)


def test_a_method_without_a_summary_is_listed_by_its_docstring(monkeypatch):
  monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
  kvjax.register("newest_of_a_test", Newest)
  kvjax.register("mute_of_a_test", Mute)
  lines = methods.listing().splitlines()
  (newest,) = [line for line in lines if "newest_of_a_test" in line]
  assert newest.endswith("Keeps the newest tokens of a test.")
  (mute,) = [line for line in lines if "mute_of_a_test" in line]
  assert mute.strip() == "mute_of_a_test"
