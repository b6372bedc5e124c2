"""kvpress's measurements; runs in the environment that `make peers` sets up.

  cd experiments && ../.peers/bin/python -m peers.kvpress_side

It needs torch, transformers and kvpress, and neither kvjax nor its Python. The
operations are those of `kvjax_side`.
"""

import contextlib
import importlib.metadata
import time
import types
from collections.abc import Sequence
from typing import Any

import kvpress
import numpy as np
import torch
import transformers

from .counterparts import PRESSES
from .serving import TOKEN_IDS, Memory, serve

EAGER = "h2o"


class CudaMemory(Memory):
  """Memory that tensors take on the GPU."""

  def __init__(self) -> None:
    """Starts CUDA, which counts from then on."""
    torch.cuda.init()

  def reset(self) -> None:
    """Starts a new peak."""
    torch.cuda.reset_peak_memory_stats()

  def peak(self) -> int:
    """Returns the peak in bytes."""
    return torch.cuda.max_memory_allocated()


class Side:
  """What a library is asked to do; every time is in seconds."""

  def __init__(self) -> None:
    """Chooses a GPU, if there is one."""
    self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

  def versions(self) -> dict[str, str]:
    """Versions of the libraries."""
    names = ("kvpress", "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in names}

  def device(self) -> str:
    """The name of the GPU, or `cpu`."""
    if self._device.type == "cpu":
      return "cpu"
    return torch.cuda.get_device_name(self._device)

  def load(self, path: str, dtype: str) -> None:
    """Loads the model, and sets the dtype of all other operations."""
    self._dtype = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      path, dtype=self._dtype, attn_implementation="sdpa"
    )
    self.model = model.to(self._device).eval()

  def prefill(
    self, method: str, retention: float, rows: int, length: int
  ) -> float:
    """Prefills prompts and compresses their cache."""
    tokens = self._tokens(rows, length)
    begin = self._now()
    cache = self._prefill(method, retention, tokens)
    seconds = self._now() - begin
    assert cache.get_seq_length() <= length
    return seconds

  def decode(
    self, method: str, retention: float, rows: int, length: int, new_tokens: int
  ) -> float:
    """Decodes after a prefill, which does not count."""
    cache = self._prefill(method, retention, self._tokens(rows, length))
    # A step before the clock starts, as a first one may set things up.
    token = self._step(self._tokens(rows, 1), cache, length)
    begin = self._now()
    self._decode(token, cache, length + 1, new_tokens)
    return self._now() - begin

  def answer(
    self,
    cells: Sequence[tuple[str, float]],
    rows: int,
    length: int,
    new_tokens: int,
  ) -> float:
    """Prefills and decodes a row at a time, as its pipeline does."""
    tokens = self._tokens(rows, length)
    begin = self._now()
    for method, retention in cells:
      for row in tokens:
        cache = self._prefill(method, retention, row[None])
        self._decode(row[None, -1:], cache, length, new_tokens)
    return self._now() - begin

  def compress(
    self,
    method: str,
    retention: float,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
  ) -> float:
    """Scores and compacts one layer, whose attention has been computed."""
    placed: dict[str, Any] = dict(device=self._device, dtype=self._dtype)
    draw = torch.Generator(self._device).manual_seed(0)

    def normal(*shape: int) -> Any:
      return torch.randn(*shape, generator=draw, **placed)

    width = heads * dim
    config = transformers.LlamaConfig(
      hidden_size=width,
      num_attention_heads=heads,
      num_key_value_heads=kv_heads,
      head_dim=dim,
      num_hidden_layers=1,
      max_position_embeddings=length,
    )
    llama = transformers.models.llama.modeling_llama
    module = llama.LlamaAttention(config, 0).to(**placed)
    hidden = normal(1, length, width)
    keys, values = (normal(1, kv_heads, length, dim) for _ in range(2))
    # Frequencies stay in float32, as in a model.
    module.rotary_emb = llama.LlamaRotaryEmbedding(config).to(self._device)
    positions = torch.arange(length, device=self._device)[None]
    kwargs = dict(
      position_embeddings=module.rotary_emb(hidden, positions),
      hidden_states=hidden,
    )
    press = _press(method, retention)
    with contextlib.suppress(AttributeError):
      press.post_init_from_model(types.SimpleNamespace(config=config))
    begin = self._now()
    with torch.no_grad():
      press.compress(module, hidden, keys, values, None, kwargs)
    return self._now() - begin

  def _now(self) -> float:
    """Reads the clock when all that was asked for has been computed."""
    if self._device.type == "cuda":
      torch.cuda.synchronize()
    return time.perf_counter()

  def _tokens(self, rows: int, length: int) -> Any:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, TOKEN_IDS, (rows, length))
    return torch.from_numpy(tokens).to(self._device)

  @torch.no_grad()
  def _prefill(self, method: str, retention: float, tokens: Any) -> Any:
    """Compresses the prompts, as `kvpress`'s pipeline does."""
    cache = transformers.DynamicCache()
    press: Any = contextlib.nullcontext()
    if method != "full":
      press = _press(method, retention)(self.model)
    eager = method == EAGER
    self.model.set_attn_implementation("eager" if eager else "sdpa")
    with press:
      self.model.model(
        input_ids=tokens, past_key_values=cache, output_attentions=eager
      )
    self.model.set_attn_implementation("sdpa")
    return cache

  @torch.no_grad()
  def _step(self, token: Any, cache: Any, position: int) -> Any:
    positions = torch.full(token.shape, position, device=self._device)
    outputs = self.model(
      input_ids=token, past_key_values=cache, position_ids=positions
    )
    return outputs.logits[:, -1:].argmax(-1)

  def _decode(self, token: Any, cache: Any, position: int, count: int) -> None:
    for index in range(count):
      token = self._step(token, cache, position + index)


def _press(method: str, retention: float) -> Any:
  """Builds the press that stands for a method."""
  *wrappers, scorer = PRESSES[method]
  press = getattr(kvpress, scorer)(1 - retention)
  for name in reversed(wrappers):
    press = getattr(kvpress, name)(press)
  return press


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  serve(Side(), CudaMemory() if torch.cuda.is_available() else Memory())
