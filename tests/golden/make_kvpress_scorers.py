"""Makes tests/golden/kvpress_scorers/: scores and choices of newer presses.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress_scorers.py

The checkpoints and prompts are those of tiny_llama.py.

  <checkpoint>.npz  for each press and length: <press>/<n>/scores, float32
                    [L, K, n], or those of one layer at 901 tokens; and for each
                    share removed (in percent) <press>/<n>/<percent>, the kept
                    tokens of all layers and heads, bool [L, K, n], packed
                    along n
  structured.npz    <checkpoint>/<press>/<n>, for presses without a share: the
                    kept tokens, packed; for FinchPress also the turned keys,
                    and for ThinKPress the kept channels, bool [L, K, D], packed
  statistics.npz    what stands for the published statistics and filters
  versions.json     what made it all
"""

import importlib.metadata
import json
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

import kvpress
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import tiny_llama  # noqa: E402

OUTPUT = HERE / "kvpress_scorers"
LENGTHS = (77, 901)
LAYER = 1
PERCENTS = (30, 75)
QUESTION = 9
# No token of a prompt: they begin at 3.
DELIMITER = 2


def snapkv(c):
  return kvpress.SnapKVPress(c, window_size=5, kernel_size=3)


def expected(c, **options):
  return kvpress.ExpectedAttentionPress(c, **options)


def with_stats(c, stored):
  press = kvpress.ExpectedAttentionStatsPress(c)
  press.mu = torch.from_numpy(stored["query_mean"])
  press.cov = torch.from_numpy(stored["query_cov"])
  return press


def q_filters(c, stored):
  press = kvpress.QFilterPress(c)
  press.q_filters = torch.from_numpy(stored["q_filters"])
  # It would load those of the model's name.
  press.post_init_from_model = lambda model: None
  return press


def cur(c, **options):
  press = kvpress.CURPress(c)
  for name, value in options.items():
    setattr(press, name, value)
  return press


def critical_ada(c):
  return kvpress.CriticalAdaKVPress(snapkv(c))


# By name, from the share removed and the stored statistics to the press.
PRESSES = {
  "expected": lambda c, _: expected(c),
  "expected_ahead": lambda c, _: expected(
    c, n_future_positions=37, n_sink=2, epsilon=1e-2
  ),
  "expected_mean": lambda c, _: expected(
    c, use_covariance=False, use_vnorm=False
  ),
  "expected_stats": with_stats,
  "ada_expected": lambda c, _: kvpress.AdaKVPress(expected(c, epsilon=1e-2)),
  "critical_snapkv": lambda c, _: kvpress.CriticalKVPress(snapkv(c)),
  "critical_expected": lambda c, _: kvpress.CriticalKVPress(
    expected(c, use_vnorm=False), epsilon=1e-3, first_stage_ratio=0.25
  ),
  "critical_ada": lambda c, _: critical_ada(c),
  "cur": lambda c, _: cur(c),
  "cur_key": lambda c, _: cur(c, leverage_type="key", local_window_size=7),
  "cur_value": lambda c, _: cur(
    c, leverage_type="value", use_local_approximation=False, num_sinks=1
  ),
  "cur_mean": lambda c, _: cur(
    c, leverage_type="kv_avg", use_random_leverage=True
  ),
  "q_filters": q_filters,
}
# Scores at a share of 0; those of the critical presses depend on the share, and
# those of the ada presses are of their inner presses.
UNSCORED = ("critical_snapkv", "critical_expected", "critical_ada")


def statistics(name: str) -> dict[str, np.ndarray]:
  """Random means, covariances and filters of a checkpoint."""
  shape = tiny_llama.SHAPES[name]
  layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
  random = np.random.default_rng(sorted(tiny_llama.SHAPES).index(name))
  size = tiny_llama.HEAD_DIM
  roots = random.standard_normal((layers, heads, size, size)) * size**-0.5
  arrays = {
    "query_mean": random.standard_normal((layers, heads, size)),
    "query_cov": roots @ np.swapaxes(roots, -1, -2),
    "q_filters": random.standard_normal((layers, shape["kv_heads"], size)),
  }
  return {name: x.astype(np.float32) for name, x in arrays.items()}


def drawn(*size, **kwargs):
  """Replaces torch.randn in CURPress."""
  del kwargs
  return torch.from_numpy(tiny_llama.normals(1, size[-1])[0])


class Checkpoint:
  """A model, and what it keeps of prompts under a press."""

  def __init__(self, name):
    self.name = name
    with tempfile.TemporaryDirectory() as folder:
      tiny_llama.write(name, pathlib.Path(folder))
      load = transformers.AutoModelForCausalLM.from_pretrained
      self.model = load(folder, dtype=torch.float32).eval()
    self.layers = self.model.model.layers

  def prefill(self, ids, press=None):
    """The cache of a prompt."""
    cache = transformers.DynamicCache()
    for layer in self.layers:
      layer.self_attn.masked_key_indices = None
    inputs = torch.tensor([ids])
    if press is None:
      self.model.model(inputs, past_key_values=cache)
    else:
      with press(self.model):
        self.model.model(inputs, past_key_values=cache)
    return cache

  def kept(self, ids, press, seen=None):
    """The tokens that a press keeps, bool [L, K, n].

    Args:
      ids: the prompt.
      press: the press.
      seen: the prompt as the model sees it, if that is not the same.
    """
    full = self.prefill(seen or ids)
    cache = self.prefill(ids, press)
    bits = []
    for layer, before, after in zip(
      self.layers, full.layers, cache.layers, strict=True
    ):
      same = (after.keys[0][:, :, None] == before.keys[0][:, None]).all(-1)
      assert (same.sum(-1) == 1).all()
      found = same.any(dim=1).numpy()
      hidden = layer.self_attn.masked_key_indices
      if hidden is not None:
        found[hidden[1].numpy(), hidden[2].numpy()] = False
      bits.append(found)
    return np.stack(bits)

  def scores(self, ids, press):
    """What a scorer gives every token, [L, K, n]."""
    found, score = [], press.score

    def listen(*args):
      found.append(score(*args))
      return found[-1]

    press.score = listen
    self.prefill(ids, press)
    return torch.cat(found).numpy()


def make_scorers(checkpoint, stored, own):
  for length in LENGTHS:
    ids = tiny_llama.prompt(checkpoint.name, length)
    for name, make in PRESSES.items():
      case = f"{name}/{length}"
      if name not in UNSCORED:
        press = make(0.5, stored)
        inner = getattr(press, "press", press)
        scores = checkpoint.scores(ids, inner)
        own[f"{case}/scores"] = (
          scores if length == LENGTHS[0] else scores[LAYER]
        )
      for percent in PERCENTS:
        kept = checkpoint.kept(ids, make(percent / 100, stored))
        own[f"{case}/{percent}"] = np.packbits(kept, axis=-1)


def make_finch(checkpoint, length, files):
  ids = tiny_llama.prompt(checkpoint.name, length)
  asked = [*ids[:-QUESTION], DELIMITER, *ids[-QUESTION:]]
  variants = {
    "finch": {},
    "finch_chunks": {"chunk_length": 40},
    "finch_plain": {"normalize_scores": False},
  }
  for name, options in variants.items():
    press = kvpress.FinchPress(0.6, rerotate_keys=False, **options)
    press.delimiter_token_id = DELIMITER
    case = f"{checkpoint.name}/{name}/{length}"
    kept = checkpoint.kept(asked, press, seen=ids)
    files[case] = np.packbits(kept, axis=-1)
  press = kvpress.FinchPress(0.6)
  press.delimiter_token_id = DELIMITER
  if length == LENGTHS[0]:
    cache = checkpoint.prefill(asked, press)
    keys = np.stack([layer.keys[0].numpy() for layer in cache.layers])
    files[f"{checkpoint.name}/finch_keys/{length}"] = keys


def make_layers(checkpoint, length, files):
  ids = tiny_llama.prompt(checkpoint.name, length)
  for percent in (10, 25, 40, 60):
    press = kvpress.SimLayerKVPress(percent / 100, n_recent=17, n_initial=3)
    case = f"{checkpoint.name}/simlayer_{percent}/{length}"
    files[case] = np.packbits(checkpoint.kept(ids, press), axis=-1)
  heads = pattern(checkpoint.name)
  for percent in (0, 30, 50, 100):
    press = kvpress.DuoAttentionPress(percent / 100)
    with mock.patch.object(
      kvpress.DuoAttentionPress,
      "load_attention_pattern",
      staticmethod(lambda model: (6, 11, heads)),
    ):
      case = f"{checkpoint.name}/duo_{percent}/{length}"
      files[case] = np.packbits(checkpoint.kept(ids, press), axis=-1)


def make_channels(checkpoint, length, files):
  ids = tiny_llama.prompt(checkpoint.name, length)
  full = checkpoint.prefill(ids)
  for percent in (30, 75):
    think = kvpress.ThinKPress(percent / 100, window_size=9)
    for name, press in (
      ("think", think),
      ("snapkv_think", kvpress.ComposedPress([snapkv(0.4), think])),
    ):
      case = f"{checkpoint.name}/{name}_{percent}/{length}"
      cache = checkpoint.prefill(ids, press)
      channels, tokens = [], []
      for before, after in zip(full.layers, cache.layers, strict=True):
        here = (after.keys[0] != 0).any(dim=1)
        same = after.keys[0][:, :, None] == before.keys[0][:, None]
        same = (same | ~here[:, None, None]).all(-1)
        assert (same.sum(-1) == 1).all()
        channels.append(here.numpy())
        tokens.append(same.any(dim=1).numpy())
      files[f"{case}/channels"] = np.packbits(np.stack(channels), axis=-1)
      files[case] = np.packbits(np.stack(tokens), axis=-1)


def pattern(name):
  """The gates of DuoAttention's heads, [L, K]."""
  shape = tiny_llama.SHAPES[name]
  random = np.random.default_rng(7)
  return random.uniform(size=(shape["num_hidden_layers"], shape["kv_heads"]))


def main() -> None:
  torch.set_num_threads(1)
  torch.set_grad_enabled(False)
  files: dict = {"structured": {}, "statistics": {}}
  with mock.patch.object(torch, "randn", drawn):
    for name in tiny_llama.SHAPES:
      checkpoint, stored = Checkpoint(name), statistics(name)
      for part, array in stored.items():
        files["statistics"][f"{name}/{part}"] = array
      files["statistics"][f"{name}/pattern"] = pattern(name)
      make_scorers(checkpoint, stored, files.setdefault(name, {}))
      for length in LENGTHS:
        make_finch(checkpoint, length, files["structured"])
        make_layers(checkpoint, length, files["structured"])
        make_channels(checkpoint, length, files["structured"])
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  for name, arrays in files.items():
    np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
