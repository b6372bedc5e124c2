"""Decoder configurations, read from and written to Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.models.rope import Rope

# The classes that `transformers` would load, by model type.
ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}

# Fields that describe training, generation or the file itself and change
# nothing in a forward pass.
_WITHOUT_EFFECT = frozenset(
  "_attn_implementation_autoset _name_or_path architectures "
  "attention_dropout auto_map bos_token_id chunk_size_feed_forward dtype "
  "eos_token_id id2label initializer_range is_encoder_decoder "
  "is_llama_config label2id max_window_layers output_attentions "
  "output_hidden_states pad_token_id problem_type return_dict "
  "torch_dtype transformers_version unsloth_fixed use_cache".split()
)

# Fields that are known and may only be false, for all types or for some.
_ONLY_FALSE = {
  "use_mrope": tuple(ARCHITECTURES),
  "rope_interleaved": tuple(ARCHITECTURES),
  "attention_bias": ("mistral",),
  "mlp_bias": ("mistral", "qwen2", "qwen3"),
}

# What transformers takes where a file names no such field at all; where it is
# null, and for other types, sizes follow from the query heads.
_ABSENT = {
  ("mistral", "num_key_value_heads"): 8,
  ("qwen2", "num_key_value_heads"): 32,
  ("qwen3", "num_key_value_heads"): 32,
  ("qwen3", "head_dim"): 128,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """One decoder of the Llama kind.

  Attributes:
    model_type: the Hugging Face model type, one of `ARCHITECTURES`.
    vocab_size: V.
    hidden_size: E.
    intermediate_size: width of the gated MLP.
    num_layers: L.
    num_heads: N.
    num_kv_heads: K.
    head_dim: D.
    max_positions: `max_position_embeddings` of the file.
    rms_norm_eps: epsilon of every norm.
    rope: rotary position embedding.
    tie_embeddings: the output matrix is the embedding matrix.
    qkv_bias: query, key and value projections have a bias.
    output_bias: the attention's output projection has a bias.
    mlp_bias: the MLP projections have a bias.
    qk_norm: queries and keys are RMS-normalized per head before RoPE.
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
      max_positions=self.rope.longest_context(self.max_positions),
    )

  @classmethod
  def from_hf(cls, fields: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the fields of a config.json.

    Raises:
      InputError: the architecture is unknown, a field is missing, or a field
        asks for something that this decoder does not do.
    """
    rest = dict(fields)
    model_type = rest.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
      raise InputError(
        f"config.json has model_type {model_type!r}, which is not supported; "
        f"supported are {', '.join(sorted(ARCHITECTURES))}."
      )
    _refuse_unsupported(rest, model_type)
    for (kind, name), size in _ABSENT.items():
      if kind == model_type:
        rest.setdefault(name, size)
    heads = _count(rest, "num_attention_heads")
    hidden = _count(rest, "hidden_size")
    head_dim = _count(rest, "head_dim", hidden // heads)
    max_positions = _count(rest, "max_position_embeddings")
    attention_bias = _flag(rest, "attention_bias")
    config = cls(
      model_type=model_type,
      vocab_size=_count(rest, "vocab_size"),
      hidden_size=hidden,
      intermediate_size=_count(rest, "intermediate_size"),
      num_layers=_count(rest, "num_hidden_layers"),
      num_heads=heads,
      num_kv_heads=_count(rest, "num_key_value_heads", heads),
      head_dim=head_dim,
      max_positions=max_positions,
      rms_norm_eps=_epsilon(rest),
      rope=Rope.from_hf(_take_rope(rest), head_dim, max_positions),
      tie_embeddings=_flag(rest, "tie_word_embeddings"),
      qkv_bias=attention_bias or model_type == "qwen2",
      output_bias=attention_bias and model_type != "qwen2",
      mlp_bias=_flag(rest, "mlp_bias"),
      qk_norm=model_type == "qwen3",
    )
    unknown = sorted(set(rest) - _WITHOUT_EFFECT)
    if unknown:
      raise InputError(
        f"config.json has the field {unknown[0]!r}, which this decoder does "
        f"not know for {model_type}; remove it if it has no effect."
      )
    return config

  def to_hf(self) -> dict[str, Any]:
    """The fields of a config.json that `from_hf` reads back."""
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


def _count(
  fields: dict[str, Any], name: str, default: int | None = None
) -> int:
  """Takes a positive whole number out of `fields`."""
  value = fields.pop(name, None)
  value = default if value is None else value
  if value is None:
    raise InputError(f"config.json lacks the field {name!r}.")
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise InputError(
      f"config.json has {value!r} for {name!r}, which must be a whole number "
      "of 1 or more."
    )
  return value


def _epsilon(fields: dict[str, Any]) -> float:
  value = fields.pop("rms_norm_eps", 1e-6)
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise InputError(
      f"config.json has {value!r} for 'rms_norm_eps', which must be a number."
    )
  return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
  """Takes true or false out of `fields`; absent is false."""
  value = fields.pop(name, None)
  if value is None or isinstance(value, bool):
    return bool(value)
  raise InputError(
    f"config.json has {value!r} for {name!r}, which must be true or false."
  )


def _take_rope(fields: dict[str, Any]) -> dict[str, Any]:
  """RoPE fields, from `rope_parameters` or the older pair of fields."""
  theta = fields.pop("rope_theta", None)
  rope: dict[str, Any] = {}
  for name in ("rope_scaling", "rope_parameters"):
    given = fields.pop(name, None) or {}
    if not isinstance(given, dict):
      raise InputError(
        f"config.json has {given!r} for {name!r}, which must be an object."
      )
    rope |= given
  if theta is not None:
    rope.setdefault("rope_theta", theta)
  return rope


def _refuse_unsupported(fields: dict[str, Any], model_type: str) -> None:
  """Takes the fields that have one supported value out of `fields`."""
  activation = fields.pop("hidden_act", "silu")
  if activation not in ("silu", "swish"):
    raise InputError(
      f"config.json has hidden_act {activation!r}; only 'silu' is supported."
    )
  for name, types in _ONLY_FALSE.items():
    if model_type in types and fields.pop(name, False):
      raise InputError(
        f"config.json sets {name!r}, which is not supported for {model_type}."
      )
  if fields.pop("pretraining_tp", 1) != 1:
    raise InputError(
      "config.json has pretraining_tp other than 1, which is not supported."
    )
  if fields.pop("quantization_config", None):
    raise InputError(
      "config.json describes quantized weights; load the unquantized model."
    )
  # transformers' own default where a Mistral file names no window.
  default = 4096 if model_type == "mistral" else None
  window = fields.pop("sliding_window", default)
  uses_window = fields.pop("use_sliding_window", model_type == "mistral")
  kinds = fields.pop("layer_types", None) or []
  if (window and uses_window) or any(k != "full_attention" for k in kinds):
    raise InputError(
      "config.json asks for sliding-window attention, which is not supported "
      "yet; use a model whose layers all attend to the whole context."
    )
