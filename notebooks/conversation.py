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
# # A conversation with CTkvr
#
# CTkvr evicts nothing. It indexes the cache by the last queries of the prompt,
# and each token reads only the keys that similar queries attended to. So a
# conversation can ask for anything in the text, while KeyDiff has decided what
# to forget before the first question. A CPU takes a minute.
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
# ## A text with three secrets
#
# Three numbers are hidden in pages about Python. Text, questions, and answers
# come to 1,024 tokens.

# %%
import random

from kvjax import models
from kvjax.experiments.tasks import niah

lm = models.load("smollm2-135m-instruct", dtype="float32")
task = niah.NeedleTask("numbers", "essay", key_count=3, max_new_tokens=32)
turns = niah.conversation(task, random.Random(2), 1024, lm.text.count)
text = turns[0].context
print(lm.text.count(text), "tokens:", text[:300], "...")

# %% [markdown]
# ## Ask
#
# `compress` prefills the text once. Every question and its answer stay in the
# cache, so that later questions may refer to them.

# %%
METHODS = {"full": 1.0, "ctkvr": 128, "keydiff": 0.25}
found = {}
for name, budget in METHODS.items():
  chat = lm.compress(text, name, budget)
  answers = [chat.ask(turn.question, 32) for turn in turns]
  found[name] = [
    turn.answers[0] in answer
    for turn, answer in zip(turns, answers, strict=True)
  ]
  read = float(chat.cache.num_attended.mean())
  print(f"{name}: {sum(found[name])} of {len(turns)} numbers")
  print(f"  a token reads {read:.0f} keys; {chat.cache.nbytes / 2**20:.1f} MiB")
  for turn, answer in zip(turns, answers, strict=True):
    print("  ", "+" if turn.answers[0] in answer else "-", answer.strip())

# %% [markdown]
# ## Stream
#
# An answer also comes piece by piece.

# %%
chat = lm.compress(text, "ctkvr", 128)
for piece in chat.ask(turns[0].question, 32, stream=True):
  print(piece, end="", flush=True)
print()

# %% [markdown]
# This is one conversation with a small model: docs/retrieval.md has more.
# With `ctkvr:offload=true`, the keys and values stay in the host's memory, and
# an accelerator holds the index alone.
