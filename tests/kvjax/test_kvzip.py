"""KVzip and KVzip+: replays written out in float64, and what is kept."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replayed

import kvjax
from kvjax.cache.packed import PAGE
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import deferred
from kvjax.engine import replay as passes_of_replay
from kvjax.errors import InputError
from kvjax.methods.replay import Replay
from kvjax.testing import TinyModel, kept_positions

LENGTHS = (45, 7, 33, 2)
REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
REPLAYS = (
  Replay(chunk=16, overlap=8),
  Replay(chunk=16, overlap=8, weight="output"),
  Replay(chunk=16, overlap=8, sinks=4),
  Replay(chunk=100, overlap=3, sinks=2, weight="output"),
  Replay(chunk=5, overlap=8),  # the chunk before has fewer tokens
)
SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
MODELS = {
  "plain": TinyModel(kvjax.Geometry((SPEC,) * 3, 4096)),
  "capped": TinyModel(
    kvjax.Geometry(
      (dataclasses.replace(SPEC, scale=0.5, softcap=2.0, sinks=True),) * 2, 4096
    )
  ),
}
MODEL = MODELS["plain"]
HALF = kvjax.Retention(0.5)
NAMES = ("kvzip:chunk=16", "kvzip.plus:chunk=16")


def drawn(lengths=LENGTHS):
  """The second and the last row begin as the template, or half of it."""
  draw = np.random.default_rng(0)
  rows = [draw.integers(5, 64, n).tolist() for n in lengths]
  rows[1][:3] = REQUEST.prefix
  rows[3][:2] = REQUEST.prefix[:2]
  return rows


ROWS = drawn()


def prompts_of(rows=ROWS, **kwargs):
  return kvjax.Prompts.of(rows, repeat_request=REQUEST, **kwargs)


def found_by(model, rows, replays, monkeypatch, **kwargs):
  """What the engine finds: for each row, scores [N, n] by replay and layer."""
  found = {}
  run = deferred.replay_prompts

  def listen(model, params, prompts, layers, own):
    found.update(run(model, params, prompts, layers, (*replays, *own)))
    return found

  monkeypatch.setattr(deferred, "replay_prompts", listen)
  plan = kvjax.get_plan("kvzip:level=head:chunk=16", kvjax.Retention(0.5))
  kvjax.prefill(model, model.init(), prompts_of(rows, **kwargs), plan)
  monkeypatch.undo()
  return [
    {
      replay: [np.asarray(of[replay][row, :, :n]) for of in found.values()]
      for replay in replays
    }
    for row, n in enumerate(map(len, rows))
  ]


@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_a_replay_written_out(name, monkeypatch):
  model = MODELS[name]
  found = found_by(model, ROWS, REPLAYS, monkeypatch)
  for row, of_row in zip(ROWS, found, strict=True):
    for replay, by_layer in of_row.items():
      expected = replayed.scores(model, model.init(), row, REQUEST, replay)
      for ours, theirs in zip(by_layer, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        # What the template has is not replayed; all else gets some attention.
        assert ((ours == -1) | (ours > 0)).all()


class Doubled(TinyModel):
  """Layers that read twice their residual, as a norm could make it."""

  def block(self, weights, spec, hidden, shared, positions, attend):
    def attend_doubled(seen):
      return attend(dataclasses.replace(seen, inputs=2 * seen.inputs))

    return super().block(
      weights, spec, hidden, shared, positions, attend_doubled
    )


def test_the_norm_is_that_of_the_input_or_of_the_residual(monkeypatch):
  model = Doubled(MODEL.geometry)
  replays = [
    Replay(chunk=16, weight="output", divisor=divisor)
    for divisor in ("input", "residual")
  ]
  row = ROWS[0]
  (found,) = found_by(model, [row], replays, monkeypatch)
  # This model's residual is its input.
  expected = replayed.scores(model, model.init(), row, REQUEST, replays[1])
  for replay, factor in zip(replays, (0.5, 1.0), strict=True):
    for ours, residual in zip(found[replay], expected, strict=True):
      theirs = np.where(residual < 0, -1, factor * residual)
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
  plan = kvjax.get_plan("kvzip.plus:divisor=residual:chunk=16:overlap=8", HALF)
  assert plan.method.traits.replay == replays[1]


@pytest.mark.slow
def test_a_row_is_replayed_as_it_is_alone(monkeypatch):
  together = found_by(MODEL, ROWS, REPLAYS[:2], monkeypatch)
  for row, of_row in zip(ROWS, together, strict=True):
    (alone,) = found_by(MODEL, [row], REPLAYS[:2], monkeypatch, padded=96)
    for replay, by_layer in of_row.items():
      for ours, theirs in zip(by_layer, alone[replay], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def expected_kept(row, replay, share, per_query_head=False):
  """Kept positions by layer and head, of the best of the whole model."""
  scores = replayed.scores(MODEL, MODEL.init(), row, REQUEST, replay)
  scores = np.stack(scores)
  if not per_query_head:
    layers, heads, length = scores.shape
    scores = scores.reshape(layers, heads // 2, 2, length).max(axis=2)
  scores = np.where(scores < 0, 0.0 if replay.sinks else np.inf, scores)
  scores[..., : replay.sinks] = np.inf
  heads, slots = np.indices((scores.shape[0] * scores.shape[1], len(row)))
  # Tokens of the template tie, and are too many for the shortest row.
  best = np.lexsort((heads.ravel(), slots.ravel(), -scores.reshape(-1)))
  count = int(np.ceil(share * len(row))) * scores.shape[0] * scores.shape[1]
  kept = np.zeros(scores.size, bool)
  kept[best[:count]] = True
  return [
    [np.flatnonzero(head).tolist() for head in layer]
    for layer in kept.reshape(scores.shape)
  ]


PLANS = [
  kvjax.get_plan(name, kvjax.Retention(share))
  for name in NAMES
  for share in (0.6, 0.25)
]


@pytest.mark.parametrize("mesh", [None, "data:4,model:1", "data:2,model:2"])
def test_the_best_of_the_whole_model_are_kept(mesh):
  context = contextlib.nullcontext()
  if mesh is not None:
    context = jax.set_mesh(parse_mesh(mesh))
  with context:
    caches, _ = kvjax.sweep(MODEL, MODEL.init(), prompts_of(), PLANS)
  for plan, cache in zip(PLANS, caches, strict=True):
    for number, row in enumerate(ROWS[:3]):
      replay, share = plan.method.traits.replay, plan.budget.share
      expected = expected_kept(row, replay, share)
      assert kept_positions(cache, number) == expected


def test_each_query_head_keeps_its_own():
  plan = dataclasses.replace(PLANS[0], per_query_head=True)
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts_of(), plan)
  expected = expected_kept(ROWS[0], plan.method.traits.replay, 0.6, True)
  assert kept_positions(cache, 0) == expected


def test_a_sweep_replays_once_and_equals_each_plan_alone(monkeypatch):
  calls, passes = [], []
  run, start = deferred.replay_prompts, passes_of_replay.Pass

  def count(*args):
    calls.append(args[-1])
    return run(*args)

  def count_pass(*args):
    passes.append(args)
    return start(*args)

  monkeypatch.setattr(deferred, "replay_prompts", count)
  monkeypatch.setattr(passes_of_replay, "Pass", count_pass)
  plans = [*PLANS, kvjax.get_plan("keydiff", kvjax.Retention(0.5))]
  swept, _ = kvjax.sweep(MODEL, MODEL.init(), prompts_of(), plans)
  assert calls == [REPLAYS[:2]]
  # One pass for each chunk, whatever the number of methods.
  chunk = REPLAYS[0].chunk
  assert len(passes) == -(-prompts_of().tokens.shape[1] // chunk)
  for plan, cache in zip(plans, swept, strict=True):
    alone, _ = kvjax.prefill(MODEL, MODEL.init(), prompts_of(), plan)
    jax.tree.map(np.testing.assert_array_equal, alone, cache)


def test_nothing_is_replayed_for_a_whole_budget(monkeypatch):
  monkeypatch.setattr(deferred, "replay_prompts", None)
  plan = kvjax.get_plan("kvzip", kvjax.Retention(1.0))
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts_of(), plan)
  assert int(cache.lengths[0, 0, 0]) == LENGTHS[0]


def test_a_replay_leaves_the_full_cache_and_the_logits_as_they_are():
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  params = MODEL.init()
  alone, logits = kvjax.prefill(MODEL, params, prompts_of(), full)
  (beside, _), same = kvjax.sweep(MODEL, params, prompts_of(), [full, PLANS[0]])
  jax.tree.map(np.testing.assert_array_equal, alone, beside)
  np.testing.assert_array_equal(logits, same)


def test_protected_tokens_are_kept_first():
  masks = [[n in (5, 6) for n in range(len(row))] for row in ROWS]
  masks[3] = [False] * LENGTHS[3]
  prompts = prompts_of(protected=masks)
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, PLANS[1])
  for row in range(3):
    by_layer = kept_positions(cache, row)
    assert all({5, 6} <= {*head} for layer in by_layer for head in layer)
    total = sum(len(head) for layer in by_layer for head in layer)
    assert total == 6 * -(-LENGTHS[row] // 4)


@pytest.mark.slow
def test_layers_without_a_full_cache_are_replayed_too():
  """Windows and a layer without attention; answers tell that all ran."""
  local = dataclasses.replace(SPEC, window=16)
  mlp = dataclasses.replace(SPEC, cache=False, weights=1)
  model = TinyModel(kvjax.Geometry((local, SPEC, mlp, SPEC, local), 4096))
  params, plan = model.init(), PLANS[1]
  cache, _ = kvjax.prefill(model, params, prompts_of(), plan)
  for row, text in enumerate(ROWS):
    alone, _ = kvjax.prefill(model, params, prompts_of([text]), plan)
    assert kept_positions(alone, 0) == kept_positions(cache, row)
  kept = kept_positions(cache, 0)
  for layer in (kept[0], kept[-1]):
    assert [len(head) for head in layer] == [16, 16]
  assert sum(len(head) for layer in kept[1:-1] for head in layer) == 4 * 12


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("kvzip:chunk=0", "chunk must be 1 or more"),
    ("kvzip:level=all", "level"),
    ("ada/kvzip", "its layers have their shares"),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError, match=sentence):
    kvjax.get_plan(name, kvjax.Retention(0.5))


def test_a_replay_must_fit_the_context():
  model = TinyModel(kvjax.Geometry((SPEC,), 64))
  said = r"with 20 tokens to replay .* is 64: give the method chunk=15 or"
  with pytest.raises(InputError, match=said):
    kvjax.prefill(model, model.init(), prompts_of(), PLANS[0])


@pytest.mark.parametrize("padded", [30, 48])
def test_padding_takes_no_position_of_a_replay(padded):
  """30 tokens are read twice, which fits 60 positions; 31 do not."""
  model = TinyModel(kvjax.Geometry((SPEC,), 60))
  plan = kvjax.get_plan("kvzip:chunk=64", kvjax.Retention(0.5))
  rows = [[*range(30)], [*range(4)]]
  prompts = kvjax.Prompts.of(rows, padded=padded)
  with pytest.warns(kvjax.InputWarning, match="do not say how"):
    cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  assert sum(map(len, kept_positions(cache, 0)[0])) == 2 * 15
  prompts = kvjax.Prompts.of([[*range(31)]], padded=padded + 1)
  with (
    pytest.warns(kvjax.InputWarning),
    pytest.raises(InputError, match=r"has 62 .*: give the method chunk=29 or"),
  ):
    kvjax.prefill(model, model.init(), prompts, plan)
  plan = kvjax.get_plan("kvzip:chunk=29", kvjax.Retention(0.5))
  with pytest.warns(kvjax.InputWarning):
    kvjax.prefill(model, model.init(), prompts, plan)


@pytest.mark.parametrize("context", [56, 57])
def test_the_template_takes_no_position_of_a_replay(context):
  """Of 30 tokens 26 are replayed, after one that asks; of 4, none."""
  request = kvjax.RepeatRequest(prefix=(0, 1, 2, 3), first=(9,))
  rows = [[*range(30)], [*range(4)]]
  prompts = kvjax.Prompts.of(rows, padded=48, repeat_request=request)
  model = TinyModel(kvjax.Geometry((SPEC,), context))
  plan = kvjax.get_plan("kvzip:chunk=64", kvjax.Retention(0.5))
  if context == 57:
    kvjax.prefill(model, model.init(), prompts, plan)
    return
  with pytest.raises(InputError, match=r"with 27 tokens to .* has 57 tokens"):
    kvjax.prefill(model, model.init(), prompts, plan)


def test_nothing_retrieves_among_what_is_replayed():
  plan = kvjax.get_plan("quest", kvjax.Tokens(9))
  method = kvjax.get_method("kvzip:level=head")
  with pytest.raises(InputError, match="until it has replayed the prompt"):
    dataclasses.replace(plan, method=method)


def test_blocks_are_refused_with_the_reason():
  with pytest.raises(InputError, match="it replays the whole prompt"):
    kvjax.get_plan("kvzip", kvjax.Tokens(9), schedule=kvjax.Schedule(block=8))


def uneven(lengths):
  """A model one of whose layers keeps nearly everything."""
  model = TinyModel(kvjax.Geometry((SPEC,) * 8, 4096))
  params = model.init()
  stack = params["layers"][0]
  # Sharp queries: one layer's attention is near 1, that of all others small.
  sharp = jnp.ones((8, 1, 1)).at[5].set(40.0)
  flat = jnp.full((8, 1, 1), 0.05).at[5].set(1.0)
  params["layers"] = [{**stack, "query": stack["query"] * sharp * flat}]
  draw = np.random.default_rng(1)
  return model, params, [draw.integers(5, 64, n).tolist() for n in lengths]


def test_the_memory_is_that_of_all_kept_tokens_together():
  model, params, rows = uneven([640, 400])
  prompts = prompts_of(rows)
  plan = kvjax.get_plan("kvzip", kvjax.Retention(0.2))
  cache, _ = kvjax.prefill(model, params, prompts, plan)
  lengths = np.asarray(cache.lengths)
  assert lengths.sum(axis=(0, 2)).tolist() == [16 * 128, 16 * 80]
  # The fullest layer has more than twice the mean, and there is no slot for it
  # in the others.
  assert lengths[:, 0].sum(axis=1).max() > 2 * 2 * 128
  # Of every head, one page need not be full; pages have positions and an owner.
  page = 4 * (PAGE * (2 * SPEC.key_dim + 1) + 1)
  pages = 16 * 128 // PAGE + 16
  assert cache.nbytes == 2 * pages * page + 2 * 4 + 8 * 4


@pytest.mark.slow
def test_layers_of_a_pool_hold_what_was_kept_of_them():
  model, params, rows = uneven([640, 400])
  plan = kvjax.get_plan("kvzip", kvjax.Retention(0.2))
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  (cache, whole), _ = kvjax.sweep(model, params, prompts_of(rows), [plan, full])
  questions = kvjax.Prompts.of([[5, 6], [7, 9, 1]])
  answer = kvjax.generate(
    model,
    params,
    kvjax.reserve(cache, 64),
    questions,
    kvjax.Decoding(5),
    keep=True,
  )
  # Every head's tokens, where `row_positions` and the layers say they are.
  for row in range(2):
    for layer, heads in enumerate(kept_positions(cache, row)):
      packed = cache.layer(layer)
      assert [sorted(h) for h in packed.row_positions(row)] == heads
      assert np.asarray(packed.lengths)[row].tolist() == [*map(len, heads)]
      pages, dense = packed.pages, whole.layer(layer)
      for page in np.flatnonzero(np.asarray(pages.heads)[row] >= 0):
        head = int(pages.heads[row, page])
        at = np.asarray(pages.positions)[row, page]
        assert (at >= 0).any()
        for ours, theirs in (
          (pages.keys, dense.keys),
          (pages.values, dense.values),
        ):
          np.testing.assert_array_equal(
            np.asarray(ours)[row, page][at >= 0],
            np.asarray(theirs)[row, head][at[at >= 0]],
          )
      after = kept_positions(answer.cache, row)[layer]
      fed = len(questions.rows()[row])
      for before, now in zip(heads, after, strict=True):
        assert now[: len(before)] == before
        assert len(now) >= len(before) + fed
  alone = [
    kvjax.generate(
      model,
      params,
      kvjax.prefill(model, params, prompts_of(rows[n : n + 1]), plan)[0],
      questions.row(n),
      kvjax.Decoding(5),
    ).rows()[0]
    for n in range(2)
  ]
  assert answer.rows() == alone
