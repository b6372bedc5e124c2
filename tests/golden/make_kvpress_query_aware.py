"""Makes tests/golden/kvpress_query_aware.json: kvpress with `query_aware`.

The file is stored in the repository, so no test needs torch. To make it again,
in the environment of make_kvpress_smollm2.py:

  python tests/golden/make_kvpress_query_aware.py SmolLM2.gguf

With `query_aware`, kvpress's `evaluation/evaluate.py` appends the question to
the context, leaves the question empty and calls its pipeline, as this does.

  samples    the texts, for each the ids of the compressed part and of what
             follows it, from the pipeline's `preprocess`, and for each press,
             at half the cache, the ids of the answer
  versions   what made it all
"""

import importlib.metadata
import json
import pathlib
import sys

import kvpress
import torch
import transformers

OUTPUT = pathlib.Path(__file__).parent / "kvpress_query_aware.json"
MOST_TOKENS = 12
PRESSES = {
  "keydiff": kvpress.KeyDiffPress,
  "snapkv": kvpress.SnapKVPress,
  "knorm": kvpress.KnormPress,
}
PREFIX = " The code for {} is"
CITIES = ("Lisbon", "Oslo", "Quito")
CODES = (4817, 9203, 3356)


def texts() -> list[dict]:
  """Three codes among sentences of equal form, one asked for in each."""
  lines = [f"House {n} of the village has {n + 3} windows." for n in range(40)]
  for place, city, code in zip((8, 19, 31), CITIES, CODES, strict=True):
    lines.insert(place, f"The code for {city} is {code}.")
  context = "Remember the codes.\n" + " ".join(lines) + "\n"
  return [
    {
      "context": context,
      "question": f"What is the code for {city} in the text?",
      "answer_prefix": PREFIX.format(city),
    }
    for city in CITIES
  ]


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("make_kvpress_query_aware.py needs the GGUF file")
  torch.set_num_threads(1)
  path = pathlib.Path(sys.argv[1]).resolve()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32
  ).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  pipeline = kvpress.KVPressTextGenerationPipeline(
    model=model, tokenizer=tokenizer
  )
  made = []
  for sample in texts():
    context = sample["context"] + sample["question"]
    prefix = sample["answer_prefix"]
    ids = pipeline.preprocess(context, [""], prefix, 10**9)
    (question,) = ids["questions_ids"]
    answers = {
      name: pipeline(
        context,
        question="",
        answer_prefix=prefix,
        press=make_press(0.5),
        max_new_tokens=MOST_TOKENS,
      )["answer"]
      for name, make_press in PRESSES.items()
    }
    made.append(
      sample
      | {"context_ids": ids["context_ids"][0].tolist()}
      | {"question_ids": question[0].tolist(), "answers": answers}
    )
    print(answers, flush=True)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("gguf", "kvpress", "torch", "transformers")
  }
  text = json.dumps({"versions": versions, "samples": made})
  OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
