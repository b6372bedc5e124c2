"""Sources of models: Hugging Face directories and GGUF files."""

import abc
import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import PyTree

from kvjax.addresses import fetch, is_address
from kvjax.errors import InputError
from kvjax.files import is_present, read_json, read_json_if_present
from kvjax.model import Model
from kvjax.models import catalog, other_families
from kvjax.models.config import DecoderConfig
from kvjax.models.gguf.metadata import read_config
from kvjax.models.gguf.reader import GgufFile
from kvjax.models.gguf.tokenizer import read_tokenizer
from kvjax.models.gguf.weights import open_gguf_tensors
from kvjax.models.language_model import DecoderModel, as_shapes
from kvjax.models.orbax_files import read_checkpoint
from kvjax.models.sharding import param_shardings
from kvjax.models.tensor_files import has_checkpoint, open_tensors
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weights import read_weights
from kvjax.registry.parsing import suggest

_CONFIG = "config.json"
# OWNER/NAME.
_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Special tokens, which both of a directory's configurations may name.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class Source(Protocol):
  """The parts of a model, which are read on demand.

  A missing, broken or unsupported part raises an InputError.
  """

  @property
  def place(self) -> pathlib.Path:
    """The path of the file or directory."""

  @property
  def dtype(self) -> str:
    """Default dtype of the weights."""

  def tokenizer(self) -> Tokenizer | None:
    """Reads the tokenizer, if there is one."""

  def load(
    self, dtype: str, mesh: jax.sharding.Mesh | None
  ) -> tuple[Model, PyTree]:
    """Makes the model and reads its weights."""

  def generation(self) -> Mapping[str, Any]:
    """Reads generation_config.json, and the token ids of config.json."""


class DecoderSource(abc.ABC):
  """A source of a model of `kvjax.models.decoder`."""

  place: pathlib.Path

  @property
  @abc.abstractmethod
  def config(self) -> DecoderConfig:
    """The configuration."""

  @abc.abstractmethod
  def tokenizer(self) -> Tokenizer | None:
    """Reads the tokenizer, if there is one."""

  @abc.abstractmethod
  def weights(
    self, template: nnx.State, shardings: PyTree[jax.sharding.Sharding] | None
  ) -> nnx.State:
    """Reads the weights; see `kvjax.models.weights.read_weights`."""

  def load(
    self, dtype: str, mesh: jax.sharding.Mesh | None
  ) -> tuple[DecoderModel, nnx.State]:
    """Makes the model and reads its weights."""
    model, template = as_shapes(self.config, dtype)
    shardings = None
    if mesh is not None:
      shardings = param_shardings(template, model.geometry, mesh)
    return model, self.weights(template, shardings)

  def _check_ids(self, tokenizer: Tokenizer) -> Tokenizer:
    """Refuses ids that end an answer and are not embedded."""
    check_eos_ids(self.place, tokenizer, self.config.vocab_size)
    return tokenizer


def check_eos_ids(
  place: pathlib.Path, tokenizer: Tokenizer, embedded: int
) -> None:
  """Refuses ids that end an answer and are not embedded.

  Raises:
    InputError: one is not below `embedded`, so that no answer would end.
  """
  for token_id in tokenizer.eos_ids:
    if not 0 <= token_id < embedded:
      raise InputError(
        f"In {place} an answer ends with the id {token_id} (eos_token_id), but "
        f"the model embeds {embedded} tokens only."
      )


def find(model: str | os.PathLike[str]) -> Source:
  """Opens the source of a model.

  Args:
    model: a path or a name, as for `kvjax.models.load`.

  Raises:
    InputError: the path does not exist, a GGUF file cannot be read, or a named
      model or an address cannot be fetched.
  """
  # For callers without a type checker, as of os.environ.get.
  if not isinstance(model, str | os.PathLike) or not str(model).strip():
    raise InputError(
      "A model is a name, such as 'reference', or the path of its directory or "
      f"GGUF file, not {model!r}."
    )
  if is_address(model):
    model = fetch(model)
  place = catalog.locate(pathlib.Path(os.path.expanduser(model)))
  if os.path.isfile(place):
    return _Gguf(GgufFile.open(place))
  if not is_present(place / _CONFIG):
    # config.json comes first: a directory may have GGUF files besides.
    files = sorted(place.glob("*.gguf")) if os.path.isdir(place) else []
    if len(files) == 1:
      return _Gguf(GgufFile.open(files[0]))
    if files:
      raise InputError(
        f"{place} has {len(files)} GGUF files; name the one to load."
      )
    if os.path.lexists(place):
      raise InputError(
        f"{place} has no {_CONFIG}; a model directory holds {_CONFIG}, "
        "safetensors weights and tokenizer.json, or a GGUF file."
      )
    if _OF_HUB.fullmatch(str(model)):
      raise InputError(
        f"There is no folder {str(model)!r}; for the model of this name on the "
        f"Hugging Face hub, run `hf download {model} --local-dir DIR` and give "
        "DIR."
      )
    names = [*catalog.NAMED, catalog.REFERENCE]
    raise InputError(
      f"There is no model {str(model)!r}{suggest(str(model), names)}; give the "
      "path of a Hugging Face directory or a GGUF file, or one of the names "
      f"{', '.join(names)}."
    )
  fields = read_json(place / _CONFIG)
  other = other_families.find(fields.get("model_type"))
  return _HuggingFace(place) if other is None else _Other(place, other)


@dataclasses.dataclass(frozen=True)
class _HuggingFace(DecoderSource):
  dtype: ClassVar[str] = "bfloat16"
  place: pathlib.Path

  @functools.cached_property
  def config(self) -> DecoderConfig:
    return DecoderConfig.from_hf(read_json(self.place / _CONFIG))

  def tokenizer(self) -> Tokenizer | None:
    tokenizer = _read_tokenizer(self.place, self.config.vocab_size)
    return None if tokenizer is None else self._check_ids(tokenizer)

  def weights(
    self, template: nnx.State, shardings: PyTree[jax.sharding.Sharding] | None
  ) -> nnx.State:
    if has_checkpoint(self.place):
      return read_checkpoint(self.place, template, shardings)
    tensors = open_tensors(self.place)
    return read_weights(tensors, self.config, template, shardings)

  def generation(self) -> Mapping[str, Any]:
    return _read_generation(self.place)


@dataclasses.dataclass(frozen=True)
class _Gguf(DecoderSource):
  dtype: ClassVar[str] = "float32"
  file: GgufFile

  @property
  def place(self) -> pathlib.Path:  # type: ignore[override]
    return self.file.path

  @functools.cached_property
  def config(self) -> DecoderConfig:
    return read_config(self.file)

  def tokenizer(self) -> Tokenizer:
    return self._check_ids(read_tokenizer(self.file, self.config.vocab_size))

  def weights(
    self, template: nnx.State, shardings: PyTree[jax.sharding.Sharding] | None
  ) -> nnx.State:
    tensors = open_gguf_tensors(self.file, self.config)
    return read_weights(tensors, self.config, template, shardings)

  def generation(self) -> Mapping[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class _Other:
  dtype: ClassVar[str] = "bfloat16"
  place: pathlib.Path
  family: other_families.Load

  def tokenizer(self) -> Tokenizer | None:
    return _read_tokenizer(self.place)

  def load(
    self, dtype: str, mesh: jax.sharding.Mesh | None
  ) -> tuple[Model, PyTree]:
    return other_families.run(self.family, self.place, dtype, mesh)

  def generation(self) -> Mapping[str, Any]:
    return _read_generation(self.place)


def _read_tokenizer(
  place: pathlib.Path, num_embedded: int | None = None
) -> Tokenizer | None:
  if not is_present(place / "tokenizer.json"):
    return None
  return Tokenizer.load(place, num_embedded)


def _read_generation(place: pathlib.Path) -> Mapping[str, Any]:
  fields = read_json(place / _CONFIG)
  ids = {name: fields[name] for name in TOKEN_IDS if name in fields}
  return ids | read_json_if_present(place / "generation_config.json")
