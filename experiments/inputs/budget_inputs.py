"""Flags for the budgets of programs that take shares or tokens, not both."""

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.inputs import plugin_inputs
from kvjax.experiments.run.candidates import Given, parse_budgets

flags.adopt_module_key_flags(plugin_inputs)

RETENTION = flags.DEFINE_list(
  "retention",
  ["0.25"],
  "Shares of the context to keep, or to retrieve per token.",
)
BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to retrieve, instead of --retention."
)


def budgets() -> list[Given]:
  """Returns those of --retention, or of --budget instead.

  Either may have a default; the flag that is given counts.

  Raises:
    InputError: both flags are given, or a value is not a number in range.
  """
  cli.refuse_together("retention", ["budget"], "both say how much to keep")
  tokens = None if RETENTION.present else BUDGET.value
  return parse_budgets(RETENTION.value, tokens)
