"""Loading of models, and saving in the layout of Hugging Face directories."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from kvjax import files
from kvjax.cache.sharding import check_mesh
from kvjax.calibration.record import Calibrated
from kvjax.engine.sampling import GREEDY, Sampling
from kvjax.errors import InputError
from kvjax.hosts import from_first, spread
from kvjax.models.chat import Chat
from kvjax.models.config import DecoderConfig
from kvjax.models.fields import format_value, is_number
from kvjax.models.json_files import write_json
from kvjax.models.language_model import DecoderModel, as_shapes
from kvjax.models.orbax_files import write_checkpoint
from kvjax.models.sharding import param_shardings
from kvjax.models.sources import TOKEN_IDS, Source, find
from kvjax.models.tensor_files import CHECKPOINT
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weights import write_weights
from kvjax.options.budgets import Budget, PerLayer, Threshold
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.registry.names import get_plan

DTYPES = ("bfloat16", "float32")
FORMATS = ("safetensors", "orbax")
_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A model with everything that its directory or file contains.

  Attributes:
    model: the pure functions that the engine calls.
    params: the weights.
    config: sizes and options.
    tokenizer: text to ids and back, if the directory has one.
    generation: fields of generation_config.json, and the ids of special tokens
      from config.json, preserved for `save`.
  """

  # `repr` leaves out the weights, and what follows from the configuration.
  model: DecoderModel = dataclasses.field(repr=False)
  params: nnx.State = dataclasses.field(repr=False)
  config: DecoderConfig
  tokenizer: Tokenizer | None
  generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def text(self) -> Tokenizer:
    """The tokenizer, or an error if there is none.

    Raises:
      InputError: there is none.
    """
    if self.tokenizer is None:
      raise InputError(
        "This model has no tokenizer, which texts need; put its tokenizer.json "
        "into its directory."
      )
    return self.tokenizer

  def compress(
    self,
    text: str,
    method: str = "keydiff",
    budget: float | Budget | PerLayer | Calibrated | Threshold = 0.5,
    *,
    schedule: Schedule = WHOLE,
  ) -> Chat:
    """Prefills a text and compresses its cache, to ask questions about it.

    Args:
      text: the text.
      method: name of a method with its options, as in `kvjax.get_plan`.
      budget: share of the text to keep (a float), tokens to keep (an integer),
        or a budget, as in `kvjax.get_plan`.
      schedule: when the method evicts. `kvjax.models.Chat` takes any plan.

    Raises:
      InputError: the name stands for no method, the budget is out of range, or
        the text is none, empty, or longer than the model's context.
    """
    plan = get_plan(method, budget, schedule=schedule)
    return Chat(self, text, plan)

  @property
  def sampling(self) -> Sampling:
    """The model's default sampling; greedy if it defines none.

    It uses temperature, top_k and top_p, but no penalties.

    Raises:
      InputError: one of them is no number, or out of range.
    """
    given = {k: v for k, v in self.generation.items() if v is not None}
    do_sample = given.get("do_sample", False)
    if do_sample is False:
      return GREEDY
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    numbers |= {name: given[name] for name in numbers if name in given}
    wrong = [name for name in numbers if not is_number(numbers[name])]
    if do_sample is not True:
      wrong.append("do_sample")
    if wrong or numbers["top_k"] != int(numbers["top_k"]):
      name = (*wrong, "top_k")[0]
      raise InputError(
        f"generation_config.json has {format_value(given[name])} for {name!r}, "
        "which is no value of it; correct it or leave it out."
      )
    return Sampling(
      temperature=float(numbers["temperature"]),
      top_k=int(numbers["top_k"]),
      top_p=float(numbers["top_p"]),
    )


def load(
  model: str | os.PathLike[str],
  dtype: DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Pretrained:
  """Loads a model, its generation defaults, and its tokenizer if it has one.

  Args:
    model: a name: "reference" is a small model that comes with kvjax, and
      "smollm2-135m-instruct", "smollm2-135m-instruct-bf16" and "gemma3-270m"
      are fetched once. Or a path: a Hugging Face directory (with config.json,
      safetensors weights and tokenizer.json), one that `save` has written, a
      GGUF file, or a directory with one.
    dtype: one of `DTYPES`, by name or as in `jnp.float32`, for the weights and
      the computation; by default bfloat16, and float32 for GGUF files.
    mesh: over whose axis "model" the weights are sharded; see
      `kvjax.cache.sharding.parse_mesh`. By default, they are on the default
      device.

  Raises:
    InputError: a file is missing, broken or not supported, a named model
      cannot be fetched, or the mesh has other axes than those of `parse_mesh`.

  Examples:
    >>> import kvjax
    >>> lm = kvjax.load("reference")
    >>> lm.config.num_layers
    6
  """
  source = find(model)
  config = source.config()
  tokenizer = source.tokenizer(config)
  decoder, params = _read_decoder(source, config, dtype, mesh)
  return Pretrained(decoder, params, config, tokenizer, source.generation())


def load_decoder(
  model: str | os.PathLike[str],
  dtype: DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[DecoderModel, nnx.State]:
  """Loads a model's functions and weights only; arguments as for `load`.

  Raises:
    InputError: the model, its configuration or its weights are missing, broken
      or not supported.
  """
  source = find(model)
  return _read_decoder(source, source.config(), dtype, mesh)


def save(
  pretrained: Pretrained,
  directory: str | os.PathLike[str],
  max_shard_bytes: int = 5_000_000_000,
  *,
  format: str = "safetensors",
) -> None:
  """Saves a model to a directory that `load` can read.

  All files are written to a temporary directory first and then moved,
  config.json last, so that what is half moved is no model. Existing files with
  these names, and old weights in any format, are replaced; other files stay.

  If weights are spread over several hosts, all of them must call it; the first
  one writes, and the others wait for it. In a program on several hosts, all
  must call it for a checkpoint of orbax in any case, with a directory that they
  share: each then writes its parts of the weights.

  Args:
    pretrained: the model; weights keep their dtype.
    directory: the directory, which is created if it does not exist.
    max_shard_bytes: maximum size of a file of safetensors.
    format: one of `FORMATS`. transformers, too, reads safetensors. Of a
      checkpoint of orbax, devices read and write their own parts of sharded
      weights; it can be loaded under any mesh.

  Raises:
    InputError: a file cannot be written, there is no such format, or the model
      has adapters.

  Examples:
    >>> import tempfile
    >>> import kvjax.models
    >>> lm = kvjax.load(kvjax.models.__path__[0] + "/reference")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   kvjax.models.save(lm, folder, format="orbax")
    ...   kvjax.load(folder).model == lm.model
    True
  """
  files.check_local(directory)
  if format not in FORMATS:
    raise InputError(
      f"There is no format {format!r} of weights; formats are "
      f"{', '.join(FORMATS)}."
    )
  adapters, _ = nnx.split_state(pretrained.params, nnx.LoRAParam, ...)
  if adapters:
    raise InputError(
      "The model has adapters, which no format of weights has; merge them "
      "first (kvjax.models.lora.merge_adapters)."
    )
  directory = pathlib.Path(directory)
  try:
    _save(pretrained, directory, max_shard_bytes, format)
  except OSError as error:
    raise InputError(
      f"The model cannot be written to {directory}: {files.reason(error)}."
    ) from error


def _save(
  pretrained: Pretrained,
  directory: pathlib.Path,
  max_shard_bytes: int,
  format: str,
) -> None:
  params = pretrained.params
  failure: InputError | OSError | None = None
  together = spread(params) or format == "orbax"
  first = from_first if together else _call
  with contextlib.ExitStack() as stack:

    def begin() -> str:
      directory.mkdir(parents=True, exist_ok=True)
      # On the same file system, where moving a file is a rename.
      made = tempfile.TemporaryDirectory(
        prefix=f"{directory.name}.", dir=directory.parent
      )
      return pathlib.Path(stack.enter_context(made)).name

    scratch = directory.parent / first(begin)
    try:
      if format == "orbax":
        write_checkpoint(params, scratch)
      else:
        writes = not together or jax.process_index() == 0
        place = scratch if writes else None
        write_weights(params, pretrained.config, place, max_shard_bytes)
    except (InputError, OSError) as error:
      failure = error

    def finish() -> str:
      # Here, as the other hosts wait for it.
      if failure is not None:
        raise failure
      _describe(pretrained, scratch)
      _move(scratch, directory)
      return _CONFIG

    first(finish)
  if failure is not None:
    raise failure


def _call(act: Callable[[], str]) -> str:
  return act()


def _describe(pretrained: Pretrained, directory: pathlib.Path) -> None:
  """Writes all files but those of the weights."""
  if pretrained.tokenizer is not None:
    pretrained.tokenizer.save(directory)
  write_json(directory / _CONFIG, _config_fields(pretrained))
  write_json(
    directory / "generation_config.json",
    dict(pretrained.generation) | _token_ids(pretrained),
  )


def _move(complete: pathlib.Path, directory: pathlib.Path) -> None:
  """Moves the files of a model, in place of those of an earlier one."""
  # An old config.json must not describe new weights.
  (directory / _CONFIG).unlink(missing_ok=True)
  # Readers prefer a single file to an index, both to a checkpoint, and
  # chat_template.jinja to the tokenizer's: what an earlier save has left
  # would win.
  old = [path.name for path in directory.glob("model*.safetensors*")]
  for name in (*old, CHECKPOINT, "chat_template.jinja"):
    _remove(directory / name)
  new = {path.name for path in complete.iterdir()}
  for name in sorted(new, key=lambda name: name == _CONFIG):
    (complete / name).replace(directory / name)


def _remove(path: pathlib.Path) -> None:
  """Removes a file or a folder, if there is one."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def name_dtype(dtype: DTypeLike) -> str:
  """Returns the name of a dtype of `DTYPES`.

  Raises:
    InputError: it is another dtype, or no dtype.
  """
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = str(dtype)
  if name not in DTYPES:
    raise InputError(f"dtype {name!r} is not one of {', '.join(DTYPES)}.")
  return name


def _read_decoder(
  source: Source,
  config: DecoderConfig,
  dtype: DTypeLike | None,
  mesh: jax.sharding.Mesh | None,
) -> tuple[DecoderModel, nnx.State]:
  dtype = name_dtype(source.dtype if dtype is None else dtype)
  model, template = as_shapes(config, dtype)
  shardings = None
  if mesh is not None:
    check_mesh(mesh)
    shardings = param_shardings(template, model.geometry, mesh)
  return model, source.weights(config, template, shardings)


def _config_fields(pretrained: Pretrained) -> dict[str, Any]:
  dtype = jax.tree.leaves(pretrained.params)[0].dtype
  return (
    pretrained.config.to_hf()
    | {"torch_dtype": str(dtype)}
    | _token_ids(pretrained)
  )


def _token_ids(pretrained: Pretrained) -> dict[str, Any]:
  """The ids of special tokens, as the tokenizer or the files name them."""
  tokenizer = pretrained.tokenizer
  if tokenizer is None:
    given = pretrained.generation
    return {name: given[name] for name in TOKEN_IDS if name in given}
  ids = {
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": list(tokenizer.eos_ids),
    "pad_token_id": tokenizer.pad_id,
  }
  return {name: value for name, value in ids.items() if value is not None}
