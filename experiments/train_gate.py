"""Trains the gates of KVzap or Fast KVzip for a model.

  kvjax train_gate --documents=DIR --output=OUT

reads the .txt and .md files of a folder in parts, replays each as KVzip+ does,
and learns the logarithm of its scores from the input of every layer. OUT gets
the files that are published for KVzap, for

  --methods=kvzap:gate=OUT

in every program, and validation.json with R2 by layer, on parts that were not
learned. With --kind=fast_kvzip, gates learn the scores that KVzip has, for
--methods=fast_kvzip:gate=OUT. --data=DIR learns the contexts of LongBench
instead. With --multihost, hosts that run the same command share the parts, and
the first one learns.

An interrupted run resumes with the same flags. Sixty parts of 600 tokens take
SmolLM2-135M about five minutes on two cores, and Fast KVzip's gates fifteen.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.finetuning import documents
from kvjax.experiments.gate_training import examples
from kvjax.experiments.gate_training.fast_kvzip_learner import FastKVzipLearner
from kvjax.experiments.gate_training.kvzap_learner import Kind, KVzapLearner
from kvjax.experiments.gate_training.learner import Learner
from kvjax.experiments.gate_training.trainer import Trainer
from kvjax.experiments.inputs import document_inputs, host_inputs, run_inputs
from kvjax.experiments.report import wording
from kvjax.experiments.run import multihost, outputs
from kvjax.experiments.run.sentences import say
from kvjax.model import Geometry
from kvjax.prompts import Prompts, bucket
from kvjax.repeat_request import RepeatRequest

for module in (document_inputs, host_inputs):
  flags.adopt_module_key_flags(module)
for name in (*run_inputs.ALONE, "seed"):
  flags.declare_key_flag(name)

_FAST_KVZIP = "fast_kvzip"

_OUTPUT = flags.DEFINE_string(
  "output",
  "results/gate",
  "Folder for the weights, by a path without colons and commas, or its "
  "address.",
)
_KIND = flags.DEFINE_enum(
  "kind",
  "mlp",
  ["mlp", "linear", _FAST_KVZIP],
  "KVzap's network with a hidden layer, its linear map, or Fast KVzip's gates.",
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
  "epochs",
  None,
  "Number of epochs; default: 15, and of Fast KVzip as many as take 5,000 "
  "steps.",
  lower_bound=1,
  upper_bound=100_000,
)
_RATE = flags.DEFINE_float(
  "learning_rate",
  None,
  "Maximum learning rate; default: 0.005, and of Fast KVzip 0.2.",
)
_STEP = flags.DEFINE_integer(
  "step",
  None,
  "Tokens per step of the optimizer; default: 512, and of Fast KVzip 1,000.",
  lower_bound=1,
)


def _check_flags() -> None:
  outputs.check_option(_OUTPUT.value)
  refusals.refuse_learning_rate()
  if _HIDDEN.value is not None and _KIND.value != "mlp":
    raise InputError(
      f"--kind={_KIND.value} has no hidden layer; leave out --hidden."
    )


def _check_length(lm: models.Pretrained) -> None:
  request = RepeatRequest.of(lm.text)
  limit = lm.model.geometry.max_positions
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


def _width(lm: models.Pretrained) -> int:
  """Returns E, the channels of the hidden states."""
  token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  hidden, _ = jax.eval_shape(lm.model.embed, lm.params, token, token)
  return int(hidden.shape[-1])


def _learner(lm: models.Pretrained) -> Learner:
  """What learns the kind of gates that the flags name."""
  seed, epochs = run_inputs.SEED.value, _EPOCHS.value
  if _KIND.value == _FAST_KVZIP:
    return FastKVzipLearner(
      group=_group(lm.model.geometry),
      epochs=epochs,
      learning_rate=_RATE.value or 0.2,
      batch=_STEP.value or 1000,
      seed=seed,
    )
  return KVzapLearner(
    kind=cast(Kind, _KIND.value),
    hidden=_HIDDEN.value or max(1, _width(lm) // 8),
    epochs=epochs or 15,
    learning_rate=_RATE.value or 5e-3,
    batch=_STEP.value or 512,
    seed=seed,
  )


def _group(geometry: Geometry) -> int:
  """Query heads of each KV head.

  Raises:
    InputError: layers that methods may compress differ in it.
  """
  groups = {
    spec.heads // spec.kv_heads for spec in geometry.layers if spec.compressible
  }
  if len(groups) > 1:
    raise InputError(
      "A gate of Fast KVzip has as many queries for a KV head in all layers; "
      f"this model has layers with {' and '.join(map(str, sorted(groups)))}."
    )
  return next(iter(groups), 1)


def main() -> None:
  """Trains and writes the gates."""
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
    digest = documents.digest(Prompts.of(rows))
    multihost.check_same({"documents": digest})
    source = run_inputs.source(digest)
    output = outputs.run_folder(_OUTPUT.value).absolute()
    learner = _learner(lm)
    summary = Trainer(output, lm, rows, _TOKENS.value, learner, source).run()
  by_layer = list(summary["r2"].values())
  say(
    f"R2 is {np.mean(by_layer):.3f} on average over "
    f"{wording.count(len(by_layer), 'layer')}, from {min(by_layer):.3f} to "
    f"{max(by_layer):.3f}; the weights are in {output}."
  )


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
