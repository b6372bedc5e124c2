"""Pictures of what methods keep of a short prompt, for the pages of methods.

  python -m kvjax.experiments.kept.pictures

writes docs/images/kept_NAME.png for seven methods, from one prefill of a prompt
of some 390 tokens by SmolLM2-135M-Instruct. It takes a minute on two cores.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import kvjax
from kvjax.experiments import cli
from kvjax.experiments.inputs.run_inputs import DEFAULT
from kvjax.experiments.kept.counts import kept
from kvjax.experiments.report.pictures import png
from kvjax.experiments.run import outputs
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.tasks import suite
from kvjax.models import pretrained

# By the file names of their pictures. LagKV's default would keep two thirds.
METHODS = {
  "snapkv": "snapkv",
  "keydiff": "keydiff",
  "lagkv": "lagkv:lag=32:retention_of=row",
  "compactor": "compactor",
  "protokv": "protokv",
  "kvzip": "kvzip",
  "ctkvr": "ctkvr",
}
RETENTION = 0.25
# From the root of the checkout.
_FOLDER = pathlib.Path("docs", "images")
_TASK, _LENGTH = "niah_single_2", 512
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
  chosen = candidates([*METHODS.values()], [kvjax.Retention(RETENTION)])[1:]
  request = kvjax.RepeatRequest.of(lm.text)
  results = kept(lm.model, lm.params, tokens, chosen, request)
  heads = lm.model.geometry.layers[0].kv_heads
  place = find(pieces, sample.answers[0])
  for name, result in zip(METHODS, results, strict=True):
    done = "read by the last token" if result.reads else "kept"
    title = f"{result.candidate.method}, {RETENTION:.0%} {done}"
    figure = draw(result.heads / heads, pieces, place, title)
    outputs.write_bytes(_FOLDER / f"kept_{name}.png", png(figure, _DPI))


def find(pieces: Sequence[str], text: str) -> Int[np.ndarray, " t"]:
  """Returns the numbers of the tokens that a text consists of.

  Examples:
    >>> find(["It is", " 4", "2", "."], "42").tolist()
    [1, 2]
  """
  start = "".join(pieces).index(text)
  ends = np.cumsum([len(piece) for piece in pieces])
  return np.flatnonzero((ends > start) & (ends - start <= len(text)))


def draw(
  shares: Float[np.ndarray, "L n"],
  pieces: Sequence[str],
  needle: Int[np.ndarray, " t"],
  title: str,
) -> Figure:
  """Draws a map of layers and tokens, and the words around a needle.

  Args:
    shares: of each layer's heads, those that keep or read each token.
    pieces: the text of each token.
    needle: numbers of the tokens to mark.
    title: the title.
  """
  figure = Figure(figsize=(6.4, 3.8), layout="constrained")
  FigureCanvasAgg(figure)
  above, below = figure.subplots(2, height_ratios=(5, 2))
  image = above.imshow(
    shares, aspect="auto", cmap=_COLORS, vmin=0, vmax=1, interpolation="none"
  )
  above.set(ylabel="layer", xlabel="token of the prompt")
  above.set_title(title, loc="left", fontsize=10, parse_math=False)
  first, last = needle[0], needle[-1]
  height = len(shares)
  above.add_patch(
    Rectangle(
      (first - 1, -0.5), last - first + 2, height, fill=False, color=_NEEDLE
    )
  )
  figure.colorbar(image, ax=above, label="heads", pad=0.01)
  _write_words(below, shares.mean(axis=0), pieces, needle)
  return figure


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
