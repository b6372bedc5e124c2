"""The numbers of KeyDiff's tables (arXiv 2504.15364).

Budgets are N = 2K to 8K tokens. Means marked [21] in the paper's table are over
all datasets of LongBench, others over the 16 English and code datasets; without
blocks they are over all but narrativeqa.
"""

from kvjax.experiments.papers import keydiff_tasks, keydiff_variant_tasks
from kvjax.experiments.papers.records import Key, Targets
from kvjax.experiments.papers.transcription import across, by_model

MEAN_16, MEAN_20, MEAN_21 = "mean of 16", "mean of 20", "mean of 21"
COLUMNS = ("N = 2K", "N = 4K", "N = 6K", "N = 8K")


def _table(full: str, text: str, what: str) -> dict[Key, float]:
  """Parses a table, with the full cache's number in every column."""
  full_line = f"Full | {' '.join([full] * 4)}"
  return across(full_line, COLUMNS, what) | across(text, COLUMNS, what)


_METHODS = ("H2O", "TOVA", "Sink", "SnapKV", "KeyDiff")
_LLAMA_8B, _LLAMA_3B = by_model(
  keydiff_tasks.LLAMA, "Full", (*_METHODS[:-1], "KeyL2Norm", "KeyDiff"), COLUMNS
)
_QWEN_7B, _QWEN_3B = by_model(keydiff_tasks.QWEN, "Full", _METHODS, COLUMNS)
_OF_64, _OF_256 = by_model(
  keydiff_variant_tasks.BLOCKS, "Full", _METHODS, COLUMNS
)
(_NO_BLOCKS_8B,) = by_model(
  keydiff_variant_tasks.NO_BLOCKS_8B, "Full", _METHODS, COLUMNS
)
# Without SnapKV.
(_NO_BLOCKS_3B,) = by_model(
  keydiff_variant_tasks.NO_BLOCKS_3B,
  "Full",
  ("H2O", "TOVA", "Sink", "KeyDiff"),
  COLUMNS,
)
_RECENT_8B, _RECENT_3B = by_model(
  keydiff_variant_tasks.RECENT, "Full", ("+10 %", "+20 %"), COLUMNS
)

BLOCKS_OF_128 = (
  Targets(
    "Llama-3.1-8B",
    _table(
      "49.20",
      """
      H2O | 16.89 26.37 33.19 38.20
      TOVA | 37.52 41.49 45.24 47.09
      Sink | 36.88 40.95 43.39 44.68
      SnapKV | 39.60 45.18 47.12 48.06
      KeyDiff | 44.33 47.66 48.51 49.03
      """,
      MEAN_16,
    )
    | _table(
      "49.74",
      """
      H2O | 15.25 24.83 33.35 38.40
      TOVA | 34.35 41.12 45.31 47.23
      Sink | 33.78 39.76 43.49 44.91
      SnapKV | 38.45 44.46 46.65 48.05
      KeyL2Norm | 27.52 40.14 45.17 47.61
      KeyDiff | 45.06 48.14 49.19 49.55
      """,
      MEAN_21,
    )
    | _LLAMA_8B,
  ),
  Targets(
    "Llama-3.2-3B",
    _table(
      "45.87",
      """
      H2O | 14.25 22.38 28.44 33.46
      TOVA | 33.52 38.24 41.02 43.21
      Sink | 33.74 37.96 40.01 41.97
      SnapKV | 35.46 40.60 43.55 44.96
      KeyDiff | 38.14 43.67 45.27 45.78
      """,
      MEAN_16,
    )
    | _table(
      "42.71",
      """
      H2O | 12.60 20.38 26.43 31.15
      TOVA | 29.35 34.56 37.71 39.91
      Sink | 29.54 33.96 36.22 38.25
      SnapKV | 30.85 36.73 39.52 41.20
      KeyL2Norm | 22.22 30.13 35.60 38.89
      KeyDiff | 35.09 40.28 41.88 42.40
      """,
      MEAN_21,
    )
    | _LLAMA_3B,
  ),
  Targets(
    "Qwen2.5-7B",
    _table(
      "36.04",
      """
      H2O | 11.66 17.64 22.25 25.45
      TOVA | 25.02 28.68 30.54 31.79
      Sink | 23.93 28.46 30.76 31.95
      SnapKV | 26.85 30.42 32.32 33.56
      KeyDiff | 23.75 30.15 32.96 33.96
      """,
      MEAN_21,
    )
    | _QWEN_7B,
  ),
  Targets(
    "Qwen2.5-3B",
    _table(
      "33.42",
      """
      H2O | 11.75 17.89 21.37 24.52
      TOVA | 24.08 27.43 29.03 30.11
      Sink | 23.18 26.63 28.39 29.85
      SnapKV | 25.87 29.05 30.50 31.55
      KeyDiff | 20.56 27.34 30.39 31.82
      """,
      MEAN_21,
    )
    | _QWEN_3B,
  ),
)

BLOCKS_OF_64 = Targets(
  "Llama-3.2-3B",
  _table(
    "42.71",
    """
    H2O | 11.43 18.75 25.19 30.39
    TOVA | 29.27 34.35 37.64 40.39
    Sink | 29.39 33.81 36.04 38.04
    SnapKV | 30.95 36.26 39.36 40.94
    KeyDiff | 34.79 40.33 41.85 42.23
    """,
    MEAN_21,
  )
  | _OF_64,
)
BLOCKS_OF_256 = Targets(
  "Llama-3.2-3B",
  _table(
    "42.71",
    """
    H2O | 13.36 20.87 27.34 31.59
    TOVA | 30.42 34.71 37.91 40.23
    Sink | 29.50 33.93 36.04 38.27
    SnapKV | 31.46 36.74 39.79 41.23
    KeyDiff | 35.52 40.20 41.77 42.35
    """,
    MEAN_21,
  )
  | _OF_256,
)

_SINK = {
  "Sink": "printed identical for Llama-3.1-8B and Llama-3.2-3B; use neither"
}
NO_BLOCKS = (
  Targets(
    "Llama-3.1-8B",
    _table(
      "50.72",
      """
      H2O | 26.33 34.77 40.65 44.67
      TOVA | 48.20 49.25 49.52 49.96
      Sink | 35.03 38.09 39.41 40.57
      SnapKV | 48.15 49.41 49.74 49.17
      KeyDiff | 47.81 49.07 49.62 49.21
      """,
      MEAN_20,
    )
    | _NO_BLOCKS_8B,
    _SINK,
  ),
  Targets(
    "Llama-3.2-3B",
    _table(
      "43.66",
      """
      H2O | 17.12 24.84 32.76 37.29
      TOVA | 41.20 42.40 42.83 42.79
      Sink | 35.03 38.09 39.41 40.57
      KeyDiff | 40.65 42.46 42.76 43.07
      """,
      MEAN_20,
    )
    | _NO_BLOCKS_3B,
    _SINK,
  ),
)

VARIANTS = (
  Targets(
    "Llama-3.2-3B",
    _table(
      "42.71",
      """
      mean_unit | 35.09 40.28 41.88 42.40
      pairwise | 35.24 40.61 41.87 42.45
      median | 35.43 40.67 41.89 42.26
      dot | 30.14 38.01 41.09 42.23
      euclid | 13.68 21.06 25.91 29.53
      +10 % | 36.72 40.56 41.78 42.37
      +20 % | 36.48 40.35 41.86 42.40
      """,
      MEAN_21,
    )
    | _RECENT_3B,
  ),
  Targets(
    "Llama-3.1-8B",
    _table(
      "49.74",
      """
      mean_unit | 45.06 48.14 49.19 49.55
      +10 % | 45.79 48.26 49.16 49.43
      +20 % | 45.51 47.92 49.14 49.56
      """,
      MEAN_21,
    )
    | _RECENT_8B,
  ),
)
