"""Flags for the budgets of programs that take shares or tokens, not both.

Each program sets a default of one of them.
"""

from absl import flags

from kvjax.experiments import refusals
from kvjax.experiments.inputs import plugin_inputs
from kvjax.experiments.run.candidates import Given, parse_budgets

flags.adopt_module_key_flags(plugin_inputs)

RETENTION = flags.DEFINE_list(
  "retention", None, "Shares of the context to keep, or to retrieve per token."
)
BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to retrieve, instead of --retention."
)


def budgets() -> list[Given]:
  """Returns those of the flag that is given, or else of the default.

  Raises:
    InputError: both flags are given, or a value is not a number in range.
  """
  refusals.refuse_together("retention", ["budget"], "both say how much to keep")
  tokens = None if RETENTION.present else BUDGET.value
  return parse_budgets(RETENTION.value or [], tokens)
