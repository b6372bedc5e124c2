"""Flags for needle tasks, and the samples they select."""

from absl import flags

from kvjax import models
from kvjax.experiments.inputs import essay_inputs, run_inputs
from kvjax.experiments.run import results
from kvjax.experiments.tasks import suite
from kvjax.experiments.tasks.sample import Sample

flags.adopt_module_key_flags(essay_inputs)

TASKS = flags.DEFINE_list(
  "tasks", list(suite.DEFAULT), f"Any of {', '.join(suite.TASKS)}."
)
SAMPLES = flags.DEFINE_integer(
  "samples",
  12,
  "Samples per task.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
LENGTH = flags.DEFINE_integer(
  "length",
  1024,
  "Tokens of prompt and answer, without the chat template.",
  lower_bound=1,
)


def samples(lm: models.Pretrained) -> results.Samples:
  """Draws the samples for --tasks, --samples, --length, --seed and --essay.

  Raises:
    InputError: they are longer than the model's context, or their texts cannot
      be read.
  """
  run_inputs.check_lengths(lm, [LENGTH.value])
  count, texts = lm.text.count, essay_inputs.texts()

  def draw(task: str, number: int) -> Sample:
    sample = suite.draw(
      task,
      number,
      run_inputs.SEED.value,
      LENGTH.value,
      count,
      texts.essay,
      texts.key_words,
    )
    return suite.bound_answer(sample, count)

  return {
    results.Part(task, LENGTH.value): [
      draw(task, number) for number in range(SAMPLES.value)
    ]
    for task in dict.fromkeys(TASKS.value)
  }
