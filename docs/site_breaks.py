"""A hook of mkdocs: lines of the site break where a reader would break them.

Browsers break lines after hyphens, which splits flags, and before percent
signs. In the cells of tables they break no name, however long, and style.css
keeps numbers on one line, which makes tables wider than the page.
"""

import re
from typing import Any

# Characters that fit into a list on a page of 390 pixels.
WIDTH = 36
# What a cell of a table can hold on one line: longer names are divided, and
# longer cells of numbers are sentences.
NAME = 24
_PRE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_TABLE = re.compile(r"(<table.*?</table>)", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_NAME = re.compile(r"<code>([^<]+)</code>")
_HEAD = re.compile(r"<th\b.*?</th>")
_NUMBERS = re.compile(r'<td (style="text-align: right;">([^<]+)</td>)')
_TAG = re.compile(r"(<[^>]+>)")
_LIST = re.compile(r"--[^\s<>]{60}")
_HYPHENED = re.compile(r"[^\s<>]*-[^\s<>]*")


def guide(html: str) -> str:
  """Returns a page that says where its lines may break.

  Args:
    html: content of the page. What is preformatted stays as it is, but for
      commands with long lists, which wrap.
  """
  parts = _PRE.split(html)
  parts[::2] = [_guide(part) for part in parts[::2]]
  parts[1::2] = [_wrap(part) for part in parts[1::2]]
  return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
  """Guides the line breaks of a page."""
  return guide(html)


def _guide(html: str) -> str:
  html = re.sub(r"(?<=\d) %", "&nbsp;%", html)
  parts = _TABLE.split(html)
  parts[::2] = [_CODE.sub(_keep_words, part) for part in parts[::2]]
  parts[1::2] = [_guide_table(part) for part in parts[1::2]]
  return "".join(parts)


def _wrap(html: str) -> str:
  """Lets a command with a long list break after commas, too."""
  if not _LIST.search(html):
    return html
  parts = _TAG.split(html)
  parts[::2] = [_HYPHENED.sub(_keep, part) for part in parts[::2]]
  return "".join(parts)


def _guide_table(html: str) -> str:
  html = _HEAD.sub(_divide_head, html)
  html = _NAME.sub(_divide, html)
  return _NUMBERS.sub(_mark_sentence, html)


def _divide_head(head: re.Match[str]) -> str:
  """Lets a name above a column of short numbers break anywhere it can."""
  return re.sub(r"(?<=\w[_,])(?=[A-Za-z])", "<wbr>", head[0])


def _mark_sentence(cell: re.Match[str]) -> str:
  long = len(cell[2]) > NAME
  return f'<td class="sentence" {cell[1]}' if long else cell[0]


def _keep_words(code: re.Match[str]) -> str:
  return _HYPHENED.sub(_keep, code[0])


def _divide(code: re.Match[str]) -> str:
  """Lets a long name break before its options, arguments and folders, too."""
  if len(code[1]) <= NAME:
    return f'<code class="word">{code[1]}</code>'
  parts = re.split(r"(?<=\w[(:,/])(?=[A-Za-z])", code[1])
  divided = "<wbr>".join(_HYPHENED.sub(_keep, part) for part in parts)
  return f"<code>{divided}</code>"


def _keep(word: re.Match[str]) -> str:
  """Keeps a word on one line, or of a long flag the name and each value."""
  text = word[0]
  end = len(text) if len(text) <= WIDTH else text.find("=") + 1
  rest = text[end:].replace(",", ",<wbr>")
  return f'<span class="word">{text[:end]}</span>{rest}'
