"""Shows which tokens of a text heads keep, as an HTML page.

  kvjax show_kept --text=notes.txt --methods=snapkv,keydiff

writes results/kept.html: the text for each method, side by side, with tokens
shaded by the number of heads that keep them, in one layer or in all. A
retrieval method keeps everything; for it the page shows the tokens that the
last token of the text reads. Without --text the page shows prose with a needle.
With --question, methods know the question. Of a --passage, such as a name, it
says how many tokens the heads keep; without --text, of the needle's number. It
takes less than a minute on two cores.
"""

import pathlib

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import budget_inputs, run_inputs
from kvjax.experiments.kept import page
from kvjax.experiments.run import outputs, side_by_side
from kvjax.experiments.run.candidates import FULL, candidates
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.sentences import say
from kvjax.experiments.tasks import prose, suite

for name in run_inputs.ALONE:
  flags.declare_key_flag(name)
flags.adopt_module_key_flags(budget_inputs)
flags.set_default(budget_inputs.RETENTION, ["0.25"])

_TEXT = flags.DEFINE_string(
  "text", None, "Text file to show; the default is prose with a needle."
)
_METHODS = flags.DEFINE_list(
  "methods",
  ["snapkv", "keydiff"],
  "Methods or presets, side by side, with options as in "
  "keydiff:anchor=median_unit.",
)
_QUESTION = flags.DEFINE_string(
  "question",
  None,
  "Question to prefill with the text, so that methods know it.",
)
_PASSAGE = flags.DEFINE_string(
  "passage",
  None,
  "Passage of the text; the program says how much of it the heads keep.",
)
_OUTPUT = flags.DEFINE_string("output", "results/kept.html", "Output file.")

# The default text: a needle in this many tokens, including question and answer.
_TASK, _LENGTH = "niah_single_2", 768


def main() -> None:
  """Checks all flags, then loads the model."""
  budgets = budget_inputs.budgets()
  chosen = [c for c in candidates(_METHODS.value, budgets) if c.method != FULL]
  if not chosen:
    raise InputError(
      "Nothing is left out; give a method and less than a retention of 1, as "
      "in --methods=keydiff --retention=0.25."
    )
  output = outputs.file(_OUTPUT.value)
  text = _TEXT.value and side_by_side.read_text(pathlib.Path(_TEXT.value))
  cli.announce()
  with (
    run_inputs.loaded() as (lm, _),
    progress_bar(None, "reading the text", transient=True),
  ):
    about = {
      "Model": f"{run_inputs.model_name()}, {run_inputs.dtype()}",
      "Text": _TEXT.value or f"{_TASK} in {prose.SOURCE}",
    }
    passage = _PASSAGE.value
    if text is None:
      sample = suite.draw(_TASK, 0, 0, _LENGTH, lm.text.count)
      text, passage = sample.context, passage or sample.answers[0]
    shown = page.of_text(lm, chosen, text, _QUESTION.value, about, passage)
  outputs.write_text(output, shown.html)
  names = [f"{c.method} at {c.budget}" for c in chosen]
  for name, one, share in zip(names, chosen, shown.shares, strict=False):
    verb = "reads" if one.plan.sparse else "keeps"
    say(f"{name} {verb}, of {passage!r} and per head, {share}.")
  say(f"{output} shows {', '.join(names)}.")


if __name__ == "__main__":
  cli.run(main)
