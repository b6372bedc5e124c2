"""Decoder configurations in the format of Hugging Face's config.json."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError, InputWarning
from kvjax.model import Geometry
from kvjax.models.fields import ConfigError, Fields, format_value
from kvjax.models.other_fields import classify_fields
from kvjax.models.rope import Rope

# The classes that `transformers` would load, by model type.
ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}

# A list of the tensors of all layers is made before any tensor is read.
_MAX_LAYERS = 10_000

_QUANTIZATION = ("quantization_config", "quantization", "compression_config")

# Defaults of transformers for absent fields. If a field is null, and for other
# model types, sizes follow from the query heads.
_ABSENT = {
  ("mistral", "num_key_value_heads"): 8,
  ("qwen2", "num_key_value_heads"): 32,
  ("qwen3", "num_key_value_heads"): 32,
  ("qwen3", "head_dim"): 128,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Configuration of a Llama-like decoder.

  Attributes:
    model_type: the Hugging Face model type, one of `ARCHITECTURES`.
    vocab_size: V.
    hidden_size: E.
    intermediate_size: width of the gated MLP.
    num_layers: L.
    num_heads: N.
    num_kv_heads: K.
    head_dim: D.
    max_positions: the field `max_position_embeddings`.
    rms_norm_eps: epsilon of all norms.
    rope: rotary position embedding.
    tie_embeddings: whether the output matrix is the embedding matrix.
    qkv_bias: whether query, key and value projections have a bias.
    output_bias: whether the attention's output projection has a bias.
    mlp_bias: whether the MLP projections have a bias.
    qk_norm: whether queries and keys are RMS-normalized per head before RoPE.
  """

  model_type: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int
  rms_norm_eps: float
  rope: Rope
  tie_embeddings: bool = False
  qkv_bias: bool = False
  output_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False

  def __post_init__(self) -> None:
    if self.head_dim % 2:
      raise InputError(
        f"config.json has heads of {self.head_dim} dimensions; rotary "
        "embeddings need an even number."
      )
    if self.num_heads % self.num_kv_heads:
      raise InputError(
        f"config.json has {self.num_heads} query heads for "
        f"{self.num_kv_heads} KV heads; the first must be a multiple of the "
        "second."
      )

  @property
  def geometry(self) -> Geometry:
    """The sizes that a KV cache depends on."""
    return Geometry.uniform(
      layers=self.num_layers,
      heads=self.num_heads,
      kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      max_positions=self.rope.max_context(self.max_positions),
    )

  @classmethod
  def from_hf(cls, fields: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the fields of a config.json.

    Fields that cannot change a result are ignored. A warning lists unknown
    fields.

    Raises:
      ConfigError: the architecture is unknown, fields are missing, or fields
        require something that this decoder does not support.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
      raise ConfigError(
        [
          f"has model_type {format_value(model_type)}, which is not supported; "
          f"supported are {', '.join(sorted(ARCHITECTURES))}"
        ]
      )
    absent = {
      name: size for (kind, name), size in _ABSENT.items() if kind == model_type
    }
    read = Fields(absent | dict(fields))
    read.take("model_type")
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    head_dim = read.count("head_dim", hidden // heads)
    layers = read.count("num_hidden_layers", limit=_MAX_LAYERS)
    max_positions = read.count("max_position_embeddings")
    rope = _rope(read, head_dim, max_positions)
    # In transformers, Mistral has no biases and Qwen2 always those of queries,
    # keys and values, whatever the field says. A field that is not read here is
    # left to `classify_fields`, which refuses it unless it is neutral.
    bias = model_type != "mistral" and read.flag("attention_bias")
    values: dict[str, Any] = dict(
      vocab_size=read.count("vocab_size"),
      hidden_size=hidden,
      intermediate_size=read.count("intermediate_size"),
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=read.count("num_key_value_heads", heads),
      head_dim=head_dim,
      max_positions=max_positions,
      rms_norm_eps=read.epsilon("rms_norm_eps", 1e-6),
      rope=rope,
      tie_embeddings=read.flag("tie_word_embeddings"),
      qkv_bias=bias or model_type == "qwen2",
      output_bias=bias and model_type != "qwen2",
      mlp_bias=model_type == "llama" and read.flag("mlp_bias"),
      qk_norm=model_type == "qwen3",
    )
    _check_supported(read)
    _check_windows(read, model_type, layers, rope.max_context(max_positions))
    other_fields = classify_fields(read.rest, model_type)
    read.faults += other_fields.faults
    read.refuse_faults()
    if other_fields.unknown:
      warnings.warn(
        "config.json has fields that kvjax does not know and passes over: "
        f"{', '.join(other_fields.unknown)}.",
        InputWarning,
        stacklevel=2,
      )
    return cls(model_type, **values)

  def to_hf(self) -> dict[str, Any]:
    """Returns the fields of a config.json that `from_hf` reads."""
    fields: dict[str, Any] = {
      "architectures": [ARCHITECTURES[self.model_type]],
      "model_type": self.model_type,
      "vocab_size": self.vocab_size,
      "hidden_size": self.hidden_size,
      "intermediate_size": self.intermediate_size,
      "num_hidden_layers": self.num_layers,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "max_position_embeddings": self.max_positions,
      "rms_norm_eps": self.rms_norm_eps,
      "hidden_act": "silu",
      "tie_word_embeddings": self.tie_embeddings,
    } | self.rope.to_hf()
    if self.model_type in ("llama", "qwen3"):
      fields["attention_bias"] = self.output_bias
    if self.model_type == "llama":
      fields["mlp_bias"] = self.mlp_bias
    if self.model_type == "mistral":
      fields["sliding_window"] = None
    return fields


def _rope(fields: Fields, head_dim: int, max_positions: int) -> Rope:
  """Reads `rope_parameters`, or the older pair of fields, or both."""
  theta = fields.take("rope_theta")
  original = fields.take("original_max_position_embeddings")
  rope = fields.object("rope_scaling") | fields.object("rope_parameters")
  if theta is not None:
    rope.setdefault("rope_theta", theta)
  # As in transformers 5; other kinds do not use it.
  kind = rope.get("rope_type") or rope.get("type")
  if original is not None and kind in ("llama3", "yarn"):
    rope.setdefault("original_max_position_embeddings", original)
  try:
    return Rope.from_hf(rope, head_dim, max_positions)
  except ConfigError as error:
    # Go on with the default, so that one error names all faults;
    # `refuse_faults` raises before it is used.
    fields.faults += error.faults
    return Rope.from_hf({}, head_dim, max_positions)


def _check_supported(fields: Fields) -> None:
  """Checks the fields that have one supported value."""
  activations = {"hidden_act": fields.take("hidden_act", "silu")}
  # Gemma's name of the same field, which some converters copy.
  other = fields.take("hidden_activation")
  if other is not None:
    activations["hidden_activation"] = other
  fields.faults += [
    f"has {name} {format_value(activation)}; only 'silu' is supported"
    for name, activation in activations.items()
    if activation not in ("silu", "swish")
  ]
  quantization = [fields.take(name) for name in _QUANTIZATION]
  if any(quantization):
    fields.faults.append(
      "describes quantized weights; load the unquantized model"
    )


def _check_windows(
  fields: Fields, model_type: str, layers: int, context: int
) -> None:
  """Checks the fields that describe sliding-window attention."""
  kinds = fields.names("layer_types")
  mistral = model_type == "mistral"
  # The default of transformers for Mistral.
  window = fields.take("sliding_window", 4096 if mistral else None)
  enabled = fields.flag("use_sliding_window") or mistral
  first = fields.take("max_window_layers")
  wrong = False
  for name, value in (("sliding_window", window), ("max_window_layers", first)):
    if value is not None and (type(value) is not int or value < 0):
      fields.faults.append(
        f"has {format_value(value)} for {name!r}, which must be a whole number "
        "or null"
      )
      wrong = True
  if wrong:
    return
  unsupported = sorted(set(kinds) - {"full_attention", "sliding_attention"})
  if unsupported:
    fields.faults.append(
      f"has layers of the type {unsupported[0]!r}, which is not supported; "
      "'full_attention' is"
    )
  if kinds and len(kinds) != layers:
    fields.faults.append(
      f"has {len(kinds)} layer_types for {layers} layers; give one for each"
    )
  if kinds:
    windows = "sliding_attention" in kinds
  else:
    # In Qwen models, layers from this one on have a window.
    all_full = type(first) is int and first >= layers and not mistral
    windows = enabled and bool(window) and not all_full
  if windows and not (window and window >= context):
    fields.faults.append(
      "asks for sliding-window attention, which is not supported yet; use a "
      "model whose layers all attend to the whole context"
    )
