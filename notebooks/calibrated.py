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
# # Calibrated compression
#
# How much of a prompt can be evicted depends on the prompt. A calibration is
# fitted once to a model and a method. The pass that prefills a prompt then also
# chooses its retention, so that a share tau of the quality remains.
# This notebook measures, fits, and applies a calibration. It runs on CPU, GPU
# and TPU runtimes; two CPU cores take three minutes.
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
# ## Texts with an answer
#
# Half of the prompts hide a number in repeated sentences, and half in prose.

# %%
import kvjax
from kvjax.experiments.tasks import suite

lm = kvjax.load("smollm2-135m-instruct", dtype="float32")
TASKS = ("niah_single_1", "niah_single_2")


def draw(batch):
  """Draws a batch of eight samples, four of each task."""
  return [
    suite.draw(task, 4 * batch + number, 0, 384, lm.text.count, essay="train")
    for task in TASKS
    for number in range(4)
  ]


for sample in draw(0)[::4]:
  print("...", sample.context[-300:], sample.question, sample.answers, "\n")

# %% [markdown]
# ## Measure
#
# One prefill compresses a prompt by both methods to all retentions. The quality
# that is left is the likelihood of the right answer, relative to that with the
# full cache.

# %%
import collections

import numpy as np

METHODS, SHARES = ("keydiff", "compactor"), (0.25, 0.5, 0.7, 0.9)
full = kvjax.get_plan("full", kvjax.Retention(1.0))


def encode(sample):
  """The ids of a context, of its question, and of its answer."""
  before, after = lm.text.split_chat(sample.context)
  question = sample.question + after + sample.answer_prefix
  texts = (before, question, f" {sample.answers[0]}")
  return [lm.text.encode(text) for text in texts]


def measure(samples, plans):
  """Compresses a batch by each plan, and computes the qualities left."""
  rows = zip(*map(encode, samples), strict=True)
  contexts, questions, answers = map(kvjax.Prompts.of, rows)
  swept = kvjax.measured_sweep(lm.model, lm.params, contexts, [full, *plans])
  nll = np.empty((len(swept.caches), len(samples)))
  # Caches of equal sizes share a compiled program.
  for group in kvjax.group_caches(swept.caches):
    times = len(group)
    found = kvjax.answer_nll(
      lm.model,
      lm.params,
      kvjax.stack([swept.caches[i] for i in group]),
      questions.repeat(times),
      answers.repeat(times),
    )
    nll[group] = np.asarray(found).reshape(times, -1)
  return swept, [kvjax.likelihood_ratio(nll[0], other) for other in nll[1:]]


def triples(batches):
  """For each method: what the prefill tells, the retention, the quality."""
  pairs = [(method, share) for method in METHODS for share in SHARES]
  plans = [kvjax.get_plan(m, kvjax.Retention(share)) for m, share in pairs]
  columns = {method: collections.defaultdict(list) for method in METHODS}
  for number, samples in enumerate(batches):
    swept, qualities = measure(samples, plans)
    for index, (method, share) in enumerate(pairs):
      column, count = columns[method], len(samples)
      column["retention"] += [share] * count
      column["ratio"] += [*qualities[index]]
      column["context"] += range(number * count, (number + 1) * count)
      column["task"] += [sample.task for sample in samples]
      for name, values in swept.features[index + 1]._asdict().items():
        if values is not None:
          column[name] += [*values]
  return {
    method: kvjax.Triples(**{k: np.array(v) for k, v in column.items()})
    for method, column in columns.items()
  }


fitted, others = triples([draw(0)]), triples([draw(1), draw(2)])

# %% [markdown]
# ## Fit
#
# A curve predicts the quality from the retention and features of the prefill.
# Other prompts, which the curve was not fitted to, then tell which quality its
# retentions leave on average. With 16 of them, a promise can be at most 16/17.

# %%
calibrations = {
  method: kvjax.calibrate(
    fitted[method],
    model_id="smollm2-135m-instruct",
    method=kvjax.get_plan(method, kvjax.Retention(0.5)).label,
    preset="prefill",
    others=others[method],
  )
  for method in METHODS
}
for method, calibration in calibrations.items():
  print(f"{method}: {calibration.formula}")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for method, marker in zip(METHODS, "Ds", strict=True):
  measured = others[method]
  means = [
    np.minimum(measured.ratio[measured.retention == share], 1).mean()
    for share in SHARES
  ]
  axes.plot(SHARES, means, marker=marker, label=method)
axes.axhline(0.9, color="gray", linestyle=":")
axes.set(xlabel="retention", ylabel="quality", xlim=(0, 1), ylim=(0, 1.02))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Apply
#
# A calibrated budget chooses the retention of each new prompt in its prefill.

# %%
TAU = 0.9
plans = [
  kvjax.get_plan(method, kvjax.Calibrated(calibration, TAU))
  for method, calibration in calibrations.items()
]
to_test = draw(3)
swept, qualities = measure(to_test, plans)
kept = dict(zip(METHODS, swept.retentions[1:], strict=True))
columns = "".join(f"{m + ', kept':>17}{'quality':>9}" for m in METHODS)
print(f"{'prompt':16}{columns}")
for row, sample in enumerate(to_test):
  cells = (
    f"{kept[method][row]:17.0%}{quality[row]:9.2f}"
    for method, quality in zip(METHODS, qualities, strict=True)
  )
  print(f"{sample.task:16}" + "".join(cells))

# %% [markdown]
# A few prompts show the way, not the numbers: `kvjax calibrate` measures more
# tasks, tests each record on held-out prompts, and saves what
# `--retention=auto` reads. docs/calibration.md explains the rules and their
# limits.
