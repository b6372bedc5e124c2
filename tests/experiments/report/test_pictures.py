"""Plots that can be read: no text on another, colors with an order."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from kvjax.experiments.report import (
  heatmaps,
  lines,
  pictures,
  score_plots,
  wording,
)
from kvjax.experiments.run import intervals


def texts(figure):
  """Of all that is written, where it stands in pixels."""
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  renderer = canvas.get_renderer()
  found = []
  for text in figure.findobj(lambda a: hasattr(a, "get_text")):
    box = text.get_window_extent(renderer)
    if text.get_visible() and text.get_text() and box.width > 0:
      found.append((text.get_text(), box))
  return found


def check_readable(figure):
  width, height = figure.canvas.get_width_height()
  found = texts(figure)
  for text, box in found:
    assert box.x0 >= 0, text
    assert box.y0 >= 0, text
    assert box.x1 <= width, text
    assert box.y1 <= height, text
  for (one, first), (other, second) in itertools.combinations(found, 2):
    apart = (
      first.x1 <= second.x0
      or second.x1 <= first.x0
      or first.y1 <= second.y0 + 1
      or second.y1 <= first.y0 + 1
    )
    assert apart, (one, other)
  return [text for text, _ in found]


@pytest.mark.parametrize(
  "draw", [score_plots.score_vs_retention, score_plots.score_vs_bytes]
)
def test_twelve_methods_are_named_apart(crowd, draw):
  found = check_readable(draw(crowd))
  assert found.count("full cache") == 1
  methods = {row["method"] for row in crowd.summary["rows"]} - {"full"}
  assert methods <= set(found)


@pytest.mark.parametrize("baseline", ["random", "worst"])
@pytest.mark.parametrize("count", [12, 13, 15])
def test_of_many_methods_the_best_are_named(answer, record, count, baseline):
  names = [baseline, *(f"method_{number:02}" for number in range(count - 1))]
  answers = [answer(n, score=4.0 * i) for i, n in enumerate(names)]
  figure = score_plots.score_vs_retention(record([answer("full"), *answers]))
  named = {text for text in check_readable(figure) if text in names}
  # A baseline is named however few needles it finds.
  kept = {"random"} & {*names}
  assert named == {*names[len(kept) - 12 :], *kept}
  others = count - 12
  (label,) = (t for t, _ in texts(figure) if t.startswith("keys and values"))
  said = {0: "intervals", 1: "gray: 1 other method", 3: "gray: 3 other methods"}
  assert label.endswith(said[others])
  colors = [line.get_color() for line in figure.axes[0].lines]
  assert colors.count("#D0D0D0") == others


def test_a_long_title_has_lines_that_fit(answer, record):
  answers = [answer("full", turn=0), answer(turn=0)]
  found = record(
    answers,
    model="an-org/A-Model-of-$8B$-Instruct",
    schedule="blocks of 128, every 16 while decoding",
  )
  for draw in (
    score_plots.score_vs_retention,
    score_plots.score_vs_bytes,
    score_plots.score_by_turn,
  ):
    words = " ".join(check_readable(draw(found))).replace("\n", " ")
    assert wording.title(found.summary) in words


def test_points_stand_at_what_was_kept_or_read(answer, record):
  answers = [
    answer("full"),
    answer("quest", score=60.0, retention=0.25, read_tokens=300.0),
    answer("quest", "0.1", score=20.0, retention=0.1, read_tokens=100.0),
  ]
  found = record(answers)
  (axes,) = score_plots.score_vs_retention(found).axes
  label = (
    "keys and values read per token; bars, side by side, are 95 % intervals"
  )
  assert axes.get_xlabel() == label
  drawn = [
    line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 2
  ]
  np.testing.assert_allclose(drawn, [[(1, 100), (0.375, 60), (0.125, 20)]])
  (axes,) = score_plots.score_vs_bytes(found).axes
  drawn = [
    line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 2
  ]
  np.testing.assert_allclose(drawn[0][0], (1024 * 800, 100))
  left, right = axes.get_xlim()
  assert left > 1024 * 800 > 1024 * 80 > right


@pytest.mark.parametrize(
  "draw", [score_plots.score_vs_retention, score_plots.score_vs_bytes]
)
def test_methods_with_fewer_tasks_are_not_drawn_beside_others(
  answer, record, draw
):
  found = record(
    [
      *(answer("full", task=task) for task in ("vt", "fwe")),
      *(answer("whole", task=task) for task in ("vt", "fwe")),
      answer("partial", task="vt"),
    ]
  )
  drawn = check_readable(draw(found))
  assert "whole" in drawn
  assert "partial" not in drawn


@pytest.mark.parametrize(("score", "top"), [(12.0, 20), (47.0, 50), (63.0, 80)])
def test_low_scores_fill_the_picture(answer, record, score, top):
  found = record(
    [answer("full", score=score), answer("quest", score=score / 2)]
  )
  figure = score_plots.score_vs_retention(found._replace(answers=[]))
  check_readable(figure)
  (axes,) = figure.axes
  np.testing.assert_allclose(axes.get_ylim(), (-0.03 * top, 1.03 * top))
  assert axes.get_yticks()[-1] == top


def test_points_of_one_retention_stand_at_one_place_with_their_intervals(
  answer, record
):
  answers = [
    answer(method, sample=sample, score=score)
    for method in ("full", "a", "b", "c")
    for sample, score in enumerate((100.0, 0.0, 100.0, 100.0))
  ]
  found = record(answers)
  for draw, at in (
    (score_plots.score_vs_retention, 0.25),
    (score_plots.score_vs_bytes, 1024 * 200),
  ):
    (axes,) = draw(found).axes
    low, high = intervals.interval([a for a in answers if a.method == "a"])
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    # The line of each method starts at the full cache.
    ends = [line[-1] for line in drawn if len({x for x, _ in line}) == 2]
    assert ends.count([at, 75]) == 3
    assert drawn.count([[at, low], [at, high]]) == 3
    assert low < 75 < high
    # The bars of these equal intervals stand two points apart.
    bars = [
      x
      for x in axes.lines
      if x.get_xydata().tolist() == [[at, low], [at, high]]
    ]
    seen = sorted(bar.get_transform().transform((at, low))[0] for bar in bars)
    point, _ = axes.transData.transform((at, low))
    apart = 2 * axes.figure.dpi / 72
    np.testing.assert_allclose(seen, [point - apart, point, point + apart])
    assert axes.get_xlabel().endswith(
      "; bars, side by side, are 95 % intervals"
    )
  (axes,) = score_plots.score_vs_retention(found._replace(answers=[])).axes
  drawn = [line.get_xydata().tolist() for line in axes.lines]
  assert [[0.25, low], [0.25, high]] not in drawn
  assert "bars" not in axes.get_xlabel()


def test_bars_of_many_methods_stay_beside_their_points(answer, record):
  answers = [
    answer(f"m{method}", budget, score, retention=float(budget), sample=sample)
    for method in range(12)
    for budget in ("0.5", "0.25")
    for sample, score in enumerate((100.0, 0.0, 100.0, 0.0))
  ]
  (axes,) = score_plots.score_vs_retention(record(answers)).axes
  pairs = [x for x in axes.lines if len(x.get_xdata()) == 2]
  bars = [x for x in pairs if len({*x.get_xdata()}) == 1]
  assert len(bars) == 24
  for bar in bars:
    ends = (bar.get_transform(), axes.transData)
    seen, point = (x.transform(bar.get_xydata()[0])[0] for x in ends)
    assert abs(seen - point) < 7.1 * axes.figure.dpi / 72


def test_turns_are_drawn_for_every_budget(answer, record):
  answers = [
    answer(
      method, budget, score, retention=float(budget), sample=turn, turn=turn
    )
    for method in ("full", "keydiff", "a:b")
    for budget in ("0.5", "0.25")
    for turn, score in enumerate((100.0, 50.0))
    if method != "full" or budget == "0.5"
  ]
  figure = score_plots.score_by_turn(record(answers))
  found = check_readable(figure)
  assert len(figure.axes) == 2
  label = "turn; bars, side by side, are 95 % intervals"
  for text in ("full cache", "keydiff", "a:b", label):
    assert found.count(text) == 2


def test_heatmaps_print_each_cell_and_the_mean(answer, record):
  answers = [
    answer(method, length=length, depth=depth, sample=sample, score=score)
    for method, short in (("full", 100.0), ("long:name=" + "x" * 30, 25.0))
    for length, score in ((512, short), (131072, 0.0))
    for sample, depth in enumerate((0.0, 1.0))
    if (length, depth) != (512, 1.0)
  ]
  figure = heatmaps.heatmaps(record(answers).summary)
  found = check_readable(figure)
  assert [found.count(text) for text in ("1.00", "0.25", "0.00")] == [1, 1, 4]
  assert any(text.endswith("100 %: mean 0.33") for text in found)
  (image,) = figure.axes[0].images
  assert image.get_array().shape == (2, 2)
  assert np.isnan(image.get_array().filled(np.nan)[1, 0])


def test_heatmaps_stand_four_in_a_row_beside_one_color_bar(answer, record):
  def panels(methods, budgets):
    answers = [
      answer(method, budget, depth=depth, sample=sample)
      for method in ("full", *methods)
      for budget in budgets
      for sample, depth in enumerate((0.0, 1.0))
    ]
    found = record(answers)
    figure = heatmaps.heatmaps(found.summary)
    check_readable(figure)
    *maps, bar = figure.axes
    assert bar.get_ylabel() == "share of answers found"
    rows = {round(axes.get_position().y0, 3) for axes in maps}
    return len(rows), len(maps) // len(rows), figure.get_size_inches()

  names = [f"method_{number}" for number in range(9)]
  rows, columns, (width, height) = panels(names, ["0.25"])
  assert (rows, columns) == (3, 4)
  assert height < width
  # The budgets of a method stay together.
  assert panels(names[:3], ["0.5", "0.25"])[:2] == (2, 4)
  assert panels(names[:2], ["0.5", "0.25", "0.1"])[:2] == (3, 3)
  assert panels(names[:1], [f"0.{number}" for number in range(1, 7)])[:2] == (
    2,
    4,
  )


def test_more_is_lighter_for_color_blind_readers():
  def luminance(share):
    red, green, blue = (
      c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
      for c in heatmaps.COLORS(share)[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

  shares = np.linspace(0, 1, 21)
  brightness = [luminance(share) for share in shares]
  assert all(b - a > 0.005 for a, b in itertools.pairwise(brightness))
  for share, behind in zip(shares, brightness, strict=True):
    ink = luminance_of_ink(heatmaps.ink(share))
    light, dark = max(behind, ink), min(behind, ink)
    assert (light + 0.05) / (dark + 0.05) > 4.5, share


def luminance_of_ink(name):
  return {"white": 1.0, "black": 0.0}[name]


def test_labels_stand_apart_and_near_their_lines():
  assert lines.spread([10.0, 50.0]) == [10.0, 50.0]
  spread = lines.spread([0.0, 0.0, 0.0, 40.0])
  assert spread[0] >= 0
  assert all(b - a > 5 for a, b in itertools.pairwise(spread))
  assert spread[3] == 40
  spread = lines.spread([80.0] + [100.0] * 4)
  assert spread[-1] <= 100
  assert all(b - a > 5 for a, b in itertools.pairwise(spread))


def test_files_are_named_by_length_where_there_are_several(
  answer, record, monkeypatch
):
  monkeypatch.setattr(pictures, "png", lambda figure: b"")
  answers = [answer(length=512), answer(length=1024)]
  found = pictures.pictures(record(answers))
  assert list(found) == [
    *("score_vs_retention_512.png", "score_vs_bytes_512.png"),
    *("score_vs_retention_1024.png", "score_vs_bytes_1024.png"),
  ]
  assert all(map(pictures.is_picture, found))
  answers = [answer(turn=0), answer(turn=1, sample=1)]
  assert "score_by_turn.png" in pictures.pictures(record(answers))
  answers = [answer(depth=0.0), answer(depth=1.0, length=2048)]
  assert list(pictures.pictures(record(answers))) == [
    *("score_vs_retention.png", "score_vs_bytes.png", "heatmap.png")
  ]
  assert all(map(pictures.is_picture, ["score_by_turn.png", "heatmap.png"]))


def test_lines_of_one_end_share_a_leader_to_their_labels(answer, record):
  scores = {"full": 100.0, "a": 0.0, "b": 0.0, "c": 60.0, "d": 0.0}
  found = record([answer(name, score=of) for name, of in scores.items()])
  (axes,) = score_plots.score_vs_retention(found).axes
  leaders = {}
  for drawn in axes.collections:
    (_, score), _ = drawn.get_segments()[0]
    leaders[score] = drawn.get_segments()[1][:, 1]
  assert {*leaders} == {0, 60, 100}
  labels = {
    text.get_text(): text.get_position()[1]
    for text in axes.texts
    if text.get_text() in "abcd"
  }
  np.testing.assert_allclose(
    leaders[0], [min(labels[n] for n in "abd"), max(labels[n] for n in "abd")]
  )
  np.testing.assert_allclose(leaders[60], [labels["c"]] * 2)
