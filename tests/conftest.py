"""How every test runs: on 4 CPU devices, strictly, with checked shapes.

The settings are environment variables, so that the binaries that tests start
run under them too. They must be set before JAX is imported.
"""

import collections
import contextlib
import gc
import os
import re
import signal
import tomllib
from pathlib import Path

import jaxtyping
import pytest
from jaxtyping import install_import_hook

# The user's, so that a fresh clone finds what another one has compiled: an
# entry's name is a digest of the program, the options and JAX's version.
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
  # Most of the time goes into compiling: LLVM's optimizations, which change no
  # result but by rounding, are left out, and a program is compiled in one
  # piece, as the other core has work of its own.
  XLA_FLAGS="--xla_force_host_platform_device_count=4"
  " --xla_backend_optimization_level=0"
  " --xla_cpu_parallel_codegen_split_count=1",
  JAX_NUMPY_DTYPE_PROMOTION="strict",
  JAX_NUMPY_RANK_PROMOTION="raise",
  # Compile everything once for all workers and runs. No limit to its size:
  # with one, JAX reads the whole folder again at every write.
  JAX_COMPILATION_CACHE_DIR=str(_CACHES / "kvjax" / "tests"),
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
  # Every worker has the whole machine in sight: keep its thread pools small.
  NPROC="2",
  OPENBLAS_NUM_THREADS="1",
  TOKENIZERS_PARALLELISM="false",
  MPLBACKEND="agg",
)

# A shell lets its background jobs ignore interrupts, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes many objects and little garbage, which is collected after each
# file: looking for it at Python's own pace takes a twentieth of the time.
gc.set_threshold(100_000, 50)

# The tower lets an int be a float, as Python's type checkers do. Functions are
# decorated one by one, so that beartype cannot tell what class Self is.
install_import_hook(
  ["kvjax"],
  "beartype.beartype(conf=beartype.BeartypeConf("
  "is_pep484_tower=True, hint_overrides=beartype.FrozenDict("
  "{beartype.typing.Self: object})))",
)


_HERE = Path(__file__).parent
_QUICK_CASES = tomllib.loads((_HERE / "quick_cases.toml").read_text())
_counts = collections.Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks as slow the cases that `quick_cases.toml` does not name."""
  for item in items:
    file = item.path.relative_to(_HERE).as_posix()
    name = item.cls.__name__ if item.cls else item.originalname
    quick = _QUICK_CASES.get(file, {}).get(name)
    if quick is None or not hasattr(item, "callspec"):
      continue
    if not re.fullmatch(quick, item.callspec.id):
      item.add_marker(pytest.mark.slow)
    # A case may be slow by its own mark as well, whatever the list says.
    runs = item.get_closest_marker("slow") is None
    _counts[file, name, runs] += 1


@pytest.fixture
def case_counts():
  """Collected cases by file, test, and whether every change runs them."""
  return _counts


@pytest.fixture
def quick_cases():
  """The contents of `quick_cases.toml`."""
  return _QUICK_CASES


@pytest.fixture(autouse=True, scope="module")
def let_go_of_programs():
  """Frees a file's compiled programs: Linux bounds what a process may map.

  A worker that keeps those of the whole suite dies of it without a word.
  """
  yield
  import jax

  jax.clear_caches()
  gc.collect()


@pytest.fixture
def untyped():
  """Without the types that tests check besides."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def rows_alone(monkeypatch):
  """Within it, prompts run row by row, as long ones do on TPUs."""
  import jax

  from kvjax.engine import by_row

  @contextlib.contextmanager
  def alone():
    # No program that runs them together is reused, nor one of these later.
    jax.clear_caches()
    with monkeypatch.context() as patched:
      patched.setitem(by_row.LONG, "cpu", 0)
      yield
    jax.clear_caches()

  return alone
