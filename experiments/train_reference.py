"""Trains the bundled reference model.

  kvjax train_reference --output=OUT

writes its weights, vocabulary and card to OUT. It takes about five hours on two
cores. An interrupted run resumes from its last
checkpoint, bit for bit, with the same flags.
"""

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.reference import curriculum, export
from kvjax.experiments.reference.trainer import Trainer
from kvjax.experiments.run import outputs

_OUTPUT = flags.DEFINE_string(
  "output",
  None,
  "Folder for checkpoints, the log and the exported model.",
  required=True,
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of weights and data.", lower_bound=0
)
_STAGES = flags.DEFINE_list(
  "stages", None, "Names of the stages to train, in order; the default is all."
)


def _chosen_stages(names: list[str] | None) -> tuple[curriculum.Stage, ...]:
  if names is None:
    return curriculum.STAGES
  known = {stage.name: stage for stage in curriculum.STAGES}
  if not names:
    raise InputError(
      f"--stages is empty; name training stages, of {', '.join(known)}."
    )
  for name in names:
    if name not in known:
      raise InputError(
        f"There is no training stage {name!r}; stages are {', '.join(known)}."
      )
  return tuple(known[name] for name in names)


def main() -> None:
  """Trains, then validates and exports."""
  stages = _chosen_stages(_STAGES.value)
  output = outputs.folder(_OUTPUT.value).absolute()
  cli.announce()
  output.mkdir(parents=True, exist_ok=True)
  trainer = Trainer(output, _SEED.value, stages)
  trainer.run()
  export.save(
    trainer.decoder(), trainer.state, _SEED.value, stages, output / "model"
  )


if __name__ == "__main__":
  cli.run(main)
