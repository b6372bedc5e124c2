"""Makes tests/golden/kvpress_presets/: what kvpress's wrappers keep.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress_presets.py

The checkpoints and prompts are those of tiny_llama.py.

  <checkpoint>.npz  for each press, length and share removed (in percent):
                    <press>/<n>/<percent>, the kept tokens of all layers and
                    heads, bool [L, K, n], packed along n
  rerotated.npz     for KeyRerotationPress, the turned keys, float32
                    [L, K, m, D]
  decoded.npz       for PrefillDecodingPress, the generated tokens and the
                    positions kept after them, int16 [L, K, m]
  versions.json     what made it all

Two presses are also run mended, where kvpress does something else than it says:
`mended_` stands before their names.

- NonCausalAttnPress, and CompactorPress with it, pads the last chunk of a
  prompt with keys that take part in the attention, and with queries that do.
- ChunkPress gives the scorer the queries of a chunk, but the rotary embeddings
  of the last positions of the prompt.
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

OUTPUT = HERE / "kvpress_presets"
# An even and an odd length; no whole number of chunks of 20, 32 or 7.
LENGTHS = (170, 197)
LONG = 901
PERCENTS = (30, 50, 90)
DECODED = 24


class OwnPositions:
  """A scorer of chunks, whose queries stay at their own positions."""

  def __init__(self, press):
    self.press, self.layer, self.start = press, None, 0
    self.score, press.score = press.score, self.of_chunk

  def of_chunk(self, module, hidden, keys, values, attentions, kwargs):
    if self.layer != module.layer_idx:
      self.layer, self.start = module.layer_idx, 0
    end = self.start + keys.shape[2]
    rotary = kwargs["position_embeddings"]
    own = tuple(part[:, self.start : end] for part in rotary)
    self.start = end
    return self.score(
      module, hidden, keys, values, attentions, {"position_embeddings": own}
    )


def in_chunks(press, length):
  OwnPositions(press)
  return kvpress.ChunkPress(press, chunk_length=length)


def whole_chunks_only(queries, keys, chunk):
  """Attention by chunk, the last of which is as short as it is."""
  sums = []
  for start in range(0, keys.shape[2], chunk):
    span = slice(start, start + chunk)
    logits = queries[:, :, span] @ keys[:, :, span].transpose(-2, -1)
    sums.append(torch.softmax(logits.float(), dim=-1).sum(dim=-2))
  return torch.cat(sums, dim=-1)


def chunkkv(press, chunk=20):
  return kvpress.ChunkKVPress(press, chunk_length=chunk)


# By name, from the share removed to the press.
PRESSES = {
  "snapkv": kvpress.SnapKVPress,
  "knorm": kvpress.KnormPress,
  "keydiff": kvpress.KeyDiffPress,
  "tova": kvpress.TOVAPress,
  "streaming": kvpress.StreamingLLMPress,
  "observed": kvpress.ObservedAttentionPress,
  # Ranks of different partitions tie, and kvpress chooses among them as torch
  # does; scores do not.
  "lagkv_cross": lambda c: kvpress.LagKVPress(
    c, lag_size=16, cross_scoring=True
  ),
  "chunkkv_snapkv": lambda c: chunkkv(kvpress.SnapKVPress(c)),
  "chunkkv_snapkv_16": lambda c: chunkkv(
    kvpress.SnapKVPress(c, window_size=16, kernel_size=7), 7
  ),
  "chunkkv_keydiff": lambda c: chunkkv(kvpress.KeyDiffPress(c)),
  "chunkkv_knorm": lambda c: chunkkv(kvpress.KnormPress(c), 33),
  "chunkkv_tova": lambda c: chunkkv(kvpress.TOVAPress(c)),
  "chunkkv_cross": lambda c: chunkkv(
    kvpress.LagKVPress(c, lag_size=16, cross_scoring=True)
  ),
  "chunkkv_leverage": lambda c: chunkkv(
    kvpress.LeverageScorePress(c, sketch_dimension=8)
  ),
  "chunkkv_long": lambda c: chunkkv(kvpress.KeyDiffPress(c), 1000),
  "ada_snapkv": lambda c: kvpress.AdaKVPress(kvpress.SnapKVPress(c)),
  "ada_snapkv_16": lambda c: kvpress.AdaKVPress(
    kvpress.SnapKVPress(c, window_size=16), alpha_safeguard=0.6
  ),
  "ada_keydiff": lambda c: kvpress.AdaKVPress(kvpress.KeyDiffPress(c)),
  "ada_knorm": lambda c: kvpress.AdaKVPress(
    kvpress.KnormPress(c), alpha_safeguard=0.01
  ),
  "ada_leverage": lambda c: kvpress.AdaKVPress(
    kvpress.LeverageScorePress(c, sketch_dimension=8), alpha_safeguard=0.5
  ),
  "pyramid": kvpress.PyramidKVPress,
  "pyramid_2": lambda c: kvpress.PyramidKVPress(c, window_size=8, beta=2),
  "pyramid_16": lambda c: kvpress.PyramidKVPress(
    c, window_size=4, kernel_size=3, beta=16
  ),
  "leverage": kvpress.LeverageScorePress,
  "leverage_8": lambda c: kvpress.LeverageScorePress(c, sketch_dimension=8),
  "mended_noncausal": kvpress.NonCausalAttnPress,
  "mended_noncausal_24": lambda c: kvpress.NonCausalAttnPress(c, chunk_size=24),
  "chunk_keydiff": lambda c: kvpress.ChunkPress(kvpress.KeyDiffPress(c), 32),
  "chunk_knorm": lambda c: kvpress.ChunkPress(kvpress.KnormPress(c), 1024),
  "chunk_lagkv": lambda c: kvpress.ChunkPress(
    kvpress.LagKVPress(c, n_sink=2, lag_size=9, cross_scoring=True), 40
  ),
  "chunk_leverage": lambda c: kvpress.ChunkPress(
    kvpress.LeverageScorePress(c, sketch_dimension=8), 50
  ),
  "mended_chunk_snapkv": lambda c: in_chunks(
    kvpress.SnapKVPress(c, window_size=2, kernel_size=3), 40
  ),
}
# At the length of 901 tokens, which is no whole number of chunks.
LONG_PRESSES = {
  "compactor": kvpress.CompactorPress,
  "mended_compactor": kvpress.CompactorPress,
  "noncausal": kvpress.NonCausalAttnPress,
  "mended_noncausal": kvpress.NonCausalAttnPress,
}
PER_LAYER = {"small": (0.2, 0.75, 0.5, 0.9), "held_out": (0.6, 0.1, 0.85)}
REROTATED = {
  "rerotate_snapkv": lambda c: kvpress.SnapKVPress(c, window_size=16),
  "rerotate_keydiff": kvpress.KeyDiffPress,
}


def drawn(*size, **kwargs):
  """Replaces torch.randn in LeverageScorePress."""
  del kwargs
  normals = tiny_llama.normals(size[1], size[3])
  return torch.from_numpy(normals)[None].reshape(size)


def attention_of(name):
  """Patches NonCausalAttnPress if a name says so."""
  own = kvpress.NonCausalAttnPress.non_causal_chunked_attn
  mended = name.startswith("mended_")
  return mock.patch.object(
    kvpress.NonCausalAttnPress,
    "non_causal_chunked_attn",
    staticmethod(whole_chunks_only if mended else own),
  )


class Checkpoint:
  """A model with the keys of prompts that nothing compresses."""

  def __init__(self, name):
    self.name = name
    with tempfile.TemporaryDirectory() as folder:
      tiny_llama.write(name, pathlib.Path(folder))
      load = transformers.AutoModelForCausalLM.from_pretrained
      self.model = load(folder, dtype=torch.float32).eval()

  def prompt(self, length):
    return torch.tensor([tiny_llama.prompt(self.name, length)])

  def prefill(self, length, press=None):
    """The cache of a prompt, and for each layer what AdaKVPress hides."""
    cache = transformers.DynamicCache()
    for layer in self.model.model.layers:
      layer.self_attn.masked_key_indices = None
    if press is None:
      self.model.model(self.prompt(length), past_key_values=cache)
    else:
      with press(self.model):
        self.model.model(self.prompt(length), past_key_values=cache)
    layers = self.model.model.layers
    return cache, [x.self_attn.masked_key_indices for x in layers]

  def kept(self, length, press):
    """The tokens that a press keeps, bool [L, K, n]."""
    observed = isinstance(press, kvpress.ObservedAttentionPress)
    self.model.set_attn_implementation("eager" if observed else "sdpa")
    full, _ = self.prefill(length)
    cache, masked = self.prefill(length, press)
    bits = []
    for before, after, hidden in zip(
      full.layers, cache.layers, masked, strict=True
    ):
      same = (after.keys[0][:, :, None] == before.keys[0][:, None]).all(-1)
      assert (same.sum(-1) == 1).all()
      found = same.any(dim=1).numpy()
      if hidden is not None:
        found[hidden[1].numpy(), hidden[2].numpy()] = False
      bits.append(found)
    return np.stack(bits)


class Followed:
  """Follows the positions of the tokens of a cache through a press."""

  def __init__(self, press, positions):
    self.compress, press.compress = press.compress, self.followed
    # By layer, those that are kept, and how many tokens there have been.
    self.positions = positions

  def followed(self, module, hidden, keys, values, attentions, kwargs):
    after = self.compress(module, hidden, keys, values, attentions, kwargs)
    count, length = keys.shape[1:3]
    nothing = np.zeros((count, 0), int), 0
    before, seen = self.positions.get(module.layer_idx, nothing)
    added = length - before.shape[1]
    # The last token may be gone, so that the next follows none of the kept.
    new = np.tile(seen + np.arange(added), (count, 1))
    before = np.concatenate([before, new], axis=1)
    same = (after[0][0][:, :, None] == keys[0][:, None]).all(-1).numpy()
    assert (same.sum(-1) == 1).all()
    kept = [row[of.argmax(-1)] for row, of in zip(before, same, strict=True)]
    self.positions[module.layer_idx] = np.stack(kept), seen + added
    return after


def decoded(checkpoint, length):
  """Generated tokens, and the positions that are left after them."""
  prefilling = kvpress.SnapKVPress(0.5, window_size=16)
  decoding = kvpress.DecodingPress(
    kvpress.KeyDiffPress(), compression_interval=8, target_size=48
  )
  positions = {}
  Followed(prefilling, positions)
  Followed(decoding, positions)
  press = kvpress.PrefillDecodingPress(prefilling, decoding)
  cache, model, tokens = transformers.DynamicCache(), checkpoint.model, []
  with press(model):
    logits = model(checkpoint.prompt(length), past_key_values=cache).logits
    for step in range(DECODED):
      tokens.append(int(logits[0, -1].argmax()))
      logits = model(
        torch.tensor([tokens[-1:]]),
        past_key_values=cache,
        position_ids=torch.tensor([[length + step]]),
      ).logits
  kept = np.stack([np.sort(positions[n][0], -1) for n in sorted(positions)])
  return np.array(tokens, np.int16), kept.astype(np.int16)


def make(checkpoint, files):
  name = checkpoint.name
  own, turned = files.setdefault(name, {}), files["rerotated"]
  cases = [(p, n) for p in PRESSES for n in LENGTHS]
  if name == "small":
    cases += [(p, LONG) for p in LONG_PRESSES]
  for press_name, length in cases:
    presses = LONG_PRESSES if length == LONG else PRESSES
    for percent in PERCENTS:
      with attention_of(press_name):
        kept = checkpoint.kept(length, presses[press_name](percent / 100))
      own[f"{press_name}/{length}/{percent}"] = np.packbits(kept, axis=-1)
  for length in LENGTHS:
    press = kvpress.PerLayerCompressionPress(
      kvpress.SnapKVPress(window_size=16), list(PER_LAYER[name])
    )
    kept = checkpoint.kept(length, press)
    own[f"per_layer/{length}/0"] = np.packbits(kept, axis=-1)
    tokens, left = decoded(checkpoint, length)
    files["decoded"][f"{name}/{length}/tokens"] = tokens
    files["decoded"][f"{name}/{length}/kept"] = left
  for press_name, scorer in REROTATED.items():
    press = kvpress.KeyRerotationPress(scorer(0.7))
    cache, _ = checkpoint.prefill(LENGTHS[0], press)
    keys = np.stack([layer.keys[0].numpy() for layer in cache.layers])
    turned[f"{name}/{press_name}/{LENGTHS[0]}/70"] = keys


def main() -> None:
  torch.set_num_threads(1)
  torch.set_grad_enabled(False)
  files: dict = {"rerotated": {}, "decoded": {}}
  with mock.patch.object(torch, "randn", drawn):
    for name in tiny_llama.SHAPES:
      make(Checkpoint(name), files)
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
