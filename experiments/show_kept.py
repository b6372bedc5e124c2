"""Shows which tokens of a text the heads keep, on one HTML page.

  python -m kvjax.experiments.show_kept --text=notes.txt --method=snapkv,keydiff

writes results/kept.html: the text for each method, side by side, its tokens
shaded by how many heads keep them in a layer or in all of them. Of a retrieval
method, which keeps everything, it shows what the text's last token reads.
Without --text the page shows a passage of prose with a needle in it, and
with --question methods know the question.
"""

import pathlib

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli, inputs, reports, results, side_by_side, suite
from kvjax.experiments.candidates import FULL, candidates, parse_budgets
from kvjax.experiments.kept import page
from kvjax.experiments.tasks import prose

for name in ("model", "mesh", "kernels", "dtype"):
  flags.declare_key_flag(name)

_TEXT = flags.DEFINE_string(
  "text", None, "File to show; by default prose with a needle in it."
)
_METHOD = flags.DEFINE_list(
  "method",
  ["snapkv", "keydiff"],
  "Methods or presets, side by side, with options as in "
  "keydiff:anchor=median_unit.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["0.25"],
  "Share of the text to keep, or to look up per token; several side by side.",
)
_BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to look up, in place of --retention."
)
_QUESTION = flags.DEFINE_string(
  "question", None, "Prefilled with the text, so that methods know it."
)
_OUTPUT = flags.DEFINE_string("output", "results/kept.html", "File to write.")

# The text without --text: a needle in so many tokens, question and answer
# included.
_TASK, _LENGTH = "niah_single_2", 768


def main() -> None:
  """Checks what can be checked first, then loads the model."""
  cli.refuse_together("retention", ["budget"], "both say how much to keep")
  budgets = parse_budgets(_RETENTION.value, _BUDGET.value)
  chosen = [c for c in candidates(_METHOD.value, budgets) if c.method != FULL]
  if not chosen:
    raise InputError(
      "Nothing is left out; give a method and less than a retention of 1, as "
      "in --method=keydiff --retention=0.25."
    )
  output = pathlib.Path(_OUTPUT.value)
  if output.is_dir():
    raise InputError(f"{output} is a folder; name the HTML file to write.")
  results.check_writable(output.parent)
  text = _TEXT.value and side_by_side.read_text(pathlib.Path(_TEXT.value))
  console = rich.console.Console(highlight=False)
  with (
    inputs.loaded() as (lm, _),
    rich.console.Console(stderr=True).status("reading the text"),
  ):
    about = {
      "Model": f"{inputs.model_name()}, {inputs.dtype()}",
      "Text": _TEXT.value or f"{_TASK} in {prose.SOURCE}",
    }
    if text is None:
      text = suite.draw(_TASK, 0, 0, _LENGTH, lm.text.count).context
    shown = page.of_text(lm, chosen, text, _QUESTION.value, about)
  output.parent.mkdir(parents=True, exist_ok=True)
  reports.write_text(output, shown.html)
  names = ", ".join(f"{c.method} at {c.budget}" for c in chosen)
  console.print(f"{output} shows {names}.")


if __name__ == "__main__":
  cli.run(main)
