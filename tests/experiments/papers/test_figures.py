"""The analyses behind the papers' figures: brute force, or a case by hand."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.experiments.papers import compare_to_paper, number_pictures, running
from kvjax.experiments.papers.analyses import (
  drawing,
  key_cosines,
  observed,
  query_plane,
  recalled_lists,
  unmasked_attention,
)
from kvjax.experiments.papers.data_model import Key, Size, Targets
from kvjax.kernels.attention import AttentionOptions
from kvjax.testing import random_activations

RNG = np.random.default_rng(0)


def cosine(x, y):
  return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def softmax(x):
  return np.exp(x) / np.exp(x).sum()


def test_a_layer_is_as_deep_as_that_of_another_model():
  found = [drawing.scaled_layer(layer, 28, 28) for layer in (0, 2, 11, 27)]
  assert found == [0, 2, 11, 27]
  assert [drawing.scaled_layer(n, 28, 6) for n in (2, 11, 27)] == [0, 2, 5]


def test_maps_have_a_cell_per_head_and_none_where_there_is_no_head():
  cells = drawing.grid([np.array([1.0, 2.0]), np.array([3.0])])
  np.testing.assert_array_equal(cells, [[1, 2], [3, np.nan]])
  one = drawing.HeadMap("x", [np.array([0.5, -0.5])])
  image = drawing.head_maps([one]).axes[0].images[0]
  np.testing.assert_array_equal(image.get_array(), [[0.5, -0.5]])
  assert image.get_clim() == (-1, 1)


def test_weights_are_those_of_a_loop_over_queries_and_heads():
  seen = random_activations(1, [9], 9, heads=4, kv_heads=2, head_dim=4)
  for head, causal in itertools.product(range(2), (True, False)):
    keys = np.asarray(seen.keys[0, head], np.float64)[:7]
    expected = np.zeros((7, 7))
    for own in np.asarray(seen.queries[0], np.float64)[2 * head : 2 * head + 2]:
      for place in range(7):
        last = place + 1 if causal else 7
        weights = softmax(keys[:last] @ own[place] / 2)
        expected[place, :last] += weights / 2
    found = observed.kv_head_weights(seen, head, 7, causal)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_weights_are_those_of_the_layer_s_attention():
  seen = random_activations(1, [9], 9, heads=4, kv_heads=2, head_dim=4)
  options = AttentionOptions(window=3, scale=0.7, softcap=2.0)
  sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
  seen = dataclasses.replace(seen, attention=options, sinks=sinks)
  keys = np.asarray(seen.keys[0, 1], np.float64)
  expected = np.zeros((9, 9))
  for own, sink in zip(np.asarray(seen.queries[0, 2:]), sinks[2:], strict=True):
    for place in range(9):
      seen_keys = range(max(0, place - 2), place + 1)
      logits = [2 * np.tanh(0.7 * keys[i] @ own[place] / 2) for i in seen_keys]
      found = softmax([*logits, float(sink)])[:-1]
      expected[place, seen_keys] += found / 2
  found = observed.kv_head_weights(seen, 1, 9, True)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_least_alike_keys_are_those_that_point_elsewhere():
  keys = np.array([[1, 0.1], [1, 0], [-2, 0], [3, 0], [0, 5]])
  alike = key_cosines.cosines(keys)
  assert alike[0, 3] == pytest.approx(cosine(keys[0], keys[3]))
  assert key_cosines.least_alike(alike, 2) == [2, 4]


def test_two_heads_are_shown_with_the_attention_of_their_keys(subject):
  findings = key_cosines.measure(subject)
  (table,) = findings.tables
  # Of two layers, those of the paper's 2 and 11 of 28.
  assert [line[:2] for line in table.lines] == [["0", "1"], ["1", "1"]]
  for *_, least, every, received, even in table.lines:
    assert float(least) < float(every)
    assert 0 <= float(received) <= 100
    assert 0 < float(even) < 100
  assert len(findings.pictures["keys_and_attention.png"].axes) == 8


def test_shares_of_attention_are_along_columns_and_diagonals():
  even = np.full((40, 40), 1 / 40)
  found = unmasked_attention.shares(even)
  near = sum(abs(i - j) <= 4 for i in range(40) for j in range(40)) / 1600
  assert found == pytest.approx((2 / 40, near, 39 / 80))
  assert unmasked_attention.shares(np.eye(40))[1:] == (1.0, 0.0)
  column = np.zeros((40, 40))
  column[:, 30] = 1
  stripes, _, ahead = unmasked_attention.shares(column)
  assert (stripes, ahead) == (1.0, 30 / 40)


def test_without_the_mask_later_keys_are_seen_in_every_layer(subject):
  findings = unmasked_attention.measure(subject)
  layers, anchors = findings.tables
  assert [line[0] for line in layers.lines] == ["0", "1"]
  assert all(float(line[-1]) > 0 for line in layers.lines)
  shares = [float(line[2]) for line in anchors.lines]
  assert shares == sorted(shares, reverse=True)
  assert shares[0] > 1
  assert set(findings.pictures) == {"mask.png", "layers.png"}


def test_top_keys_are_those_least_like_the_anchor():
  keys = RNG.normal(size=(40, 6)) + 1
  queries = RNG.normal(size=(80, 6)) - 1
  units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
  anchor = units.mean(axis=0)
  likeness = [cosine(key, anchor) for key in keys]
  order = np.argsort(likeness)
  head = query_plane._Head(0, 0, keys, queries, order[:2])
  mean = queries.mean(axis=0)
  products = np.array([cosine(key, mean) for key in keys])
  expected = (
    cosine(anchor, mean),
    products[order[:2]].mean(),
    products[order[2:]].mean(),
  )
  found = query_plane.cosines_with_mean_query(head)
  assert found == pytest.approx(expected)
  seen = random_activations(3, [40], 40, heads=4, kv_heads=2, head_dim=6)
  own = query_plane._head(seen, 5, 1)
  keys = np.asarray(seen.keys[0, 1], np.float64)
  units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
  likeness = units @ units.mean(axis=0)
  assert set(own.top.tolist()) == set(np.argsort(likeness)[:2].tolist())
  assert own.queries.shape == (80, 6)


def test_four_heads_are_shown_with_their_queries(subject):
  findings = query_plane.measure(subject)
  (table,) = findings.tables
  # The paper's four places fall on three heads of two layers.
  places = [tuple(line[:2]) for line in table.lines]
  assert places == list(dict.fromkeys(places))
  panel = findings.pictures["queries.png"].axes[0]
  labels = panel.get_legend_handles_labels()[1]
  assert labels == ["keys", "queries", "top keys", "anchor", "mean query"]


def recalled_by_hand(seen, read, probes, count, last, listed):
  """One query at a time, with sets."""
  group = seen.queries.shape[1] // seen.keys.shape[1]
  results = []
  for head, keys in enumerate(np.asarray(seen.keys[0], np.float64)):
    own = np.asarray(seen.queries[0], np.float64)
    own = own[head * group : (head + 1) * group]

    def best(place, number, own=own, keys=keys):
      weights = [softmax(keys @ q[place] / np.sqrt(len(q[place]))) for q in own]
      allowed = np.max(weights, axis=0)[listed]
      return set(np.argsort(-allowed, kind="stable")[:number].tolist())

    lists = [best(place, 5 * read // 2) for place in range(last - count, last)]
    for place in range(last, keys.shape[0]):
      alike = [
        max(cosine(q[place], q[other]) for q in own)
        for other in range(last - count, last)
      ]
      chosen = [lists[at] for at in np.argsort(alike)[::-1][:probes]]
      union = set().union(*chosen)
      wanted = best(place, read)
      results.append(
        (
          len(union) / sum(map(len, chosen)),
          len(union),
          len(union & wanted) / len(wanted),
        )
      )
  return np.mean(results, axis=0)


def test_recalled_keys_are_those_of_a_loop_over_queries(monkeypatch):
  monkeypatch.setattr(recalled_lists, "_LOCAL", 8)
  monkeypatch.setattr(recalled_lists, "_QUERIES", 6)
  seen = random_activations(2, [64], 64, heads=4, kv_heads=2, head_dim=8)
  found = recalled_lists.recall(seen, 4)
  for probes in (1, 2, 4):
    # 64 / 16 centroids before the last six queries; four sinks are not listed.
    expected = recalled_by_hand(seen, 4, probes, 4, 58, slice(4, 50))
    assert found[probes] == pytest.approx(expected, rel=1e-5)
  # There are four lists in all.
  assert found[16] == found[4]
  assert found[1].alpha == 1.0


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_scores_are_drawn_by_size(invented, scale):
  """At the paper's scale next to its numbers."""

  def kept(candidate):
    return None if candidate.method == "full" else len(candidate.method)

  size = Size("kept", kept, (3, 90))
  sized = dataclasses.replace(invented, size=size)
  cells = running.cells_of(sized, scale, sized.at(scale))
  empty = compare_to_paper.compare_to_paper(sized, scale, cells, [])
  headline = invented.averages[0]
  number = compare_to_paper.Number(40.0, (30.0, 50.0), 2)
  ours = {Key(*place, headline.name): number for place in empty.here}
  compared = empty._replace(averages={headline.name: headline}, ours=ours)
  axes = number_pictures.draw(compared)["by_size"].axes[0]
  curves = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
  own = ["ours, Full", "ours, Sinks", "ours, Ours"]
  printed = ["A model, Full", "A model, Sinks", "A model, Ours"]
  assert sorted(curves) == sorted(own if scale == "small" else own + printed)
  sizes = sorted(n for (line, _), n in empty.sizes.items() if line == "Ours")
  assert curves["ours, Ours"].get_xdata().tolist() == sizes
  # A level.
  assert curves["ours, Full"].get_xdata() == [0, 1]
  assert list(curves["ours, Full"].get_ydata()) == [40.0, 40.0]
  guides = {line.get_xdata()[0] for line in axes.lines}
  assert {3, 90} <= guides
  assert axes.get_xlabel() == "kept"


def test_lines_are_grouped_by_the_parameter_that_they_vary():
  names = [
    "Full",
    "C = 320",
    "C = 80",
    "C' = 4",
    "rho = 1 rho'",
    "rho = 5 rho'",
  ]
  assert number_pictures.parameters(names) == {
    "C": {"C = 320": 320, "C = 80": 80},
    "rho / rho'": {"rho = 1 rho'": 1, "rho = 5 rho'": 5},
  }


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_sweep_has_a_panel_per_parameter(invented, scale):
  first, *others = invented.lines
  lines = [
    dataclasses.replace(first, name=name)
    for name in ("C = 20", "C = 40", "p = 1", "p = 2")
  ]
  headline = invented.averages[0].name
  printed = Targets("A model", {Key("C = 40", "short", headline): 70.0})
  swept = dataclasses.replace(
    invented, lines=(*lines, *others), targets=(printed,), quoted=()
  )
  cells = running.cells_of(swept, scale, swept.at(scale))
  empty = compare_to_paper.compare_to_paper(swept, scale, cells, [])
  number = compare_to_paper.Number(40.0, (30.0, 55.0), 2)
  ours = {Key(line.name, "short", headline): number for line in lines}
  compared = empty._replace(
    averages={headline: invented.averages[0]}, ours=ours
  )
  figure = number_pictures.draw(compared)["sweeps"]
  assert [axes.get_xlabel() for axes in figure.axes] == ["C", "p"]
  labels = figure.axes[0].get_legend_handles_labels()[1]
  expected = ["ours, short"]
  assert sorted(labels) == sorted(
    expected if scale == "small" else [*expected, "A model, short"]
  )
  bar = figure.axes[0].lines[0]
  assert tuple(bar.get_ydata()) == (30.0, 55.0)
