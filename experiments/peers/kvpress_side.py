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

from .serving import serve

# By the method's name in kvjax, from the share removed to the press.
PRESSES = {
  "random": kvpress.RandomPress,
  "streaming": kvpress.StreamingLLMPress,
  "key_norm": kvpress.KnormPress,
  "keydiff": kvpress.KeyDiffPress,
  "lagkv:lag=128": kvpress.LagKVPress,
  "compactor": kvpress.CompactorPress,
  "tova": kvpress.TOVAPress,
  "snapkv": kvpress.SnapKVPress,
  "pyramidkv": kvpress.PyramidKVPress,
  "adakv": lambda c: kvpress.AdaKVPress(kvpress.SnapKVPress(c)),
  "h2o": kvpress.ObservedAttentionPress,
}
EAGER = "h2o"
# Any model has so many.
TOKEN_IDS = 1000


class Side:
  """What a library is asked to do; every time is in seconds."""

  def versions(self) -> dict[str, str]:
    """Versions of the libraries."""
    names = ("kvpress", "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in names}

  def load(self, path: str) -> None:
    """Loads the model that the other operations use, in float32."""
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

  def prefill(
    self, method: str, retention: float, rows: int, length: int
  ) -> float:
    """Prefills prompts and compresses their cache."""
    tokens = self._tokens(rows, length)
    begin = time.perf_counter()
    cache = self._prefill(method, retention, tokens)
    seconds = time.perf_counter() - begin
    assert cache.get_seq_length() <= length
    return seconds

  def decode(
    self, method: str, retention: float, rows: int, length: int, new_tokens: int
  ) -> float:
    """Decodes after a prefill, which does not count."""
    cache = self._prefill(method, retention, self._tokens(rows, length))
    # A step before the clock starts, as a first one may set things up.
    token = self._step(self._tokens(rows, 1), cache, length)
    begin = time.perf_counter()
    self._decode(token, cache, length + 1, new_tokens)
    return time.perf_counter() - begin

  def answer(
    self,
    cells: Sequence[tuple[str, float]],
    rows: int,
    length: int,
    new_tokens: int,
  ) -> float:
    """Prefills and decodes a row at a time, as its pipeline does."""
    tokens = self._tokens(rows, length)
    begin = time.perf_counter()
    for method, retention in cells:
      for row in tokens:
        cache = self._prefill(method, retention, row[None])
        self._decode(row[None, -1:], cache, length, new_tokens)
    return time.perf_counter() - begin

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
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
      return torch.randn(*shape, generator=draw)

    width = heads * dim
    config = transformers.LlamaConfig(
      hidden_size=width,
      num_attention_heads=heads,
      num_key_value_heads=kv_heads,
      head_dim=dim,
      num_hidden_layers=1,
      max_position_embeddings=length,
    )
    module = transformers.models.llama.modeling_llama.LlamaAttention(config, 0)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    hidden = normal(1, length, width)
    keys, values = (normal(1, kv_heads, length, dim) for _ in range(2))
    module.rotary_emb = rotary(config)
    positions = torch.arange(length)[None]
    kwargs = dict(
      position_embeddings=module.rotary_emb(hidden, positions),
      hidden_states=hidden,
    )
    press = PRESSES[method](1 - retention)
    with contextlib.suppress(AttributeError):
      press.post_init_from_model(types.SimpleNamespace(config=config))
    begin = time.perf_counter()
    with torch.no_grad():
      press.compress(module, hidden, keys, values, None, kwargs)
    return time.perf_counter() - begin

  def _tokens(self, rows: int, length: int) -> Any:
    draw = np.random.default_rng(0)
    return torch.from_numpy(draw.integers(0, TOKEN_IDS, (rows, length)))

  @torch.no_grad()
  def _prefill(self, method: str, retention: float, tokens: Any) -> Any:
    """Compresses the prompts, as `kvpress`'s pipeline does."""
    cache = transformers.DynamicCache()
    press: Any = contextlib.nullcontext()
    if method != "full":
      press = PRESSES[method](1 - retention)(self.model)
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
    positions = torch.full(token.shape, position)
    outputs = self.model(
      input_ids=token, past_key_values=cache, position_ids=positions
    )
    return outputs.logits[:, -1:].argmax(-1)

  def _decode(self, token: Any, cache: Any, position: int, count: int) -> None:
    for index in range(count):
      token = self._step(token, cache, position + index)


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  serve(Side())
