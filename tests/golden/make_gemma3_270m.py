"""Makes tests/golden/gemma3_270m/: Gemma 3 270M out of its GGUF file.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
gguf, sentencepiece and protobuf, with the file that
`kvjax.models.load("gemma3-270m")` keeps in `~/.cache/kvjax/models`:

  python tests/golden/make_gemma3_270m.py gemma-3-270m-q4_k_m.gguf

`logits.npz` has what transformers answers to a text of more tokens than a
window with the weights that the gguf library dequantizes: the ids, float32
logits of the last positions for every 256th token of the vocabulary (`logits`)
and their largest over all of it (`highest`), and what greedy decoding appends
(`generated`). The configuration is that of the model's maker, not that of the
file.

`texts.json` has the ids of odd texts by SentencePiece itself, with a model of
the tokens, scores and kinds in the file. (transformers 5.2 makes a unigram
model of them, which they are not.) SentencePiece takes the names of control
tokens in texts for text, so texts are split there first. Under `small` there
are a few tokens, and what SentencePiece makes of them with and without a blank
before each text.
"""

import importlib.metadata
import json
import pathlib
import re
import sys

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from make_smollm2 import TEXTS
from sentencepiece import sentencepiece_model_pb2 as formats

GOLDEN = pathlib.Path(__file__).parent
OUTPUT = GOLDEN / "gemma3_270m"
POSITIONS = 8
STRIDE = 256
GENERATED = 24
CHARACTERS = 3_600  # About 750 tokens, where a window has 512.
PIECES = 260
OWN_TEXTS = (
  "a" + " " * 30 + "b" + " " * 31 + "c" + " " * 32 + "d" + " " * 70,
  "\n" * 29 + "x" + "\n" * 30 + "y" + "\n" * 31 + "z" + "\n" * 64,
  "\t" * 30 + "x" + "\t" * 31 + "y" + "\t" * 33 + " \t \t  \t\t",
  "<table><tr><td>1</td>< td></tr></table><b>bold</b><bb>[multimodal]",
  "x\u2581y a\u2581b\u2581, <0x41> <0x0A><0xGG> <unused7> unused7",
  "<bos>Hello<eos><start_of_turn>user\n hi <end_of_turn>\n<pad><mask>",
  "if a:\n  if b:\n    return  [ [0] * 3 ]   # 3  blanks\n\treturn\r\n",
)
# Of google/gemma-3-270m's config.json.
CONFIG = dict(
  vocab_size=262_144,
  hidden_size=640,
  intermediate_size=2048,
  num_hidden_layers=18,
  num_attention_heads=4,
  num_key_value_heads=1,
  head_dim=256,
  hidden_activation="gelu_pytorch_tanh",
  max_position_embeddings=32_768,
  query_pre_attn_scalar=256,
  rms_norm_eps=1e-6,
  rope_parameters={
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
  },
  sliding_window=512,
  layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
  tie_word_embeddings=True,
)
NAMES = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "attn_norm": "input_layernorm",
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
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


def text_of(reader, name: str):
  return reader.fields[f"tokenizer.ggml.{name}"].contents()


def make_processor(tokens, scores, kinds, prefixed=False):
  """SentencePiece's own BPE with these tokens."""
  model = formats.ModelProto()
  for token, score, kind in zip(tokens, scores, kinds, strict=True):
    # llama.cpp stores runs of blanks as such.
    model.pieces.add(piece=token.replace(" ", "\u2581"), score=score, type=kind)
  unknown = tokens.index("<unk>")
  model.pieces[unknown].type = gguf.TokenType.UNKNOWN
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  trainer.model_type = formats.TrainerSpec.BPE
  trainer.byte_fallback = True
  trainer.unk_id = unknown
  normalizer.name = "identity"
  normalizer.add_dummy_prefix = prefixed
  normalizer.remove_extra_whitespaces = False
  normalizer.escape_whitespaces = True
  return sentencepiece.SentencePieceProcessor(
    model_proto=model.SerializeToString()
  )


def encode(processor, tokens, kinds, text):
  """Ids of a text, in which the names of control tokens are these tokens."""
  ids = {token: number for number, token in enumerate(tokens)}
  control = [
    token
    for token, kind in zip(tokens, kinds, strict=True)
    if kind == gguf.TokenType.CONTROL
  ]
  parts = re.split("(" + "|".join(map(re.escape, control)) + ")", text)
  found = []
  for number, part in enumerate(parts):
    found += [ids[part]] if number % 2 else processor.encode(part)
  return found


def small(tokens, scores, kinds):
  """The tokens that are special, bytes, and the most common pieces."""
  common = PIECES + tokens.index("\u2581t")
  letters = set("".join(tokens[common - PIECES : common]))
  chosen = [
    number
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if "unused" not in token
    and (kind != gguf.TokenType.NORMAL or number < common or token in letters)
  ]
  return tuple([each[n] for n in chosen] for each in (tokens, scores, kinds))


def make_texts(reader):
  vocabulary = [
    text_of(reader, name) for name in ("tokens", "scores", "token_type")
  ]
  tokens, _, kinds = vocabulary
  processor = make_processor(*vocabulary)
  texts = TEXTS + OWN_TEXTS
  few = small(*vocabulary)
  found = {
    "samples": [
      {"text": text, "ids": encode(processor, tokens, kinds, text)}
      for text in texts
    ],
    "small": dict(zip(("tokens", "scores", "kinds"), few, strict=True))
    | {
      name: [
        encode(make_processor(*few, prefixed), few[0], few[2], text)
        for text in texts
      ]
      for name, prefixed in (("ids", False), ("prefixed_ids", True))
    },
    "versions": {
      name: importlib.metadata.version(name)
      for name in ("gguf", "sentencepiece", "torch", "transformers")
    },
  }
  text = json.dumps(found, sort_keys=True)
  text = text.replace("}, {", "},\n{")
  (OUTPUT / "texts.json").write_text(text + "\n", encoding="utf-8")
  return processor


def read_model(reader):
  config = transformers.Gemma3TextConfig(**CONFIG)
  config._attn_implementation = "eager"
  model = transformers.Gemma3ForCausalLM(config).eval()
  weights = {}
  for tensor in reader.tensors:
    start, _, own = tensor.name.removesuffix(".weight").rpartition(".")
    if start:
      start = f"model.layers.{start.removeprefix('blk.')}."
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    if own.endswith("_norm"):
      # llama.cpp stores what multiplies, transformers what it adds 1 to.
      value = value - 1
    weights[f"{start}{NAMES[own]}.weight"] = torch.from_numpy(value.copy())
  lacking, unknown = model.load_state_dict(weights, strict=False)
  assert lacking == ["lm_head.weight"], lacking
  assert not unknown, unknown
  model.tie_weights()
  return model


def make_logits(reader, processor):
  model = read_model(reader)
  text = (GOLDEN.parents[1] / "LICENSE").read_text()[:CHARACTERS]
  ids = torch.tensor([[2, *processor.encode(text)]])
  assert ids.shape[1] > CONFIG["sliding_window"] + 100, ids.shape
  with torch.no_grad():
    whole = model(input_ids=ids, use_cache=False).logits[0]
  loss = torch.nn.functional.cross_entropy(whole[:-1], ids[0, 1:])
  print(f"{ids.shape[1]} tokens, loss {loss:.3f}")
  logits = whole[-POSITIONS:]
  model.generation_config.eos_token_id = None
  answer = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    max_new_tokens=GENERATED,
    pad_token_id=0,
  )
  generated = answer[0, ids.shape[1] :].numpy().astype(np.int32)
  print(processor.decode(generated.tolist()))
  np.savez_compressed(
    OUTPUT / "logits.npz",
    ids=ids.numpy().astype(np.int32),
    logits=logits[:, ::STRIDE].numpy(),
    highest=logits.max(dim=-1).values.numpy(),
    loss=np.float32(loss),
    generated=generated,
  )


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_gemma3_270m.py needs the GGUF file")
  OUTPUT.mkdir(exist_ok=True)
  reader = gguf.GGUFReader(pathlib.Path(sys.argv[1]).resolve())
  make_logits(reader, make_texts(reader))


if __name__ == "__main__":
  main()
