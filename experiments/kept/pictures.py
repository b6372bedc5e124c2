"""Pictures of what methods keep of a short prompt, for the pages of methods.

  python -m kvjax.experiments.kept.pictures

writes docs/images/kept_PAGE.png for the pages of docs/methods, from one prefill
of a prompt of 376 tokens by SmolLM2-135M-Instruct. The networks of KVzap are
those that `make leaderboard` trains first. It takes two minutes on two cores.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

import kvjax
from kvjax.experiments import cli
from kvjax.experiments.inputs.run_inputs import DEFAULT
from kvjax.experiments.kept import passages
from kvjax.experiments.kept.counts import kept
from kvjax.experiments.report import figures
from kvjax.experiments.report.pictures import png
from kvjax.experiments.run import outputs
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.tasks import suite
from kvjax.models import pretrained

# The methods of each page. LagKV's default would keep two thirds.
PAGES = {
  "snapkv": ("snapkv",),
  "keydiff": ("keydiff",),
  "lagkv": ("lagkv:lag=32:retention_of=row",),
  "compactor": ("compactor",),
  "protokv": ("protokv",),
  "kvzip": ("kvzip",),
  "ctkvr": ("ctkvr",),
  "baselines": ("random", "streaming", "key_norm", "cur"),
  "attention": ("h2o", "tova", "chunkkv", "dropkv", "criticalkv"),
  "budgets": (
    *("pyramidkv", "adakv", "criticaladakv", "duoattention", "simlayerkv"),
  ),
  "expected": ("expected_attention", "qfilters"),
  "gates": ("kvzap:gate=results/leaderboard/gate",),
  "decoding": ("rkv",),
  "retrieval": (
    *("flat", "quest", "shadowkv", "magicpig", "clusterkv", "squeezed"),
  ),
}
RETENTION = 0.25
# From the root of the checkout.
_FOLDER = pathlib.Path("docs", "images")
_TASK, _LENGTH = "niah_single_2", 512
_LAYERS, _TOKENS = "layer", "token of the prompt"
# White to dark blue.
_COLORS = LinearSegmentedColormap.from_list("kept", ["#FFFFFF", "#0B3C6F"])
_NEEDLE = "#C2410C"
# Words before and after the needle, and the share from which text is white.
_AROUND, _DARK = 10, 0.4
_LINE_WIDTH = 66
_DPI = 110


def main() -> None:
  """Draws all pictures."""
  lm = pretrained.load(DEFAULT, "float32")
  sample = suite.draw(_TASK, 0, 0, _LENGTH, lm.text.count)
  before, _ = lm.text.split_chat(sample.context)
  pieces, tokens = lm.text.pieces(before), lm.text.encode(before)
  methods = [name for names in PAGES.values() for name in names]
  chosen = candidates(methods, [kvjax.Retention(RETENTION)])[1:]
  request = kvjax.RepeatRequest.of(lm.text)
  results = kept(lm.model, lm.params, tokens, chosen, request)
  heads = lm.model.geometry.layers[0].kv_heads
  place = passages.find(pieces, sample.answers[0])
  shares = {each.candidate.method: each.heads / heads for each in results}
  for page, names in PAGES.items():
    drawn = draw({name: shares[name] for name in names}, pieces, place)
    outputs.write_bytes(_FOLDER / f"kept_{page}.png", png(drawn, _DPI))


def draw(
  maps: Mapping[str, Float[np.ndarray, "L n"]],
  pieces: Sequence[str],
  needle: Int[np.ndarray, " t"],
) -> Figure:
  """Draws maps of layers and tokens; below a single one, its words.

  Args:
    maps: of each layer's heads, the share that keep each token, or read it for
      the last one, by method.
    pieces: the text of each token.
    needle: numbers of the tokens to mark.
  """
  if len(maps) == 1:
    figure = figures.canvas(6.4, 3.8)
    above, below = figure.subplots(2, height_ratios=(5, 2))
    (shares,) = maps.values()
    _write_words(below, shares.mean(axis=0), pieces, needle)
    places, labels = [above], (_TOKENS, _LAYERS)
  else:
    rows = -(-len(maps) // 2)
    figure = figures.canvas(6.4, 1.5 * rows + 0.4)
    places = figures.panels(figure, len(maps), 2, sharex=True, sharey=True)
    figures.label_sides(figure, _TOKENS, _LAYERS)
    labels = ("", "")
  images = [
    _draw_map(axes, *one, needle, labels)
    for axes, one in zip(places, maps.items(), strict=True)
  ]
  figures.color_bar(figure, images[0], places, "share of heads", pad=0.01)
  return figure


def _draw_map(
  axes: Axes,
  method: str,
  shares: Float[np.ndarray, "L n"],
  needle: Int[np.ndarray, " t"],
  labels: tuple[str, str],
) -> AxesImage:
  """Draws a map and the lines around the needle."""
  image = axes.imshow(
    shares, aspect="auto", cmap=_COLORS, vmin=0, vmax=1, interpolation="none"
  )
  figures.finish(axes, *labels, method, framed=True)
  first, last = needle[0], needle[-1]
  height = len(shares)
  axes.add_patch(
    Rectangle(
      (first - 1, -0.5), last - first + 2, height, fill=False, color=_NEEDLE
    )
  )
  return image


def _write_words(
  axes: Axes,
  shares: Float[np.ndarray, " n"],
  pieces: Sequence[str],
  needle: Int[np.ndarray, " t"],
) -> None:
  """Writes the tokens around a needle in lines, each on its shade."""
  begin, end = max(needle[0] - 3 * _AROUND, 0), needle[-1] + _AROUND
  column, line = 0, 0
  for number in range(begin, min(end, len(pieces))):
    word = pieces[number].replace("\n", "↵")
    if column + len(word) > _LINE_WIDTH:
      column, line = 0, line + 1
    share = shares[number]
    axes.add_patch(
      Rectangle((column, line), len(word), 0.9, color=_COLORS(share))
    )
    is_needle = number in needle
    axes.text(
      column,
      line + 0.45,
      word,
      family="monospace",
      fontsize=8,
      va="center",
      color="white" if share > _DARK else _NEEDLE if is_needle else "black",
      weight="bold" if is_needle else "normal",
      parse_math=False,
    )
    column += len(word)
  axes.set(xlim=(0, _LINE_WIDTH), ylim=(line + 1, 0))
  axes.set_axis_off()


if __name__ == "__main__":
  cli.run(main)
