"""The numbers of LagKV's tables (arXiv 2504.04704)."""

from kvjax.experiments.benchmarks.ruler.generator import TASKS as RULER
from kvjax.experiments.papers.records import Key, Targets
from kvjax.experiments.papers.shared import of_category, plain
from kvjax.experiments.papers.transcription import across, by_task

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


def _tasks(full: str, **texts: str) -> dict[Key, float]:
  """Parses the tasks' numbers for the full cache and for methods."""
  full_lines = "\n".join(f"{column} | {full}" for column in REMOVED)
  parsed = by_task(full_lines, "Full", RULER)
  for method, text in texts.items():
    parsed |= by_task(text, method, RULER)
  return parsed


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
      LagKV="""
      25 % removed | 100 100 95.7 97.4 96.7 56.9 99.4 98.5 100 88.4 89.0 74.3
        50.0
      50 % removed | 100 98.8 88.4 98.7 81.7 13.9 97.9 98.5 98.7 65.7 86.3 66.2
        45.3
      75 % removed | 100 98.8 46.4 90.9 33.3 1.4 86.2 92.4 96.1 10.9 73.3 46.0
        42.2
      87.5 % removed | 95.6 77.0 5.8 75.3 8.3 1.4 70.6 80.8 89.8 1.5 62.0 29.7
        37.5
      """,
      SnapKV="""
      25 % removed | 100 100 33.3 98.7 83.3 63.9 97.9 98.2 94.8 85.3 90.2 64.9
        46.9
      50 % removed | 100 94.2 15.9 93.5 48.3 15.3 77.9 87.8 94.8 72.3 85.5 44.6
        37.5
      75 % removed | 93.4 79.3 4.3 52.0 26.7 1.4 33.5 35.7 83.0 17.1 77.2 28.4
        26.6
      87.5 % removed | 85.7 43.7 4.3 26.0 15.0 1.4 17.1 14.3 61.3 1.9 66.3 18.9
        26.6
      """,
      StreamingLLM="""
      25 % removed | 72.5 74.7 72.5 79.2 86.7 66.7 72.7 75.0 90.5 .1 87.1 75.7
        43.8
      50 % removed | 47.2 46.0 46.4 53.2 50.0 44.4 48.5 52.4 69.5 1.6 83.1 75.7
        35.9
      75 % removed | 28.6 21.8 20.3 33.8 26.7 23.6 23.2 27.1 43.6 .9 80.4 33.8
        29.7
      87.5 % removed | 12.1 13.8 11.6 26.0 16.7 15.3 12.3 13.4 20.7 .9 75.3
        29.7 29.7
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
      LagKV="""
      25 % removed | 100 99.3 86.6 98.4 88.4 24.2 93.9 99.4 99.0 79.3 92.1 66.1
        45.5
      50 % removed | 100 97.8 48.2 98.4 54.5 3.3 93.9 95.3 98.6 74.4 89.5 58.1
        42.9
      75 % removed | 99.3 87.7 8.9 85.2 6.2 .8 86.2 83.5 95.6 43.8 69.5 39.5
        29.5
      87.5 % removed | 99.3 62.3 3.6 56.2 0 .8 60.2 50.6 93.0 18.8 55.2 29.0
        22.3
      """,
      SnapKV="""
      25 % removed | 88.2 90.6 4.5 44.5 57.1 50.0 39.8 44.9 92.2 80.1 92.8 62.9
        42.0
      50 % removed | 86.8 64.5 3.6 24.2 28.6 9.2 21.9 23.0 90.8 77.8 92.3 40.3
        35.7
      75 % removed | 82.2 18.8 3.6 13.3 10.7 4.2 13.2 12.2 79.7 64.4 89.3 27.4
        27.7
      87.5 % removed | 69.7 8.0 3.6 14.1 6.2 .8 11.6 11.4 55.1 47.7 79.2 19.4
        22.3
      """,
      StreamingLLM="""
      25 % removed | 76.3 72.5 75.9 78.9 79.5 67.5 71.1 74.4 76.8 74.1 89.3
        69.3 36.6
      50 % removed | 50.7 42.8 52.7 52.3 45.5 45.8 48.8 51.2 61.5 72.3 88.3
        72.6 33.0
      75 % removed | 25.0 20.3 22.3 28.9 25.9 20.0 24.4 25.8 35.8 66.9 82.3
        32.3 24.1
      87.5 % removed | 11.2 13.8 14.3 18.8 15.2 12.5 13.4 14.0 20.7 56.1 78.1
        21.0 18.8
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
      L = 1024 4x | 37.06 36.77 26.79 66.96 63.50 58.42
      L = 1024 6x | 35.74 36.08 26.33 66.33 60.50 57.91
      L = 1024 8x | 35.49 35.99 25.90 65.21 61.00 57.95
      L = 512 2x | 39.43 37.45 27.35 67.82 67.50 58.66
      L = 512 4x | 37.39 36.27 26.19 66.56 62.50 57.86
      L = 512 6x | 34.95 35.62 25.52 65.87 59.50 58.14
      L = 512 8x | 34.03 36.12 25.25 64.94 56.00 57.50
      L = 128 2x | 38.56 36.80 27.20 67.64 68.00 59.27
      L = 128 4x | 36.66 36.58 25.62 66.78 66.50 57.90
      L = 128 6x | 34.57 35.41 24.59 63.59 64.00 56.97
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
      L = 1024 4x | 36.92 40.39 24.81 65.91 95.00 61.60
      L = 1024 6x | 35.77 39.74 24.68 65.28 93.50 61.45
      L = 1024 8x | 34.60 39.10 24.18 64.74 90.50 61.30
      L = 512 2x | 38.72 42.79 25.91 67.98 98.50 62.00
      L = 512 4x | 35.42 39.12 24.49 64.59 94.00 60.16
      L = 512 6x | 34.00 38.04 23.72 64.31 87.50 58.80
      L = 512 8x | 32.14 37.83 23.11 63.48 82.50 58.71
      L = 128 2x | 38.67 42.49 25.69 67.75 99.00 60.64
      L = 128 4x | 34.47 39.78 24.07 65.13 96.00 58.67
      L = 128 6x | 32.83 38.15 22.95 62.23 90.50 56.25
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
