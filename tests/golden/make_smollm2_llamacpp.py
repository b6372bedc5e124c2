"""Makes tests/golden/smollm2/llamacpp.json: what llama.cpp makes of texts.

llama.cpp reads the same GGUF file as kvjax, and its splits of texts are written
without the library `tokenizers`, on which kvjax and `make_smollm2.py` stand.
The file is stored in the repository. To make it again, in an environment of its
own with xllamacpp 2026.10, which has llama.cpp in its wheel:

  python tests/golden/make_smollm2_llamacpp.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import importlib.metadata
import json
import pathlib
import sys
import urllib.request

import xllamacpp

GOLDEN = pathlib.Path(__file__).parent
OUTPUT = GOLDEN / "smollm2" / "llamacpp.json"


def texts() -> list[str]:
  """The texts of the model's other golden file, and of other tokenizers'."""
  smollm2 = json.loads((GOLDEN / "smollm2" / "texts.json").read_text("utf-8"))
  published = json.loads(
    (GOLDEN / "published_tokenizers.json").read_text("utf-8")
  )
  found = [sample["text"] for sample in smollm2["samples"]]
  found.append(smollm2["chat"]["rendered"])
  return list(dict.fromkeys([*found, *published["texts"]]))


def serve(path: str) -> xllamacpp.Server:
  settings = xllamacpp.CommonParams()
  settings.model.path = path
  settings.n_ctx = 512
  return xllamacpp.Server(settings)


def encode(server: xllamacpp.Server, text: str) -> list[int]:
  asked = {"content": text, "add_special": False, "parse_special": True}
  request = urllib.request.Request(
    server.listening_address + "/tokenize",
    data=json.dumps(asked).encode(),
    headers={"Content-Type": "application/json"},
  )
  with urllib.request.urlopen(request) as answer:
    return json.load(answer)["tokens"]


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_smollm2_llamacpp.py needs the GGUF file")
  server = serve(sys.argv[1])
  found = {
    "samples": [
      {"text": text, "ids": encode(server, text)} for text in texts()
    ],
    "version": importlib.metadata.version("xllamacpp"),
  }
  text = json.dumps(found, sort_keys=True).replace('}, {"ids', '},\n{"ids')
  OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
