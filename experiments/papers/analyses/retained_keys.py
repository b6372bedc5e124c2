"""E2.6 and E2.7: diversity of the keys that methods retain."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.experiments.papers.analyses.observed import unit
from kvjax.experiments.papers.findings import Findings, Scale, Subject
from kvjax.experiments.report import figures, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.lines import styled
from kvjax.experiments.run.progress_bar import track

METHODS = {
  "H2O": "h2o.keydiff",
  "TOVA": "tova.keydiff",
  "Sink": "streaming",
  "SnapKV": "snapkv.keydiff",
  "KeyL2Norm": "key_norm",
  "KeyDiff": "keydiff",
}
_OURS = "KeyDiff"
# Budget and block size of the paper, and those for shorter prompts: of the
# determinants, and of the components.
_Sizes = Mapping[Scale, tuple[int, int]]
_SIZES: _Sizes = {"paper": (2048, 128), "small": (256, 16)}
_COMPONENTS: _Sizes = {"paper": (4096, 128), "small": (256, 16)}
_RIDGE = 1e-6

# Retained keys of each layer and KV head.
_Heads = Mapping[tuple[int, int], Float[np.ndarray, "T D"]]


def determinants(subject: Subject) -> Findings:
  """Measures log det of retained keys' cosines over layers, heads, prompts."""
  by_method: dict[str, list[dict[tuple[int, int], float]]] = {}
  for row in track(subject.rows):
    for name, heads in _retained(subject, row, _SIZES).items():
      log_dets = {place: log_determinant(keys) for place, keys in heads.items()}
      by_method.setdefault(name, []).append(log_dets)
  lines = []
  for name, rows in by_method.items():
    values = [value for row in rows for value in row.values()]
    below = [
      row[place] < best[place]
      for row, best in zip(rows, by_method[_OURS], strict=True)
      for place in row
    ]
    lines.append(
      [
        name,
        f"{statistics.fmean(values):.1f}",
        f"{min(values):.1f}",
        f"{max(values):.1f}",
        "" if name == _OURS else f"{100 * statistics.fmean(below):.0f} %",
      ]
    )
  budget, block = _SIZES[subject.scale]
  header = ["method", "mean", "lowest", "highest", f"below {_OURS}"]
  title = (
    f"log det(cosines + 1e-6 I), N = {budget}, blocks of {block}, "
    f"{wording.count(len(subject.rows), 'prompt')}"
  )
  return Findings(
    [Table(title, header, lines)],
    [
      "A key retained more than head-dim others leaves only the 1e-6, so that "
      "logarithms are large and negative; all methods retain as many."
    ],
    {"determinants.png": _draw_distributions(by_method)},
  )


def components(subject: Subject) -> Findings:
  """Projects retained keys to the first two components of all keys."""
  row = subject.rows[0]
  geometry = subject.lm.model.geometry
  layer = geometry.num_layers // 2
  kv_heads = geometry.layers[layer].kv_heads
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  everything = _keys(subject, row, full)
  retained = _retained(subject, row, _COMPONENTS)
  lines = []
  for name, heads in retained.items():
    shares = [
      spread(everything[layer, head], heads[layer, head])
      for head in range(kv_heads)
    ]
    lines.append([name, *(f"{share:.2f}" for share in shares)])
  names = [f"KV head {head}" for head in range(kv_heads)]
  title = f"spread of retained keys over that of all keys, layer {layer}"
  picture = _draw(
    everything[layer, 0],
    {name: heads[layer, 0] for name, heads in retained.items()},
  )
  return Findings(
    [Table(title, ["method", *names], lines)],
    [
      "Spread is the mean squared distance from the mean of all keys, in the "
      "plane of their first two principal components; the picture shows KV "
      f"head 0 of layer {layer}."
    ],
    {"components.png": picture},
  )


def log_determinant(keys: Float[np.ndarray, "T D"]) -> float:
  """Computes log det(U U^T + 1e-6 I) of unit keys U, from a D x D matrix."""
  units = unit(keys)
  count, dim = units.shape
  gram = units.T @ units + _RIDGE * np.eye(dim)
  # det(I + A B) = det(I + B A), after factoring out the ridge.
  return float(np.linalg.slogdet(gram)[1] + (count - dim) * math.log(_RIDGE))


def spread(
  everything: Float[np.ndarray, "T D"], retained: Float[np.ndarray, "M D"]
) -> float:
  """Computes the mean square in the plane, relative to that of all keys."""
  mean, axes = plane(everything)
  retained_squares = ((retained - mean) @ axes.T) ** 2
  all_squares = ((everything - mean) @ axes.T) ** 2
  return float(
    retained_squares.sum(axis=1).mean() / all_squares.sum(axis=1).mean()
  )


def plane(
  keys: Float[np.ndarray, "T D"],
) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "2 D"]]:
  """Computes the mean of keys and their first two principal components."""
  mean = keys.mean(axis=0)
  return mean, np.linalg.svd(keys - mean, full_matrices=False)[2][:2]


def _retained(
  subject: Subject, row: Sequence[int], sizes: _Sizes
) -> dict[str, _Heads]:
  """Computes the keys that each method retains with block-wise prefill."""
  budget, block = sizes[subject.scale]
  schedule = kvjax.Schedule(block=block)
  return {
    name: _keys(
      subject,
      row,
      kvjax.get_plan(method, kvjax.Tokens(budget), schedule=schedule),
    )
    for name, method in METHODS.items()
  }


def _keys(subject: Subject, row: Sequence[int], plan: kvjax.Plan) -> _Heads:
  prompts = kvjax.Prompts.of([row])
  cache, _ = kvjax.prefill(subject.lm.model, subject.lm.params, prompts, plan)
  by_head = {}
  for number, layer in enumerate(cache.layers):
    assert isinstance(layer, LayerCache)
    keys = np.asarray(layer.keys[0], np.float64)
    valid = np.asarray(layer.valid[0])
    for head, head_keys in enumerate(keys):
      by_head[number, head] = head_keys[valid[head]]
  return by_head


def _draw_distributions(
  by_method: Mapping[str, Sequence[Mapping[tuple[int, int], float]]],
) -> Figure:
  """Plots the share of heads and prompts with at most each value."""
  figure = figures.canvas(6.6, 3.6)
  axes = figure.add_subplot()
  for index, (name, rows) in enumerate(by_method.items()):
    style = styled(name, [], index)
    axes.ecdf(
      [value for row in rows for value in row.values()],
      color=style.color,
      linewidth=2.2 if name == _OURS else 1.2,
      linestyle=(0, style.dashes) if style.dashes else "-",
      label=name,
    )
  figures.finish(
    axes,
    "log det of the cosines of retained keys",
    "share of heads that have at most this",
  )
  axes.legend(fontsize=figures.LABEL)
  return figure


def _draw(
  everything: Float[np.ndarray, "T D"],
  retained: Mapping[str, Float[np.ndarray, "M D"]],
) -> Figure:
  """Plots a panel per method: all keys in gray, retained ones in color."""
  mean, axes = plane(everything)
  figure = figures.canvas(9, 6.2)
  drawn = figures.panels(figure, 6, 3, sharex=True, sharey=True)
  for panel, (name, keys) in zip(drawn, retained.items(), strict=True):
    for rows, color in (everything, figures.GRAY), (keys, figures.BLUE):
      x, y = ((rows - mean) @ axes.T).T
      panel.scatter(x, y, s=5, color=color)
    figures.finish(panel, title=f"{name}, {len(keys)} of {len(everything)}")
  figures.label_sides(figure, "first component", "second component")
  return figure
