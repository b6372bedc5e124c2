"""What README and the pages in docs/ show is so."""

import ast
import dataclasses
import functools
import json
import pathlib
import re
import shutil

import orbax.checkpoint as ocp
import page_commands
import pytest
import safetensors.numpy
from adapted import GOLDEN
from made_up_gates import write_fast_kvzip, write_kvzap
from maxtext_trees import maxtext_tree

import kvjax
from kvjax.experiments.main import PROGRAMS
from kvjax.models import catalog, family_table
from kvjax.models.adapters import ADAPTERS
from kvjax.models.config import DecoderConfig
from kvjax.models.families import FAMILIES
from kvjax.registry.names import get_recipe
from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.registry.wrappers import WRAPPERS
from kvjax.testing import TinyModel

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = (
  *("README.md", "CONTRIBUTING.md", "WORKSPACE.md"),
  *(path.relative_to(ROOT).as_posix() for path in DOCS),
)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}

# Their code continues that of the pages before; CONTRIBUTING.md has its own
# test. Those of WITH_CODE that are not QUICK compile further programs.
QUICK = ("README.md", "docs/getting_started.md", "docs/methods/README.md")
WITH_CODE = (
  "README.md",
  "docs/getting_started.md",
  "docs/methods/README.md",
  "docs/methods/ctkvr.md",
  "docs/methods/kvzip.md",
  "docs/methods/gates.md",
  "docs/models.md",
  "docs/sharding.md",
  "docs/coming_from_kvpress.md",
)


def python_of(page):
  return re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)


def test_all_pages_with_code_run():
  assert {page for page in PAGES if python_of(page)} == {
    "CONTRIBUTING.md",
    *WITH_CODE,
  }


@pytest.mark.parametrize("page", PAGES)
def test_python_is_fenced(page):
  """It would not be run otherwise."""
  text = re.sub(r"^ *```.*?^ *```$", "", TEXTS[page], flags=re.M | re.S)
  python = r"^ {4}(?:[\w, ]+ = [\w.]+\(|import \w|from [\w.]+ import|def \w)"
  assert not re.findall(python, text, re.MULTILINE)


def keep_layers(folder, count):
  """Leaves the first layers of a model; all of them compile alike."""
  config = folder / "config.json"
  fields = json.loads(config.read_text()) | {"num_hidden_layers": count}
  config.write_text(json.dumps(fields))
  path = folder / "model.safetensors"
  kept = {
    name: weight
    for name, weight in safetensors.numpy.load_file(path).items()
    if not (layer := re.search(r"layers\.(\d+)", name)) or int(layer[1]) < count
  }
  safetensors.numpy.save_file(kept, path, {"format": "pt"})


def write_maxtext(folder):
  """Writes a checkpoint of MaxText and its config."""
  golden = GOLDEN / "qwen3"
  (folder / "qwen").mkdir()
  shutil.copy(golden / "config.json", folder / "qwen")
  config = DecoderConfig.from_hf(
    json.loads((golden / "config.json").read_text())
  )
  state = {"params": {"params": maxtext_tree("qwen3", config, scanned=True)}}
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(folder / "checkpoints" / "0" / "items", state)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
# The record was measured on longer contexts.
@pytest.mark.filterwarnings("ignore::kvjax.InputWarning")
@pytest.mark.parametrize(
  "pages",
  [
    pytest.param(QUICK, id="quick"),
    pytest.param(WITH_CODE, id="all", marks=pytest.mark.slow),
  ],
)
def test_the_code_runs(pages, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "docs").mkdir()
  shutil.copy(ROOT / "docs" / "notes.txt", "docs")
  shutil.copytree(ROOT / "models" / "reference", "models/reference")
  # A small model stands in for the one that is fetched.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  name = "smollm2-135m-instruct"
  fetched = tmp_path / "cache" / "kvjax" / "models" / name
  shutil.copytree(ROOT / "models" / "reference", fetched)
  assert name in catalog.NAMED
  monkeypatch.setattr(catalog, "fetch", lambda source, folder: None)
  keep_layers(fetched, 2)
  # What the commands on the pages of gates and models leave.
  write_kvzap("results/gate", inputs=128, heads=2, layers=2)
  write_maxtext(tmp_path)
  names = {}
  for page in pages:
    for code in python_of(page):
      exec(compile(code, page, "exec"), names)
  printed = capsys.readouterr().out
  assert printed.endswith("\n")
  if "docs/getting_started.md" in pages:
    assert re.findall(r"^(\w+) [\d,]+ ", printed, re.MULTILINE) == [
      *("keydiff", "snapkv", "kvzip")
    ]
    assert len(names["answers"].rows()) == 1
  assert names["chat"].cache.nbytes > 0


def anchors(text):
  """The anchors of headings, as GitHub makes them."""
  text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
  plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
  return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
    if link.startswith("https://"):
      continue
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists(), link
    if anchor:
      assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_is_linked():
  linked = {
    ((ROOT / page).parent / link.partition("#")[0]).resolve()
    for page, text in TEXTS.items()
    for link in re.findall(r"\]\(([^)\s]+)\)", text)
  }
  assert {(ROOT / page).resolve() for page in PAGES} - linked <= {
    ROOT / "README.md"
  }


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_programs_and_flags_that_exist(page):
  text = TEXTS[page]
  programs = re.findall(r"(?:^ {4}|`)kvjax ([a-z_]+)", text, re.MULTILINE)
  modules = re.findall(r"python -m kvjax\.experiments\.([\w.]*\w)", text)
  assert {*programs} <= {*PROGRAMS}
  for module in modules:
    path = f"{module.replace('.', '/')}.py"
    assert (ROOT / "experiments" / path).exists(), module
  known = set().union(*map(flags_of, PROGRAMS), OF_EVERY_PROGRAM, {"sync"})
  # Launchers have flags of their own, before the command that they launch.
  launcher = r"^ {4}(?:gcloud|xpk) (?:(?!kvjax ).)*"
  text = page_commands.joined(text)
  text = re.sub(launcher, "", text, flags=re.MULTILINE)
  assert {*flags_in(text)} <= known


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_of_their_own_program(page):
  text = page_commands.joined(TEXTS[page])
  commands = re.findall(r"^ {4}.*?\bkvjax (\w+)(.*)", text, re.MULTILINE)
  commands += re.findall(r"`kvjax (\w+)([^`]*)`", text)
  commands += [
    ("compare", made) for made in re.findall(r'make demo ARGS="([^"]*)"', text)
  ]
  for program, arguments in commands:
    # `trials` passes what follows to `evaluate`.
    own, _, passed = arguments.partition(" -- ")
    known = OF_EVERY_PROGRAM | flags_of(program)
    assert {*flags_in(own)} <= known, f"kvjax {program}{arguments}"
    assert {*flags_in(passed)} <= flags_of("evaluate"), passed


def test_flags_are_those_of_a_program():
  assert {"methods", "samples"} <= flags_of("compare") & flags_of("evaluate")
  assert "data" in flags_of("evaluate") - flags_of("compare")
  assert "slice" in flags_of("plan") - flags_of("evaluate")


OF_EVERY_PROGRAM = {"help", "verbosity"}


def flags_in(text):
  return re.findall(r"(?<![\w-])--([a-z][a-z_]*)(?![\w-])", text)


@functools.cache
def flags_of(program):
  """Names of the flags that a program and the modules it imports define."""
  seen, todo, names = set(), [f"kvjax.experiments.{program}"], set()
  while todo:
    module = todo.pop()
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in seen or not path.exists():
      continue
    seen.add(module)
    source = path.read_text()
    names |= {*re.findall(r'(?:DEFINE_\w+|Option)\(\s*"(\w+)"', source)}
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{name.name}" for name in node.names]
        todo += [m for m in (node.module, *inner) if "experiments" in m]
  return names


# The method of CONTRIBUTING.md is made there.
@pytest.mark.parametrize("page", [p for p in PAGES if p != "CONTRIBUTING.md"])
def test_methods_that_commands_name_exist(page, tmp_path, monkeypatch):
  # Methods read files that commands before have made, as `make leaderboard`.
  monkeypatch.chdir(tmp_path)
  model = TinyModel()
  (tmp_path / "results" / "leaderboard").mkdir(parents=True)
  found = kvjax.calibrate_queries(model, model.init(), [[1, 2, 3, 4, 5, 6]])
  for folder in ("results", "results/leaderboard"):
    found.save(f"{folder}/queries.safetensors")
    write_kvzap(f"{folder}/gate", inputs=32, heads=2, layers=2)
  (tmp_path / "results" / "fast_gate").mkdir()
  write_fast_kvzip("results/fast_gate/gate.pt", inputs=32, heads=2, layers=2)
  # No bucket can be reached from here.
  text = TEXTS[page].replace("gs://bucket/", "results/")
  for names in re.findall(r"--methods?=([^\s`\"]+)", text):
    # It stands for several.
    for name in {*names.split(",")} - {"default"}:
      kvjax.get_plan(name, kvjax.Retention(0.5))


def is_own(entry):
  """Whether it is of this package: tests may have registered others."""
  own = ("kvjax.methods.", "kvjax.registry.eviction", "kvjax.retrieval.")
  return entry.make.__module__.startswith(own)


def option_tables():
  """The documented options of methods: pairs of a name and a default.

  A table belongs to the method that the heading above it names in backticks,
  or else to the one of the page. "all" has those of all retrieval methods.
  """
  found = {}
  for page, text in TEXTS.items():
    if "docs/methods/" not in page:
      continue
    of_page = re.findall(r"`(\w+)`", text.splitlines()[0])
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
      title, _, body = section.partition("\n")
      table = re.search(r"^\| option .*\n.*\n((?:\|.*\n)+)", body, re.MULTILINE)
      if table is None or "prefixes" in page:
        continue
      (name,) = re.findall(r"`(\w+)`", title) or (
        ["all"] if "all methods" in title else of_page
      )
      assert name not in found
      found[name] = rows = {}
      for line in table[1].splitlines():
        option, default = (cell.strip() for cell in line.split("|")[1:3])
        rows[option.strip("`")] = default.replace("none", "").strip("`")
  return found


OPTIONS = option_tables()


def is_option(field):
  return field.metadata.get("option", True) and field.name != "over"


@pytest.mark.parametrize("name", [*METHODS, *RETRIEVALS])
def test_the_pages_list_all_options_with_their_defaults(name):
  kind = METHODS if name in METHODS else RETRIEVALS
  if not is_own(kind[name]):
    pytest.skip("registered by another test")
  documented = OPTIONS.get(name, {})
  make = get_recipe
  if kind is RETRIEVALS:
    documented, make = OPTIONS["all"] | documented, kvjax.get_retrieval
  for option, default in documented.items():
    assert make(f"{name}:{option}={default}") == make(name), option
  made = make(name)
  # Those of SnapKV are on its own page.
  spread = getattr(made, "allocation", None)
  described = spread or getattr(made, "method", made)
  if [field.name for field in dataclasses.fields(described)] == ["over"]:
    described = described.over
  options = {f.name for f in dataclasses.fields(described) if is_option(f)}
  assert options <= {*documented}
  if spread is None:
    assert options == {*documented}


def test_the_pages_name_all_presets():
  pages = "".join(TEXTS[page] for page in PAGES if "docs/methods" in page)
  for names in (METHODS, RETRIEVALS):
    for preset in names.presets:
      if is_own(names[preset.partition(".")[0]]):
        assert f"`{preset}`" in pages, preset


def test_the_page_of_prefixes_lists_their_options():
  text = TEXTS["docs/methods/prefixes.md"]
  rows = re.findall(r"^\| `([\w.]+):(\w+)` \| `([\w.]+)`", text, re.MULTILINE)
  assert {name for name, _, _ in rows} == {
    *("pyramid", "ada", "critical", "chunked", "think", "chunkkv.kvpress")
  }
  for name, option, default in rows:
    method = "h2o" if name == "critical" else "keydiff"
    assert get_recipe(f"{name}:{option}={default}/{method}") == get_recipe(
      f"{name}/{method}"
    )


def test_every_press_has_the_name_that_its_page_gives():
  text = TEXTS["docs/coming_from_kvpress.md"]
  table = text.split("| press | kvjax |\n")[1].split("\n\n")[0]
  cells = re.findall(r"`([^`]+)`", "".join(re.findall(r"\| (?=`).*", table)))
  names = {cell.removesuffix("/NAME") for cell in cells}
  presets = {name for name in METHODS.presets if name.endswith(".kvpress")}
  assert presets | {*WRAPPERS} - {"pyramid", "ada"} <= names
  for name in names & {*METHODS, *METHODS.presets}:
    kvjax.get_plan(name, kvjax.Retention(0.5))


def test_the_table_of_families_is_what_the_code_reads():
  """`python -m kvjax.models.family_table` writes it."""
  page = TEXTS["docs/models.md"]
  assert family_table.replace_table(page) == page
  assert page.count(family_table.family_table()) == 1
  for model_type in FAMILIES:
    assert f"\n| `{model_type}` | " in family_table.family_table()
  stale = page.replace("| gpt-oss |", "| |")
  assert family_table.replace_table(stale) == page != stale


def test_the_page_of_models_has_every_adapter():
  page = TEXTS["docs/models.md"]
  for adapter in ADAPTERS.values():
    assert f"\n| `{adapter.function.__name__}(" in page
