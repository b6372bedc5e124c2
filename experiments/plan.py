"""Says what a model and its cache take on a slice of TPUs.

  make plan ARGS="--model=llama-3.1-8b --slice=v5e-8 --context=32768"

compiles prefill and decoding for the chips of the slice, by libtpu, and prints
for each device: weights, cache, temporaries and their share of HBM, memory on
the host, the largest batch, what devices send each other, and what a token
takes at least. It takes a minute or two. If it does not fit, the program exits
with code 1.

--model is a config.json or one of the models whose sizes come with kvjax;
nothing is fetched. --method, one number for --retention or --budget, --block,
--every and --kv_dtype say how the cache is compressed, as for other programs.

  make plan ARGS="--model=llama-3.1-8b --search --chips=v5e,v6e"

names the smallest slice of each kind of chip and the largest batch on it, and
draws the largest batch against retention into results/plan.png.
"""

import contextlib
import dataclasses

from absl import flags

import kvjax
from kvjax.cache.layers import KV_DTYPES
from kvjax.cache.sharding import parse_sizes
from kvjax.errors import InputError
from kvjax.experiments import cli, exits, refusals
from kvjax.experiments.calibration.record_files import Auto
from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.compilation.published import SHIPPED, Published
from kvjax.experiments.inputs import budget_inputs
from kvjax.experiments.planning import (
  batches,
  compiling,
  search_picture,
  searching,
  slices,
  tables,
)
from kvjax.experiments.report import pictures
from kvjax.experiments.run import outputs, prompting
from kvjax.experiments.run.progress_bar import progress_bar

flags.adopt_module_key_flags(budget_inputs)
flags.set_default(budget_inputs.RETENTION, ["0.25"])

_MODEL = flags.DEFINE_string(
  "model",
  "llama-3.1-8b",
  "A config.json, its folder, or the name of a model whose sizes come with "
  f"kvjax: {', '.join(SHIPPED)}.",
)
_SLICE = flags.DEFINE_string(
  "slice",
  "v5e-8",
  "Slice of chips, such as v5e-8, v5p-128, v6e-256 or tpu7x-16; the numbers "
  "of v5p and tpu7x count cores, two of a chip.",
)
_MESH = flags.DEFINE_string(
  "mesh",
  None,
  "Mesh of all devices of the slice, as in data:2,model:4; the default is all "
  "along 'model'.",
)
_CONTEXT = flags.DEFINE_integer(
  "context",
  32_768,
  "Tokens of each context, which are padded as other programs pad them.",
  lower_bound=1,
)
_ANSWER = flags.DEFINE_integer(
  "answer", 128, "Tokens that are decoded for each.", lower_bound=1
)
_BATCH = flags.DEFINE_integer(
  "batch", 1, "Contexts that are read and answered together.", lower_bound=1
)
_METHOD = flags.DEFINE_string(
  "method", "keydiff", "Method or preset, with options and prefixes."
)
_BLOCK = flags.DEFINE_integer(
  "block", None, "Tokens per prompt block; default: one block.", lower_bound=1
)
_EVERY = flags.DEFINE_integer(
  "every", None, "Tokens between evictions while decoding.", lower_bound=1
)
_KV_DTYPE = flags.DEFINE_enum(
  "kv_dtype", None, list(KV_DTYPES), "Stores the cache in eight bits."
)
_SEARCH = flags.DEFINE_bool(
  "search", False, "Find the smallest slice and the largest batch."
)
_CHIPS = flags.DEFINE_list(
  "chips", list(slices.KINDS), "Kinds of chips that --search tries."
)
_OUTPUT = flags.DEFINE_string(
  "output", "results/plan.png", "Picture that --search draws."
)

_DOES_NOT_FIT = 1
# Programs that a plan compiles for a batch.
_COMPILED = 2


def main() -> None:
  """Checks all flags, then compiles."""
  refusals.refuse_together(
    "search", ["slice", "mesh"], "it chooses among slices"
  )
  for name in ("chips", "output"):
    if flags.FLAGS[name].present and not _SEARCH.value:
      raise InputError(f"--{name} is for --search.")
  use = _use()
  if _SEARCH.value:
    _search(use)
  else:
    _plan(use)


def _use() -> Use:
  """Reads what is planned from the flags."""
  budgets = budget_inputs.budgets()
  if len(budgets) != 1:
    raise InputError(
      "A plan has one budget; give --retention or --budget one number."
    )
  (budget,) = budgets
  assert not isinstance(budget, Auto)
  schedule = kvjax.Schedule(block=_BLOCK.value, every=_EVERY.value)
  plan = kvjax.get_plan(
    _METHOD.value, budget, schedule=schedule, kv_dtype=_KV_DTYPE.value
  )
  model = Published.find(_MODEL.value)
  devices = 1 if _MESH.value is None else parse_sizes(_MESH.value)["context"]
  tokens = prompting.padded(_CONTEXT.value, devices)
  return Use(
    _METHOD.value, "", plan, tokens, model, _BATCH.value, _ANSWER.value
  )


def _plan(use: Use) -> None:
  """Plans a slice; exits with code 1 if it is too small."""
  slice_ = slices.find_slice(_SLICE.value)
  rows, tokens = 1, 1
  if _MESH.value is not None:
    sizes = parse_sizes(_MESH.value)
    slices.check_devices(slice_, sizes)
    rows, tokens = sizes["data"], sizes["context"]
  if use.rows % rows:
    raise InputError(
      f"--batch={use.rows} is no multiple of {rows}, the size of the axis "
      "'data' of --mesh, which shares out the rows of a batch."
    )
  cli.announce()
  chips.prepare_libtpu()
  chip = slice_.load(rows, use.model.kv_heads, tokens)
  # For the batch, and for larger ones; see `_largest`.
  count = 3 if use.rows == chip.rows else 2
  sparse = use.model.config(use.model.layers).experts is not None
  with progress_bar(count * _COMPILED + int(sparse)) as advance:
    try:
      planned = compiling.compile_use(use, chip, advance)
    except compiling.TooLargeError as error:
      _say(str(error))
      exits.leave(_DOES_NOT_FIT)
    most = _largest(planned, advance)
  _say(
    f"{tables.describe(use)}\n{tables.facts(planned, slice_)}\n",
    tables.to_markdown(planned, slice_, most),
    tables.verdict(planned, slice_),
    tables.sources([slice_.kind]),
  )
  if not planned.fits:
    exits.leave(_DOES_NOT_FIT)


def _largest(
  planned: compiling.Planned, advance: compiling.Advance
) -> batches.Batches | None:
  """Computes the largest batches on a line through this one and larger ones.

  Returns:
    None if twice as many rows are too many for a few layers.
  """
  use, chip = planned.use, planned.chip

  def times(factor: int) -> compiling.Planned:
    larger = dataclasses.replace(use, rows=factor * use.rows)
    return compiling.compile_use(larger, chip, advance)

  most = None
  with contextlib.suppress(compiling.TooLargeError):
    beyond = compiling.decode_beyond(use, chip, advance)
    twice = times(2)
    most = batches.largest(planned, twice, beyond)
    # A prompt alone on its devices runs through another program than several.
    if use.rows == chip.rows:
      most = batches.largest(twice, times(4), beyond)
  return most


def _search(use: Use) -> None:
  """Finds slices; exits with code 1 if there is none."""
  refusals.refuse_unknown("chips", _CHIPS.value, slices.KINDS)
  output = outputs.file(_OUTPUT.value)
  cli.announce()
  chips.prepare_libtpu()
  kinds = list(dict.fromkeys(_CHIPS.value))
  drawn = {}
  _say(f"{tables.describe(use)}\n")
  with progress_bar(None) as advance:
    found = {kind: searching.search(use, kind, advance) for kind in kinds}
    for named in filter(None, found.values()):
      advance(f"{named.slice.name}, picture", 0)
      drawn[named.slice.name] = searching.batches_by_retention(
        named, search_picture.SHARES
      )
  for kind, each in found.items():
    if each is None:
      _say(f"No slice of {kind} is large enough.\n")
      continue
    _say(
      f"{tables.facts(each.most, each.slice)}\n",
      tables.to_markdown(each.most, each.slice, each.batches),
      tables.finding(each) + "\n",
    )
  if not drawn:
    exits.leave(_DOES_NOT_FIT)
  title = f"{use.model.name}, {use.tokens:,} tokens each, {use.name}"
  figure = search_picture.draw(title, drawn)
  outputs.write_bytes(output, pictures.png(figure))
  _say(tables.sources(kinds), f"The picture is {output}.")


def _say(*texts: str) -> None:
  print(*texts, sep="\n")


if __name__ == "__main__":
  cli.run(main)
