"""Models as they are loaded, with everything that is known of them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from kvjax.cache.sharding import check_mesh
from kvjax.calibration.record import Calibrated
from kvjax.engine.compression_plan import Plan
from kvjax.engine.decode import Decoding
from kvjax.engine.sampling import GREEDY, Sampling
from kvjax.errors import InputError, warn
from kvjax.methods.base import Method
from kvjax.model import Model, Vocabulary
from kvjax.models.chat import Chat, check_text
from kvjax.models.config import DecoderConfig
from kvjax.models.fields import format_value, is_number
from kvjax.models.language_model import DecoderModel
from kvjax.models.other_families import NO_DECODER
from kvjax.models.sources import DecoderSource, Source, check_eos_ids, find
from kvjax.models.tokenizer import Tokenizer
from kvjax.options.budgets import Budget, PerLayer, Threshold
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.prompts import Prompts
from kvjax.registry.names import get_plan
from kvjax.repeat_request import RepeatRequest

DTYPES = ("bfloat16", "float32")
# Fields of generation_config.json that change what transformers answers, and
# the values with which they do not. The others matter where it samples.
_UNUSED_ALWAYS = {
  "repetition_penalty": 1.0,
  "no_repeat_ngram_size": 0,
  "num_beams": 1,
  "penalty_alpha": 0.0,
}
_UNUSED = _UNUSED_ALWAYS | {
  "min_p": 0.0,
  "typical_p": 1.0,
  "epsilon_cutoff": 0.0,
  "eta_cutoff": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A model with everything that its directory or file contains.

  Attributes:
    model: the pure functions that the engine calls.
    params: the weights.
    tokenizer: text to ids and back, if the directory has one.
    generation: fields of generation_config.json, and the ids of special tokens
      from config.json, preserved for `save`.
  """

  model: Model
  params: PyTree = dataclasses.field(repr=False)
  tokenizer: Tokenizer | None = None
  generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def decoder(self) -> DecoderModel:
    """The model, if it is one of kvjax's own.

    Raises:
      InputError: another package loads models of its family.
    """
    if isinstance(self.model, DecoderModel):
      return self.model
    raise InputError(f"{type(self.model).__name__} {NO_DECODER}.")

  @property
  def config(self) -> DecoderConfig:
    """Sizes and options of a model of kvjax's own.

    Raises:
      InputError: as for `decoder`.
    """
    return self.decoder.config

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
    method: str | Method = "keydiff",
    budget: float | Budget | PerLayer | Calibrated | Threshold = 0.5,
    *,
    schedule: Schedule = WHOLE,
    decoding: Plan | None = None,
  ) -> Chat:
    """Prefills a text and compresses its cache, to ask questions about it.

    Args:
      text: the text.
      method: name of a method with its options, as in `kvjax.get_plan`, or a
        method.
      budget: share of the text to keep (a float), tokens to keep (an integer),
        or a budget, as in `kvjax.get_plan`.
      schedule: when the method evicts.
      decoding: what evicts while answers are decoded, if the method or the
        budget is another; see `kvjax.Plan`, all of whose options
        `kvjax.models.Chat` takes.

    Raises:
      InputError: the name stands for no method, the budget is out of range, or
        the text is none, empty, or longer than the model's context.
    """
    if isinstance(method, Method):
      plan = Plan(method, budget, schedule=schedule, decoding=decoding)
    else:
      plan = get_plan(method, budget, schedule=schedule, decoding=decoding)
    return Chat(self, text, plan)

  def prompts(self, texts: str | Sequence[str]) -> Prompts:
    """Encodes texts to compress, each as the beginning of a user's message.

    `questions` end the message that the chat template begins here. The prompts
    have the request to repeat them, which methods such as KVzip need. As in
    transformers, a special token that is written in a text, such as <|im_end|>,
    becomes that token: remove it from untrusted text.

    Args:
      texts: a text, or a list with one for each row.

    Raises:
      InputError: there is none, one is no text or empty, the model has no
        tokenizer, or its chat template refuses a single user message.

    Examples:
      >>> import kvjax
      >>> lm = kvjax.load("reference")
      >>> contexts = lm.prompts("The code of the door is 4817. Tea is at five.")
      >>> plan = kvjax.get_plan("keydiff", 0.75)
      >>> cache, _ = kvjax.prefill(lm.model, lm.params, contexts, plan)
      >>> questions = lm.questions("What is the code of the door?")
      >>> answers = kvjax.generate(
      ...   lm.model, lm.params, cache, questions, lm.decoding(8)
      ... )
      >>> len(answers.rows())
      1
    """
    given = _listed("text to compress", texts)
    rows = [self.text.split_chat(text)[0] for text in given]
    return Prompts.of(
      [self.text.encode(row) for row in rows],
      repeat_request=RepeatRequest.of(self.text),
    )

  def questions(self, questions: str | Sequence[str]) -> Prompts:
    """Encodes questions about `prompts`, up to where the answer begins.

    Args:
      questions: a question, or a list with one for each row of a cache.

    Raises:
      InputError: as for `prompts`.
    """
    given = _listed("question", questions)
    _, suffix = self.text.split_chat("")
    return Prompts.of([self.text.encode(text + suffix) for text in given])

  def decoding(
    self, max_new_tokens: int = 256, sampling: Sampling = GREEDY
  ) -> Decoding:
    """Options of decoding that end an answer as the model ends it.

    Args:
      max_new_tokens: maximum number of tokens of an answer.
      sampling: how tokens are drawn; `self.sampling` is the model's own.

    Raises:
      InputError: as for `kvjax.Decoding`, or the model has no tokenizer.
    """
    return Decoding(max_new_tokens, self.text.eos_ids, sampling)

  @property
  def sampling(self) -> Sampling:
    """The model's default sampling; greedy if it defines none.

    It uses temperature, top_k and top_p, each only if it is given. A warning
    names other fields that change what transformers answers, such as penalties.

    Raises:
      InputError: one of them is no number, or out of range.
    """
    given = {k: v for k, v in self.generation.items() if v is not None}
    do_sample = given.get("do_sample", False)
    neutral = _UNUSED_ALWAYS if do_sample is False else _UNUSED
    ignored = [
      name for name in neutral if given.get(name, 0) not in (0, neutral[name])
    ]
    if ignored:
      warn(
        f"generation_config.json has {', '.join(ignored)}, which kvjax ignores."
      )
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
    if numbers["temperature"] == 0:
      return GREEDY
    try:
      return Sampling(
        temperature=float(numbers["temperature"]),
        top_k=int(numbers["top_k"]),
        top_p=float(numbers["top_p"]),
      )
    except InputError as error:
      raise InputError(f"generation_config.json: {error}") from error


def _listed(name: str, texts: Any) -> Sequence[str]:
  """Texts, or a text as a list of it, that are not empty."""
  listed = list(texts) if isinstance(texts, list | tuple) else [texts]
  for text in listed:
    check_text(name, text)
  return listed


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
      GGUF file, a directory with one, or a directory of a family that
      `kvjax.models.register` has been given. Or the address of one, such as
      gs://bucket/model, which is copied into the user's cache.
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
  name, tokenizer = _dtype_of(source, dtype, mesh), source.tokenizer()
  loaded, params = source.load(name, mesh)
  # Only the loaded model tells how many tokens one of another family embeds.
  if tokenizer is not None and isinstance(loaded, Vocabulary):
    check_eos_ids(source.place, tokenizer, loaded.vocab_size)
  return Pretrained(loaded, params, tokenizer, source.generation())


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
  if not isinstance(source, DecoderSource):
    raise InputError(f"{source.place} {NO_DECODER}.")
  return source.load(_dtype_of(source, dtype, mesh), mesh)


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


def _dtype_of(
  source: Source, dtype: DTypeLike | None, mesh: jax.sharding.Mesh | None
) -> str:
  """The dtype of a source's weights; refuses others, and meshes of others."""
  if mesh is not None:
    check_mesh(mesh)
  return name_dtype(source.dtype if dtype is None else dtype)
