"""Makes tests/golden/kvpress_smollm2/: kvpress on SmolLM2-135M-Instruct.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5, gguf and numpy, with the file that
`kvjax.models.load("smollm2-135m-instruct")` keeps in `~/.cache/kvjax/models`:

  python tests/golden/make_kvpress_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Names of presses may follow; the other presses then keep what is stored of them.

The prompts and statistics are those that draw_kvpress_smollm2.py makes. The
context is prefilled and compressed, then the question is appended at the
positions after the whole context and answered greedily, by the code of
kvpress's pipeline.

  kept_<prompt>.npz  for each press and share removed (in percent):
                     <press>_<percent>, the kept tokens as bits, uint8
                     [L, K, n / 8], or the kept channels of ThinKPress, after
                     which those of ComposedPress have the kept tokens;
                     prompts are numbered in their order, the first `SETS` of
                     each task have such a file
  answers.json       for each press, <press>_<percent>: per prompt the ids of
                     the answer, without the token that ends it; `full_0` is
                     without a press
  sketches.npz       the sketch [K, D, k] that kvpress would have drawn, here
                     the same in all layers
  versions.json      what made the presses of the last run
  kvzap_linear/, kvzap_mlp/  gates that smollm2_gates.py describes

What a press does follows the attention of a layer, so one forward pass serves
many: each press gets the layer's keys and values in a cache of its own, through
its own hook. KVzipPress gets those of all layers, and replays the context;
FastKVzipPress chooses when it has scored all layers. PrefillDecodingPress also
evicts while its answers are decoded. For the first prompt every press also runs
as users run it, and must keep the same. Presses that turn keys run again
without that, for the tokens that they keep.
Everything runs with scaled-dot-product attention, but for
ObservedAttentionPress, which takes the model's own attention weights.
transformers masks a block of tokens in all layers alike, which fails after
PyramidKVPress: there the question is fed token by token.

Contexts have 1,036 tokens. Both shares of them are whole, so that nothing is
rounded, and so are both shares of the seven partitions of LagKV, so that no
equal ranks compete; less Compactor's 12 protected tokens they are four of its
chunks: kvpress lets the padding of a shorter one into its scores. For the same
reason the chunks of NonCausalAttnPress have 259 tokens here.
"""

import contextlib
import importlib.metadata
import json
import pathlib
import sys
import types
from collections.abc import Sequence

import kvpress
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import smollm2_presses  # noqa: E402
from smollm2_presses import EAGER, PRESSES, STILL, TURNING  # noqa: E402

OUTPUT = HERE / "kvpress_smollm2"
PERCENTS = (50, 75)
SETS = 2
MOST_TOKENS = 12
FULL = "full_0"


class Pass:
  """A forward pass over a context, compressed by many presses.

  Attributes:
    context: the token ids.
    presses: by case.
    full: the cache without compression.
    caches: by case.
    masked: by case, for presses that hide tokens, those of each layer.
  """

  def __init__(self, model, context, presses):
    self.model, self.context, self.presses = model, context, presses
    self.full = transformers.DynamicCache()
    self.caches = {case: transformers.DynamicCache() for case in presses}
    self.masked = {case: [] for case in presses}
    hooks = []
    for press in presses.values():
      press.post_init_from_model(model)
      if isinstance(press, kvpress.FastKVzipPress):
        press.score_val = [None] * len(model.model.layers)
    for layer in model.model.layers:
      layer.self_attn.rotary_emb = model.model.rotary_emb
      hook = layer.self_attn.register_forward_hook(self.hook, with_kwargs=True)
      hooks.append(hook)
    model.model(input_ids=context, past_key_values=self.full)
    for hook in hooks:
      hook.remove()
    for case, press in presses.items():
      if isinstance(press, kvpress.KVzipPress):
        self.masked[case] = self.replay(press, self.caches[case])
      if isinstance(press, kvpress.FastKVzipPress):
        press.compress_post(model)
        self.masked[case] = masked(model)

  def replay(self, press, cache):
    """The tokens that KVzipPress hides after a prefill of this cache."""
    for layer in self.model.model.layers:
      # The replay attends to all tokens.
      layer.self_attn.masked_key_indices = None
    with press(self.model):
      press._context_ids, press._cache = self.context, cache
    return masked(self.model)

  def hook(self, module, inputs, kwargs, output):
    layer = self.full.layers[module.layer_idx]
    for case, press in self.presses.items():
      cache = self.caches[case]
      cache.update(layer.keys, layer.values, module.layer_idx)
      if isinstance(press, kvpress.KVzipPress):
        continue
      module.masked_key_indices = None
      own = {**kwargs, "past_key_values": cache}
      press.forward_hook(module, inputs, own, output)
      self.masked[case].append(module.masked_key_indices)
    return output

  def kept(self, case):
    """The kept tokens of a press, bool [L, K, n]."""
    press, cache = self.presses[case], self.caches[case]
    return kept(press, self.full, cache, self.masked[case])

  def answer(self, case, question):
    """The ids that kvpress's pipeline answers with; the cache is used up."""
    cache = self.full if case == FULL else self.caches[case]
    length = self.context.shape[1]
    if isinstance(self.presses.get(case), TURNING):
      length = cache.get_seq_length()
    for index, layer in enumerate(self.model.model.layers):
      hidden = None if case == FULL else self.masked[case][index]
      layer.self_attn.masked_key_indices = hidden
    if len({layer.keys.shape[2] for layer in cache.layers}) > 1:
      for token in question[:, :-1].T:
        self.model(
          input_ids=token[None],
          past_key_values=cache,
          position_ids=torch.tensor([[length]]),
        )
        length += 1
      question = question[:, -1:]
    found = []
    tokenizer = types.SimpleNamespace(
      decode=lambda ids, **options: found.extend(ids.tolist())
    )
    pipeline = types.SimpleNamespace(model=self.model, tokenizer=tokenizer)
    with self.evicting(case):
      kvpress.KVPressTextGenerationPipeline.generate_answer(
        pipeline, question, cache, length, MOST_TOKENS
      )
    end = self.model.generation_config.eos_token_id
    return found[:-1] if found[-1] == end else found

  def evicting(self, case):
    """A press is active in an answer only if it evicts while decoding."""
    press = self.presses.get(case)
    if isinstance(press, kvpress.PrefillDecodingPress):
      return press(self.model)
    return contextlib.nullcontext()


def masked(model):
  """The tokens that each layer hides, or None."""
  return [layer.self_attn.masked_key_indices for layer in model.model.layers]


def kept(press, full, cache, masked):
  """Which tokens of a full cache another one has, bool [L, K, n].

  Of ThinKPress, which keeps all tokens, it is the channels [L, K, D]; of
  ComposedPress, the channels and then the tokens, [L, K, D + n].
  """
  channels = torch.stack(
    [(layer.keys[0] != 0).any(dim=1) for layer in cache.layers]
  ).numpy()
  if isinstance(press, kvpress.ThinKPress):
    return channels
  found = []
  for layer, own, hidden, written in zip(
    full.layers, cache.layers, masked, channels, strict=True
  ):
    bits = survivors(layer.keys[0].numpy(), own.keys[0].numpy(), written)
    if hidden is not None:
      _, heads, tokens = hidden
      bits[heads, tokens] = False
    found.append(bits)
  if isinstance(press, kvpress.ComposedPress):
    return np.concatenate([channels, found], axis=-1)
  return np.stack(found)


def survivors(before, after, channels):
  """The tokens whose keys, in some channels, are still there, bool [K, n]."""
  bits = np.zeros(before.shape[:2], bool)
  for head, every, left, written in zip(
    bits, before, after, channels, strict=True
  ):
    every, left = every[:, written], left[:, written]
    places = {key.tobytes(): place for place, key in enumerate(every)}
    assert len(places) == len(every)
    head[[places[key.tobytes()] for key in left]] = True
    assert head.sum() == len(left)
  return bits


def check(made: Pass) -> None:
  """Every press, as users run it, keeps what it kept beside the others."""
  model = made.model
  for case, press in made.presses.items():
    if isinstance(press, TURNING):
      continue
    cache = transformers.DynamicCache()
    for layer in model.model.layers:
      layer.self_attn.masked_key_indices = None
    with press(model):
      model.model(input_ids=made.context, past_key_values=cache)
    again = kept(press, made.full, cache, masked(model))
    np.testing.assert_array_equal(again, made.kept(case), err_msg=case)


def make_presses(makers) -> dict:
  """The presses of all shares, by case."""
  return {
    f"{name}_{percent}": make_press(percent / 100)
    for name, make_press in makers.items()
    for percent in PERCENTS
  }


def kept_sets(made: Pass) -> dict[str, np.ndarray]:
  """The kept tokens of all presses, as bits."""
  names = {case.rpartition("_")[0] for case in made.presses}
  still = {name: STILL[name] for name in STILL if name in names}
  again = Pass(made.model, made.context, make_presses(still)) if still else None
  found = {}
  for case in made.presses:
    turned = again is not None and case in again.presses
    found[case] = np.packbits((again if turned else made).kept(case), axis=-1)
  return found


def make(model, samples, names: Sequence[str]) -> dict:
  """Writes the kept tokens of some presses and returns their answers."""
  answers: dict = {}
  seen: dict = {}
  for number, sample in enumerate(samples):
    context = torch.tensor([sample["context"]])
    question = torch.tensor([sample["question"]])
    seen[sample["task"]] = seen.get(sample["task"], 0) + 1
    stored = seen[sample["task"]] <= SETS
    sets = {}
    for eager in (False, True):
      model.set_attn_implementation("eager" if eager else "sdpa")
      chosen = [name for name in names if (name in EAGER) == eager]
      if not chosen:
        continue
      made = Pass(
        model, context, make_presses({name: PRESSES[name] for name in chosen})
      )
      if number == 0:
        check(made)
      if stored:
        sets |= kept_sets(made)
      for case in made.presses:
        answers.setdefault(case, []).append(made.answer(case, question))
      if not eager:
        answers.setdefault(FULL, []).append(made.answer(FULL, question))
    if stored:
      store(OUTPUT / f"kept_{number}.npz", sets)
    print(f"{number + 1} of {len(samples)} prompts", flush=True)
  return answers


def store(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
  """Replaces arrays of a file, and leaves its others as they are."""
  before = {}
  if path.exists():
    with np.load(path) as stored:
      before = dict(stored)
  np.savez_compressed(path, **(before | arrays))


def main() -> None:
  if len(sys.argv) < 2:
    sys.exit("make_kvpress_smollm2.py needs the GGUF file")
  names = sys.argv[2:] or list(PRESSES)
  torch.set_num_threads(1)
  path = pathlib.Path(sys.argv[1]).resolve()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32
  ).eval()
  prompts = json.loads((OUTPUT / "prompts.json").read_text(encoding="utf-8"))
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  with torch.no_grad(), smollm2_presses.given(tokenizer):
    answers = make(model, prompts["samples"], names)
  target = OUTPUT / "answers.json"
  if target.exists():
    answers = json.loads(target.read_text(encoding="utf-8")) | answers
  lines = ",\n".join(
    f"{json.dumps(case)}: {json.dumps(ids)}" for case, ids in answers.items()
  )
  text = f"{{\n{lines}\n}}\n"
  target.write_text(text, encoding="utf-8")
  np.savez_compressed(
    OUTPUT / "sketches.npz",
    **{str(smollm2_presses.SKETCH_DIM): smollm2_presses.scaled_sketch()},
  )
  versions = {
    name: importlib.metadata.version(name)
    for name in ("gguf", "kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
