"""The tables of docs/api/README.md: every public name, and what it is.

    python -m kvjax.experiments.report.api_names

writes them into the page, from the root of the repository. The other pages of
the reference name what is public, and only the built site has its docstrings.
"""

import inspect
import pathlib
import pkgutil
import re
import typing
from typing import Any

import kvjax
from kvjax import files
from kvjax.experiments.report import formats, page_parts

# From the root of the checkout.
PAGE = pathlib.Path("docs", "api", "README.md")
NAME = "names"
_ROOT = pathlib.Path(kvjax.__file__).parents[1]


def replace_tables(page: str) -> str:
  """Returns the page with the present tables; it links to the other pages."""
  links = re.findall(r"^\| \[.*?\]\((\w+\.md)\)", page, re.M)
  parts = "\n".join(map(_section, dict.fromkeys(links)))
  return page_parts.replace(page, NAME, f"\n{parts}\n")


def _section(link: str) -> str:
  """The names of a page, below its title."""
  text = files.read_text(_ROOT / PAGE.with_name(link))
  title = text.partition("\n")[0].removeprefix("# ")
  names = re.findall(r"^::: (\S+)$", text, re.M)
  rows = [_row(name, pkgutil.resolve_name(name)) for name in names]
  table = formats.grid(["name", "what it is"], rows, left=[0, 1])
  return f"## [{title}]({link})\n\n{table}"


def _row(name: str, named: Any) -> list[str]:
  """A name, which leads to its source, and the first line of its docstring."""
  members = typing.get_args(named)
  if members:
    return [f"`{name}`", " or ".join(f"`{kind.__name__}`" for kind in members)]
  file = pathlib.Path(inspect.getfile(inspect.unwrap(named)))
  source = file.resolve().relative_to(_ROOT)
  line = (inspect.getdoc(named) or "").partition("\n")[0]
  return [f"[`{name}`](../../{source.as_posix()})", line.replace("|", r"\|")]


if __name__ == "__main__":
  files.write_text(PAGE, replace_tables(files.read_text(PAGE)))
