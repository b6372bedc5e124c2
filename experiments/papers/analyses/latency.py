"""E3.8: latency of scorers in one layer of Llama-3.1-8B."""

import jax

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.forward import attend_to_prompt
from kvjax.experiments.papers.analyses.scorer_timing import (
  Scorer,
  scorer_of,
  seconds_of,
)
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track
from kvjax.testing import random_activations

_HEADS, _KV_HEADS, _DIM = 32, 8, 128
_BASELINE = "SnapKV"


def scorers(subject: Subject) -> Findings:
  """Measures median milliseconds, and ratios to SnapKV."""
  lines = []
  for length in track(subject.lengths):
    activations = random_activations(
      subject.seed,
      [length],
      length,
      heads=_HEADS,
      kv_heads=_KV_HEADS,
      head_dim=_DIM,
      dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
    )
    cache = LayerCache.of(activations)
    seconds = {
      name: seconds_of(scorer, cache, activations)
      for name, scorer in _SCORERS.items()
    }
    lines += [
      [
        f"{length:,}",
        name,
        f"{1000 * median:,.1f}",
        f"{median / seconds[_BASELINE]:.2f}",
      ]
      for name, median in seconds.items()
    ]
  title = f"{_HEADS} query heads, {_KV_HEADS} KV heads, D = {_DIM}, batch 1"
  header = ["tokens", "scorer", "ms", f"× {_BASELINE}"]
  return Findings([Table(title, header, lines, names=2)])


_SCORERS: dict[str, Scorer] = {
  "Compactor": scorer_of(kvjax.get_method("compactor")),
  "Compactor without a": scorer_of(kvjax.get_method("leverage")),
  "SnapKV": scorer_of(kvjax.get_method("snapkv.compactor")),
  "H2O": scorer_of(kvjax.get_method("h2o.compactor")),
  "dense attention": lambda _, activations: attend_to_prompt(activations),
}
