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
# # kvjax: compress a context and query it
#
# This notebook loads SmolLM2-135M-Instruct, compresses the KV cache of a text
# with four methods, asks questions about the text, plots how many answers each
# method still finds, and shows the tokens it kept. It runs on CPU, GPU and TPU
# runtimes; two CPU cores take less than three minutes.
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
# ## Load a model and a text
#
# A named model is fetched once (93 MB); `kvjax.load` also takes a Hugging Face
# directory. The text is English prose with eight hidden numbers.

# %%
import random

import jax

import kvjax
from kvjax.experiments.tasks import niah

lm = kvjax.load("smollm2-135m-instruct", dtype="float32")

task = niah.NeedleTask("numbers", "essay", key_count=8, max_new_tokens=16)
turns = niah.conversation(task, random.Random(4), 1024, lm.text.count)
text = turns[0].context

print(jax.devices()[0].device_kind)
print(lm.text.count(text), "tokens:", text[:400], "...")
for turn in turns[:3]:
  print(turn.question, turn.answers[0])

# %% [markdown]
# ## Compress
#
# One forward pass serves all methods at all budgets. The methods do not see the
# questions. KVzip lets the model repeat the text, which takes the words of a
# request.

# %%
METHODS = ("snapkv", "compactor", "keydiff", "kvzip")
SHARES = (0.75, 0.5, 0.25)

names = [("full", 1.0)] + [(name, s) for name in METHODS for s in SHARES]
plans = [kvjax.get_plan(name, share) for name, share in names]
caches, _ = kvjax.sweep(lm.model, lm.params, lm.prompts(text), plans)

# %% [markdown]
# ## Ask
#
# Generating answers does not change the cache. Here, one batch answers all
# questions from copies of it.

# %%
# The chat template ends the question, and the answer begins as the task says.
after = lm.text.split_chat(text)[1]
questions = kvjax.Prompts.of(
  [lm.text.encode(turn.question + after + turn.answer_prefix) for turn in turns]
)
decoding = lm.decoding(task.max_new_tokens)


def answer_all(cache):
  """Generates the answers to all questions."""
  copies = kvjax.stack([cache] * len(turns))
  answers = kvjax.generate(lm.model, lm.params, copies, questions, decoding)
  return [lm.text.decode(tokens) for tokens in answers.rows()]


scores = {}
for (name, share), cache in zip(names, caches, strict=True):
  correct = [
    turn.answers[0] in answer
    for turn, answer in zip(turns, answer_all(cache), strict=True)
  ]
  scores[name, share] = 100 * sum(correct) / len(correct)
  print(
    f"{name:10}{share:5.0%}{cache.nbytes / 2**20:7.2f} MiB"
    f"{scores[name, share]:7.1f} % of the numbers found"
  )

# %% [markdown]
# ## Plot

# %%
import matplotlib.pyplot as plt

sizes = {
  key: cache.nbytes / 2**20 for key, cache in zip(names, caches, strict=True)
}
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, marker in zip(METHODS, "osD^", strict=True):
  keys = [("full", 1.0), *((name, share) for share in SHARES)]
  axes.plot(
    [sizes[key] for key in keys],
    [scores[key] for key in keys],
    marker=marker,
    label=name,
  )
axes.set(
  xlabel="cache (MiB)",
  ylabel="numbers found (%)",
  xlim=(0, None),
  ylim=(-4, 104),
)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Show the kept tokens
#
# A token is darker (on a dark page, brighter) the more heads kept it. The
# slider selects a layer; hover over a token for its counts.
# `kvjax show_kept` writes this page for your own text.

# %%
from kvjax.experiments.kept import page
from kvjax.experiments.run.candidates import candidates

pair = candidates(["snapkv", "keydiff"], [kvjax.Retention(0.25)])[1:]
shaded = page.of_text(lm, pair, text)
shaded
