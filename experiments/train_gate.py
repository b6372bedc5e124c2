"""Trains the networks of KVzap for a model.

  kvjax train_gate --documents=DIR --output=OUT

reads the .txt and .md files of a folder in parts, replays each as KVzip+ does,
and learns the logarithm of its scores from the input of every layer. OUT gets
the files that are published for KVzap, for

  --methods=kvzap:gate=OUT

in every program, and validation.json with R2 by layer, on parts that were not
learned. --data=DIR learns the contexts of LongBench instead. With --multihost,
hosts that run the same command share the parts, and the first one learns.

An interrupted run resumes with the same flags. Sixty parts of 600 tokens take
SmolLM2-135M about five minutes on two cores.
"""

from typing import cast

import numpy as np
from absl import flags

from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.finetuning import documents
from kvjax.experiments.gate_training import examples
from kvjax.experiments.gate_training.fitting import Kind, Recipe
from kvjax.experiments.gate_training.trainer import Trainer
from kvjax.experiments.inputs import document_inputs, host_inputs, run_inputs
from kvjax.experiments.report import wording
from kvjax.experiments.run import multihost, outputs
from kvjax.experiments.run.sentences import say
from kvjax.prompts import Prompts, bucket
from kvjax.repeat_request import RepeatRequest

for module in (document_inputs, host_inputs):
  flags.adopt_module_key_flags(module)
for name in (*run_inputs.ALONE, "seed"):
  flags.declare_key_flag(name)

_OUTPUT = flags.DEFINE_string(
  "output",
  "results/gate",
  "Folder for the weights, by a path without colons and commas, or its "
  "address.",
)
_KIND = flags.DEFINE_enum(
  "kind",
  "mlp",
  ["mlp", "linear"],
  "A network with a hidden layer, or a linear map.",
)
_HIDDEN = flags.DEFINE_integer(
  "hidden",
  None,
  "Width of the hidden layer; default: an eighth of the model's.",
  lower_bound=1,
)
_LENGTH = flags.DEFINE_integer(
  "length", 1000, "Maximum tokens of a part of a document.", lower_bound=16
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 100, "Maximum number of parts.", lower_bound=2
)
_TOKENS = flags.DEFINE_integer(
  "tokens", 500, "Tokens that are learned of each part.", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer(
  "epochs", 15, "Number of epochs.", lower_bound=1, upper_bound=100_000
)
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Maximum learning rate.")
_STEP = flags.DEFINE_integer(
  "step", 512, "Tokens per step of the optimizer.", lower_bound=1
)


def _check_flags() -> None:
  outputs.check_option(_OUTPUT.value)
  refusals.refuse_learning_rate()
  if _HIDDEN.value is not None and _KIND.value == "linear":
    raise InputError("A linear map has no hidden layer; leave out --hidden.")


def _check_length(lm: models.Pretrained) -> None:
  request = RepeatRequest.of(lm.text)
  limit = lm.config.geometry.max_positions
  asked = len(request.first) + len(request.suffix)

  def fits(length: int) -> bool:
    # A part is read twice, and padded the second time.
    part = len(request.prefix) + length
    return part + asked + bucket(part) <= limit

  if not fits(_LENGTH.value):
    most = max(filter(fits, range(limit)), default=0)
    raise InputError(
      f"--length={_LENGTH.value} is too long to be read twice in the context "
      f"of this model, {limit} tokens; give at most {most}."
    )


def main() -> None:
  """Trains and writes the networks."""
  _check_flags()
  outputs.check_run(_OUTPUT.value, writes=True)
  texts = document_inputs.read()
  with run_inputs.loaded() as (lm, _):
    _check_length(lm)
    rows = examples.rows_of(texts, lm.text, _LENGTH.value, _SAMPLES.value)
    say(
      f"{wording.count(len(rows), 'part')} of "
      f"{np.mean([len(row) for row in rows]):.0f} tokens"
    )
    cli.announce()
    recipe = Recipe(
      cast(Kind, _KIND.value),
      _HIDDEN.value or max(1, lm.config.hidden_size // 8),
      _EPOCHS.value,
      _RATE.value,
      _STEP.value,
      run_inputs.SEED.value,
    )
    digest = documents.digest(Prompts.of(rows))
    multihost.check_same({"documents": digest})
    source = run_inputs.source(digest)
    output = outputs.run_folder(_OUTPUT.value).absolute()
    summary = Trainer(output, lm, rows, _TOKENS.value, recipe, source).run()
  by_layer = list(summary["r2"].values())
  say(
    f"R2 is {np.mean(by_layer):.3f} on average over "
    f"{wording.count(len(by_layer), 'layer')}, from {min(by_layer):.3f} to "
    f"{max(by_layer):.3f}; the weights are in {output}."
  )


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
