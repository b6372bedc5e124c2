"""Does with the installed methods all that is done with ours.

  python use_all.py FOLDER

A program of its own: in the tests' own process nothing is installed.
"""

import sys

import numpy as np

import kvjax
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
DRAW = np.random.default_rng(0)
PROMPTS = kvjax.Prompts.of(
  [DRAW.permutation(64)[:n].tolist() for n in (60, 41)]
)
QUESTIONS = kvjax.Prompts.of([[5, 6], [7]])
DECODING = kvjax.Decoding(8)
NAMES = ["last_votes:window=4", "mean_query.near:sinks=1", "flipped/keydiff"]


def lengths(cache):
  """Tokens of the rows in the first head of the first layer."""
  return [len(kept_positions(cache, row)[0][0]) for row in range(2)]


def main(folder: str) -> None:
  """Sweeps, answers, saves, loads, goes on, and calibrates."""
  plans = [kvjax.get_plan(name, kvjax.Tokens(12)) for name in NAMES]
  caches, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  assert [lengths(cache) for cache in caches] == [[12, 12], [60, 41], [12, 12]]
  identity = {"model": MODEL, "model_id": "tiny"}
  found = kvjax.generate(MODEL, PARAMS, caches, QUESTIONS, DECODING)
  for number, (cache, answer) in enumerate(zip(caches, found, strict=True)):
    kvjax.save_cache(cache, f"{folder}/{number}", **identity)
    loaded = kvjax.load_cache(f"{folder}/{number}", **identity)
    again = kvjax.generate(MODEL, PARAMS, loaded, QUESTIONS, DECODING)
    assert again.rows() == answer.rows()

  schedule = kvjax.Schedule(block=16, every=4)
  for number, name in enumerate((NAMES[0], NAMES[2])):
    plan = kvjax.get_plan(name, kvjax.Tokens(12), schedule=schedule)
    cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
    kvjax.save_cache(cache, f"{folder}/going_on_{number}", **identity)
    cache = kvjax.load_cache(f"{folder}/going_on_{number}", **identity)
    assert cache.plan == plan
    cache = kvjax.generate(
      MODEL, PARAMS, kvjax.reserve(cache, 48), QUESTIONS, DECODING, keep=True
    ).cache
    assert max(lengths(cache)) <= 12 + 4

  triples = kvjax.Triples(
    np.array([0.2, 0.5, 0.8]), np.full(3, 4.0), np.array([0.5, 0.8, 0.95])
  )
  whole = kvjax.get_plan(NAMES[0], kvjax.Retention(1.0))
  record = kvjax.calibrate(
    triples, model_id="tiny", method=whole.method, preset="paper"
  )
  plan = kvjax.get_plan(NAMES[0], kvjax.Calibrated(record, 0.8))
  measured = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  assert all(0 < share < 1 for share in measured.retentions[0])
  assert 4 < lengths(measured.caches[0])[0] < 60
  print("all done")


if __name__ == "__main__":
  main(sys.argv[1])
