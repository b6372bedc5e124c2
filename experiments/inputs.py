"""Flags of the binaries that ask a model about needles, and what they name."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import jax
from absl import flags

import kernels
import kvjax
import models
from experiments import comparison, suite
from kvjax.errors import InputError
from kvjax.sharding import parse_mesh
from models.pretrained import DTYPES

_BUNDLED = pathlib.Path(models.__file__).resolve().parent / "reference"

_MODEL = flags.DEFINE_string(
  "model", str(_BUNDLED), "Hugging Face directory of a model."
)
TASKS = flags.DEFINE_list(
  "tasks", list(suite.DEFAULT), f"Any of {', '.join(suite.TASKS)}."
)
SAMPLES = flags.DEFINE_integer(
  "samples", 12, "Samples per task.", lower_bound=1
)
LENGTH = flags.DEFINE_integer(
  "length",
  1024,
  "Tokens of prompt and answer, chat template aside.",
  lower_bound=1,
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.")
BATCH = flags.DEFINE_integer(
  "batch", 12, "Samples per prefill; less needs less memory.", lower_bound=1
)
_MESH = flags.DEFINE_string("mesh", None, "Devices, as in data:2,model:2.")
_KERNELS = flags.DEFINE_enum(
  "kernels",
  "auto",
  ["auto", "xla"],
  "Pallas kernels where the device has them and they serve, or XLA's programs "
  "alone.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", None, DTYPES, "By default float32 on CPU, else bfloat16."
)


def samples(lm: models.Pretrained) -> comparison.Samples:
  """What --tasks, --samples, --length and --seed ask for.

  Raises:
    InputError: they are longer than the model's context.
  """
  count = lm.tokenizer.count
  limit = lm.config.geometry.max_positions
  template = sum(count(text) for text in lm.tokenizer.split_chat(""))
  if LENGTH.value + template > limit:
    raise InputError(
      f"--length={LENGTH.value} and {template} tokens of chat template are "
      f"longer than the context of this model, {limit} tokens."
    )
  return {
    task: [
      suite.draw(task, number, SEED.value, LENGTH.value, count)
      for number in range(SAMPLES.value)
    ]
    for task in dict.fromkeys(TASKS.value)
  }


@contextlib.contextmanager
def loaded() -> Iterator[tuple[models.Pretrained, int]]:
  """The model, on the mesh if there is one, and its number of devices."""
  with kernels.use("xla" if _KERNELS.value == "xla" else None):
    if _MESH.value is None:
      yield models.load(_MODEL.value, dtype()), 1
      return
    mesh = parse_mesh(_MESH.value)
    with jax.set_mesh(mesh):
      yield models.load(_MODEL.value, dtype(), mesh), mesh.size


def dtype() -> str:
  """Of weights and cache."""
  if _DTYPE.value is not None:
    return str(_DTYPE.value)
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def budgets(
  retention: Sequence[str], tokens: Sequence[str] | None
) -> list[kvjax.Budget]:
  """What --retention, or --budget in its place, asks for.

  Raises:
    InputError: they hold something else than numbers in range.
  """
  try:
    if tokens is not None:
      return [kvjax.Tokens(int(text)) for text in tokens]
    return [kvjax.Retention(float(text)) for text in retention]
  except InputError:
    raise
  except ValueError as error:
    raise InputError(
      "--retention takes numbers such as 0.5,0.25 and --budget whole numbers "
      f"such as 256,64: {error}."
    ) from error


def model_directory() -> pathlib.Path:
  """Where the model is."""
  return pathlib.Path(_MODEL.value).resolve()


def model_name() -> str:
  """What tables call the model."""
  directory = model_directory()
  return "kvjax-ref" if directory == _BUNDLED else directory.name
