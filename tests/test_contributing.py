"""The recipes of CONTRIBUTING.md are followed to the letter."""

import os
import re
import shutil
from unittest import mock

import numpy as np
import page_commands
import pytest
import scoring
from recipes import ROOT, TEXT, blocks, run_in, section

import kvjax
from kvjax.registry.wrappers import WRAPPERS
from kvjax.testing import TinyModel
from kvjax.testing.checks import all_activations


def test_named_commands_are_the_makefiles():
  makefile = (ROOT / "Makefile").read_text()
  targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
  named = set(re.findall(r"(?:^ +|`)make ([\w-]+)", TEXT, re.M))
  assert {"test", "lint", "demo"} <= named <= targets


def test_linked_files_exist():
  links = re.findall(r"\]\(([^)]+)\)", TEXT)
  assert links
  assert all((ROOT / link).exists() for link in links)


OWN, PART = "Add a method", "Make a method part of kvjax"
RETRIEVAL, AROUND = "Add a retrieval method", "Change what methods keep"
# The folders that a new method of kvjax changes, and their imports.
SOURCES = ("kvjax", "kernels", "models", "experiments")


def write(folder, title):
  """Writes the file of a recipe; returns its check."""
  (file, method), (_, check) = blocks(section(title))
  (folder / file).write_text(method)
  return check


def follow(folder):
  """Makes the recipe's method part of a copy of the tree."""
  for name in SOURCES:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
  (file, method), _ = blocks(section(OWN))
  ((registry, entry),) = blocks(section(PART))
  moved = folder / "kvjax" / "methods" / file
  assert not moved.exists()
  *lines, last = method.replace("import kvjax\n", "").splitlines(keepends=True)
  assert last.startswith("kvjax.register(")
  moved.write_text("".join(lines))
  path = folder / registry
  imported, line = filter(None, entry.splitlines())
  source = path.read_text()
  path.write_text(f"{imported}\n{source}  {line}\n")


def methods_of(page):
  """The rows of the methods that evict."""
  return page.read_text().split("| Name | Method |")[1].split("| **")[0]


SWEEP = """
import kvjax
from kvjax.testing import TinyModel

plans = [
  kvjax.get_plan(name, kvjax.Tokens(5))
  for name in ("big_values", "ada/big_values:power=1")
]
model = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 64))
prompts = kvjax.Prompts.of([list(range(40))])
caches, _ = kvjax.sweep(model, model.init(), prompts, plans)
print(*(int(cache.lengths.sum()) for cache in caches))
"""


def test_a_method_takes_a_file(tmp_path):
  """Its name is then known to a sweep."""
  done = run_in(tmp_path, "-c", f"{write(tmp_path, OWN)}{SWEEP}")
  assert done.returncode == 0, done.stderr
  assert done.stdout == "10 10\n"


def test_a_method_of_kvjax_takes_a_line_more(tmp_path):
  """In a copy of the tree, which knows the name by itself."""
  follow(tmp_path)
  done = run_in(tmp_path, "-c", f"{SWEEP}print(kvjax.__file__)")
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f"10 10\n{tmp_path}/")


SMALL = "--model=reference --length=320 --samples=1 --retention=0.5"


@pytest.fixture
def shell(tmp_path):
  """Runs the commands of a section in a folder, with small settings."""
  programs = tmp_path / "bin"
  programs.mkdir()
  recall = SMALL.replace("--retention=0.5", "--budget=32")
  page_commands.write_kvjax(
    programs, {"compare": SMALL, "retrieval_recall": recall}
  )
  path = os.pathsep.join([str(programs), os.environ["PATH"]])

  def run(title):
    commands = page_commands.commands(section(title))
    assert commands
    for command in commands:
      page_commands.run(command, tmp_path, os.environ | {"PATH": path})

  return run


@pytest.mark.slow
def test_the_method_is_compared_and_ranked(tmp_path, shell):
  """By the commands of the recipe, which read its file."""
  write(tmp_path, OWN)
  shell(OWN)
  ranked = (tmp_path / "results/leaderboard/leaderboard.md").read_text()
  assert {"big_values", "keydiff"} <= {
    *re.findall(r"^\| \d+ \| (\w+)", ranked, re.M)
  }


@pytest.mark.slow
def test_the_tests_pass_with_one_more_method(tmp_path):
  """Those that read the registry, and the new method's own cases."""
  follow(tmp_path)
  shutil.copytree(ROOT / "tests", tmp_path / "tests")
  for path in ROOT.glob("*.*"):
    if path.is_file():
      shutil.copy(path, tmp_path)
  for name in ("docs", "notebooks"):
    shutil.copytree(ROOT / name, tmp_path / name)
  ((file, row),) = blocks(section(PART), "markdown")
  page = tmp_path / file
  *_, last = methods_of(page).splitlines(keepends=True)
  page.write_text(page.read_text().replace(last, last + row))
  files = [
    *("tests/test_readme.py", "tests/test_examples.py"),
    *("tests/kvjax/test_contract.py", "tests/kvjax/test_methods.py"),
    *("tests/kvjax/test_contract_engine.py", "tests/kvjax/test_protected.py"),
    "tests/kvjax/test_layer_specs.py",
    "tests/experiments/test_shipped_calibrations.py",
  ]
  done = run_in(
    tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files
  )
  assert done.returncode == 0, done.stdout
  done = run_in(
    tmp_path,
    *("-m", "pytest", "-q", "-m", "", "-k", "big_values"),
    *("-p", "no:cacheprovider", *files),
  )
  assert done.returncode == 0, done.stdout


# A method that leaves room and one that reads what no cache stores.
OTHERS = '''"""Two methods."""

import dataclasses

import jax.numpy as jnp

from kvjax.methods.base import Method, ScoringMethod
from kvjax.methods.traits import Traits
from kvjax.selection import top_slots


@dataclasses.dataclass(frozen=True)
class Pairs(Method):
  """Keeps an even number of tokens, those of small keys, or a single one."""

  @property
  def traits(self):
    return Traits(coarse="it keeps pairs")

  def evaluate(self, layer, cache, activations):
    norms = -jnp.sum(jnp.square(cache.keys.astype("float32")), axis=-1)
    return jnp.nan_to_num(norms, nan=-jnp.inf)

  def token_scores(self, scores, cache):
    return scores

  def select(self, scores, cache, budget):
    must = budget.must_keep(cache)
    most = budget.per_head
    counts = jnp.where(most > 1, most // 2 * 2, 1)
    counts = jnp.maximum(counts, jnp.sum(must, axis=-1, dtype=jnp.int32))
    return top_slots(scores, cache.valid, must, counts, budget.capacity)


@dataclasses.dataclass(frozen=True)
class InputNorm(ScoringMethod):
  """Keeps the tokens whose layer inputs are large."""

  @property
  def traits(self):
    return Traits(
      activations=frozenset({"inputs"}),
      whole_prompts_only="it reads what no cache stores",
    )

  def scores(self, layer, cache, activations):
    norms = jnp.sum(jnp.square(activations.inputs.astype("float32")), axis=-1)
    spread = jnp.sum(jnp.abs(cache.keys.astype("float32")), axis=-1)
    return norms[:, None] * spread
'''


@pytest.mark.slow
def test_methods_of_every_kind_pass_the_tests(tmp_path):
  """The contract reads their traits, whatever their names are."""
  follow(tmp_path)
  shutil.copytree(ROOT / "tests", tmp_path / "tests")
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  (tmp_path / "kvjax" / "methods" / "others.py").write_text(OTHERS)
  registry = tmp_path / "kvjax" / "registry" / "eviction.py"
  registry.write_text(
    "from kvjax.methods.others import InputNorm, Pairs\n"
    f"{registry.read_text()}"
    '  register("pairs", Pairs)\n'
    '  register("input_norm", InputNorm)\n'
  )
  done = run_in(
    tmp_path,
    *("-m", "pytest", "-q", "-m", "", "-k", "pairs or input_norm"),
    *("-p", "no:cacheprovider", "tests/kvjax/test_contract.py"),
    *("tests/kvjax/test_contract_engine.py", "tests/kvjax/test_layer_specs.py"),
  )
  assert done.returncode == 0, done.stdout


def test_the_entry_point_is_where_ours_look():
  ((_, lines),) = blocks(section("Keep a method in your own package"), "toml")
  group = lines.splitlines()[0]
  example = (ROOT / "tests" / "plugins" / "pyproject.toml").read_text()
  assert group in example.splitlines()


def test_a_method_scores_by_attention():
  """In blocks, too, although some of its queries are of the block before."""
  ((_, code),) = blocks(section("Score by attention"))
  names = {}
  exec(code, names)
  model = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 64))
  prompts = kvjax.Prompts.of([list(range(24))])
  for block in (None, 5):
    plan = kvjax.Plan(
      names["LastRead"](window=6),
      kvjax.Tokens(10),
      schedule=kvjax.Schedule(block=block),
    )
    cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
    for head in cache.layer(0).positions[0].tolist():
      kept = {*head} - {-1}
      assert {*range(18, 24)} <= kept
      assert len(kept) == 10

  seen = all_activations(0, [24], 24)
  scores = scoring.evaluate(names["LastRead"](window=6), seen)
  queries, keys = (np.asarray(x[0], float) for x in (seen.queries, seen.keys))
  keys = np.repeat(keys, len(queries) // len(keys), axis=0)
  logits = queries @ keys.transpose(0, 2, 1) / keys.shape[-1] ** 0.5
  weights = np.tril(np.exp(logits))
  weights /= weights.sum(axis=-1, keepdims=True)
  mass = weights[:, 18:].sum(axis=1).reshape(len(seen.keys[0]), -1, 24)
  padded = np.pad(mass.max(axis=1), ((0, 0), (2, 2)))
  pooled = np.lib.stride_tricks.sliding_window_view(padded, 5, axis=-1)
  np.testing.assert_allclose(scores[0], pooled.mean(axis=-1), rtol=1e-4)


def test_a_retrieval_method_passes_its_check(tmp_path):
  done = run_in(tmp_path, "-c", write(tmp_path, RETRIEVAL))
  assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_a_retrieval_method_is_measured(tmp_path, shell):
  write(tmp_path, RETRIEVAL)
  shell(RETRIEVAL)
  table = (tmp_path / "results/retrieval/table.md").read_text()
  assert "| key_signs | 32 tokens |" in table


def test_an_allocation_counts_by_layer():
  ((_, code),) = blocks(section("Spread a budget your own way"))
  names = {}
  with mock.patch.dict(WRAPPERS):
    exec(code, names)
  model = TinyModel(kvjax.Geometry.uniform(2, 4, 2, 8, 64))
  prompts = kvjax.Prompts.of([list(range(24)), list(range(11))])
  cache, _ = kvjax.prefill(model, model.init(), prompts, names["plan"])
  assert cache.lengths[:, :, 0].tolist() == [[8, 8], [4, 4]]
  assert [cache.layer(layer).capacity for layer in range(2)] == [8, 4]


def test_a_method_around_others_passes_its_check(tmp_path):
  done = run_in(tmp_path, "-c", write(tmp_path, AROUND))
  assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_a_method_around_others_is_compared(tmp_path, shell):
  write(tmp_path, AROUND)
  shell(AROUND)
  table = (tmp_path / "results/demo/table.md").read_text()
  assert "| valued/snapkv |" in table


def test_values_count_as_in_the_paper():
  """By a loop over tokens, on what SnapKV's window attends to."""
  (_, code), _ = blocks(section(AROUND))
  names = {}
  with mock.patch.dict(WRAPPERS):
    exec(code, names)
  seen = all_activations(0, [24], 24)
  inner = kvjax.get_method("snapkv:window=6:kernel=1")
  scores = np.asarray(scoring.evaluate(names["Valued"](inner, 2.0), seen)[0])
  plain = np.asarray(scoring.evaluate(inner, seen)[0], float)
  values = np.asarray(seen.values[0], float)
  for place in np.ndindex(*plain.shape):
    norm = sum(abs(value) for value in values[place])
    assert scores[place] == pytest.approx(plain[place] * norm**2, rel=1e-5)
  with pytest.raises(kvjax.InputError, match="multiplies attention"):
    names["Valued"](kvjax.get_method("keydiff"))
