"""What methods cost at several lengths: bytes, and the time of a prompt."""

from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import Mean, means
from kvjax.experiments.report.run_files import Record


def are_known(record: Record) -> bool:
  """Whether a run has measured prompts of more than one length."""
  rows = record.summary["rows"]
  timed = all(row.get("prefill_seconds") is not None for row in rows)
  return timed and len(record.values("length")) > 1


def table(record: Record) -> Table:
  """Builds a table with bytes and times at each length of a timed run.

  Lines are methods and budgets, the fastest at the longest length first; what
  they lack are dashes.
  """
  lengths = sorted(record.values("length"))
  by_length = {
    length: {m.name: m for m in means(record.at(length=length).summary["rows"])}
    for length in lengths
  }
  longest = by_length[lengths[-1]]
  fastest = sorted(longest, key=lambda name: longest[name].prefill_seconds or 0)
  columns = [
    f"{length:,}: {what}" for length in lengths for what in ("MiB", "ms")
  ]
  lines = [
    (
      name[0],
      wording.budget(*name),
      *(cell for of in by_length.values() for cell in _cells(of.get(name))),
    )
    for name in fastest
  ]
  return Table("", ["method", "budget", *columns], lines, names=2)


def _cells(mean: Mean | None) -> tuple[str, str]:
  if mean is None:
    return wording.NOTHING, wording.NOTHING
  assert mean.prefill_seconds is not None
  return f"{mean.cache_bytes / 2**20:.1f}", f"{1e3 * mean.prefill_seconds:,.0f}"
