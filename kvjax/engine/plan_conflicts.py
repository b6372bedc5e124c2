"""Parts of plans that exclude each other."""

from typing import TYPE_CHECKING

from kvjax.errors import InputError

if TYPE_CHECKING:
  from kvjax.engine.plans import Plan


def check_channels(plan: "Plan") -> None:
  """Refuses to drop channels where that cannot be done.

  Raises:
    InputError: a part of the plan needs whole keys, or other tokens than all
      heads have.
  """
  traits = plan.method.traits
  if traits.channels is None:
    return
  conflicts = {
    "heads that keep different numbers of tokens": plan.spread.ragged,
    "a replay of the prompt": traits.replay is not None,
    "a budget that is known after the prompt": plan.adapts,
    "kept tokens that move": traits.renumbers,
    "keys of eight bits": plan.kv_dtype is not None,
    "retrieval": plan.sparse is not None,
    "evictions while decoding": plan.while_decoding is not None,
  }
  found = [what for what, given in conflicts.items() if given]
  if found:
    raise InputError(
      f"{type(plan.method).__name__} drops channels of the kept keys of each "
      "layer, once the layer has read the prompt; it cannot work with "
      f"{' and '.join(found)}."
    )
