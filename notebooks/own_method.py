# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own method in 30 lines
#
# A method scores the tokens of a cache, and kvjax does the rest: batches,
# blocks, decoding, budgets, sharding, saving. This notebook writes a method,
# checks that it keeps the contract of all methods, and compares it with others
# on a real language model. A CPU takes two minutes.
#
# The first cell installs kvjax if it is missing, from the clone that the
# notebook stands in, or from a wheel beside it. On Colab, upload the wheel.

# %%
import importlib
import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys

if importlib.util.find_spec("kvjax") is None:
  # From the clone that this notebook stands in, or a wheel beside it.
  here = pathlib.Path.cwd()
  clones = [p for p in (here, *here.parents) if (p / "WORKSPACE.md").exists()]
  source = next(iter([*clones, *here.glob("kvjax-*.whl")]), None)
  if source is None:
    raise RuntimeError(
      "kvjax is not installed: run this notebook in a clone of it, or put its "
      "wheel beside it, from `python -m pip wheel --no-deps PATH/TO/CLONE`."
    )
  # JAX has a build for each kind of device.
  tpu = any(pathlib.Path("/dev").glob("accel[0-9]*"))
  tpu = tpu or any(pathlib.Path("/dev").glob("vfio/[0-9]*"))
  build = "cuda13" if shutil.which("nvidia-smi") else "tpu" if tpu else "cpu"
  subprocess.run(
    [
      sys.executable,
      "-m",
      "pip",
      "install",
      "-q",
      f"jax[{build}]",
      str(source),
    ],
    check=True,
  )
  importlib.invalidate_caches()
  for name in ("jax", "numpy"):
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if loaded not in (None, importlib.metadata.version(name)):
      raise RuntimeError("Restart the session and run all cells once more.")

# %% [markdown]
# ## Write it
#
# KeyDiff keeps the keys that differ from the mean key. This method also weighs
# how large a token's value is: a token matters if its key is unusual *and* its
# value adds much to the output. A `HeadwiseMethod` sees one head: `head.keys`
# and `head.values` are `[T, D]`, float32, and zero in empty slots, which are
# never kept.

# %%
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

import kvjax
from kvjax.methods import Head, HeadwiseMethod


@dataclasses.dataclass(frozen=True)
class ValuedKeys(HeadwiseMethod):
  """Unusual keys, weighed by the norm of their values.

  Attributes:
    power: exponent of the norm; 0 is KeyDiff.
  """

  power: float = 0.5

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Computes (1 - cosine of key and mean key) |v|^power."""
    norms = jnp.linalg.norm(head.keys, axis=-1, keepdims=True)
    units = head.keys / jnp.maximum(norms, 1e-12)
    # Empty slots are zero and add nothing.
    mean = jnp.sum(units, axis=0)
    cosines = units @ mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)
    return (1 - cosines) * jnp.linalg.norm(head.values, axis=-1) ** self.power


kvjax.register("valued_keys", ValuedKeys, summary="unusual keys, large values")

# %% [markdown]
# ## Check it
#
# `check_method` runs what the tests run for every method: rows do not depend
# on each other, empty slots never matter, and a cache is saved and loaded. It
# raises an error that describes what is wrong.

# %%
from kvjax.testing import check_method

check_method(kvjax.get_method("valued_keys:power=0.5"))
print("The contract holds.")

# %% [markdown]
# ## Evaluate it
#
# Eight contexts of 512 tokens each hide a number in prose. All methods compress
# the same prefill, before the question is known. The run is that of `kvjax
# compare`: it says about how long it takes, writes every answer to a folder,
# and resumes there if this cell is interrupted.

# %%
import time

from kvjax import models
from kvjax.experiments.report import ranking, run_files, writing
from kvjax.experiments.run import results, runner
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.tasks import prose, suite

MODEL, TASK, LENGTH, SAMPLES = "smollm2-135m-instruct", "niah_single_2", 512, 8
METHODS = ["valued_keys", "valued_keys:power=0", "keydiff", "snapkv", "random"]
chosen = candidates(METHODS, [kvjax.Retention(0.5), kvjax.Retention(0.25)])

lm = models.load(MODEL, dtype="float32")
count = lm.text.count
drawn = [suite.draw(TASK, n, 0, LENGTH, count) for n in range(SAMPLES)]
samples = [suite.bound_answer(sample, count) for sample in drawn]
weights = results.digest(models.catalog.locate(MODEL))
data = {"essay": prose.SOURCE}
settings = results.Settings(MODEL, weights, "float32", seed=0, data=data)
folder, began = pathlib.Path("results/own_method"), time.monotonic()
parts = {results.Part(TASK, LENGTH): samples}
job = runner.Job(lm, 1, chosen, parts, settings, folder, batch=SAMPLES)
run = runner.answer(job, began)
writing.write_comparison(folder, run.summary, run.answers)
print(f"{run}; all in {folder}")

# %% [markdown]
# ## The leaderboard
#
# `kvjax leaderboard results/own_method` prints the same, and adds a page and
# plots. Give it the folders of other runs, too, and it ranks all of them.

# %%
import rich

board = ranking.merge(run_files.find([folder]))
rich.print(board.to_terminal())

# %% [markdown]
# With eight samples, differences below 30 points mean little. More `SAMPLES`
# narrow the intervals; the run goes on from the answers that are there. For the
# command line, save the cell with the class as `valued_keys.py`, and run
# `kvjax compare --plugins=valued_keys.py --methods=valued_keys,keydiff`. It may
# also be part of a package of your own; CONTRIBUTING.md says how.
