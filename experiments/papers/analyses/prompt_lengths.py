"""E2.9: prompt lengths, and the share that budgets keep."""

import statistics

from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table

_BUDGETS = {"2K": 2048, "4K": 4096, "6K": 6144, "8K": 8192}


def measure(subject: Subject) -> Findings:
  """Measures mean tokens per task, and the mean of min(1, N / tokens)."""
  divisor = 1 if subject.scale == "paper" else 8
  budgets = [count // divisor for count in _BUDGETS.values()]
  groups = {**subject.prompts, "all": subject.rows}
  lines = []
  for task, rows in groups.items():
    lengths = [len(row) for row in rows]
    kept = [
      statistics.fmean(min(1, budget / length) for length in lengths)
      for budget in budgets
    ]
    lines.append(
      [
        task,
        str(len(rows)),
        f"{statistics.fmean(lengths):.0f}",
        *(f"{share:.2f}" for share in kept),
      ]
    )
  header = ["task", "prompts", "tokens", *(f"N = {n}" for n in budgets)]
  return Findings([Table("share of a prompt that N tokens are", header, lines)])
