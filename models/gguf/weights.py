"""The tensors of a GGUF file under Hugging Face's names."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float, Int

from kvjax.models.config import DecoderConfig
from kvjax.models.gguf.metadata import EMBEDDING, OUTPUT, ROPE_FACTORS
from kvjax.models.gguf.reader import GgufFile, StoredTensor
from kvjax.models.tensor_files import Tensors

_OUTSIDE = {
  EMBEDDING: "model.embed_tokens",
  "output_norm.weight": "model.norm",
  OUTPUT: "lm_head",
}
_IN_LAYER = {
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


def open_gguf_tensors(file: GgufFile, config: DecoderConfig) -> Tensors:
  """Opens the tensors by Hugging Face's names; unknown ones keep theirs.

  For the architecture llama, llama.cpp rotates neighboring pairs instead of the
  pairs (i, i + D/2) and stores the rows of queries and keys in that order. The
  original order is restored. Weights of norms that a model adds 1 to are stored
  with it; it is subtracted.

  Args:
    file: the file. The factors of the rotary embedding are omitted, as the
      config already contains them.
    config: configuration of the model.
  """
  modules = _modules_in_layer(config)
  dequantized = {
    _hugging_face_name(name, modules): _Dequantized(
      stored,
      _num_reordered_heads(name, config),
      config.style.norm.offset if name.endswith("_norm.weight") else 0.0,
    )
    for name, stored in file.tensors.items()
    if name != ROPE_FACTORS
  }
  files = dict.fromkeys(dequantized, _Files(dequantized))
  gguf_name = functools.partial(_gguf_name, modules=modules)
  return Tensors(files, file.path, "its metadata", gguf_name)


def _modules_in_layer(config: DecoderConfig) -> dict[str, str]:
  """Hugging Face's names of a layer's modules, by llama.cpp's."""
  norms = config.style.norms
  named = {
    "attn_norm": norms.before_attention,
    "post_attention_norm": norms.after_attention,
    "ffn_norm": norms.before_mlp,
    "post_ffw_norm": norms.after_mlp,
  }
  return _IN_LAYER | {old: new for old, new in named.items() if new is not None}


def _gguf_name(name: str, modules: Mapping[str, str]) -> str:
  """Converts a name of Hugging Face to that in a GGUF file."""
  parts = {new: old for old, new in modules.items()}
  outside = {new: old for old, new in _OUTSIDE.items()}
  module, _, kind = name.rpartition(".")
  if module in outside:
    return outside[module]
  match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
  if match and match[2] in parts:
    return f"blk.{match[1]}.{parts[match[2]]}.{kind}"
  return name


def _hugging_face_name(name: str, modules: Mapping[str, str]) -> str:
  if name in _OUTSIDE:
    return f"{_OUTSIDE[name]}.weight"
  match = _LAYER.fullmatch(name)
  if match and match[2] in modules:
    return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
  return name


def _num_reordered_heads(name: str, config: DecoderConfig) -> int | None:
  """Number of heads of a tensor if llama.cpp reorders its rows, else None."""
  match = _LAYER.fullmatch(name)
  if config.model_type != "llama" or match is None:
    return None
  return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(
    match[2]
  )


@dataclasses.dataclass(frozen=True)
class _Dequantized:
  """A tensor whose rows are dequantized on demand.

  Attributes:
    stored: the tensor in the file.
    reordered_heads: number of heads whose rows must be reordered, if any.
    offset: is subtracted from the numbers.
  """

  stored: StoredTensor
  reordered_heads: int | None
  offset: float

  def get_shape(self) -> tuple[int, ...]:
    return self.stored.shape

  def get_dtype(self) -> str:
    return "F32"

  def __getitem__(self, index: tuple[slice, ...]) -> Float[np.ndarray, "..."]:
    rows, *rest = index
    order: Any = rows
    if self.reordered_heads is not None:
      order = _restore_order(self.stored.shape[0], self.reordered_heads)[rows]
    kind, data = self.stored.kind, self.stored.data
    # A vector is a single row of blocks and is dequantized as a whole. Of a
    # matrix, rows are selected first, so that only these become float32.
    if rest:
      values = gguf.dequantize(data[order], kind)[:, *rest]
    else:
      values = gguf.dequantize(data, kind)[order]
    return values - np.float32(self.offset) if self.offset else values


@dataclasses.dataclass(frozen=True)
class _Files:
  """All tensors, with the interface of an open safetensors file."""

  tensors: Mapping[str, _Dequantized]

  def get_slice(self, name: str) -> _Dequantized:
    return self.tensors[name]


def _restore_order(rows: int, heads: int) -> Int[np.ndarray, " R"]:
  """Indices that restore the order of pairs (i, i + D/2)."""
  pairs = np.arange(rows).reshape(heads, -1, 2)
  return np.swapaxes(pairs, 1, 2).reshape(-1)
