"""Draws the prompts of tests/golden/kvpress_smollm2/, and needs no kvpress.

  python tests/golden/draw_kvpress_smollm2.py

writes what kvpress and kvjax both read:

  prompts.json    RULER's needles in prose, as kvjax draws them, encoded by the
                  model's tokenizer with its chat template. Of each task they
                  are the first samples whose context can be exactly `LENGTH`
                  tokens long: a context ends after a word, so not every one can
  statistics.npz  what methods read from files, by `kvjax.calibrate_queries`
                  over four of the contexts: query_mean [L, N, D], query_var
                  [L, N, D], the diagonals of the covariances, and q_filters
                  [L, K, D], float32; and full_attention_heads [L, K], the gates
                  of heads, which are random
"""

import json
import pathlib

import numpy as np

import kvjax
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.tasks import suite
from kvjax.models.pretrained import Pretrained, load

OUTPUT = pathlib.Path(__file__).parent / "kvpress_smollm2"
MODEL = "smollm2-135m-instruct"
TASKS = ("niah_single_2", "niah_multikey_1")
SAMPLES = 4
SEED = 0
# Shares of it are whole, and so are Compactor's chunks of 256 tokens between
# the 12 that it protects; make_kvpress_smollm2.py says more.
LENGTH = 1036
# What `suite.draw` counts beside the context, in tokens.
_MARGINS = range(110, 190)
# Numbers of the contexts whose queries are measured: the last of each task.
_MEASURED = (2, 3, 6, 7)


def drawn(lm: Pretrained, task: str, number: int):
  """A sample with a context of `LENGTH` tokens, or None."""
  for margin in _MARGINS:
    sample = suite.draw(task, number, SEED, LENGTH + margin, lm.text.count)
    prompt = Prompt.of_sample(lm.text, sample)
    if len(prompt.context) == LENGTH:
      return {
        "task": task,
        "number": number,
        "context": prompt.context,
        "question": prompt.question,
        "answers": sample.answers,
      }
    if len(prompt.context) > LENGTH:
      return None
  raise AssertionError(f"{task} {number} is always shorter")


def statistics(lm: Pretrained, samples) -> dict[str, np.ndarray]:
  """What methods read from files."""
  rows = [samples[number]["context"] for number in _MEASURED]
  found = kvjax.calibrate_queries(lm.model, lm.params, rows, seed=SEED)
  gates = np.random.default_rng(SEED).uniform(size=found.q_filters.shape[:2])
  return {
    "query_mean": found.query_mean,
    "query_var": np.diagonal(found.query_cov, axis1=2, axis2=3),
    "q_filters": found.q_filters,
    "full_attention_heads": gates,
  }


def main() -> None:
  lm = load(MODEL)
  samples, numbers = [], dict.fromkeys(TASKS, 0)
  for task in TASKS:
    found = []
    while len(found) < SAMPLES:
      sample = drawn(lm, task, numbers[task])
      found += [sample] if sample else []
      numbers[task] += 1
    samples += found
  OUTPUT.mkdir(exist_ok=True)
  lines = ",\n".join(json.dumps(sample) for sample in samples)
  text = f'{{"seed": {SEED}, "samples": [\n{lines}\n]}}\n'
  (OUTPUT / "prompts.json").write_text(text, encoding="utf-8")
  np.savez_compressed(OUTPUT / "statistics.npz", **statistics(lm, samples))


if __name__ == "__main__":
  main()
