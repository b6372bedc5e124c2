"""Fine-tunes a model on documents with adapters (LoRA).

  kvjax finetune --documents=DIR --output=OUT

trains on the .txt and .md files of a folder and writes a model directory OUT
with the adapters merged into its weights, for --model=OUT in every program.
OUT/adapter has the adapters alone in PEFT's format. A fine-tuned model predicts
its documents better, so --retention=auto evicts more of them. --data=DIR trains
on the contexts of LongBench instead.

With --multihost, hosts that run the same command train on parts of each batch;
all must see the folder OUT. On one host, OUT may be an address, such as
gs://bucket/tuned. An interrupted run resumes from its last checkpoint, bit for
bit, with the same flags; on SIGTERM, it saves one first. Twelve steps over
44,500 tokens take SmolLM2-135M about seven minutes on two cores.
"""

import dataclasses

from absl import flags, logging

from kvjax import addresses, models
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.finetuning import documents, training
from kvjax.experiments.finetuning.tuner import Recipe, Tuner
from kvjax.experiments.inputs import document_inputs, host_inputs, run_inputs
from kvjax.experiments.report import wording
from kvjax.experiments.run import multihost, outputs
from kvjax.experiments.run.sentences import say
from kvjax.models import lora

for module in (document_inputs, run_inputs, host_inputs):
  flags.adopt_module_key_flags(module)

_SAMPLES = flags.DEFINE_integer(
  "samples", None, "Documents per dataset; default: all.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  "output",
  "results/finetuned",
  "Folder for the model, its adapters, checkpoints and a log, or, on one host, "
  "an address such as gs://bucket/tuned.",
)
_RANK = flags.DEFINE_integer("rank", 128, "Rank of the adapters.")
_TARGETS = flags.DEFINE_list(
  "targets",
  "q,k,v",
  f"Projections with an adapter, of {', '.join(lora.TARGETS)}.",
)
_EPOCHS = flags.DEFINE_integer(
  "epochs", 8, "Number of epochs.", lower_bound=1, upper_bound=100_000
)
_RATE = flags.DEFINE_float(
  "learning_rate", 1e-3, "Maximum learning rate, after a short warm-up."
)
_LENGTH = flags.DEFINE_integer(
  "length", 1024, "Maximum tokens of a chunk of a document.", lower_bound=2
)
_BATCH = flags.DEFINE_integer(
  "batch",
  4,
  "Chunks per step; fewer need less memory.",
  lower_bound=1,
  allow_override=True,
)
_SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Seed of the adapters and of the order of chunks.",
  lower_bound=0,
  allow_override=True,
)


def _recipe() -> Recipe:
  refusals.refuse_learning_rate()
  lora.check(_RANK.value, _TARGETS.value)
  return Recipe(
    rank=_RANK.value,
    targets=tuple(name for name in lora.TARGETS if name in _TARGETS.value),
    epochs=_EPOCHS.value,
    learning_rate=_RATE.value,
    batch=_BATCH.value,
    seed=_SEED.value,
  )


def _check_output() -> None:
  if multihost.count() > 1 and addresses.is_address(_OUTPUT.value):
    raise InputError(
      f"--output={_OUTPUT.value} is an address, and each of several hosts "
      "writes its parts of checkpoints itself; give a folder that all of them "
      "see, which may be in a mounted bucket."
    )
  outputs.check_run(_OUTPUT.value, writes=True)


def main() -> None:
  """Fine-tunes, then writes adapters and model."""
  run_inputs.span_hosts()
  _check_output()
  refusals.refuse_together(
    "documents", ["samples"], "--samples are documents of each set of --data"
  )
  texts, recipe = document_inputs.read(_SAMPLES.value), _recipe()
  with run_inputs.loaded() as (lm, _):
    run_inputs.check_batch()
    run_inputs.check_part_length(lm, _LENGTH.value)
    parts = documents.chunks(texts, lm.text, _LENGTH.value, training.QUERIES)
    say(
      f"{wording.count(len(texts), 'document')} of {sum(parts.lengths):,} "
      f"tokens in {wording.count(len(parts.lengths), 'chunk')}"
    )
    cli.announce()
    digest = documents.digest(parts)
    multihost.check_same({"documents": digest})
    source = run_inputs.source(digest) | {"length": _LENGTH.value}
    output = outputs.run_folder(_OUTPUT.value).absolute()
    multihost.on_first(lambda: output.mkdir(parents=True, exist_ok=True))
    tuner = Tuner(output, lm, parts, recipe, source)
    tuner.run()
    adapter = output / "adapter"
    base = str(run_inputs.model_directory())
    lora.write_adapter(tuner.state.params, lm.config, adapter, base)
    logging.info("Wrote the adapters to %s", adapter)
    # The others wait for the first one, and hear if it cannot write.
    multihost.gather(b"")
    model, params = tuner.merged()
    models.save(dataclasses.replace(lm, model=model, params=params), output)
    logging.info("Wrote the model to %s", output)
    multihost.gather(b"")
  say(f"The finetuned model is in {output}, its adapters in {adapter}.")


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
