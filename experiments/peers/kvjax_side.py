"""kvjax's measurements, as another process asks for them.

  python -m kvjax.experiments.peers.kvjax_side

A first request of a kind compiles; callers repeat requests to leave that out.
"""

from collections.abc import Sequence
from typing import Any

import jax

import kvjax
from kvjax.experiments.peers.serving import TOKEN_IDS, Memory, serve
from kvjax.experiments.run import stopwatch
from kvjax.experiments.timing import (
  kernel_timing,
  layer_compression,
  random_models,
)
from kvjax.model import Geometry
from kvjax.models.pretrained import load_decoder

# Rows that are swept together: the caches of 40 plans must fit in memory.
_BATCH = 2


class DeviceMemory(Memory):
  """Memory of the device, which no CPU counts, or else of the process."""

  def peak(self) -> int | None:
    """Returns the peak in bytes; the device's is since the process started."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or super().peak()


class Side:
  """What a library is asked to do; every time is in seconds."""

  def versions(self) -> dict[str, str]:
    """Versions of the libraries."""
    return {"kvjax": kvjax.__version__, "jax": jax.__version__}

  def device(self) -> str:
    """The kind of the device, `cpu` for any processor."""
    return jax.local_devices()[0].device_kind

  def load(self, path: str, dtype: str) -> None:
    """Loads the model, and sets the dtype of all other operations."""
    self._dtype = dtype
    self._model, self._params = load_decoder(path, dtype)
    jax.block_until_ready(self._params)

  def limits(self) -> dict[str, float]:
    """Measures bytes per second of reading and operations of products."""
    size, nbytes = 2048, 2**29
    if jax.default_backend() != "cpu":
      # For milliseconds; less would measure how fast calls start.
      size, nbytes = 8192, 2**31
    # Not of ones: a GPU's clock depends on the bits that change.
    matrix = jax.random.normal(jax.random.key(0), (size, size), self._dtype)
    array = kernel_timing.readable(nbytes)
    multiply, read = jax.jit(lambda x: x @ x), jax.jit(kernel_timing.read)
    product = min(stopwatch.repeated(lambda: multiply(matrix), 5))
    reading = min(stopwatch.repeated(lambda: read(array), 5))
    return {"bytes": nbytes / reading, "operations": 2 * size**3 / product}

  def prefill(
    self, method: str, retention: float, rows: int, length: int
  ) -> float:
    """Prefills prompts and compresses their cache."""
    prompts = random_models.prompts(TOKEN_IDS, rows, length)
    return stopwatch.seconds(lambda: self._prefill(method, retention, prompts))

  def decode(
    self, method: str, retention: float, rows: int, length: int, new_tokens: int
  ) -> float:
    """Decodes after a prefill, which does not count."""
    prompts = random_models.prompts(TOKEN_IDS, rows, length)
    cache, logits = self._prefill(method, retention, prompts)
    jax.block_until_ready(cache)
    decoding = kvjax.Decoding(max_new_tokens=new_tokens)
    return stopwatch.seconds(
      lambda: kvjax.generate(self._model, self._params, cache, logits, decoding)
    )

  def answer(
    self,
    cells: Sequence[tuple[str, float]],
    rows: int,
    length: int,
    new_tokens: int,
  ) -> float:
    """Prefills once for all methods and retentions, and decodes from all."""
    plans = [
      kvjax.get_plan(name, kvjax.Retention(share)) for name, share in cells
    ]
    prompts = random_models.prompts(TOKEN_IDS, rows, length)
    decoding = kvjax.Decoding(max_new_tokens=new_tokens)

    def answer() -> None:
      for start in range(0, rows, _BATCH):
        part = slice(start, start + _BATCH)
        batch = kvjax.Prompts(prompts.tokens[part], prompts.lengths[part])
        caches, logits = kvjax.sweep(self._model, self._params, batch, plans)
        jax.block_until_ready(
          kvjax.generate(self._model, self._params, caches, logits, decoding)
        )

    return stopwatch.seconds(answer)

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
    geometry = Geometry.uniform(1, heads, kv_heads, dim, length)
    plan = kvjax.get_plan(method, kvjax.Retention(retention))
    activations = layer_compression.draw_for(
      plan, geometry, length, self._dtype
    )
    return layer_compression.Compression(plan).seconds(geometry, activations)

  def _prefill(
    self, method: str, retention: float, prompts: kvjax.Prompts
  ) -> tuple[kvjax.Cache, Any]:
    plan = kvjax.get_plan(method, kvjax.Retention(retention))
    return kvjax.prefill(self._model, self._params, prompts, plan)


if __name__ == "__main__":
  serve(Side(), DeviceMemory())
