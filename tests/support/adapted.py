"""What tests of adapters share: golden models, and how two are compared."""

import pathlib

import jax
import numpy as np
import safetensors.numpy

import kvjax

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
TOLERANCE = 1e-4


def last_logits(lm, rows):
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  return kvjax.prefill(lm.model, lm.params, kvjax.Prompts.of(rows), plan)[1]


def rows_of(vocabulary):
  """Longer than the windows of the golden models."""
  draw = np.random.default_rng(0)
  return [draw.integers(3, vocabulary, n).tolist() for n in (30, 17)]


def assert_same(lm, other):
  """The same decoder with the same weights, and the same logits."""
  assert lm.model == other.model
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
    lm.params,
    other.params,
  )
  rows = rows_of(lm.config.vocab_size)
  np.testing.assert_allclose(
    last_logits(lm, rows), last_logits(other, rows), atol=TOLERANCE
  )


def tensors_of(folder):
  """Matrices as [in, out], by the names in the files."""
  return {
    name: x.T if x.ndim == 2 and "embed_tokens" not in name else x
    for path in folder.glob("*.safetensors")
    for name, x in safetensors.numpy.load_file(path).items()
  }


def put(tree, path, value):
  *folders, last = path.split("/")
  for folder in folders:
    tree = tree.setdefault(folder, {})
  tree[last] = value
