"""KVzip, KVzip+ and KVgrad score and keep what kvpress 0.5.5 does.

tests/golden has what it does on random checkpoints, which are built here as
they were for kvpress. Rows of unequal lengths are padded in one batch; kvpress
ran each of them alone.
"""

import importlib.util
import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.engine import deferred
from kvjax.models.pretrained import load
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LENGTHS = (61, 173)
PERCENTS = (25, 50, 90)
# By the name of the press in make_kvpress_replay.py.
COUNTERPARTS = {
  "plain": "kvzip.kvpress:chunk=64",
  "plus": "kvzip.kvpress_plus:chunk=64",
  "sinks": "kvzip.kvpress:chunk=50:sinks=2",
  "layerwise": "kvzip.kvpress:chunk=64:level=layer",
  "grad": "kvzip.kvpress_grad:chunk=64",
  "grad_layerwise": "kvzip.kvpress_grad:chunk=64:level=layer",
}
TIE = 1e-6


def _builder():
  spec = importlib.util.spec_from_file_location(
    "tiny_llama", GOLDEN / "tiny_llama.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


tiny_llama = _builder()


@pytest.mark.parametrize(
  "name", ["small", pytest.param("held_out", marks=pytest.mark.slow)]
)
def test_scores_and_choices(name, tmp_path, monkeypatch):
  tiny_llama.write(name, tmp_path / name)
  lm = load(tmp_path / name, dtype="float32")
  found = {}
  run = deferred.replay_prompts

  def listen(*args):
    found.update(run(*args))
    return found

  monkeypatch.setattr(deferred, "replay_prompts", listen)
  prompts = kvjax.Prompts.of(
    [tiny_llama.chat(name, length) for length in LENGTHS],
    repeat_request=kvjax.RepeatRequest(**tiny_llama.REQUEST),
  )
  cases = [(press, p) for press in COUNTERPARTS for p in PERCENTS]
  plans = [
    kvjax.get_plan(COUNTERPARTS[press], kvjax.Retention(1 - percent / 100))
    for press, percent in cases
  ]
  caches, _ = kvjax.sweep(lm.model, lm.params, prompts, plans)
  golden = np.load(GOLDEN / "kvpress_replay" / f"{name}.npz")
  assert len(golden.files) == len(LENGTHS) * (len(COUNTERPARTS) + len(cases))
  for (press, percent), plan, cache in zip(cases, plans, caches, strict=True):
    for row, length in enumerate(LENGTHS):
      theirs = golden[f"{press}/{length}/scores"]
      replay = plan.method.traits.replay
      ours = np.stack([of[replay][row, :, :length] for of in found.values()])
      ours = ours.reshape(*theirs.shape[:2], -1, length).max(axis=2)
      # kvpress does not score the template: 0.
      ours = np.maximum(ours, 0.0)
      np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
      bits = golden[f"{press}/{length}/{percent}"]
      bits = np.unpackbits(bits, axis=-1, count=length).astype(bool)
      kept = np.zeros(theirs.shape, bool)
      for layer, heads in enumerate(kept_positions(cache, row)):
        for head, places in enumerate(heads):
          kept[layer, head, places] = True
      assert kept.sum() == bits.sum()
      differing = theirs[kept != bits]
      # Only tokens whose scores equal the lowest that is kept may differ.
      np.testing.assert_allclose(
        differing, theirs[bits & kept].min(), rtol=0, atol=TIE
      )
