"""KVgrad: gradients of a replay against differences in float64."""

import dataclasses

import jax
import numpy as np
import pytest
import replayed

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import deferred
from kvjax.methods.replay import Replay
from kvjax.testing import TinyModel, kept_positions

REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13,), (9, 2))
REPLAY = Replay(chunk=6, overlap=2, weight="gradient")
SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=4)
MODELS = {
  name: TinyModel(
    kvjax.Geometry((dataclasses.replace(SPEC, **options),) * 2, 256), width=8
  )
  for name, options in {
    "plain": {},
    "capped": dict(scale=0.7, softcap=1.5, sinks=True),
    "parallel": dict(parallel=True),
  }.items()
}
# Layers that nothing is evicted from pass gradients on.
MODELS["local"] = TinyModel(
  kvjax.Geometry(
    (
      SPEC,
      dataclasses.replace(SPEC, window=8),
      dataclasses.replace(SPEC, cache=False, weights=1),
      SPEC,
    ),
    256,
  ),
  width=8,
)
MODEL = MODELS["plain"]
LENGTHS = (10, 3, 13)


def drawn():
  """The second row begins as the template."""
  draw = np.random.default_rng(0)
  rows = [draw.integers(5, 64, n).tolist() for n in LENGTHS]
  rows[1][:2] = REQUEST.prefix[:2]
  return rows


ROWS = drawn()


def found_by(model, rows, monkeypatch, replays=(REPLAY,), **kwargs):
  """Scores [N, n] of each row, by replay and layer."""
  found = {}
  run = deferred.replay_prompts

  def listen(model, params, prompts, layers, own):
    found.update(run(model, params, prompts, layers, replays))
    return {n: {own[0]: of[replays[0]]} for n, of in found.items()}

  monkeypatch.setattr(deferred, "replay_prompts", listen)
  prompts = kvjax.Prompts.of(rows, repeat_request=REQUEST, **kwargs)
  plan = kvjax.get_plan("kvzip.grad:level=head", kvjax.Retention(0.5))
  kvjax.prefill(model, model.init(), prompts, plan)
  monkeypatch.undo()
  return [
    {
      replay: [np.asarray(of[replay][row, :, :n]) for of in found.values()]
      for replay in replays
    }
    for row, n in enumerate(map(len, rows))
  ]


@pytest.mark.parametrize(
  "name",
  [
    "plain",
    pytest.param("capped", marks=pytest.mark.slow),
    pytest.param("parallel", marks=pytest.mark.slow),
    "local",
  ],
)
def test_scores_equal_differences(name, monkeypatch):
  model = MODELS[name]
  replays = (REPLAY, dataclasses.replace(REPLAY, sinks=2))
  found = found_by(model, ROWS, monkeypatch, replays)
  for row, of_row in zip(ROWS, found, strict=True):
    for replay, by_layer in of_row.items():
      expected = [
        scores
        for scores, spec in zip(
          replayed.scores(model, model.init(), row, REQUEST, replay),
          model.geometry.layers,
          strict=True,
        )
        if spec.compressible
      ]
      for ours, theirs in zip(by_layer, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4)
        assert ((ours == -1) | (ours >= 0)).all()


def test_the_gradient_of_the_last_layer_is_twice_the_hidden_state():
  """As it has no MLP; so do the differences that the scores equal."""
  written = replayed.Written(MODEL, MODEL.init())
  past = written.run(ROWS[0])
  slopes = replayed.gradients(written, [7, 9, 8], len(ROWS[0]), past)
  last = written.run([7, 9, 8], len(ROWS[0]), past)[-1]["outputs"]
  np.testing.assert_allclose(
    slopes[-1], 2 * np.linalg.norm(last, axis=-1), rtol=1e-6
  )


def test_a_row_is_scored_as_it_is_alone(monkeypatch):
  together = found_by(MODEL, ROWS, monkeypatch)
  (alone,) = found_by(MODEL, ROWS[:1], monkeypatch, padded=32)
  for ours, theirs in zip(together[0][REPLAY], alone[REPLAY], strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_other_replays_beside_it_change_nothing(monkeypatch):
  """Passes with and without gradients, of equal chunks."""
  plain = dataclasses.replace(REPLAY, weight="attention")
  (together,) = found_by(MODEL, ROWS[:1], monkeypatch, (REPLAY, plain))
  for replay in (REPLAY, plain):
    (alone,) = found_by(MODEL, ROWS[:1], monkeypatch, (replay,))
    for ours, theirs in zip(together[replay], alone[replay], strict=True):
      np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
  "mesh",
  [pytest.param("data:4,model:1", marks=pytest.mark.slow), "data:2,model:2"],
)
def test_a_mesh_changes_nothing(mesh):
  prompts = kvjax.Prompts.of([*ROWS, ROWS[0]], repeat_request=REQUEST)
  plan = kvjax.get_plan("kvzip.grad:chunk=6", kvjax.Retention(0.5))
  alone, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, plan)
  with jax.set_mesh(parse_mesh(mesh)):
    cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, plan)
  for row in range(4):
    assert kept_positions(cache, row) == kept_positions(alone, row)
