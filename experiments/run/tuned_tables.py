"""Tables of kernels' options that `kvjax tune` has written."""

import pathlib
from typing import NoReturn

from kvjax.errors import InputError
from kvjax.files import read_json
from kvjax.kernels.specs import all_choices
from kvjax.kernels.tuning import Table
from kvjax.models.fields import format_value


def read(path: pathlib.Path) -> Table:
  """Reads a table.

  Raises:
    InputError: the file cannot be read, or is no table of candidates.
  """

  def refuse(what: str) -> NoReturn:
    raise InputError(
      f"{path} is no table of kvjax tune, which has values by device, kernel "
      f"and option: {what}."
    )

  candidates = {
    (choices.kernel, name): values
    for choices in all_choices()
    for name, values in choices.candidates.items()
  }
  table = read_json(path)
  for kind, entry in table.items():
    if not isinstance(entry, dict):
      refuse(f"{format_value(kind)} has {format_value(entry)}")
    for kernel, options in entry.items():
      if not isinstance(options, dict):
        refuse(f"{format_value(kernel)} has {format_value(options)}")
      for name, value in options.items():
        known = candidates.get((kernel, name))
        said = f"{format_value(name)} of {format_value(kernel)}"
        if known is None:
          refuse(f"there is no {said}")
        if type(value) is not int or value not in known:
          refuse(
            f"{said} is {format_value(value)}, and not one of "
            f"{', '.join(map(str, known))}"
          )
  return table
