"""Questions for the color of a door."""

from colors.metric import hue
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Option,
  Presentation,
)
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks.sample import Sample

registry.register("hue", hue)

SHADE = Option("shade", "dark", "Its shade.", choices=("dark", "pale"))


class Colors(Benchmark):
  """Doors whose color is asked for."""

  name = "colors"
  options = (SHADE,)
  lengths = (64,)
  presentation = Presentation(score="hue", scored="colors named")

  def total(self, request):
    return request.samples

  def draw(self, lm, request):
    shade = request.value(SHADE)
    drawn = []
    for number in range(request.samples):
      drawn.append(door(shade, number))
      request.on_draw("door", 1)
    (length,) = self.lengths_of(request)
    return Drawn({Part("door", length): drawn}, {"shade": shade})


def door(shade, number):
  """The sample of a number."""
  return Sample(
    context=f"The door is of a {shade} red. " * (number + 4),
    question="What is the color of the door?",
    answer_prefix="",
    answers=("red",),
    task="door",
    max_new_tokens=2,
    metadata={"shade": shade},
    metric="hue",
    scored_by=("shade",),
    key="red",
  )
