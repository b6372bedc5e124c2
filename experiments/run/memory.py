"""How many contexts fit in memory with the caches of all candidates."""

import os
from collections.abc import Sequence

import jax

import kvjax
from kvjax.engine.plan_fit import recites
from kvjax.errors import warn
from kvjax.experiments.run.candidates import Candidate
from kvjax.models.pretrained import Pretrained

# Of the memory, for caches. Those of one kind are copied to be joined, and the
# prefill needs room besides.
_SHARE = 1 / 3


def rows_that_fit(
  lm: Pretrained, candidates: Sequence[Candidate], tokens: int, batch: int
) -> int:
  """Lowers the contexts per prefill until all their caches fit in memory.

  Args:
    lm: the model.
    candidates: methods and budgets; all their caches exist at once.
    tokens: tokens of the longest context.
    batch: the contexts that are wanted.

  Returns:
    At least one per device of the mesh axis "data", which divides it if it
    divides `batch`; with a warning if it is less than `batch`.
  """
  row = sum(cache_bytes(lm, each, tokens) for each in candidates)
  memory = _memory()
  fitting = max(int(_SHARE * memory / row), 1) if row else batch
  rows = jax.sharding.get_abstract_mesh().shape.get("data", 1)
  fitting = max(fitting // rows, 1) * rows
  if fitting >= batch:
    return batch
  warn(
    f"A batch of {batch} contexts needs about {batch * row / 2**30:.1f} GiB "
    f"for {len(candidates)} caches, too much with everything else in the "
    f"{memory / 2**30:.1f} GiB here; using --batch={fitting}."
  )
  return fitting


def cache_bytes(lm: Pretrained, candidate: Candidate, tokens: int) -> float:
  """Estimates the bytes of a context's cache.

  Args:
    lm: the model.
    candidate: method and budget; calibrated budgets and thresholds, which
      depend on the context, count as if everything was kept. Where caches
      recite, all of them count.
    tokens: tokens of the context.
  """
  plan = candidate.plan
  width = 1 if plan.kv_dtype else jax.tree.leaves(lm.params)[0].dtype.itemsize
  share = 1.0
  unknown = isinstance(plan.budget, kvjax.Calibrated | kvjax.Threshold)
  if plan.sparse is None and not unknown:
    share = candidate.retention(tokens)
  if isinstance(plan.budget, kvjax.Calibrated) and recites(plan):
    share += sum(plan.budget.calibration.grid)
  total = 0.0
  for spec in lm.model.geometry.layers:
    if not spec.cache:
      continue
    heads = spec.heads if plan.per_query_head else spec.kv_heads
    slots = share * tokens
    if spec.window is not None:
      slots = min(spec.window, tokens)
    total += slots * heads * (spec.key_dim + spec.value_width) * width
  return total


def _memory() -> int:
  """Bytes of the device, or of the machine if that is its memory."""
  limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
  if limit is None:
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return int(limit)
