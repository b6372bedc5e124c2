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
# # Reading a TPU plan
#
# Does a long prompt fit on a chip, and how fast can a token be at best? Nothing
# here needs a TPU: shapes say how many bytes weights and caches take, and
# libtpu compiles for chips that are not attached. This notebook runs on CPU,
# GPU and TPU runtimes; two CPU cores take less than a minute.
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
# ## A model and its plans
#
# Llama-3.1-8B in bfloat16, as shapes without numbers, and a prompt of 131,072
# tokens. `jax.eval_shape` traces a prefill and computes nothing.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache.base import AXES
from kvjax.experiments.compilation.published import LLAMA

TOKENS, NEW = 131_072 - 128, 128
PLANS = {
  "full": kvjax.get_plan("full", kvjax.Retention(1.0)),
  "keydiff, 25 %": kvjax.get_plan("keydiff", kvjax.Retention(0.25)),
  "keydiff, 25 %, int8": kvjax.get_plan(
    "keydiff", kvjax.Retention(0.25), kv_dtype="int8"
  ),
  "ada/snapkv, 10 %": kvjax.get_plan("ada/snapkv", kvjax.Retention(0.1)),
}

mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), AXES)
model, params = LLAMA.shapes(mesh, LLAMA.layers)
weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
decoding = kvjax.Decoding(max_new_tokens=NEW)


def cache_bytes(plan):
  """The bytes of a row's cache while it decodes."""

  def prefill(params, tokens):
    prompts = kvjax.Prompts(tokens, np.array([TOKENS], np.int32))
    cache, _ = kvjax.prefill(model, params, prompts, plan)
    return kvjax.reserve(cache, NEW)

  tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
  return jax.eval_shape(prefill, params, tokens).nbytes


caches = {name: cache_bytes(plan) for name, plan in PLANS.items()}
print(f"weights {weights / 2**30:.1f} GiB")
for name, nbytes in caches.items():
  print(f"{name:20} {nbytes / 2**30:5.1f} GiB per prompt")

# %% [markdown]
# ## Chips
#
# Weights and KV heads are split over the chips of a slice. How many prompts fit
# beside the weights? A tenth of the memory stays free for intermediate results.

# %%
# Bytes of HBM and bytes per second of each chip.
CHIPS = {
  "v5e": (16_403 * 2**20, 820e9),
  "v6e": (32_806 * 2**20, 1640e9),
  "v5p": (98_228 * 2**20, 2460e9),
}
SLICE = 8


def prompts_that_fit(hbm, nbytes):
  """Number of prompts whose caches fit beside the weights on a slice."""
  return max(int((0.9 * hbm * SLICE - weights) // nbytes), 0)


fitting = {
  chip: {name: prompts_that_fit(hbm, n) for name, n in caches.items()}
  for chip, (hbm, _) in CHIPS.items()
}
print(f"{'prompts on 8 chips':20}" + "".join(f"{chip:>8}" for chip in CHIPS))
for name in PLANS:
  row = "".join(f"{fitting[chip][name]:8}" for chip in CHIPS)
  print(f"{name:20}{row}")

# %% [markdown]
# ## Time
#
# A token reads every weight and every slot of the cache once, so that the
# bandwidth bounds its time from below. A batch shares the weights.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
batches = np.array([1, 2, 4, 8, 16, 32])
hbm, bandwidth = CHIPS["v5e"]
for (name, nbytes), marker in zip(caches.items(), "osD^", strict=True):
  fits = batches <= fitting["v5e"][name]
  seconds = (weights + batches * nbytes) / (SLICE * bandwidth)
  axes.plot(batches[fits], (batches / seconds)[fits], marker=marker, label=name)
axes.set(
  xlabel="prompts in a batch",
  ylabel="tokens per second, at most",
  xscale="log",
  yscale="log",
  title="Llama-3.1-8B, 131,072 tokens, 8 chips of v5e",
)
axes.set_xticks(batches, batches)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What the compiler says
#
# Shapes do not tell intermediate results, copies, or what XLA reads twice. With
# libtpu, which comes with JAX's build for TPUs, this cell compiles the decoding
# loop of two layers for 8 chips of v5e. docs/tpu_compile.md has the same
# numbers of whole models on four kinds of chips; `make tpu-compile` writes it.

# %%
if importlib.util.find_spec("libtpu") is None:
  print("No libtpu here: pip install libtpu, or read docs/tpu_compile.md.")
else:
  from kvjax.experiments.compilation import chips, engine_programs

  chips.prepare_libtpu()
  chip = chips.Chip.load("v5e")
  # Programs for other chips can be written to JAX's cache, but not read.
  jax.config.update("jax_enable_compilation_cache", False)
  use = engine_programs.KEYDIFF_IN_INT8
  lowered = engine_programs.lower_decode(use, 2, chip)
  found = lowered.measure()
  print(f"{use.name}, {use.shapes}, 2 layers: MiB on each of 8 chips")
  for what, nbytes in {
    "arguments: weights and cache": found.arguments,
    "temporary: intermediate results": found.temporary,
    "moved: read and written per token": found.moved,
    "ideal: must be read per token": lowered.ideal,
  }.items():
    print(f"  {what:36}{nbytes / 2**20:10,.1f}")

# %% [markdown]
# Read such a table from the right: `moved` near `ideal` means that the loop is
# as fast as the memory allows. A large `temporary` means a copy, and the sum of
# `arguments` and `temporary` must stay below the chip's HBM.
