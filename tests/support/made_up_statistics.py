"""Made-up statistics of a model's queries, in the file that methods read."""

import atexit
import functools
import pathlib
import shutil
import tempfile

import numpy as np

from kvjax.engine.query_statistics import QueryStatistics


@functools.cache
def made_up_statistics(heads, kv_heads, size, layers):
  """The path of a file for a model of these sizes, for as long as it runs."""
  folder = tempfile.mkdtemp(prefix="kvjax-statistics-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  draw = np.random.default_rng(0)
  mean = draw.standard_normal((layers, heads, size)).astype(np.float32)
  root = draw.standard_normal((layers, heads, size, size)).astype(np.float32)
  filters = draw.standard_normal((layers, kv_heads, size)).astype(np.float32)
  found = QueryStatistics(
    mean, root @ np.swapaxes(root, 2, 3), filters, np.abs(mean) + 1
  )
  path = pathlib.Path(folder) / "queries.safetensors"
  found.save(path)
  return path
