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
# # What methods keep
#
# Two methods with the same budget keep different tokens. This notebook shows
# which: token by token in the text, by depth and layer, and how far the choices
# of two methods agree. It runs on CPU, GPU and TPU runtimes; two CPU cores take
# a minute.
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
# ## A text with a needle
#
# A number is hidden in pages about Python. Each method keeps a quarter of the
# tokens before any question is asked.

# %%
import kvjax
from kvjax.experiments.kept import counts, page, passages
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.tasks import suite

lm = kvjax.load("smollm2-135m-instruct", dtype="float32")
sample = suite.draw("niah_single_2", 0, 0, 512, lm.text.count)
text, needle = sample.context, sample.answers[0]

LAGKV = "lagkv:lag=32:retention_of=row"  # for so short a text
METHODS = ["snapkv", "keydiff", LAGKV, "compactor", "protokv", "random"]
chosen = candidates(METHODS, [kvjax.Retention(0.25)])[1:]
print(lm.text.count(text), "tokens, and in them", needle)

# %% [markdown]
# ## In the text
#
# A token is darker (on a dark page, brighter) the more heads kept it. The
# slider selects a layer; hover over a token for its counts.
# `kvjax show_kept` writes this page for a text of your own.

# %%
page.of_text(lm, chosen, text)

# %% [markdown]
# ## By layer and depth
#
# The same counts are an array of layers and tokens. SnapKV keeps what the last
# tokens attend to, which is near the end, and KeyDiff spreads its choices. Each
# picture has one row per layer, and the share of heads that keep a token.

# %%
import matplotlib.pyplot as plt
import numpy as np

before, _ = lm.text.split_chat(text)
tokens = lm.text.encode(before)
results = counts.kept(lm.model, lm.params, tokens, chosen)
heads = lm.model.geometry.layers[0].kv_heads
# [methods, layers, tokens]
shares = np.stack([result.heads for result in results]) / heads

figure, axes = plt.subplots(
  len(METHODS), figsize=(7, 8), sharex=True, layout="constrained"
)
for name, share, ax in zip(METHODS, shares, axes, strict=True):
  ax.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1)
  ax.set(title=name, ylabel="layer")
axes[-1].set_xlabel("token")
plt.show()

# %% [markdown]
# ## The needle
#
# How many heads keep the tokens of the hidden number? A method that drops the
# number cannot answer for it, whatever else it keeps.

# %%
pieces = lm.text.pieces(before)
inside = passages.find(pieces, needle)
kept_needle = dict(
  zip(METHODS, shares[:, :, inside].mean(axis=(1, 2)), strict=True)
)
for name, share in kept_needle.items():
  print(f"{name:30} keeps {share:4.0%} of the number, and 25% of the text")

# %% [markdown]
# ## Do they agree?
#
# The overlap of two methods: of the places that either keeps, the share that
# both keep. A place is a token in a layer, and counts by its heads. `random`
# shows what chance alone gives: a method that agrees less with another one than
# with chance looks for other tokens.


# %%
def overlap(one, other):
  """The mean overlap of the kept places, weighted by heads."""
  return np.minimum(one, other).sum() / np.maximum(one, other).sum()


agreement = np.array([[overlap(a, b) for b in shares] for a in shares])
print(" " * 30, *(f"{name.partition(':')[0]:>9}" for name in METHODS))
for name, row in zip(METHODS, agreement, strict=True):
  print(f"{name:30}", *(f"{value:9.0%}" for value in row))

# %% [markdown]
# ## When the question is known
#
# The same methods, but the question is prefilled with the text. SnapKV now
# keeps what the question attends to.

# %%
known = page.of_text(lm, chosen[:2], text, sample.question)
known
