"""The experiments of LagKV (Liang et al., arXiv 2504.04704)."""

from kvjax.experiments.papers import printed, shared
from kvjax.experiments.papers.data_model import Comparison, Parts, Setup, Size
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC
from kvjax.methods.lagkv import LagKV
from kvjax.options.budgets import Retention
from kvjax.options.schedules import Schedule

# Compression continues while decoding.
_RECURSIVE = Schedule(every=1)

_REMOVED = shared.budgets(
  {
    "25 % removed": Retention(0.75),
    "50 % removed": Retention(0.5),
    "75 % removed": Retention(0.25),
    "87.5 % removed": Retention(0.125),
  }
)
_E5_1 = Comparison(
  "RULER",
  shared.ruler((16384,), 100),
  Setup("ruler", shared.NEEDLES, (2048,), 1),
  shared.lines(
    {
      "Full": "full",
      "LagKV": ("lagkv.kvpress", "lagkv.kvpress:lag=16"),
      "SnapKV": "snapkv.kvpress",
      "StreamingLLM": "streaming",
    }
  ),
  _REMOVED,
  (shared.MEAN_13,),
  printed.read("E5.1"),
  protocol=QUERY_AGNOSTIC,
  scaling="Retentions are the paper's; LagKV's lag is 16 in place of 128, an "
  "eighth, as prompts are. What SnapKV always keeps, 64 tokens, is not scaled.",
)

_TIMES = shared.budgets(
  {
    "2x": Retention(0.5),
    "4x": Retention(0.25),
    "6x": Retention(0.167),
    "8x": Retention(0.125),
  }
)
# Only 4x, since every budget has its own prefill or decoder.
_LAGS = {
  f"L = {lag}": (f"lagkv:lag={lag}", f"lagkv:lag={lag // 8}")
  for lag in (1024, 512, 128)
}
_ONE_LAG = "Retentions are the paper's; the lag is 128 in place of 1,024."
_NOT_DECODING = "Here nothing is evicted while decoding."
_SCALING = (
  "Retentions are the paper's; lags are an eighth of its lags, 128, 64 and 16. "
  f"{_NOT_DECODING}"
)
_FIFTEEN = tuple(name for name in shared.ENGLISH_16 if name != "passage_count")

_E5_2 = Comparison(
  "LongBench",
  shared.longbench(_FIFTEEN, shared.LIMIT_32K, _RECURSIVE),
  shared.four_needles(),
  shared.lines({"Full": "full", **_LAGS}),
  _TIMES,
  (
    shared.plain("mean of 15", _FIFTEEN),
    *(average.over(_FIFTEEN) for average in shared.CATEGORIES),
    *shared.code_scores(),
  ),
  printed.read("E5.2"),
  scaling=_SCALING,
)


def _kept_of_a_lag(candidate: Candidate) -> int | None:
  """Computes r L, by which the paper explains the scores."""
  method, budget = candidate.plan.method, candidate.plan.budget
  if not isinstance(method, LagKV) or not isinstance(budget, Retention):
    return None
  return int(budget.share * method.lag)


_PASSKEY = ("passkey",)
_WORDS = tuple(512 + (20480 - 512) * step // 9 for step in range(10))
_PARTIAL = shared.plain("partial", _PASSKEY, "partial")
_EXACT = shared.plain("exact", _PASSKEY)
# Answers may have 256 tokens, so prompts have at most 416 and 928.
_SHORT = (672, 1184)
_ONCE = Setup("passkey", _PASSKEY, _SHORT, 1, 5)


def _grid(schedule: Schedule) -> Setup:
  """Defines the paper's 10 lengths and 10 depths, with three samples each."""
  return Setup("passkey", _PASSKEY, _WORDS, 3, schedule=schedule, in_words=True)


_E5_3 = Comparison(
  "passkey",
  _grid(_RECURSIVE),
  _ONCE,
  shared.lines({"Full": "full", **_LAGS}),
  _TIMES,
  (_PARTIAL, _EXACT),
  printed.read("E5.3"),
  scaling=_SCALING,
  size=Size("r L", _kept_of_a_lag, (64, 128)),
)

_SAME = shared.plain("same first token", _PASSKEY, "same_first_token")
_KEY = shared.plain("first key token", _PASSKEY, "first_key_token")


def _chunked(lag: int) -> Schedule:
  """Defines chunks: the first has the sinks and two lags, others one lag."""
  return Schedule(block=lag, first=16 + 2 * lag, every=1)


_E5_4 = Comparison(
  "chunked prefill",
  _grid(_chunked(1024)),
  Setup("passkey", _PASSKEY, _SHORT, 1, 5, schedule=_chunked(128)),
  shared.lines({"Full, plain prefill": "full", "LagKV": _LAGS["L = 1024"]}),
  _TIMES,
  (_SAME, _KEY, _PARTIAL),
  printed.read("E5.4"),
  scaling=_ONE_LAG,
)
# All first tokens are equal, since they are generated before any eviction.
_E5_4_PLAIN = Comparison(
  "plain prefill",
  _grid(_RECURSIVE),
  _ONCE,
  shared.lines({"Full": "full", "LagKV": _LAGS["L = 1024"]}),
  _TIMES,
  (_KEY, _PARTIAL),
  scaling=_ONE_LAG,
)

_E5_5 = Comparison(
  "scores",
  _grid(_RECURSIVE),
  _ONCE,
  shared.lines(
    {
      "Full": "full",
      "LagKV": _LAGS["L = 1024"],
      "LocalKV": ("lagkv.local:lag=1024", "lagkv.local:lag=128"),
      "L2Norm": ("lagkv.key_norm:lag=1024", "lagkv.key_norm:lag=128"),
      "H2O": "h2o",
    }
  ),
  _TIMES,
  (_EXACT, _PARTIAL),
  printed.read("E5.5"),
  scaling=f"{_ONE_LAG} {_NOT_DECODING}",
)

PARTS: Parts = {
  "E5.1": _E5_1,
  "E5.2": _E5_2,
  "E5.3": _E5_3,
  "E5.4": (_E5_4, _E5_4_PLAIN),
  "E5.5": _E5_5,
}
