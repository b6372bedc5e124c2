"""Flags for the model, its devices and its dtype, and their values."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
from absl import flags, logging

from kvjax import kernels, models
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models import catalog
from kvjax.models.pretrained import DTYPES

REFERENCE = "reference"
_BUNDLED = pathlib.Path(models.__file__).resolve().parent / "reference"

_HUB = "models--"
_NUMBER = re.compile("[1-9][0-9]{0,8}")

MODEL = flags.DEFINE_string(
  "model",
  REFERENCE,
  "Hugging Face directory or GGUF file of a model, or a name, which is fetched "
  f"once: {', '.join(catalog.NAMED)}; {REFERENCE} is the small one that comes "
  "with kvjax.",
)
# More than this are never answered, and do not fit into memory.
MOST_SAMPLES = 100_000
SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Seed of samples, and of random methods, sketches and hashes that are named "
  "without one.",
  lower_bound=0,
)
BATCH = flags.DEFINE_integer(
  "batch",
  12,
  "Contexts per prefill; fewer are used if their caches do not fit in memory.",
  lower_bound=1,
)
_MESH = flags.DEFINE_string("mesh", None, "Device mesh, as in data:2,model:2.")
_KERNELS = flags.DEFINE_enum(
  "kernels",
  "auto",
  ["auto", "xla"],
  "auto: Pallas kernels where the device supports them; xla: XLA's programs "
  "only.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", None, DTYPES, "Default: float32 on CPU, otherwise bfloat16."
)


@contextlib.contextmanager
def loaded() -> Iterator[tuple[models.Pretrained, int]]:
  """Loads the model, on the mesh if given; yields it and the device count."""
  logging.info("Loading %s in %s", _model(), dtype())
  with kernels.use("xla" if _KERNELS.value == "xla" else None):
    if _MESH.value is None:
      yield models.load(_model(), dtype()), 1
      return
    mesh = parse_mesh(_MESH.value)
    with jax.set_mesh(mesh):
      yield models.load(_model(), dtype(), mesh), mesh.size


def check_lengths(lm: models.Pretrained, lengths: Sequence[int]) -> None:
  """Rejects lengths that exceed the model's context.

  Args:
    lm: the model.
    lengths: tokens of prompt and answer, without the chat template.

  Raises:
    InputError: the longest, with the template, is longer than the context.
  """
  limit = lm.config.geometry.max_positions
  template = sum(map(lm.text.count, lm.text.split_chat("")))
  if max(lengths) + template > limit:
    raise InputError(
      f"--length={max(lengths)} and {template} tokens of chat template are "
      f"longer than the context of this model, {limit} tokens."
    )


def parse_lengths(texts: Sequence[str]) -> list[int]:
  """Parses the values of --length, without repetitions.

  Raises:
    InputError: a value is not a positive integer.
  """
  distinct = dict.fromkeys(text.strip() for text in texts)
  if not distinct or not all(map(_NUMBER.fullmatch, distinct)):
    raise InputError(
      f"--length takes numbers of tokens such as 1024,2048; "
      f"{','.join(texts)[:60]!r} is not."
    )
  return [int(text) for text in distinct]


def dtype() -> str:
  """Returns the dtype of weights and cache."""
  if _DTYPE.value is not None:
    return str(_DTYPE.value)
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def model_directory() -> pathlib.Path:
  """Returns the model's directory, or its GGUF file.

  Raises:
    InputError: a named model is missing and cannot be fetched.
  """
  # Path.resolve() raises an error at a loop of links; loading names it.
  return pathlib.Path(os.path.realpath(catalog.locate(_model())))


def _model() -> str:
  """What --model names; a path that exists is taken as one."""
  if MODEL.value == REFERENCE and not pathlib.Path(REFERENCE).exists():
    return str(_BUNDLED)
  return str(MODEL.value)


def model_name() -> str:
  """Returns the model's name in tables."""
  directory = model_directory()
  if directory == _BUNDLED:
    return "kvjax-ref"
  # In the Hugging Face hub's cache: models--ORG--NAME/snapshots/COMMIT.
  hub = directory.parent.parent.name
  if directory.parent.name == "snapshots" and hub.startswith(_HUB):
    return hub.removeprefix(_HUB).replace("--", "/")
  return directory.name
