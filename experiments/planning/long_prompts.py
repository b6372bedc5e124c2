"""The table of docs/sharding.md: what long prompts take of each device.

    PYTHONPATH=.libtpu python -m kvjax.experiments.planning.long_prompts

compiles prefill and decoding of an 8B model for slices that need not be there,
and writes the table into the page, from the root of the repository. It takes
half an hour.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import kvjax
from kvjax import files
from kvjax.cache.sharding import parse_sizes
from kvjax.experiments import cli
from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.compilation.published import LLAMA
from kvjax.experiments.planning.compiling import Planned, compile_use
from kvjax.experiments.planning.slices import find_slice
from kvjax.experiments.report import formats, page_parts
from kvjax.experiments.report.wording import mib
from kvjax.experiments.run.progress_bar import progress_bar

PAGE = pathlib.Path("docs", "sharding.md")
PART = "long_prompts"
HEADER = (
  *("slice and mesh", "prompt", "method", "weights", "cache"),
  *("prefill, together", "decoding, together"),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A long prompt on a slice.

  Attributes:
    slice: name of the slice.
    mesh: axes of the mesh, as in `--mesh`.
    tokens: length of the prompt.
    method: name of the method.
    retention: share of the tokens that it keeps.
  """

  slice: str
  mesh: str
  tokens: int
  method: str
  retention: float

  @property
  def use(self) -> Use:
    """What is planned: one prompt, of a model with so long a context."""
    plan = kvjax.get_plan(self.method, kvjax.Retention(self.retention))
    longest = max(self.tokens, LLAMA.fields["max_position_embeddings"])
    fields = {**LLAMA.fields, "max_position_embeddings": longest}
    model = dataclasses.replace(LLAMA, fields=fields)
    return Use(self.method, "", plan, self.tokens, model)

  @property
  def chip(self) -> Chip:
    """The devices with their mesh; libtpu describes them."""
    sizes = parse_sizes(self.mesh)
    slice_ = find_slice(self.slice)
    return slice_.load(sizes["data"], LLAMA.kv_heads, sizes["context"])

  @property
  def named(self) -> tuple[str, ...]:
    """The cells that name it."""
    kept = f" at {100 * self.retention:g} %" if self.retention < 1 else ""
    return (
      f"{self.slice}, `{self.mesh}`",
      f"{self.tokens:,}",
      f"`{self.method}`{kept}",
    )


CASES = (
  Case("v5e-64", "context:8,model:8", 131_072, "keydiff", 0.25),
  Case("v5p-32", "context:4,model:4", 131_072, "snapkv", 0.25),
  Case("v5e-64", "context:8,model:8", 1_048_576, "keydiff", 0.0625),
  Case("v5p-32", "context:4,model:4", 1_048_576, "keydiff", 0.0625),
)


def cells(case: Case, planned: Planned) -> tuple[str, ...]:
  """Formats the line of a case."""
  taken = planned.sizes
  sizes = (taken.weights, taken.cache)
  together = map(planned.hbm, (planned.prefill, planned.decode))
  return (*case.named, *map(mib, (*sizes, *together)))


def replace_table(page: str, lines: Sequence[Sequence[str]]) -> str:
  """Returns the page with the table of these lines."""
  return page_parts.replace(page, PART, formats.grid(HEADER, lines, (0, 2)))


def main() -> None:
  """Compiles all cases, and writes the table."""
  chips.prepare_libtpu()
  page = files.read_text(PAGE)
  with progress_bar(2 * len(CASES)) as advance:
    lines = [
      cells(case, compile_use(case.use, case.chip, advance)) for case in CASES
    ]
  files.write_text(PAGE, replace_table(page, lines))


if __name__ == "__main__":
  cli.run(main)
