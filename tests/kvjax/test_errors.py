"""What errors and warnings show of names in files."""

import pytest

from kvjax import InputError, InputWarning, errors

SHOWN = "a field x\\x1b[2J\\nand more"


def test_names_move_no_cursor_and_break_no_line():
  sentence = "a field x\x1b[2J\nand more"
  assert str(InputError(sentence)) == SHOWN
  with pytest.warns(InputWarning) as seen:
    errors.warn(sentence)
  assert [str(one.message) for one in seen] == [SHOWN]


def test_a_long_name_is_cut_but_not_the_end_of_its_sentence():
  said = str(InputError(f"The tensor {'x' * 10**6} is not read; leave it out."))
  assert len(said) < 3000
  assert said.startswith("The tensor xxx")
  assert said.endswith("xxx is not read; leave it out.")
