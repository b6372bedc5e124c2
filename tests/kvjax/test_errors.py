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


@pytest.mark.parametrize(("char", "shown"), [("x", "xx"), ("\x1b", "\\x1b")])
def test_a_long_name_is_cut_but_not_the_end_of_its_sentence(char, shown):
  said = str(InputError(f"The tensor {char * 2900} is not read; leave it out."))
  longer = str(InputError(f"The tensor {char * 10**6} is not read; leave it."))
  assert len(longer) < 3000
  assert said.startswith(f"The tensor {shown}")
  assert said.endswith(f"{shown} is not read; leave it out.")
  assert (" ... " in said) == (char != "x")
