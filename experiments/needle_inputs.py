"""Flags for needle tasks, and the samples they select."""

from absl import flags

from kvjax import models
from kvjax.experiments import inputs, results, suite

TASKS = flags.DEFINE_list(
  "tasks", list(suite.DEFAULT), f"Any of {', '.join(suite.TASKS)}."
)
SAMPLES = flags.DEFINE_integer(
  "samples",
  12,
  "Samples per task.",
  lower_bound=1,
  upper_bound=inputs.MOST_SAMPLES,
)
LENGTH = flags.DEFINE_integer(
  "length",
  1024,
  "Tokens of prompt and answer, without the chat template.",
  lower_bound=1,
)


def samples(lm: models.Pretrained) -> results.Samples:
  """Draws the samples for --tasks, --samples, --length and --seed.

  Raises:
    InputError: they are longer than the model's context.
  """
  inputs.check_lengths(lm, [LENGTH.value])
  count = lm.text.count
  return {
    results.Part(task, LENGTH.value): [
      suite.bound_answer(
        suite.draw(task, number, inputs.SEED.value, LENGTH.value, count), count
      )
      for number in range(SAMPLES.value)
    ]
    for task in dict.fromkeys(TASKS.value)
  }
