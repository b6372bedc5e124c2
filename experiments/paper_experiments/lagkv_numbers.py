"""The numbers of LagKV's tables (arXiv 2504.04704)."""

from kvjax.experiments.benchmarks.ruler import TASKS as RULER
from kvjax.experiments.paper_experiments.records import Key, Targets
from kvjax.experiments.paper_experiments.shared import of_category, plain
from kvjax.experiments.paper_experiments.transcription import across, by_task

# Shares removed, and compression ratios.
REMOVED = ("25 % removed", "50 % removed", "75 % removed", "87.5 % removed")
TIMES = ("2x", "4x", "6x", "8x")
MEAN_13, MEAN_15 = "mean of 13", "mean of 15"
PARTIAL, EXACT = "partial", "exact"
_LLAMA, _QWEN = "Llama-3.1-8B", "Qwen2.5-7B"

CATEGORIES = (
  plain("single-document", of_category("single-document")),
  plain("multi-document", of_category("multi-document")),
  plain("summaries", of_category("summaries")),
  plain("few-shot", of_category("few-shot")),
  plain("synthetic", ("passage_retrieval_en",)),
  plain("code", of_category("code")),
)


def _full(number: str, columns: tuple[str, ...], what: str) -> dict[Key, float]:
  return across(f"Full | {' '.join([number] * len(columns))}", columns, what)


def _tasks(full: str, text: str) -> dict[Key, float]:
  full_lines = "\n".join(f"{column} | {full}" for column in REMOVED)
  return by_task(full_lines, "Full", RULER) | by_task(text, "LagKV", RULER)


RULER_16K = (
  Targets(
    _LLAMA,
    _full("92.6", REMOVED, MEAN_13)
    | across(
      """
      LagKV | 88.2 80.0 62.9 48.9
      SnapKV | 81.3 66.8 43.0 29.4
      StreamingLLM | 69.0 50.3 30.3 21.3
      """,
      REMOVED,
      MEAN_13,
    )
    | _tasks(
      "100 100 100 97.4 100 100 100 98.2 100 90.2 87.5 75.7 54.7",
      """
      25 % removed | 100 100 95.7 97.4 96.7 56.9 99.4 98.5 100 88.4 89.0 74.3
        50.0
      50 % removed | 100 98.8 88.4 98.7 81.7 13.9 97.9 98.5 98.7 65.7 86.3 66.2
        45.3
      75 % removed | 100 98.8 46.4 90.9 33.3 1.4 86.2 92.4 96.1 10.9 73.3 46.0
        42.2
      87.5 % removed | 95.6 77.0 5.8 75.3 8.3 1.4 70.6 80.8 89.8 1.5 62.0 29.7
        37.5
      """,
    ),
  ),
  Targets(
    _QWEN,
    _full("90.8", REMOVED, MEAN_13)
    | across(
      """
      LagKV | 82.5 73.5 56.6 42.4
      SnapKV | 60.7 46.1 34.4 26.9
      StreamingLLM | 72.5 55.2 33.4 23.7
      """,
      REMOVED,
      MEAN_13,
    )
    | _tasks(
      "100 100 100 99.2 99.1 94.2 94.3 100 99.0 79.9 93.2 72.6 48.2",
      """
      25 % removed | 100 99.3 86.6 98.4 88.4 24.2 93.9 99.4 99.0 79.3 92.1 66.1
        45.5
      50 % removed | 100 97.8 48.2 98.4 54.5 3.3 93.9 95.3 98.6 74.4 89.5 58.1
        42.9
      75 % removed | 99.3 87.7 8.9 85.2 6.2 .8 86.2 83.5 95.6 43.8 69.5 39.5
        29.5
      87.5 % removed | 99.3 62.3 3.6 56.2 0 .8 60.2 50.6 93.0 18.8 55.2 29.0
        22.3
      """,
    ),
  ),
)


def _categories(full: str, text: str) -> dict[Key, float]:
  """Parses category means from lines such as `L = 1024 2x | 39.42 ...`."""
  names = [category.name for category in CATEGORIES]
  full_lines = "\n".join(f"{column} | {full}" for column in TIMES)
  parsed = by_task(full_lines, "Full", names)
  for row in text.strip().splitlines():
    setting, _, numbers = row.partition("|")
    line, _, column = setting.strip().rpartition(" ")
    parsed |= by_task(f"{column} | {numbers}", line, names)
  return parsed


LONGBENCH = (
  Targets(
    _LLAMA,
    _full("47.44", TIMES, MEAN_15)
    | across(
      """
      L = 1024 | 46.74 45.54 44.65 44.31
      L = 512 | 46.73 45.16 44.11 43.47
      L = 128 | 46.48 45.28 43.49 42.42
      """,
      TIMES,
      MEAN_15,
    )
    | _categories(
      "40.71 37.90 28.29 68.49 68.00 58.70",
      """
      L = 1024 2x | 39.42 37.12 27.38 67.71 68.50 58.83
      L = 1024 8x | 35.49 35.99 25.90 65.21 61.00 57.95
      L = 512 2x | 39.43 37.45 27.35 67.82 67.50 58.66
      L = 512 8x | 34.03 36.12 25.25 64.94 56.00 57.50
      L = 128 2x | 38.56 36.80 27.20 67.64 68.00 59.27
      L = 128 8x | 33.78 34.60 23.91 62.21 61.50 55.68
      """,
    ),
  ),
  Targets(
    _QWEN,
    _full("51.53", TIMES, MEAN_15)
    | across(
      """
      L = 1024 | 50.33 48.15 47.52 46.73
      L = 512 | 49.91 47.01 45.69 44.64
      L = 128 | 49.61 46.91 44.76 43.78
      """,
      TIMES,
      MEAN_15,
    )
    | _categories(
      "41.62 45.00 26.41 68.91 100.00 63.60",
      """
      L = 1024 2x | 39.80 42.85 26.11 67.66 99.50 63.12
      L = 1024 8x | 34.60 39.10 24.18 64.74 90.50 61.30
      L = 512 2x | 38.72 42.79 25.91 67.98 98.50 62.00
      L = 512 8x | 32.14 37.83 23.11 63.48 82.50 58.71
      L = 128 2x | 38.67 42.49 25.69 67.75 99.00 60.64
      L = 128 8x | 32.47 37.10 22.20 60.24 88.50 56.10
      """,
    ),
  ),
)

PASSKEY = (
  Targets(
    _LLAMA,
    _full("99.44", TIMES, PARTIAL)
    | across(
      """
      L = 1024 | 99.27 96.57 91.77 86.26
      L = 512 | 97.02 85.73 75.67 68.25
      L = 128 | 92.76 73.41 38.48 25.01
      """,
      TIMES,
      PARTIAL,
    )
    | across("L = 1024 | - 89 - -", TIMES, EXACT),
  ),
  Targets(
    _QWEN,
    _full("100", TIMES, PARTIAL)
    | across(
      """
      L = 1024 | 99.75 96.98 77.47 66.88
      L = 512 | 97.07 75.89 42.70 30.00
      L = 128 | 65.93 20.83 16.18 15.07
      """,
      TIMES,
      PARTIAL,
    ),
  ),
)
