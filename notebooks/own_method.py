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
# notebook stands in, or from a wheel beside it. On Colab it asks for the wheel.

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
  on_colab = "google.colab" in sys.modules
  wheel = "from `python -m pip wheel --no-deps PATH/TO/CLONE`"
  if not clones and not [*here.glob("kvjax-*.whl")] and on_colab:
    print(f"Upload the wheel of kvjax, {wheel}.")
    importlib.import_module("google.colab.files").upload()  # into this folder
  source = next(iter([*clones, *here.glob("kvjax-*.whl")]), None)
  if source is None:
    raise RuntimeError(
      "kvjax is not installed: run this notebook in a clone of it, or put its "
      f"wheel beside it, {wheel}."
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
#
# The cell writes a file, which `kvjax` takes as `--plugins`.

# %%
# %%writefile valued_keys.py
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
#
# It runs in a process of its own, as the programs below do: a TPU serves one
# process at a time, so the notebook itself never uses JAX. The process also
# reads the file as it is now, after all edits.

# %%
# The path may have spaces.
python = f'"{sys.executable}"'
# !{python} -c "from kvjax.testing import check_method; \
#   from valued_keys import ValuedKeys; check_method(ValuedKeys(power=0.5)); \
#   print('The contract holds.')"

# %% [markdown]
# ## Evaluate it
#
# Eight contexts of 512 tokens each hide a number in prose. All methods compress
# the same prefill, before the question is known. The program says about how
# long it takes, writes every answer to a folder, and resumes there if this cell
# is interrupted.

# %%
# !{python} -m kvjax.experiments compare --plugins=valued_keys.py \
#   --methods=valued_keys,valued_keys:power=0,keydiff,snapkv,random \
#   --retention=0.5,0.25 --tasks=niah_single_2 --length=512 --samples=8 \
#   --dtype=float32 --output=results/own_method

# %% [markdown]
# ## The leaderboard
#
# `kvjax leaderboard` writes a page, plots and a file of numbers. Give it the
# folders of other runs, too, and it ranks all of them.

# %%
# !{python} -m kvjax.experiments leaderboard results/own_method

# %% [markdown]
# With eight samples, differences below 30 points mean little. More `--samples`
# narrow the intervals; the run goes on from the answers that are there. In a
# terminal, the programs are called `kvjax compare` and `kvjax leaderboard`. The
# method may also be part of a package of your own; CONTRIBUTING.md says how.
