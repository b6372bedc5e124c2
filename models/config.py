"""Decoder configurations in the format of Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError, warn
from kvjax.model import Geometry, LayerSpec
from kvjax.models.families import FAMILIES, Family
from kvjax.models.features import find_features, text_fields
from kvjax.models.fields import ConfigError, Fields, format_value
from kvjax.models.layer_fields import (
  FULL,
  SLIDING,
  read_experts,
  read_kinds,
  write_experts,
  write_kinds,
)
from kvjax.models.other_fields import classify_fields
from kvjax.models.rope import Rope
from kvjax.models.rope_fields import read_ropes
from kvjax.models.structure import ExpertSizes, LayerKind, Style

# A list of the tensors of all layers is made before any tensor is read.
_MAX_LAYERS = 10_000

_QUANTIZATION = ("quantization_config", "quantization", "compression_config")
# Experts in this format are dequantized as they are read.
_DEQUANTIZED = "mxfp4"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Configuration of a decoder.

  Attributes:
    model_type: the Hugging Face model type, one of `FAMILIES`.
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
    local_rope: that of layers whose kind has a "local" one.
    tie_embeddings: whether the output matrix is the embedding matrix.
    qkv_bias: whether query, key and value projections have a bias.
    output_bias: whether the attention's output projection has a bias.
    mlp_bias: whether the MLP projections have a bias.
    kinds: the kinds of layers, in the order of their first layers.
    pattern: for each layer, the index of its kind; empty if there is one kind.
    experts: sizes of the experts of sparse layers.
    attention_scale: factor of the attention's logits; None for D^-1/2.
    embedding_scale: factor of the embeddings, rounded to their dtype.
    residual_scale: factor of what attention and MLP add to the residual.
    logit_scale: factor of the next-token logits.
    logit_softcap: c; next-token logits become c tanh(logits / c).
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
  local_rope: Rope | None = None
  tie_embeddings: bool = False
  qkv_bias: bool = False
  output_bias: bool = False
  mlp_bias: bool = False
  kinds: tuple[LayerKind, ...] = (LayerKind(),)
  pattern: tuple[int, ...] = ()
  experts: ExpertSizes | None = None
  attention_scale: float | None = None
  embedding_scale: float = 1.0
  residual_scale: float = 1.0
  logit_scale: float = 1.0
  logit_softcap: float | None = None

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
  def family(self) -> Family:
    """What the model type fixes."""
    return FAMILIES[self.model_type]

  @property
  def style(self) -> Style:
    """Structure of the layers."""
    return self.family.style

  @property
  def layer_kinds(self) -> tuple[int, ...]:
    """For each layer, the index of its kind."""
    return self.pattern or (0,) * self.num_layers

  def layers_of(self, kind: int) -> list[int]:
    """The layers of a kind, in order."""
    return [n for n, own in enumerate(self.layer_kinds) if own == kind]

  @property
  def ropes(self) -> dict[str, Rope]:
    """The rotary embeddings of the layers, by the names in `LayerKind`."""
    named = {"global": self.rope, "local": self.local_rope}
    used = {kind.rope for kind in self.kinds}
    return {
      name: rope
      for name, rope in named.items()
      if name in used and rope is not None
    }

  @property
  def geometry(self) -> Geometry:
    """The sizes that a KV cache depends on.

    The layers of a kind are one stack of weights.
    """
    specs = [
      LayerSpec(
        self.num_heads,
        self.num_kv_heads,
        self.head_dim,
        window=kind.window,
        scale=self.attention_scale,
        sinks=self.style.sinks,
        weights=number,
        parallel=self.style.parallel,
      )
      for number, kind in enumerate(self.kinds)
    ]
    return Geometry(
      tuple(specs[number] for number in self.layer_kinds),
      _context(self.family, self.rope, self.max_positions),
    )

  @classmethod
  def from_hf(cls, fields: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the fields of a config.json.

    Of a model with images, the text decoder is read. Fields that cannot change
    a result are ignored. A warning lists unknown fields.

    Raises:
      ConfigError: the architecture is unknown, fields are missing, or fields
        require something that this decoder does not support.
    """
    faults, named = find_features(fields)
    fields = text_fields(fields)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
      raise ConfigError(
        [
          *faults,
          f"has model_type {format_value(model_type)}, which is not supported; "
          f"supported are {', '.join(sorted(FAMILIES))}, and those that "
          "kvjax.models.register is given",
        ]
      )
    family = FAMILIES[model_type]
    read = Fields({**family.absent, **fields})
    read.faults += faults
    for name in ("model_type", *named):
      read.take(name)
    for name, value in family.fixed.items():
      found = read.take(name, value)
      if found != value:
        read.faults.append(
          f"has {format_value(found)} for {name!r}, which is not supported for "
          f"{model_type}; {value!r} is"
        )
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    # Where sizes are wrong, they are the faults that are named.
    head_dim = read.count("head_dim", max(hidden // heads, 1))
    layers = read.count("num_hidden_layers", limit=_MAX_LAYERS)
    max_positions = read.count("max_position_embeddings")
    rope, local_rope = read_ropes(read, family, head_dim, max_positions)
    # Where it is not read, `classify_fields` refuses it unless it is neutral.
    said = family.attention_bias == "field" and read.flag("attention_bias")
    if family.attention_bias == "always":
      read.take("attention_bias")
    always = family.attention_bias == "always"
    experts = read_experts(read, model_type)
    kinds = read_kinds(
      read, model_type, family, layers, _context(family, rope, max_positions)
    )
    values: dict[str, Any] = dict(
      vocab_size=read.count("vocab_size"),
      hidden_size=hidden,
      intermediate_size=_inner_width(read, experts),
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=read.count("num_key_value_heads", heads),
      head_dim=head_dim,
      max_positions=max_positions,
      rms_norm_eps=read.epsilon(family.epsilon, 1e-6),
      rope=rope,
      local_rope=local_rope,
      tie_embeddings=read.flag("tie_word_embeddings"),
      qkv_bias=said or always or family.attention_bias == "qkv",
      output_bias=said or always,
      mlp_bias=family.mlp_bias and read.flag("mlp_bias"),
      experts=experts,
      **_distinct(kinds),
      **_factors(read, family, hidden, head_dim),
    )
    _check_supported(read, model_type, family)
    other_fields = classify_fields(read.rest, model_type, family.activations)
    read.faults += other_fields.faults
    read.refuse_faults()
    if other_fields.unknown:
      warn(
        "config.json has fields that kvjax does not know and passes over: "
        f"{', '.join(other_fields.unknown)}."
      )
    return cls(model_type, **values)

  def to_hf(self) -> dict[str, Any]:
    """Returns the fields of a config.json that `from_hf` reads."""
    family = self.family
    fields: dict[str, Any] = {
      "architectures": [family.architecture],
      "model_type": self.model_type,
      "vocab_size": self.vocab_size,
      "hidden_size": self.hidden_size,
      "intermediate_size": self.intermediate_size,
      "num_hidden_layers": self.num_layers,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "max_position_embeddings": self.max_positions,
      family.epsilon: self.rms_norm_eps,
      family.activation_field: family.activation,
      "tie_word_embeddings": self.tie_embeddings,
    } | self._ropes_to_hf()
    if family.attention_bias == "field":
      fields["attention_bias"] = self.output_bias
    if family.mlp_bias:
      fields["mlp_bias"] = self.mlp_bias
    kinds = tuple(self.kinds[number] for number in self.layer_kinds)
    context = _context(family, self.rope, self.max_positions)
    fields |= write_kinds(kinds, family, context)
    if self.experts is not None:
      fields |= write_experts(self.experts, kinds, self.model_type)
    return fields | {
      name: value
      for name, value in self._multipliers().items()
      if name in family.multipliers
    }

  def _multipliers(self) -> dict[str, float | None]:
    """The fields that `_factors` reads."""
    scale = self.attention_scale or self.head_dim**-0.5
    return {
      # Whole in all published files.
      "query_pre_attn_scalar": round(scale**-2, 3),
      "attention_multiplier": scale,
      "embedding_multiplier": self.embedding_scale,
      "residual_multiplier": self.residual_scale,
      "logit_scale": self.logit_scale,
      "logits_scaling": 1 / self.logit_scale,
      "final_logit_softcapping": self.logit_softcap,
    }

  def _ropes_to_hf(self) -> dict[str, Any]:
    """The fields that `read_ropes` reads."""
    fields, local = self.rope.to_hf(), self.local_rope
    of_layers = self.family.rope in ("local", "unscaled")
    if of_layers and local is not None:
      # The older fields say no more than the base, or imply that it is equal.
      if local.kind == "default" and self.family.rope == "local":
        fields["rope_local_base_freq"] = local.theta
      elif (local.kind, local.theta) != ("default", self.rope.theta):
        both = {FULL: self.rope.parameters(), SLIDING: local.parameters()}
        fields = {"rope_parameters": both}
    if self.family.scaling and self.rope.kind == "default":
      # If config.json does not say, transformers scales. All versions read
      # this field.
      fields["rope_scaling"] = {"rope_type": "default"}
    if self.family.partial:
      fields["partial_rotary_factor"] = self.rope.dim / self.head_dim
      fields["original_max_position_embeddings"] = self.rope.original_context
    return fields


def _context(family: Family, rope: Rope, max_positions: int) -> int:
  """Number of tokens that a row can have."""
  if family.scaled_positions:
    return max_positions
  return rope.max_context(max_positions)


def _distinct(kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
  """The kinds of layers and their pattern."""
  distinct = tuple(dict.fromkeys(kinds))
  if len(distinct) == 1:
    return {"kinds": distinct}
  return {"kinds": distinct, "pattern": tuple(map(distinct.index, kinds))}


def _inner_width(fields: Fields, experts: ExpertSizes | None) -> int:
  """Reads the width of the MLP, which may be that of the experts."""
  if experts is not None and "intermediate_size" not in fields.rest:
    return experts.width
  return fields.count("intermediate_size")


def _factors(
  fields: Fields, family: Family, hidden: int, head_dim: int
) -> dict[str, Any]:
  """Reads constant factors."""
  factors = {
    name: fields.factor(name)
    for name in family.multipliers
    if name != "final_logit_softcapping"
  }
  values: dict[str, Any] = {}
  if "final_logit_softcapping" in family.multipliers:
    cap = "final_logit_softcapping"
    values["logit_softcap"] = (
      None if fields.rest.get(cap) is None else fields.factor(cap)
    )
    fields.take(cap)
  scale = None
  if "query_pre_attn_scalar" in factors:
    scale = factors["query_pre_attn_scalar"] ** -0.5
    values["embedding_scale"] = hidden**0.5
  scale = factors.get("attention_multiplier", scale)
  if scale is not None and scale != head_dim**-0.5:
    values["attention_scale"] = scale
  if "embedding_multiplier" in factors:
    values["embedding_scale"] = factors["embedding_multiplier"]
  if "residual_multiplier" in factors:
    values["residual_scale"] = factors["residual_multiplier"]
  if "logits_scaling" in factors:
    values["logit_scale"] = 1 / factors["logits_scaling"]
  if "logit_scale" in factors:
    values["logit_scale"] = factors["logit_scale"]
  return values


def _check_supported(fields: Fields, model_type: str, family: Family) -> None:
  """Checks the fields that have one supported value."""
  names = ("hidden_act", "hidden_activation")
  activations = {
    name: fields.take(name) for name in names if name in fields.rest
  }
  # The other name is Gemma's, which some converters copy.
  if activations.get("hidden_activation", "") is None:
    del activations["hidden_activation"]
  fields.faults += [
    f"has {name} {format_value(activation)}; only {family.activation!r} is "
    "supported"
    for name, activation in activations.items()
    if activation not in family.activations
  ]
  quantization = [fields.take(name) for name in _QUANTIZATION]
  if model_type == "gpt_oss":
    quantization = [
      each
      for each in quantization
      if not isinstance(each, dict) or each.get("quant_method") != _DEQUANTIZED
    ]
  if any(quantization):
    fields.faults.append(
      "describes quantized weights; load the unquantized model"
    )
