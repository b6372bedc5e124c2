"""Makes tests/golden/kvpress_decoding/: what DecodingPress keeps.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress_decoding.py SmolLM2-135M-Instruct.Q4_1.gguf

with gguf, and the file that `kvjax.models.load("smollm2-135m-instruct")` keeps
in `~/.cache/kvjax/models`. The other checkpoints and their prompts are those of
tiny_llama.py.

  <checkpoint>.npz  for prompts of n tokens and every compression
                    <press>/<n>/<step>, the positions kept, int16 [L, K, m];
                    a press that compresses the prompt does so at step 0
  versions.json     what made it all

The tokens of the answers are given, as decoding_prompts.py has them: those that
random checkpoints generate repeat themselves, and equal tokens tie.

kvpress leaves the kept tokens in the order of their scores, so that neighbors,
partitions and the first tokens are others at the next compression. With
`ordered_` before the name of a press, they are put in the order of their
positions. With `mended_`, queries are rotated to their own positions:
DecodingPress has the rotary embedding of the last position alone. Those with
`_then_` in their names are a PrefillDecodingPress.
"""

import functools
import importlib.metadata
import json
import pathlib
import shutil
import sys
import tempfile

import kvpress
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import tiny_llama  # noqa: E402
from decoding_prompts import (  # noqa: E402
  INTERVAL,
  LENGTHS,
  REMOVED,
  SMOLLM2,
  TARGET,
  answer_to,
  prompt_of,
)

OUTPUT = HERE / "kvpress_decoding"


class OwnPositions:
  """SnapKVPress whose queries are rotated to their own positions."""

  def __init__(self, press, rotary):
    self.press, self.rotary = press, rotary
    self.score, press.score = press.score, self.mended
    self.seen = 0

  def mended(self, module, hidden, keys, values, attentions, kwargs):
    positions = torch.arange(self.seen - hidden.shape[1], self.seen)[None]
    own = self.rotary(hidden, positions)
    return self.score(
      module, hidden, keys, values, attentions, {"position_embeddings": own}
    )


def snapkv(removed=0.0):
  return kvpress.SnapKVPress(removed, window_size=12, kernel_size=3)


# By name, makers of presses.
PRESSES = {
  "snapkv": snapkv,
  "tova": lambda: kvpress.TOVAPress(),
  "keydiff": lambda: kvpress.KeyDiffPress(),
  "knorm": lambda: kvpress.KnormPress(),
  "streaming": lambda: kvpress.StreamingLLMPress(n_sink=4),
  "lagkv": lambda: kvpress.LagKVPress(n_sink=4, lag_size=8),
  "lagkv_cross": lambda: kvpress.LagKVPress(
    n_sink=4, lag_size=8, cross_scoring=True
  ),
}
ORDERED = {
  f"ordered_{name}": PRESSES[name]
  for name in ("snapkv", "streaming", "lagkv", "lagkv_cross")
}
MENDED = {"ordered_mended_snapkv": snapkv}
# What compresses the prompt, and what then evicts.
PAIRS = {"snapkv_then_keydiff": (snapkv, PRESSES["keydiff"])}


class Followed:
  """Follows the positions of the tokens of a cache through presses."""

  def __init__(self, *presses, ordered):
    for press in presses:
      press.compress = functools.partial(self.followed, press.compress)
    self.ordered = ordered
    # By layer, those that are kept after each compression, as they lie.
    self.kept, self.seen = {}, 0

  def followed(self, compress, module, hidden, keys, *others):
    parts = compress(module, hidden, keys, *others)
    count, length = keys.shape[1:3]
    history = self.kept.setdefault(module.layer_idx, [])
    before = history[-1] if history else np.zeros((count, 0), int)
    added = length - before.shape[1]
    new = np.tile(np.arange(self.seen - added, self.seen), (count, 1))
    before = np.concatenate([before, new], axis=1)
    same = (parts[0][0][:, :, None] == keys[0][:, None]).all(-1).numpy()
    assert (same.sum(-1) == 1).all()
    kept = [row[of.argmax(-1)] for row, of in zip(before, same, strict=True)]
    kept = np.stack(kept)
    if self.ordered:
      order = torch.from_numpy(kept.argsort(-1))[None, :, :, None]
      parts = tuple(part.take_along_dim(order, dim=2) for part in parts)
      kept = np.sort(kept, -1)
    history.append(kept)
    return parts


def decoded(model, name, press_name, length):
  """The positions after every compression, [L, K, m] each."""
  before, later = PAIRS.get(press_name, (None, None))
  inner = (later or {**PRESSES, **ORDERED, **MENDED}[press_name])()
  press = kvpress.DecodingPress(
    inner, compression_interval=INTERVAL, target_size=TARGET
  )
  presses = [press]
  if before is not None:
    presses = [before(REMOVED), press]
    press = kvpress.PrefillDecodingPress(*presses)
  followed = Followed(*presses, ordered=press_name.startswith("ordered_"))
  followed.seen = length
  mended = None
  if press_name in MENDED:
    mended = OwnPositions(inner, model.model.rotary_emb)
  cache = transformers.DynamicCache()
  prompt = torch.tensor([prompt_of(name, length)])
  answer = answer_to(name, length)
  with press(model):
    model(prompt, past_key_values=cache)
    for step, token in enumerate(answer):
      followed.seen = length + step + 1
      if mended is not None:
        mended.seen = followed.seen
      model(
        torch.tensor([[token]]),
        past_key_values=cache,
        position_ids=torch.tensor([[length + step]]),
      )
  layers = [followed.kept[n] for n in sorted(followed.kept)]
  return [np.sort(np.stack(parts)) for parts in zip(*layers, strict=True)]


def loaded(name, file):
  """The model of a checkpoint; SmolLM2 is in the GGUF file."""
  load = transformers.AutoModelForCausalLM.from_pretrained
  if name == SMOLLM2:
    return load(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
  with tempfile.TemporaryDirectory() as folder:
    tiny_llama.write(name, pathlib.Path(folder))
    return load(folder, dtype=torch.float32).eval()


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_kvpress_decoding.py needs the GGUF file")
  file = pathlib.Path(sys.argv[1]).resolve()
  torch.set_num_threads(1)
  torch.set_grad_enabled(False)
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  for name in (*tiny_llama.SHAPES, SMOLLM2):
    model, arrays = loaded(name, file), {}
    for press in (*PRESSES, *ORDERED, *MENDED, *PAIRS):
      # After 90 tokens ranks tie, or norms of equal tokens, and torch chooses.
      ties = press.endswith(("lagkv", "knorm"))
      for length in LENGTHS[:1] if ties else LENGTHS:
        kept = decoded(model, name, press, length)
        case = f"{press}/{length}"
        first = 0 if press in PAIRS else 1
        for number, positions in enumerate(kept, first):
          step = INTERVAL * number
          arrays[f"{case}/{step}"] = positions.astype(np.int16)
    np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
