"""A hook of mkdocs: links that leave docs/ work on the site too.

The pages are written for the folders of the repository, so that a Git host
shows them with working links. For the site, Markdown that they link to outside
docs/ becomes a page, other files are copied, and links to folders become plain
text.
"""

import pathlib
import posixpath
import re
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
HOME = "README.md"
# A link with its text, in a line that is not code.
_LINK = re.compile(r"(!?\[(?:[^][]|\[[^]]*\])*\])\(([^)\s]+)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
  """Returns where the site has a file of the repository.

  Args:
    path: its path from the root of the repository.
  """
  return "index.md" if path == HOME else path.removeprefix("docs/")


def outside() -> list[str]:
  """Lists the files outside docs/ that pages lead to, README first."""
  found = [HOME]
  pages = [HOME, *(_from_root(path) for path in ROOT.glob("docs/**/*.md"))]
  for page in pages:  # grows while it is read
    for link in _links((ROOT / page).read_text(encoding="utf-8")):
      target = _target(page, link)
      if target and not target.startswith("docs/") and target not in found:
        found.append(target)
        if target.endswith(".md"):
          pages.append(target)
  return found


def rewrite(text: str, page: str) -> str:
  """Returns a page whose links are those of the site.

  Args:
    text: Markdown of the page.
    page: its path from the root of the repository.
  """
  folder = posixpath.dirname(place(page)) or "."

  def replace(match: re.Match[str]) -> str:
    label, link = match.groups()
    path, mark, anchor = link.partition("#")
    if not path or "://" in path:
      return match[0]
    if (ROOT / page).parent.joinpath(path).is_dir():
      return label.strip("[]")
    target = _target(page, link)
    if target is None:
      return match[0]
    return f"{label}({posixpath.relpath(place(target), folder)}{mark}{anchor})"

  parts = _FENCED.split(text)
  parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
  return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
  """Adds the files outside docs/ to the site."""
  # Only the environment of the site has mkdocs.
  from mkdocs.structure.files import File

  for path in outside():
    file = File.generated(config, place(path), abs_src_path=str(ROOT / path))
    files.append(file)
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Rewrites the links of a page."""
  path = pathlib.Path(page.file.abs_src_path)
  return rewrite(markdown, _from_root(path))


def _from_root(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def _links(text: str) -> list[str]:
  return [link for _, link in _LINK.findall("".join(_FENCED.split(text)[::2]))]


def _target(page: str, link: str) -> str | None:
  """The file of the repository that a link leads to; None if there is none."""
  path = link.partition("#")[0]
  joined = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
  return joined if path and (ROOT / joined).is_file() else None
