"""Makes tests/golden/smollm2/: SmolLM2-135M-Instruct out of its GGUF file.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2
and gguf, with the file that `kvjax.models.load("smollm2-135m-instruct")` keeps
in `~/.cache/kvjax/models`:

  python tests/golden/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

`logits.npz` has what transformers answers to a chat with the weights that it
dequantizes itself: the ids, float32 logits of the last positions for every
16th token of the vocabulary (`logits`) and their largest over all of it
(`highest`), and what greedy decoding appends (`generated`).

`texts.json` has the ids of odd texts, by a tokenizer with the parts of the
model's published tokenizer.json, over the vocabulary and the merges that the
gguf library reads. transformers does not build it from a GGUF file: it leaves
out that digits stand alone. Under `small` there are a few of its merges, and
what transformers' own converters make of them for Qwen2 and Llama 3, which
split texts otherwise.
"""

import importlib.metadata
import json
import pathlib
import sys
import types

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import (
  Qwen2Converter,
  TikTokenConverter,
)

OUTPUT = pathlib.Path(__file__).parent / "smollm2"
POSITIONS = 8
STRIDE = 16
GENERATED = 24
MERGES = 400
# In the vocabulary, and not what any merge makes: Llama 3 takes them whole.
UNMERGED = ("Ġfull", "Windows", "\u010a\u010a", "196", "969")
QUESTION = "In one sentence: why is the sky blue, and since when (e.g. 1871)?"
TEXTS = (
  "",
  " ",
  "Plain words, and a full stop.",
  "  two blanks before,  two inside,  and three after   ",
  "tabs\tand\t\ttabs\nlines\n\nlines\r\nof Windows\r\r\n \n  \n",
  "In 1969, 3.14159 of 1,000,000 at 10:45 on 24/12/2031: 0x1F + 007.",
  "x1y22z333 4four 5ive ١٢٣ ५६ ⅷ ½ ² Ⅻ",
  "I'm sure they'll say it's fine; we've seen he'd DON'T you're 'tis 'RE.",
  "Café naïve Ångström, cafe\u0301 A\u030angstro\u0308m, \ufb01n",
  "中文没有空格，日本語もそうです。한국어는 띄어 씁니다.",
  "Привет, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم",
  "😀👍🏽 👩‍👩‍👧 🇩🇪 ❤️ — “quotes” ‘single’ … · •",
  "def f(x: int) -> str:\n    return f'{x!r:>8}'  # __init__\n\n\n",
  "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><repo_name> <file_sep>",
  "<|im_start |> <|im_star|> <jupyter_code><empty_output><issue_start>",
  "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\temp\\x",
  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!????....----____====",
  "\u00a0no-break\u2003em\u200bzero\ufeffmark\u2028line\x00nul\x07bell\x7f",
  "\U0001d4d0\U00020000\U0010ffff \u0301alone\ue000private",
  "SCREAMING camelCase snake_case kebab-case dot.case ßẞ ıİ",
)


def text_of(reader, name: str):
  return reader.fields[name].contents()


def published_tokenizer(tokens, special, merges) -> tokenizers.Tokenizer:
  """The parts of the model's tokenizer.json, with these tokens and merges."""
  backend = tokenizers.Tokenizer(
    models.BPE(
      {token: number for number, token in enumerate(tokens)},
      [tuple(merge.split(" ")) for merge in merges],
    )
  )
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(special)
  return backend


class Llama3Converter(TikTokenConverter):
  """Takes the vocabulary and the merges from us, and not from a file."""

  def __init__(self, vocabulary, merges):
    super().__init__()
    self.parts = vocabulary, merges

  def extract_vocab_merges_from_model(self, tiktoken_url):
    return self.parts


def small(reader):
  """A small vocabulary, split in the three ways."""
  merges = text_of(reader, "tokenizer.ggml.merges")[:MERGES]
  made = ["".join(merge.split(" ")) for merge in merges]
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = list(dict.fromkeys([*alphabet, *made, *UNMERGED]))
  vocabulary = {token: number for number, token in enumerate(tokens)}
  pairs = [tuple(merge.split(" ")) for merge in merges]
  skeleton = types.SimpleNamespace()
  backends = {
    "qwen2": Qwen2Converter(skeleton).converted(vocabulary, pairs),
    "llama-bpe": Llama3Converter(vocabulary, pairs).converted(),
    "smollm": published_tokenizer(tokens, [], merges),
  }
  ids = {
    name: [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for name, backend in backends.items()
  }
  return {"tokens": tokens, "merges": merges, "ids": ids}


def make_texts(tokenizer, reader) -> None:
  samples = []
  for text in TEXTS:
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    samples.append({"text": text, "ids": ids, "decoded": decoded})
  found = {
    "special": {
      "bos_id": tokenizer.bos_token_id,
      "eos_id": tokenizer.eos_token_id,
      "pad_id": tokenizer.pad_token_id,
    },
    "chat": {"question": QUESTION, "rendered": rendered(tokenizer)},
    "samples": samples,
    "small": small(reader),
    "versions": {
      "gguf": importlib.metadata.version("gguf"),
      "tokenizers": tokenizers.__version__,
      "torch": str(torch.__version__),
      "transformers": transformers.__version__,
    },
  }
  text = json.dumps(found, sort_keys=True)
  text = text.replace('}, {"decoded', '},\n{"decoded')
  (OUTPUT / "texts.json").write_text(text + "\n", encoding="utf-8")


def rendered(tokenizer) -> str:
  return tokenizer.apply_chat_template(
    [{"role": "user", "content": QUESTION}],
    add_generation_prompt=True,
    tokenize=False,
  )


def make_logits(path: pathlib.Path, tokenizer) -> None:
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    attn_implementation="eager",
    dtype=torch.float32,
  ).eval()
  ids = tokenizer.encode(rendered(tokenizer), add_special_tokens=False)
  ids = torch.tensor([ids])
  with torch.no_grad():
    logits = model(input_ids=ids, use_cache=False).logits[0, -POSITIONS:]
  model.generation_config.eos_token_id = None
  whole = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    max_new_tokens=GENERATED,
    pad_token_id=tokenizer.pad_token_id,
  )
  generated = whole[0, ids.shape[1] :].numpy().astype(np.int32)
  print(tokenizer.decode(generated))
  np.savez_compressed(
    OUTPUT / "logits.npz",
    ids=ids.numpy().astype(np.int32),
    logits=logits[:, ::STRIDE].numpy(),
    highest=logits.max(dim=-1).values.numpy(),
    generated=generated,
  )


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_smollm2.py needs the GGUF file")
  path = pathlib.Path(sys.argv[1]).resolve()
  OUTPUT.mkdir(exist_ok=True)
  reader = gguf.GGUFReader(path)
  tokens = text_of(reader, "tokenizer.ggml.tokens")
  kinds = text_of(reader, "tokenizer.ggml.token_type")
  special = [
    token
    for token, kind in zip(tokens, kinds, strict=True)
    if kind == gguf.TokenType.CONTROL
  ]
  merges = text_of(reader, "tokenizer.ggml.merges")
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=published_tokenizer(tokens, special, merges),
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
    pad_token="<|im_end|>",
    chat_template=text_of(reader, "tokenizer.chat_template"),
  )
  make_texts(tokenizer, reader)
  make_logits(path, tokenizer)


if __name__ == "__main__":
  main()
