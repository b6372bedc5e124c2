"""Describes numbers and settings in words, for tables, plots and pages."""

from collections.abc import Iterable, Mapping, Sequence

from kvjax.experiments.benchmarks.registry import presentation
from kvjax.experiments.report.means import Mean, Summary, complete, ranked
from kvjax.experiments.run.candidates import FULL

# Above these numbers, lengths are named by the first and last one, and tasks by
# their count.
_LENGTHS, _TASKS = 3, 4
NOTHING = "–"


def title(summary: Summary) -> str:
  """Describes the run of a summary, as a title."""
  number = samples(summary)
  return (
    f"{summary['model']}, {lengths(summary)} tokens, {summary['protocol']}, "
    f"{keeping(summary)}, {number} sample{'s' * (number != '1')} per task"
  )


def keeping(summary: Summary) -> str:
  """Describes the schedule, the selecting heads and the dtype."""
  kv_dtype = summary["kv_dtype"] and f", kept in {summary['kv_dtype']}"
  return f"{summary['schedule']}, per {summary['heads']}{kv_dtype}"


def lengths(summary: Summary) -> str:
  """Describes the lengths of the contexts, or of long answers."""
  distinct = sorted({row["length"] for row in summary["rows"]})
  if presentation(summary["benchmark"]).long_answers:
    return f"answers of up to {distinct[-1]}"
  if len(distinct) > _LENGTHS:
    return f"{distinct[0]} to {distinct[-1]}"
  return ", ".join(str(length) for length in distinct)


def samples(summary: Summary) -> str:
  """Says how many samples a task and length have; turns count.

  A run that was resumed with more may have fewer at the budgets of before.
  """
  counts: dict[tuple[object, ...], int] = {}
  for row in summary["rows"]:
    key = (row["method"], row["budget"], row["task"], row["length"])
    counts[key] = counts.get(key, 0) + row["samples"]
  fewest, most = min(counts.values()), max(counts.values())
  return f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"


def data(summary: Summary) -> str:
  """Describes the sources of the texts and other facts about the samples."""
  facts = {**summary["data"], **summary.get("about", {})}
  words = "; ".join(f"{name}: {text}" for name, text in facts.items())
  return words or "no texts"


def count(number: int, thing: str) -> str:
  """Formats a count: `1 sample`, `2,000 samples`."""
  return f"{number:,} {thing}{'' if number == 1 else 's'}"


def circumstances(summary: Summary) -> str:
  """Describes seed, decoding, device and versions."""
  return (
    f"Seed {summary['seed']}, {summary['decoding']}, {summary['dtype']} on "
    f"{summary['device']}; {versions(summary['versions'])}."
  )


def versions(of: Mapping[str, str]) -> str:
  """Lists the versions of Python and packages: `python 3.12.1, jax 0.12.0`."""
  return ", ".join(f"{name} {version}" for name, version in of.items())


def averaged(tasks: Sequence[str], every: bool = False) -> str:
  """Describes what a mean is over; lists the tasks if few, or on request."""
  if len(tasks) == 1:
    return tasks[0]
  names = f": {', '.join(tasks)}" if every or len(tasks) <= _TASKS else ""
  return f"mean over {len(tasks)} tasks{names}"


def share(value: float) -> str:
  """Formats a share as a percentage: `12.5 %`."""
  return f"{100 * value:.3g} %"


def budget(method: str, words: str) -> str:
  """Formats a budget: `25 %` or `128 tokens`."""
  if method == FULL:
    return share(1)
  try:
    return share(float(words))
  except ValueError:
    return words


def reached(mean: Mean) -> str:
  """Formats a retention: `25 %`, or `auto at 0.95: 38 %` if automatic."""
  words = f"{mean.budget}: " if mean.automatic else ""
  return f"{words}{share(mean.retention)}"


def headline(averages: Sequence[Mean]) -> str:
  """Names the best method and its scores; empty without methods to compare.

  As in `Best of 3 methods: keydiff (50 %: 60.4, 25 %: 31.2); full cache 87.5.`
  Two methods with the same scores at all budgets are both named; of more, the
  others are counted. Methods that cannot be compared do not count.
  """
  averages = complete(averages)
  full = [f"{mean.score:.1f}" for mean in averages if mean.method == FULL]
  methods = [mean for mean in ranked(averages) if mean.method != FULL]
  if not methods:
    return ""
  scores: dict[str, list[str]] = {}
  for mean in methods:
    text = f"{budget(*mean.name)}: {mean.score:.1f}"
    scores.setdefault(mean.method, []).append(text)
  best = scores[methods[0].method]
  first, *others = [name for name in scores if scores[name] == best]
  if len(others) > 1:
    others = [f"{len(others)} others"]
  names = " and ".join([first, *others])
  of = f"Best of {len(scores)} methods: " if len(scores) > 1 else ""
  end = f"; full cache {full[0]}." if full else "."
  return f"{of}{names} ({', '.join(best)}){end}"


def signed(delta: float | None) -> str:
  """Formats a difference: `+1.2` or `−3.4`."""
  if delta is None:
    return NOTHING
  text = f"{delta:+.1f}".replace("-", "−")
  return "0.0" if text in ("+0.0", "−0.0") else text


def interval(bounds: tuple[float, float] | None) -> str:
  """Formats two bounds: `93.1–99.0`."""
  if bounds is None:
    return NOTHING
  return "–".join(f"{bound:.1f}" for bound in bounds)


# Explains what `with_uncertainty` returns.
INTERVALS = "± longer half of the 95 % interval, or (from–to)"


def with_uncertainty(score: float, bounds: tuple[float, float] | None) -> str:
  """Formats a score and the longer half of its interval: `87.4 ±8`.

  If the score is an end of its interval, the interval is shown instead:
  `100.0 (94–100)`. Halves below two points have a decimal.

  >>> with_uncertainty(0.0, (0.0, 7.4))
  '0.0 (0–7)'
  """
  text = f"{score:.1f}"
  if bounds is None:
    return text
  halves = [abs(score - bound) for bound in bounds]
  longer = round(max(halves), 1)
  digits = int(longer < 2)
  if min(halves) >= 0.05:
    return f"{text} ±{longer:.{digits}f}"
  # An end that is the score has its digits.
  low, high = (
    f"{round(bound, digits if half >= 0.05 else 1):g}"
    for bound, half in zip(bounds, halves, strict=True)
  )
  return f"{text} ({low}–{high})"


def score_name(summary: Summary) -> str:
  """Returns the name of the main score."""
  return presentation(summary["benchmark"]).score


def scored(summary: Summary) -> str:
  """Returns what the main score is a share of."""
  return presentation(summary["benchmark"]).scored


def score_axis(summary: Summary) -> str:
  """Returns the axis label of the main score."""
  tasks = {row["task"] for row in summary["rows"]}
  mean = ", mean over tasks" if len(tasks) > 1 else ""
  return f"{scored(summary)}{mean} (%)"


def milliseconds(seconds: float, decimals: int = 2) -> str:
  """Writes seconds as milliseconds; less than one has three digits."""
  value = 1e3 * seconds
  return f"{value:.3g}" if value < 1 else f"{value:,.{decimals}f}"


def mib(size: float) -> str:
  """Formats bytes as MiB without the unit: `1,234` or `56.7`."""
  number = size / 2**20
  return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def unit(sizes: Iterable[float]) -> tuple[str, float]:
  """Chooses the unit with the fewest digits; returns its name and bytes."""
  largest = max(sizes, default=0)
  for name, size in (("GiB", 2**30), ("MiB", 2**20)):
    if largest >= 10 * size:
      return name, size
  return "KiB", 2**10
