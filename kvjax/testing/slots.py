"""Checks of the slots that a method selects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import LayerBudget
from kvjax.testing import checks
from kvjax.testing.checks import require
from kvjax.testing.subject import Subject

# Slots that were kept, of each row and head.
Slots = list[list[list[int]]]


def check_slots(
  subject: Subject,
  slots: Any,
  budget: LayerBudget,
  lengths: Sequence[int],
  padded: int,
) -> Slots:
  """Checks slots and converts them to lists.

  Raises:
    InputError: they are out of range, empty, unsorted, too many or too few.
  """
  slots, name = np.asarray(slots), subject.name
  require(
    slots.ndim == 3
    and slots.shape[:2] == (len(lengths), checks.KV_HEADS)
    and np.issubdtype(slots.dtype, np.integer),
    f"{name} must select whole numbers of slots, a list for each row and KV "
    f"head; it gives {slots.dtype} {slots.shape}.",
  )
  all_heads = []
  counts, totals = np.asarray(budget.counts), np.asarray(budget.total)
  rows = zip(slots, lengths, counts.tolist(), totals.tolist(), strict=True)
  for row, length, count, total in rows:
    heads = [_check_head(name, head, length, padded) for head in row]
    where = f"of {length}"
    subject.check_counts(heads, length, count, total, where)
    for places in heads:
      window = min(
        subject.traits.protects,
        len(places) if subject.spread.ragged else min(count, length),
      )
      newest = set(range(length - window, length))
      require(
        newest <= {*places},
        f"The traits of {name} say that the last {subject.traits.protects} "
        f"tokens always stay (protects); it evicts "
        f"{sorted(newest - {*places})} {where}.",
      )
      sinks = subject.traits.sinks
      fits = len(places) >= sinks + subject.traits.protects
      first = set(range(min(sinks, length) if fits else 0))
      require(
        first <= {*places},
        f"The traits of {name} say that the first {sinks} tokens always stay "
        f"(sinks); it evicts {sorted(first - {*places})} {where}.",
      )
    all_heads.append(heads)
  return all_heads


def _check_head(
  name: str, slots: Int[np.ndarray, " M"], length: int, padded: int
) -> list[int]:
  outside = slots[(slots < -1) | (slots >= padded)]
  require(
    not outside.size,
    f"{name} selects slot {outside[:1].sum()} of a layer whose slots are 0 to "
    f"{padded - 1}; give those, ascending, then -1 for what is not filled.",
  )
  filled: list[int] = slots[slots >= 0].tolist()
  require(
    slots[: len(filled)].tolist() == filled == sorted({*filled}),
    f"{name} must select every slot once, in ascending order, then -1; it "
    f"gives {slots.tolist()}.",
  )
  empty = [slot for slot in filled if slot >= length]
  require(
    not empty,
    f"{name} selects slot {empty[:1]}, which holds no token; only slots of "
    "cache.valid may be kept.",
  )
  return filled
