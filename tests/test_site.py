"""The site has every page and every public name, and its links lead there."""

import importlib
import pathlib
import re
import runpy

import pytest

from kvjax.experiments.report import api_names

ROOT = pathlib.Path(__file__).parents[1]
HOOK = runpy.run_path(str(ROOT / "docs" / "site_links.py"))
BREAKS = runpy.run_path(str(ROOT / "docs" / "site_breaks.py"))
API = {path.stem: path.read_text() for path in ROOT.glob("docs/api/*.md")}
REFERRED = [
  name
  for text in API.values()
  for name in re.findall(r"^::: (.*)$", text, re.M)
]
MODULES = ("models", "methods", "allocation", "retrieval", "testing")
PAGES = [
  path.read_text()
  for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
  if path.parent.name != "api"
]


def public(module):
  """The names that a package passes on."""
  source = pathlib.Path(importlib.import_module(module).__file__).read_text()
  names = re.findall(r"\bas (\w+)", source)
  return {f"{module}.{name}" for name in names if not name.startswith("_")}


def adapters():
  names = vars(importlib.import_module("kvjax.models.adapters"))
  found = (name for name in names if name.startswith("from_"))
  return {f"kvjax.models.adapters.{name}" for name in found}


def used_by_pages():
  """What pages import from deeper modules, or name in their text."""
  imports = [
    f"{module}.{name}"
    for text in PAGES
    for module, names in re.findall(
      r"^from (kvjax\.[\w.]+) import ([\w, ]+)$", text, re.M
    )
    for name in names.split(", ")
  ]
  named = re.findall(r"`(kvjax\.(?:kernels|hosts)\.\w+)", "".join(PAGES))
  return {*imports, *named}


def test_the_reference_has_every_public_name_once():
  top = public("kvjax") - {f"kvjax.{name}" for name in MODULES}
  expected = top.union(*(public(f"kvjax.{name}") for name in MODULES))
  assert len(REFERRED) == len({*REFERRED})
  assert {*REFERRED} == expected | adapters() | used_by_pages()


def test_names_stand_with_their_docstrings_first_line():
  """`python -m kvjax.experiments.report.api_names` writes them."""
  page = API["README"]
  assert api_names.replace_tables(page) == page
  stale = page.replace("Reads the chunks whose mean keys", "Reads")
  assert api_names.replace_tables(stale) == page != stale
  listed = re.findall(r"^\| \[?`(\S+)`.*\| \S.* \|$", page, re.M)
  assert {*REFERRED} <= {*listed}


def test_the_hook_finds_what_pages_link_to_outside_docs():
  found = HOOK["outside"]()
  assert found[0] == "README.md"
  assert len(found) == len({*found})
  assert {
    *("CONTRIBUTING.md", "WORKSPACE.md", "CHANGELOG.md"),
    *("models/reference/README.md", "models/adapters/keras_hub.py"),
    "notebooks/quickstart.ipynb",
  } <= {*found}
  assert not [path for path in found if path.startswith("docs/")]
  assert all((ROOT / path).is_file() for path in found)


@pytest.mark.parametrize(
  ("page", "link", "on_site"),
  [
    ("README.md", "(docs/models.md)", "(models.md)"),
    ("README.md", "(docs/methods/README.md)", "(methods/README.md)"),
    ("docs/models.md", "(benchmarks.md#data)", "(benchmarks.md#data)"),
    ("docs/models.md", "(#dtypes)", "(#dtypes)"),
    (
      "docs/methods/README.md",
      "(../../CONTRIBUTING.md#add-a-method)",
      "(../CONTRIBUTING.md#add-a-method)",
    ),
    ("CONTRIBUTING.md", "(docs/design.md)", "(design.md)"),
    ("docs/design.md", "(../README.md)", "(index.md)"),
    ("docs/models.md", "(https://arxiv.org)", "(https://arxiv.org)"),
    ("docs/models.md", "(no_such_page.md)", "(no_such_page.md)"),
  ],
)
def test_links_become_those_of_the_site(page, link, on_site):
  text = f"See [the `page`]{link}, and ![a picture]{link}."
  changed = f"See [the `page`]{on_site}, and ![a picture]{on_site}."
  assert HOOK["rewrite"](text, page) == changed


def test_links_to_folders_become_text_and_code_stays():
  text = "[tests/plugins](tests/plugins)\n\n```markdown\n[a](docs/a.md)\n```\n"
  plain = text.replace("[tests/plugins](tests/plugins)", "tests/plugins")
  assert HOOK["rewrite"](text, "CONTRIBUTING.md") == plain


def word(text):
  return f'<span class="word">{text}</span>'


LONG = "a," * 40
DIVIDED = "a,<wbr>" * 40
RIGHT = '<td style="text-align: right;">'
SENTENCE = '<td class="sentence" style="text-align: right;">'


@pytest.mark.parametrize(
  ("html", "guided"),
  [
    ("<p>50 % of them</p>", "<p>50&nbsp;% of them</p>"),
    ("<p>a--b</p>", "<p>a--b</p>"),
    (
      "<code>kvjax compare --every=16</code>",
      f"<code>kvjax compare {word('--every=16')}</code>",
    ),
    (
      f"<code>--methods={LONG}</code>",
      f"<code>{word('--methods=')}{DIVIDED}</code>",
    ),
    ("<code>lagkv:lag=32</code>", "<code>lagkv:lag=32</code>"),
    (
      "<table><tr><td><code>f(a:b=1:2)</code></table>",
      '<table><tr><td><code class="word">f(a:b=1:2)</code></table>',
    ),
    (
      "<table><tr><td><code>f(a:b=1:2) --c-d file=folder/d</code></table>",
      "<table><tr><td><code>f(<wbr>a:<wbr>b=1:2) "
      f"{word('--c-d')} file=folder/<wbr>d</code></table>",
    ),
    (
      "<table><tr><th>a_b_1</th><th><code>data:2,model:2</code></th></table>",
      "<table><tr><th>a_<wbr>b_1</th>"
      "<th><code>data:2,<wbr>model:2</code></th></table>",
    ),
    (
      f"<table>{RIGHT}9 (8–10)</td>{RIGHT}{'2 of 3, ' * 4}</td></table>",
      f"<table>{RIGHT}9 (8–10)</td>{SENTENCE}{'2 of 3, ' * 4}</td></table>",
    ),
    # Links of the API reference, whose tags have attributes.
    ('<code><a href="a-b">a</a></code>', '<code><a href="a-b">a</a></code>'),
    (
      "<pre><code>--a-b 5 %\n</code></pre><p>5 %</p>",
      "<pre><code>--a-b 5 %\n</code></pre><p>5&nbsp;%</p>",
    ),
    (
      f"<pre><code>a, --b={LONG}</code></pre>",
      f"<pre><code>a, {word('--b=')}{DIVIDED}</code></pre>",
    ),
  ],
)
def test_lines_break_between_words_of_code(html, guided):
  assert BREAKS["guide"](html) == guided


def test_commands_fit_the_site():
  """But for lists of methods, which have no spaces."""
  for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
    for line in path.read_text(encoding="utf-8").splitlines():
      command = re.match(r" {4}(?:kvjax|make|gcloud|xpk) (.*)", line)
      assert not command or len(line) <= 84, f"{path}: {line}"


def test_warnings_stop_the_build():
  """With --quiet, mkdocs counts none, and --strict does nothing."""
  (command,) = re.findall(
    r"mkdocs build (.*)", (ROOT / "Makefile").read_text(encoding="utf-8")
  )
  assert command == "--strict"


def test_shapes_are_no_python():
  """It would show "B #K" as `B`, with a comment; a space in front helps."""
  for path in ROOT.glob("kvjax/**/*.py"):
    assert not re.search(r'"\w+ #', path.read_text()), path


def test_examples_have_the_heading_that_the_site_knows():
  """It would show those below `Example:` as quotes."""
  for name in ("kvjax", "kernels", "models", "experiments"):
    for path in ROOT.glob(f"{name}/**/*.py"):
      assert not re.search(r"^ *Example:$", path.read_text(), re.M), path
