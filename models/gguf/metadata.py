"""The metadata of a GGUF file as the fields of a Hugging Face config.json."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import gguf
import numpy as np

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig
from kvjax.models.features import find_gguf_feature
from kvjax.models.gguf.reader import GgufFile
from kvjax.models.layer_fields import FULL, SLIDING

# llama.cpp's architectures, and the model types of `DecoderConfig` for them.
MODEL_TYPES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma3": "gemma3_text",
}

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

# The scaling that Llama 3.1 and its successors share. The file contains only
# the frequency divisors that follow from it and from the factor.
_LLAMA3 = {
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}

# Fields of the architecture that are read below or have no effect.
_KNOWN = frozenset(
  "vocab_size context_length embedding_length block_count feed_forward_length "
  "attention.head_count attention.head_count_kv attention.key_length "
  "attention.value_length attention.layer_norm_rms_epsilon "
  "rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor "
  "rope.scaling.attn_factor rope.scaling.original_context_length "
  "rope.scaling.finetuned rope.scaling.yarn_beta_fast "
  "rope.scaling.yarn_beta_slow rope.scale_linear tensor_data_layout "
  "pooling_type attention.causal".split()
)
# Those of Gemma 3 besides.
_GEMMA3 = frozenset(
  "attention.sliding_window attention.sliding_window_pattern "
  "rope.freq_base_swa final_logit_softcapping".split()
)
# What llama.cpp takes for fields that files of Gemma 3 lack: every sixth layer
# has no window.
_PERIOD, _LOCAL_THETA = 6, 10000.0
# The layers of the model of 27B, whose scale of attention is another.
_LAYERS_27B = 62


def read_config(file: GgufFile) -> DecoderConfig:
  """Reads the configuration of the decoder from the metadata.

  Raises:
    InputError: the architecture is not supported, or a field is missing,
      invalid or not supported.
  """
  fields = config_fields(file)
  try:
    return DecoderConfig.from_hf(fields)
  except InputError as error:
    # Name the actual file in the message.
    sentence = str(error).replace("config.json", str(file.path))
    raise InputError(sentence) from error


def config_fields(file: GgufFile) -> dict[str, Any]:
  """Converts the metadata to the fields of a config.json.

  Raises:
    InputError: as for `read_config`.
  """
  architecture = file.fields.get(gguf.Keys.General.ARCHITECTURE)
  if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
    feature = find_gguf_feature(file.fields, str(architecture))
    if feature is not None:
      raise InputError(
        f"{file.path} asks for {feature[0]}, as {feature[1]!r} says, which is "
        "not supported."
      )
    raise InputError(
      f"{file.path} is of the architecture {architecture!r}, which is not "
      f"supported; supported are {', '.join(MODEL_TYPES)}."
    )
  # gguf-split leaves a count of 0 in the files that it merges.
  parts = file.fields.get(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 0)
  if parts not in (0, 1):
    raise InputError(
      f"{file.path} is one of {parts} parts of a model; merge them to one file "
      "with llama.cpp's gguf-split."
    )
  fields = _Fields(file, architecture)
  gemma3 = architecture == "gemma3"
  fields.refuse_unknown(_KNOWN | _GEMMA3 if gemma3 else _KNOWN)
  heads = fields.count("attention.head_count")
  width = fields.count("embedding_length")
  head_dim = fields.count("attention.key_length", width // heads)
  for name in ("attention.value_length", "rope.dimension_count"):
    fields.only(name, head_dim, f"where heads have {head_dim} dimensions")
  fields.only("attention.causal", True, "for a decoder")
  layers = fields.count("block_count")
  if layers > len(file.tensors):
    raise InputError(
      f"{file.path} has {layers} for {architecture}.block_count, but not as "
      "many tensors."
    )
  if EMBEDDING not in file.tensors:
    raise InputError(f"The weights in {file.path} lack the tensor {EMBEDDING}.")
  config = {
    "model_type": MODEL_TYPES[architecture],
    "vocab_size": file.tensors[EMBEDDING].shape[0],
    "hidden_size": width,
    "intermediate_size": fields.count("feed_forward_length"),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": fields.count("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "max_position_embeddings": fields.count("context_length"),
    "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    "rope_parameters": _rope(fields, file, head_dim),
    "tie_word_embeddings": OUTPUT not in file.tensors,
    "use_sliding_window": False,
  }
  if architecture == "llama":
    config |= _biases(file)
  if gemma3:
    config |= _gemma3(fields, layers, width // heads, head_dim)
  return config


def _biases(file: GgufFile) -> dict[str, bool]:
  """Detects biases of Llama models, which no field describes."""
  return {
    "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
  }


def _gemma3(
  fields: "_Fields", layers: int, share: int, head_dim: int
) -> dict[str, Any]:
  """Reads windows, the RoPE of layers with a window, and constant factors.

  Args:
    fields: the fields.
    layers: L.
    share: E / N, which the model of 27B scales attention by instead of D.
    head_dim: D.
  """
  config: dict[str, Any] = {
    "sliding_window": fields.count("attention.sliding_window"),
    "rope_local_base_freq": fields.number("rope.freq_base_swa", _LOCAL_THETA),
    "query_pre_attn_scalar": share if layers == _LAYERS_27B else head_dim,
  }
  cap = "final_logit_softcapping"
  if fields.has(cap):
    config[cap] = fields.number(cap)
  pattern = "attention.sliding_window_pattern"
  if fields.has_list(pattern):
    local = fields.flags(pattern, layers)
    config["layer_types"] = [SLIDING if one else FULL for one in local]
  else:
    config["sliding_window_pattern"] = fields.count(pattern, _PERIOD)
  return config


def _rope(fields: "_Fields", file: GgufFile, head_dim: int) -> dict[str, Any]:
  """Converts to the field `rope_parameters` of config.json."""
  theta = fields.number("rope.freq_base", 10000.0)
  rope: dict[str, Any] = {"rope_theta": theta}
  older = fields.number("rope.scale_linear", 1.0)
  kind = fields.text("rope.scaling.type", "none" if older == 1.0 else "linear")
  factor = fields.number("rope.scaling.factor", older)
  if ROPE_FACTORS in file.tensors:
    if kind != "none":
      raise InputError(
        f"{file.path} has both rope.scaling.type {kind!r} and the tensor "
        f"{ROPE_FACTORS}; only one of them can be."
      )
    return rope | _llama3(file, theta, head_dim)
  if kind == "none":
    return rope
  if kind == "linear":
    return rope | {"rope_type": kind, "factor": factor}
  if kind != "yarn":
    raise InputError(
      f"{file.path} has rope.scaling.type {kind!r}, which is not supported; "
      "supported are none, linear and yarn."
    )
  rope |= {"rope_type": kind, "factor": factor}
  original = "rope.scaling.original_context_length"
  rope["original_max_position_embeddings"] = fields.count(original)
  for name in ("beta_fast", "beta_slow"):
    if fields.has(f"rope.scaling.yarn_{name}"):
      rope[name] = fields.number(f"rope.scaling.yarn_{name}")
  attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
  if attention_factor != 1.0:
    # llama.cpp multiplies the attention factor of YaRN's paper by this one.
    rope["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
  return rope


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
  """Recovers the scaling of Llama 3 from its frequency divisors."""
  stored = file.tensors[ROPE_FACTORS]
  divisors = gguf.dequantize(stored.data, stored.kind).astype(np.float64)
  # The lowest frequencies are divided by the whole factor.
  factor = _round_float32(
    np.max(divisors, initial=1.0, where=np.isfinite(divisors))
  )
  low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
  exponents = np.arange(0, head_dim, 2) / head_dim
  turns = theta**-exponents / (2 * math.pi)
  turns *= _LLAMA3["original_max_position_embeddings"]
  ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
  # As `_llama3` in `rope`, as a divisor of each frequency.
  expected = 1 / ((1 - ramp) / factor + ramp)
  if divisors.shape != expected.shape or not np.allclose(
    divisors, expected, rtol=1e-4
  ):
    raise InputError(
      f"The tensor {ROPE_FACTORS} in {file.path} is not that of Llama 3.1 to "
      "3.3, whose scaling of rotary embeddings alone is supported."
    )
  return {"rope_type": "llama3", "factor": factor} | _LLAMA3


def _round_float32(value: float) -> float:
  """Rounds to the fewest digits that give the same float32.

  A file has 9.9999997e-06 where config.json had 1e-05.
  """
  return float(str(np.float32(value)))


class _Fields:
  """Fields of the architecture, with type checks."""

  def __init__(self, file: GgufFile, architecture: str) -> None:
    self._path = file.path
    self._start = f"{architecture}."
    self._fields: Mapping[str, Any] = {
      name.removeprefix(self._start): value
      for name, value in file.fields.items()
      if name.startswith(self._start)
    }

  def refuse_unknown(self, known: Collection[str]) -> None:
    """Refuses fields that change the computation in llama.cpp but not here.

    Fields that the gguf library does not define have no effect in llama.cpp.
    """
    for name, value in self._fields.items():
      if name not in known and name in _library_names() and _is_set(value):
        raise InputError(
          f"{self._path} sets {self._start}{name} to {value!r}, which is not "
          "supported."
        )

  def has(self, name: str) -> bool:
    """Whether the file has the field."""
    return name in self._fields

  def has_list(self, name: str) -> bool:
    """Whether the field is an array."""
    return isinstance(self._fields.get(name), list)

  def flags(self, name: str, layers: int) -> list[bool]:
    """Reads an array with true or false for each layer."""
    value = self._get(name, None)
    if len(value) != layers or not all(one in (0, 1) for one in value):
      raise self._wrong(
        name, value, f"true or false for each of {layers} layers"
      )
    return list(map(bool, value))

  def count(self, name: str, default: int | None = None) -> int:
    """Reads an integer from 1 to 2^31 - 1."""
    value = self._get(name, default)
    if type(value) is not int or not 1 <= value < 2**31:
      raise self._wrong(name, value, f"a whole number from 1 to {2**31 - 1}")
    return value

  def number(self, name: str, default: float | None = None) -> float:
    """Reads a positive finite number."""
    value = self._get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
      raise self._wrong(name, value, "a number above 0")
    return _round_float32(value) if isinstance(value, float) else value

  def text(self, name: str, default: str) -> str:
    """Reads a string."""
    value = self._get(name, default)
    if not isinstance(value, str):
      raise self._wrong(name, value, "a text")
    return value

  def only(self, name: str, value: Any, why: str) -> None:
    """Refuses any other value."""
    actual = self._get(name, value)
    if actual != value:
      raise InputError(
        f"{self._path} has {actual!r} for {self._start}{name}; only {value!r} "
        f"is supported {why}."
      )

  def _get(self, name: str, default: Any) -> Any:
    value = self._fields.get(name, default)
    if value is None:
      raise InputError(f"{self._path} lacks the field {self._start}{name}.")
    return value

  def _wrong(self, name: str, value: Any, expected: str) -> InputError:
    shown = "a list" if isinstance(value, list) else repr(value)
    return InputError(
      f"{self._path} has {shown} for {self._start}{name}, which must be "
      f"{expected}."
    )


@functools.cache
def _library_names() -> frozenset[str]:
  """The architecture fields that the gguf library defines."""
  start = "{arch}."
  groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM)
  return frozenset(
    value.removeprefix(start)
    for group in groups
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith(start)
  )


def _is_set(value: Any) -> bool:
  return any(value) if isinstance(value, list) else bool(value)
