"""A hook of mkdocs: lines of the site break where a reader would break them.

Browsers break lines after hyphens, which splits flags, and before percent
signs. In the cells of tables they break no name, however long, which makes
tables wider than the page.
"""

import re
from typing import Any

# Characters that fit into a list on a page of 390 pixels.
WIDTH = 36
_PRE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_TABLE = re.compile(r"(<table.*?</table>)", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_HYPHENED = re.compile(r"[^\s<>]*-[^\s<>]*")


def guide(html: str) -> str:
  """Returns a page that says where its lines may break.

  Args:
    html: content of the page. What is preformatted stays as it is.
  """
  parts = _PRE.split(html)
  parts[::2] = [_guide(part) for part in parts[::2]]
  return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
  """Guides the line breaks of a page."""
  return guide(html)


def _guide(html: str) -> str:
  html = re.sub(r"(?<=\d) %", "&nbsp;%", html)
  parts = _TABLE.split(html)
  parts[::2] = [_CODE.sub(_keep_words, part) for part in parts[::2]]
  parts[1::2] = [_CODE.sub(_divide, part) for part in parts[1::2]]
  return "".join(parts)


def _keep_words(code: re.Match[str]) -> str:
  return _HYPHENED.sub(_keep, code[0])


def _divide(code: re.Match[str]) -> str:
  """Lets a name break before its options and arguments, too."""
  parts = re.split(r"(?<=\w[(:,])(?=[A-Za-z])", code[0])
  return "<wbr>".join(_HYPHENED.sub(_keep, part) for part in parts)


def _keep(word: re.Match[str]) -> str:
  """Keeps a word on one line, or of a long flag the name."""
  text = word[0]
  end = len(text) if len(text) <= WIDTH else text.find("=") + 1
  return f'<span class="word">{text[:end]}</span>{text[end:]}'
