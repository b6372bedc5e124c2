"""Layers of several kinds against attention written out in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_up_gates import made_up_fast_kvzip, made_up_kvzap

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.engine.feed import feed
from kvjax.engine.forward import States, run_layers
from kvjax.errors import InputError
from kvjax.model import LayerSpec
from kvjax.registry.registry import METHODS, RETRIEVALS
from kvjax.testing import TinyModel, kept_positions, poison_cache

WINDOW = 6
LOCAL = LayerSpec(4, 2, 8, window=WINDOW, sinks=True, weights=0)
GLOBAL = LayerSpec(
  6, 3, 4, value_dim=10, scale=0.4, softcap=2.0, sinks=True, weights=1
)
# It does not attend.
DENSE = LayerSpec(1, 1, 1, cache=False, weights=2)
# A pattern that repeats, and an end that does not fit it.
LAYERS = (LOCAL, GLOBAL, DENSE, LOCAL, GLOBAL, DENSE, LOCAL)
CACHED = [spec for spec in LAYERS if spec.cache]
MODEL = TinyModel(geometry=kvjax.Geometry(LAYERS, 4096))
PARAMS = MODEL.init(seed=4)
LENGTHS = (21, 13, 3)
DRAW = np.random.default_rng(0)
ROWS = [DRAW.integers(0, 64, n).tolist() for n in LENGTHS]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = [DRAW.integers(0, 64, n).tolist() for n in (4, 9, 1)]
DECODING = kvjax.Decoding(max_new_tokens=12)
FULL = kvjax.Retention(1.0)


def rotated(x, positions):
  """[H, S, D] turned as `TinyModel` does."""
  half = x.shape[-1] // 2
  speed = 100.0 ** (-np.arange(half) / half)
  angles = np.asarray(positions, np.float64)[None, :, None] * speed
  low, high = x[..., :half], x[..., half:]
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


class Reference:
  """One row in float64, a token at a time over plain lists."""

  def __init__(self, params, layers=LAYERS):
    self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    self.layers = layers
    # Of every layer and KV head: (position, key, value).
    self.kept = [[[] for _ in range(s.kv_heads)] for s in layers]
    self.length = 0

  def weights(self, layer):
    spec = self.layers[layer]
    index = sum(s.weights == spec.weights for s in self.layers[:layer])
    stack = self.params["layers"][spec.weights]
    return jax.tree.map(lambda x: x[index], stack)

  def feed(self, tokens):
    for token in tokens:
      x = self.params["embedding"][token]
      for layer in range(len(self.layers)):
        x = x + (
          self.attend(layer, x)
          if self.layers[layer].cache
          else np.tanh(x @ self.weights(layer)["square"])
        )
      self.length += 1
    return x @ self.params["embedding"].T

  def attend(self, layer, x):
    spec, own = self.layers[layer], self.weights(layer)
    here = [self.length]
    queries = rotated((x @ own["query"]).reshape(spec.heads, 1, -1), here)
    keys = rotated((x @ own["key"]).reshape(spec.kv_heads, 1, -1), here)
    values = (x @ own["value"]).reshape(spec.kv_heads, -1)
    outputs = []
    for head in range(spec.kv_heads):
      self.kept[layer][head].append((self.length, keys[head, 0], values[head]))
    for head in range(spec.heads):
      seen = self.kept[layer][head // (spec.heads // spec.kv_heads)]
      if spec.window:
        seen = [t for t in seen if self.length - t[0] < spec.window]
      scale = spec.scale or spec.key_dim**-0.5
      logits = np.array([k @ queries[head, 0] * scale for _, k, _ in seen])
      if spec.softcap:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
      weights = np.exp(logits)
      total = weights.sum()
      if spec.sinks:
        total += np.exp(own["sinks"][head])
      outputs.append(
        sum(w * t[2] for w, t in zip(weights, seen, strict=True)) / total
      )
    return np.concatenate(outputs) @ own["output"]

  def evict(self, count):
    """KeyDiff on the global layers."""
    for layer, spec in enumerate(self.layers):
      if not spec.compressible:
        continue
      for head, tokens in enumerate(self.kept[layer]):
        units = np.array([k / np.linalg.norm(k) for _, k, _ in tokens])
        mean = units.mean(axis=0)
        scores = -(units @ mean) / np.linalg.norm(mean)
        best = sorted(np.argsort(-scores, kind="stable")[:count])
        self.kept[layer][head] = [tokens[i] for i in best]

  def decode(self, logits, count):
    found = []
    for _ in range(count):
      found.append(int(np.argmax(logits)))
      logits = self.feed([found[-1]])
    return found


# Every method, in sizes that fit prompts this short.
SIZES = {
  "snapkv": ":window=4",
  "pyramidkv": ":window=2",
  "adakv": ":window=4",
  "chunkkv": ":window=4:chunk=3:layer_reuse=2",
  "lagkv": ":sinks=2:lag=5",
  "compactor": ":chunk=8",
  "protokv": ":window=4:prototypes=5",
}
# It gives tokens new positions, which layers with a window cannot follow.
REFUSED = "finch"
NAMES = [
  f"{name}{SIZES.get(name, '')}"
  for name in (*METHODS, *RETRIEVALS)
  if name != REFUSED
]


# Weights for all layers, of which two have heads that are scored.
SCORED = (MODEL.width, 3, len(LAYERS))
FILES = {
  "kvzap": f":gate={made_up_kvzap(*SCORED)}",
  "fast_kvzip": f":gate={made_up_fast_kvzip(*SCORED)}",
}


def plan_of(name):
  return kvjax.get_plan(f"{name}{FILES.get(name, '')}", kvjax.Retention(0.5))


def prefilled(plan, prompts=PROMPTS):
  return kvjax.prefill(MODEL, PARAMS, prompts, plan)


@pytest.mark.parametrize("retention", [1.0, 0.5])
def test_answers_are_those_of_attention_written_out(retention):
  budget = kvjax.Retention(retention)
  cache, logits = prefilled(kvjax.get_plan("keydiff", budget))
  questions = kvjax.Prompts.of(QUESTIONS)
  answers = kvjax.generate(MODEL, PARAMS, cache, questions, DECODING)
  asked, _ = feed(
    MODEL,
    PARAMS,
    cache.grow([s.capacity and s.capacity + 64 for s in cache.stacks]),
    jnp.asarray(questions.tokens),
    jnp.asarray(questions.lengths),
  )
  for row, tokens in enumerate(ROWS):
    reference = Reference(PARAMS)
    expected = reference.feed(tokens)
    np.testing.assert_allclose(logits[row], expected, atol=2e-4)
    if retention < 1:
      reference.evict(budget.num_kept(len(tokens)))
    tokens_kept = zip(LAYERS, reference.kept, strict=True)
    expected_kept = [
      [[t[0] for t in head][-WINDOW if spec.window else None :] for head in own]
      for spec, own in tokens_kept
      if spec.cache
    ]
    assert kept_positions(cache, row) == expected_kept
    expected = reference.feed(QUESTIONS[row])
    np.testing.assert_allclose(asked[row], expected, atol=2e-4)
    decoded = reference.decode(expected, DECODING.max_new_tokens)
    assert answers.rows()[row] == decoded


@pytest.mark.parametrize(
  "block", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))]
)
def test_blocks_attend_as_the_whole_prompt_does(block):
  whole, logits = prefilled(kvjax.get_plan("full", FULL))
  plan = kvjax.get_plan("full", FULL, schedule=kvjax.Schedule(block=block))
  cache, last = prefilled(plan)
  np.testing.assert_allclose(last, logits, atol=2e-4)
  for row in range(len(ROWS)):
    assert kept_positions(cache, row) == kept_positions(whole, row)


def test_new_positions_are_refused_beside_windows():
  with pytest.raises(InputError, match="layers with a window keep other tok"):
    prefilled(plan_of(REFUSED))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_stands_alone(name):
  plan = plan_of(name)
  cache, _ = prefilled(plan)
  questions = kvjax.Prompts.of(QUESTIONS)
  answers = kvjax.generate(MODEL, PARAMS, cache, questions, DECODING).rows()
  spoiled = poison_cache(cache)
  again = kvjax.generate(MODEL, PARAMS, spoiled, questions, DECODING).rows()
  assert again == answers
  alone, _ = prefilled(plan, PROMPTS.row(1))
  question = kvjax.Prompts.of(QUESTIONS[1:2], padded=questions.tokens.shape[1])
  answer = kvjax.generate(MODEL, PARAMS, alone, question, DECODING).rows()
  assert kept_positions(alone, 0) == kept_positions(cache, 1)
  assert answer == answers[1:2]


def test_layers_share_a_selection_across_local_ones():
  name = "chunkkv:window=4:chunk=3:layer_reuse=5"
  cache, _ = prefilled(kvjax.get_plan(name, kvjax.Tokens(9)))
  alone, _ = prefilled(
    kvjax.get_plan(name.replace("=5", "=1"), kvjax.Tokens(9))
  )
  for row in range(len(ROWS)):
    _, first, _, second, _ = kept_positions(cache, row)
    assert first == second
  _, first, _, second, _ = kept_positions(alone, 0)
  assert first != second


@pytest.mark.slow
def test_evicting_goes_on_in_global_layers_alone():
  schedule = kvjax.Schedule(block=4, every=2)
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(7), schedule=schedule)
  cache, _ = prefilled(plan)
  questions = kvjax.Prompts.of([[1], [2], [3]])
  cache = kvjax.reserve(cache, 64)
  after = kvjax.generate(
    MODEL, PARAMS, cache, questions, DECODING, keep=True
  ).cache
  total = np.asarray(LENGTHS) + 1 + DECODING.max_new_tokens
  for layer, spec in zip(after.layers, LAYERS, strict=True):
    if not spec.cache:
      assert layer is None
      continue
    most = np.minimum(total, WINDOW if spec.window else 7)
    expected = np.tile(most[:, None], (1, spec.kv_heads))
    assert np.array_equal(layer.lengths, expected)
  with pytest.raises(kvjax.InputError, match="different numbers of KV heads"):
    _ = after.lengths


def test_eviction_between_blocks_sees_the_sinks():
  # One block is the whole prompt, of which only the window is left by then.
  method = kvjax.methods.SnapKV(window=5, kernel=1)
  budget = kvjax.Tokens(8)
  plan = kvjax.Plan(method, budget, schedule=kvjax.Schedule(block=32))
  strong = jax.tree.map(lambda x: x, PARAMS)
  strong["layers"][1]["sinks"] = 6 * PARAMS["layers"][1]["sinks"]
  whole, blocks = (
    kvjax.prefill(MODEL, strong, PROMPTS, each)[0]
    for each in (kvjax.Plan(method, budget), plan)
  )
  for row in range(len(ROWS)):
    assert kept_positions(blocks, row) == kept_positions(whole, row)


def test_bytes_are_those_of_rings_and_kept_tokens():
  cache, _ = prefilled(kvjax.get_plan("keydiff", kvjax.Tokens(7)))
  rows, expected = len(ROWS), 0
  for spec in CACHED:
    slots = WINDOW if spec.window else 7
    token = 4 * (spec.key_dim + (spec.value_dim or spec.key_dim)) + 4
    expected += rows * spec.kv_heads * slots * token
    expected += 0 if spec.window else 4  # the cursor
  assert cache.nbytes == expected + 4 * rows


def test_a_saved_cache_answers_the_same(tmp_path):
  cache, _ = prefilled(kvjax.get_plan("keydiff", kvjax.Retention(0.5)))
  kvjax.save_cache(cache, tmp_path / "c", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "c", model=MODEL, model_id="tiny")
  questions = kvjax.Prompts.of(QUESTIONS)
  ours = kvjax.generate(MODEL, PARAMS, cache, questions, DECODING)
  theirs = kvjax.generate(MODEL, PARAMS, loaded, questions, DECODING)
  assert ours.rows() == theirs.rows()
  other = dataclasses.replace(
    MODEL, geometry=kvjax.Geometry((*LAYERS[:-1], GLOBAL), 4096)
  )
  with pytest.raises(kvjax.InputError, match="another model"):
    kvjax.load_cache(tmp_path / "c", model=other, model_id="tiny")


@pytest.mark.parametrize("mesh", ["data:2,model:2", "data:2", "model:2"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_changes_nothing(name, mesh):
  rows = [*ROWS, ROWS[0][:9]]
  questions = kvjax.Prompts.of([*QUESTIONS, [5, 6]])
  prompts = kvjax.Prompts.of(rows)
  plan = plan_of(name)
  cache, _ = prefilled(plan, prompts)
  alone = kvjax.generate(MODEL, PARAMS, cache, questions, DECODING).rows()
  with jax.set_mesh(parse_mesh(mesh)):
    spread, _ = prefilled(plan, prompts)
    found = kvjax.generate(MODEL, PARAMS, spread, questions, DECODING).rows()
  assert found == alone
  for row in range(4):
    assert kept_positions(spread, row) == kept_positions(cache, row)


def test_layers_of_one_kind_are_compiled_once():
  """A pattern that repeats is one loop; what it holds is traced once."""
  traced = []

  def step(place, stack, activations):
    traced.append(activations.queries.shape)
    return jnp.zeros_like(activations.queries), stack

  spec = LayerSpec(4, 2, 8, weights=0)
  other = LayerSpec(4, 2, 8, window=3, weights=0)
  tokens = jnp.zeros((1, 2), jnp.int32)

  def hidden(model, params):
    states = States.none(model)
    return run_layers(model, params, tokens, tokens, states, step)[0]

  for repeats in (2, 8):
    layers = (other, other, spec) * repeats
    model = TinyModel(geometry=kvjax.Geometry(layers, 64))
    traced.clear()
    jax.eval_shape(functools.partial(hidden, model), model.init())
    # Local layers in an inner loop, global ones in the outer.
    assert len(traced) <= 4


def one_layer(**spec):
  """A model with a single layer, and its weights."""
  layer = LayerSpec(4, 2, 8, **spec)
  model = TinyModel(geometry=kvjax.Geometry((layer,), 512))
  return model, model.init(seed=1)


def last_logits(model, params, tokens, asked):
  """Of a prompt's last token, or of one that comes after the prompt."""
  plan = kvjax.get_plan("full", FULL)
  context = kvjax.Prompts.of([tokens[: len(tokens) - asked]])
  cache, logits = kvjax.prefill(model, params, context, plan)
  if not asked:
    return logits[0]
  question = jnp.asarray([tokens[-asked:]], jnp.int32)
  cache = cache.grow([s.capacity and s.capacity + 64 for s in cache.stacks])
  count = jnp.asarray([asked], jnp.int32)
  return feed(model, params, cache, question, count)[0][0]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_window_ends_where_it_is_said_to(asked):
  """Query i sees keys i - W + 1 to i; one layer, so nothing is passed on."""
  model, params = one_layer(window=WINDOW)
  tokens = ROWS[0]
  before = last_logits(model, params, tokens, asked)
  for distance, matters in ((WINDOW, False), (WINDOW - 1, True)):
    changed = list(tokens)
    place = len(tokens) - 1 - distance
    changed[place] = (tokens[place] + 1) % 64
    after = last_logits(model, params, changed, asked)
    assert bool(jnp.any(after != before)) == matters


@pytest.mark.parametrize("asked", [0, 1])
def test_a_sink_of_no_weight_is_none(asked):
  model, params = one_layer(sinks=True)
  plain, _ = one_layer()
  (layer,) = params["layers"]
  without = {name: x for name, x in layer.items() if name != "sinks"}
  expected = last_logits(plain, {**params, "layers": [without]}, ROWS[0], asked)
  found = {
    sink: last_logits(
      model,
      {**params, "layers": [{**layer, "sinks": layer["sinks"] * 0 + sink}]},
      ROWS[0],
      asked,
    )
    for sink in (0.0, -1e4)
  }
  np.testing.assert_allclose(found[-1e4], expected, rtol=0, atol=1e-5)
  assert jnp.abs(found[0.0] - expected).max() > 1e-3
