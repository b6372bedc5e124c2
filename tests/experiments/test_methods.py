"""The list of methods."""

from kvjax.experiments import methods
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
