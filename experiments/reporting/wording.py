"""Numbers and settings in words, the same in every table, plot and page."""

from collections.abc import Iterable, Sequence

from kvjax.experiments.candidates import FULL
from kvjax.experiments.reporting.means import Mean, Summary

# More lengths than these are named by the first and the last, more tasks by
# their number.
_LENGTHS, _TASKS = 3, 4
NOTHING = "–"


def title(summary: Summary) -> str:
  """What a table or a plot of the summary is about."""
  return (
    f"{summary['model']}, {lengths(summary)} tokens, {summary['protocol']}, "
    f"{keeping(summary)}, {count(samples(summary), 'sample')} per task"
  )


def keeping(summary: Summary) -> str:
  """When, by which heads and how methods keep, in words."""
  kv_dtype = summary["kv_dtype"] and f", kept in {summary['kv_dtype']}"
  return f"{summary['schedule']}, per {summary['heads']}{kv_dtype}"


def lengths(summary: Summary) -> str:
  """The lengths of the contexts, in words."""
  found = sorted({row["length"] for row in summary["rows"]})
  if len(found) > _LENGTHS:
    return f"{found[0]} to {found[-1]}"
  return ", ".join(str(length) for length in found)


def samples(summary: Summary) -> int:
  """The least that any task has, at one length; turns are samples too."""
  found: dict[tuple[object, ...], int] = {}
  for row in summary["rows"]:
    key = (row["method"], row["budget"], row["task"], row["length"])
    found[key] = found.get(key, 0) + row["samples"]
  return min(found.values())


def data(summary: Summary) -> str:
  """Where the texts come from, and what else is said about the samples."""
  found = {**summary["data"], **summary.get("about", {})}
  return "; ".join(f"{name}: {text}" for name, text in found.items())


def count(number: int, thing: str) -> str:
  """So many things: `1 sample`, `2 samples`."""
  return f"{number} {thing}{'' if number == 1 else 's'}"


def circumstances(summary: Summary) -> str:
  """How the numbers came about."""
  return (
    f"Seed {summary['seed']}, {summary['decoding']}, {summary['dtype']} on "
    f"{summary['device']}; {versions(summary)}."
  )


def versions(summary: Summary) -> str:
  """Of Python and packages: `python 3.12.1, jax 0.12.0`."""
  found = summary["versions"].items()
  return ", ".join(f"{name} {version}" for name, version in found)


def averaged(tasks: Sequence[str], every: bool = False) -> str:
  """What a mean is over; of few tasks, or of every one, it says which."""
  if len(tasks) == 1:
    return tasks[0]
  names = f": {', '.join(tasks)}" if every or len(tasks) <= _TASKS else ""
  return f"mean over {len(tasks)} tasks{names}"


def share(value: float) -> str:
  """A share as a percentage: `12.5 %`."""
  return f"{100 * value:.3g} %"


def budget(method: str, words: str) -> str:
  """What a method might keep: `25 %` or `128 tokens`."""
  if method == FULL:
    return share(1)
  try:
    return share(float(words))
  except ValueError:
    return words


def reached(mean: Mean) -> str:
  """A method's retention: `25 %`, or `auto at 0.95: 38 %` where it varies."""
  words = f"{mean.budget}: " if mean.automatic else ""
  return f"{words}{share(mean.retention)}"


def signed(delta: float | None) -> str:
  """A difference: `+1.2` or `−3.4`."""
  if delta is None:
    return NOTHING
  text = f"{delta:+.1f}".replace("-", "−")
  return "0.0" if text in ("+0.0", "−0.0") else text


def interval(bounds: tuple[float, float] | None) -> str:
  """Two bounds: `93.1–99.0`."""
  if bounds is None:
    return NOTHING
  return "–".join(f"{bound:.1f}" for bound in bounds)


def give_or_take(mean: Mean) -> str:
  """A score and half its interval, the longer half: `97.4 ±1.2`.

  Where there is nothing beyond the score, the other half: `100.0 −5.6`.
  """
  text = f"{mean.score:.1f}"
  if mean.interval is None:
    return text
  low, high = mean.interval
  below, above = round(mean.score - low, 1), round(high - mean.score, 1)
  sign = "±" if below and above else "−" if below else "+"
  return f"{text} {sign}{max(below, above):.1f}"


def score_name(summary: Summary) -> str:
  """What the main score is called."""
  return {"passkey": "exact"}.get(summary["benchmark"], "score")


def scored(summary: Summary) -> str:
  """What the main score is the share of."""
  own = {"passkey": "exact answers", "longbench": "score"}
  return own.get(summary["benchmark"], "answers found")


def score_axis(summary: Summary) -> str:
  """What the main score is, beside a plot."""
  return f"{scored(summary)}, mean over tasks (%)"


def unit(sizes: Iterable[float]) -> tuple[str, float]:
  """The unit that shows sizes in few digits, and its bytes."""
  largest = max(sizes, default=0)
  for name, size in (("GiB", 2**30), ("MiB", 2**20)):
    if largest >= 10 * size:
      return name, size
  return "KiB", 2**10
