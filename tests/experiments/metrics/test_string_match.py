"""RULER's metrics: what counts as found."""

from kvjax.experiments.metrics.string_match import (
  clean,
  string_match_all,
  string_match_part,
)


def test_control_characters_become_line_breaks():
  assert clean(" a\x00b\tc \n") == "a\nb\nc"
  # As in RULER, the answer is not found across what was a tab.
  assert string_match_all("ab\tcd", ["ab cd"]) == 0


def test_all_is_a_share_and_part_is_any():
  assert string_match_all("It is ABC and def.", ["abc", "DEF"]) == 1
  assert string_match_all("abc", ["abc", "def"]) == 0.5
  assert string_match_part("It is ABC.", ["def", "abc"]) == 1
  assert string_match_part("It is AB.", ["def", "abc"]) == 0
