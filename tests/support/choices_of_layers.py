"""TriAttention's three choices, by loops over layers, heads and tokens."""

import numpy as np
import safetensors.numpy
from made_up_statistics import made_up_statistics

import kvjax
from kvjax.model import Geometry, LayerSpec
from kvjax.testing import TinyModel, kept_positions

HEADS, KV_HEADS, DIM = 4, 2, 8
GROUP, HALF = HEADS // KV_HEADS, DIM // 2
SPEEDS = 100.0 ** (-np.arange(HALF) / HALF)
FARTHEST = 64
# Two stacks that evict, and one of windows that does not.
ONE = LayerSpec(HEADS, KV_HEADS, DIM, scale=0.3, weights=0)
OTHER = LayerSpec(HEADS, KV_HEADS, DIM, softcap=3.0, weights=1)
LOCAL = LayerSpec(HEADS, KV_HEADS, DIM, window=6, weights=2)
MODEL = TinyModel(Geometry((ONE, LOCAL, OTHER, ONE), 4096))
GLOBAL = (0, 2, 3)
PARAMS = MODEL.init()
STORED = made_up_statistics(HEADS, KV_HEADS, DIM, 4)
RNG = np.random.default_rng(0)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (47, 30, 12)]
# The first tokens of each row, and one more.
PROTECTED = (0, 1, 2, 7)
CHOICES = ("layer_head", "head", "model")


def kept_by_the_rule(scores, free, count, choice, group=np.max, recent=()):
  """Slots of each KV head of each layer that are kept of the free ones.

  Args:
    scores: scores of a row for every layer and query head, [L, K, G, T].
    free: the slots of each KV head of each layer that compete, in order.
    count: how many of them stay.
    choice: what chooses for itself.
    group: how scores are reduced over a group.
    recent: those of the free ones that stay, as they are new.
  """
  layers, kv_heads, size, _ = scores.shape
  standard = {}
  for layer in range(layers):
    for head in range(kv_heads):
      for query in range(size):
        own = scores[layer, head, query, free[layer][head]].astype(np.float64)
        mean = own.sum() / len(own)
        deviation = np.sqrt(((own - mean) ** 2).sum() / len(own))
        standard[layer, head, query] = (own - mean) / max(deviation, 1e-6)

  def best(mixed, number, among):
    order = sorted(among, key=lambda place: (-mixed[place], place))
    return sorted(order[:number])

  def of_head(layer, head):
    return group([standard[layer, head, g] for g in range(size)], axis=0)

  kept = [[None] * kv_heads for _ in range(layers)]
  for layer in range(layers):
    for head in range(kv_heads):
      slots = free[layer][head]
      places = range(len(slots))
      last = [n for n in places if slots[n] in recent]
      rest, number = set(places) - {*last}, count - len(last)
      if choice == "layer_head":
        chosen = best(of_head(layer, head), number, rest)
      elif choice == "head":
        mixed = sum(of_head(n, head) for n in range(layers)) / layers
        chosen = best(mixed, number, rest)
      else:
        union = set()
        for own in standard.values():
          union |= {*best(own, number, rest)}
        most = np.max([*standard.values()], axis=0)
        chosen = best(most, number, union)
        others = rest - {*chosen}
        chosen += best(most, number - len(chosen), others)
      kept[layer][head] = [slots[n] for n in sorted([*chosen, *last])]
  return kept


def as_complex(x):
  """Pairs of channels as complex numbers, in the layout of the tiny model."""
  x = np.asarray(x, np.float64)
  return x[..., :HALF] + 1j * x[..., HALF:]


def scores_of(layer, row, number):
  """TriAttention's scores of a row of a layer, by the sum over pairs."""
  stored = safetensors.numpy.load_file(STORED)
  center = as_complex(stored["query_mean"][number])
  # Those that are made up differ between the channels of a pair.
  lengths = stored["query_abs"][number].astype(np.float64)
  lengths = (lengths[:, :HALF] + lengths[:, HALF:]) / 2
  positions = np.asarray(layer.positions[row])
  keys = as_complex(layer.keys[row])
  now = positions.max() + 1
  found = np.zeros((KV_HEADS, GROUP, positions.shape[1]))
  for head in range(HEADS):
    kv_head = head // GROUP
    back = keys[kv_head] * np.exp(-1j * positions[kv_head][:, None] * SPEEDS)
    offset = 1
    while offset <= FARTHEST:
      distance = (now - positions[kv_head] + offset)[:, None] * SPEEDS
      wave = np.cos(distance + np.angle(center[head] * back.conj()))
      total = (np.abs(center[head]) * np.abs(back) * wave).sum(axis=-1)
      total += ((lengths[head] - np.abs(center[head])) * np.abs(back)).sum(-1)
      found[kv_head, head % GROUP] += total / (FARTHEST.bit_length())
      offset *= 2
  return found


def expected_positions(cache, row, count, choice, protected=()):
  """What is kept of a row of a cache, by layer and KV head."""
  layers = [cache.layers[number] for number in GLOBAL]
  scores = np.stack(
    [
      scores_of(layer, row, number)
      for layer, number in zip(layers, GLOBAL, strict=True)
    ]
  )
  positions = [np.asarray(layer.positions[row]) for layer in layers]
  free = [
    [
      [n for n, place in enumerate(head) if place not in (-1, *protected)]
      for head in of_layer.tolist()
    ]
    for of_layer in positions
  ]
  kept, stay = free, count - len(protected)
  if len(free[0][0]) > stay:
    kept = kept_by_the_rule(scores, free, stay, choice)
  return [
    [
      sorted([*protected, *own[head][slots].tolist()])
      for head, slots in enumerate(of_layer)
    ]
    for own, of_layer in zip(positions, kept, strict=True)
  ]


def name_of(choice):
  return f"triattention:choice={choice}:farthest={FARTHEST}:statistics={STORED}"


def global_positions(cache, row):
  found = kept_positions(cache, row)
  return [found[number] for number in GLOBAL]


def assert_law(kept, choice):
  """Layers agree where heads choose, and heads as well where the model does."""
  if choice != "layer_head":
    assert all(heads == kept[0] for heads in kept)
  if choice == "model":
    assert all(head == kept[0][0] for heads in kept for head in heads)


def prompts_of(masks):
  protected = [[n in PROTECTED for n in range(len(row))] for row in ROWS]
  return kvjax.Prompts.of(ROWS, protected=protected if masks else None)
