"""The tensors of a GGUF file under the names that Hugging Face gives them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float, Int

from kvjax.models.config import DecoderConfig
from kvjax.models.gguf.metadata import EMBEDDING, OUTPUT, ROPE_FACTORS
from kvjax.models.gguf.reader import GgufFile, StoredTensor
from kvjax.models.weights import Tensors

_OUTSIDE = {
  EMBEDDING: "model.embed_tokens",
  "output_norm.weight": "model.norm",
  OUTPUT: "lm_head",
}
_IN_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


def open_gguf_tensors(file: GgufFile, config: DecoderConfig) -> Tensors:
  """The tensors by the names of Hugging Face; unknown ones keep their own.

  llama.cpp rotates neighbors in place of the pairs (i, i + D/2) where the
  architecture is llama, and stores the rows of queries and keys in that order;
  they are put back.

  Args:
    file: what has them. The factors of the rotary embedding are left out: the
      config is what they say.
    config: of the model.
  """
  found = {
    _name(own): _Dequantized(stored, _rotated_heads(own, config))
    for own, stored in file.tensors.items()
    if own != ROPE_FACTORS
  }
  files = dict.fromkeys(found, _Files(found))
  return Tensors(files, file.path, "its metadata", _own_name)


def _own_name(name: str) -> str:
  """What a GGUF file calls the tensor that Hugging Face calls so."""
  parts = {new: old for old, new in _IN_LAYER.items()}
  outside = {new: old for old, new in _OUTSIDE.items()}
  module, _, kind = name.rpartition(".")
  if module in outside:
    return outside[module]
  match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
  if match and match[2] in parts:
    return f"blk.{match[1]}.{parts[match[2]]}.{kind}"
  return name


def _name(own: str) -> str:
  if own in _OUTSIDE:
    return f"{_OUTSIDE[own]}.weight"
  match = _LAYER.fullmatch(own)
  if match and match[2] in _IN_LAYER:
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
  return own


def _rotated_heads(own: str, config: DecoderConfig) -> int | None:
  """Heads of a tensor whose rows llama.cpp has reordered."""
  match = _LAYER.fullmatch(own)
  if config.model_type != "llama" or match is None:
    return None
  return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(
    match[2]
  )


@dataclasses.dataclass(frozen=True)
class _Dequantized:
  """A tensor whose rows are dequantized where they are asked for.

  Attributes:
    stored: in the file.
    rotated_heads: heads whose rows are to be put back in order, if any.
  """

  stored: StoredTensor
  rotated_heads: int | None

  def get_shape(self) -> tuple[int, ...]:
    return self.stored.shape

  def get_dtype(self) -> str:
    return "F32"

  def __getitem__(self, index: tuple[slice, ...]) -> Float[np.ndarray, "..."]:
    rows, *others = index
    order: Any = rows
    if self.rotated_heads is not None:
      order = _in_halves(self.stored.shape[0], self.rotated_heads)[rows]
    kind, data = self.stored.kind, self.stored.data
    if not others:
      return gguf.dequantize(data, kind)[order]
    return gguf.dequantize(data[order], kind)[:, *others]


@dataclasses.dataclass(frozen=True)
class _Files:
  """Has all tensors, as an open safetensors file has those of its own."""

  tensors: Mapping[str, _Dequantized]

  def get_slice(self, name: str) -> _Dequantized:
    return self.tensors[name]


def _in_halves(rows: int, heads: int) -> Int[np.ndarray, " R"]:
  """Where each row of heads (i, i + D/2) is among those of neighbors."""
  pairs = np.arange(rows).reshape(heads, -1, 2)
  return np.swapaxes(pairs, 1, 2).reshape(-1)
