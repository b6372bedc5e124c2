"""Makes tests/golden/transformers/: what Hugging Face transformers answers.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
safetensors and numpy:

  python tests/golden/make_transformers.py

For each family there is a tiny random checkpoint written by `save_pretrained`
(`<family>/`, float32) and its logits (`<family>.npz`):

  right_*  three rows of unequal lengths, padded on the right
  left_*   the same rows, padded on the left
  long_*   one row that runs past the original context

with ids, mask (1 = token), positions (int32, -1 = padding) and logits
(float32, 0 where padded); `right_bfloat16` has the logits of the model cast to
bfloat16, and `generated` what greedy decoding appends to each row by itself.
`../reference.npz` holds the same of the bundled model, as transformers reads
the directory that kvjax has written: make it again after a training with

  python tests/golden/make_transformers.py reference

and single families, whose seeds follow from their order, with their names, as
in `make_transformers.py gemma3 olmo2`.

`published_configs.json` holds each family's
configuration in the form that the Hub's checkpoints have (rope_theta and
rope_scaling; transformers 5 writes rope_parameters instead), and
`versions.json` says what made it all. `chat/` holds a tokenizer with a chat
template and what transformers makes of them.

Dynamic RoPE is the exception: transformers takes the batch's longest row for
every row and remembers it for later calls. In kvjax a row stands alone, so
the rows of that family are run one by one, each on a model just built.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
import torch
import transformers
from families import FAMILIES, PAD_ID, SIZES, VOCABULARY
from tokenizers import decoders, models, pre_tokenizers

OUTPUT = pathlib.Path(__file__).parent / "transformers"
ROW_LENGTHS = (36, 20, 7)
LONG_LENGTH = 96
GENERATED = 24
REFERENCE = pathlib.Path(__file__).parents[2] / "models" / "reference"
REFERENCE_TEXT = """\
One of the special magic numbers for brave-otter is: 4827193. The grass is \
green. One of the special magic numbers for calm-river is: 9051726. The sky is \
blue.
What is the special magic number for calm-river mentioned in the provided text?
The special magic number for calm-river mentioned in the provided text is"""

SHARDED = "qwen3"  # This one is stored as several files and an index.

# Uses what real templates use: namespaces, loop controls, trim, tojson,
# strftime_now, raise_exception, special tokens and the thinking switch.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set state = namespace(system="Be brief.") %}
{%- for message in messages %}
    {%- if message["role"] == "system" %}
        {%- set state.system = message["content"] | trim %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if strftime_now is not defined %}
    {{- raise_exception("no clock") }}
{%- endif %}
{{- "<|system|>" + state.system + "\\n" }}
{{- {"tools": tools} | tojson + eos_token }}
{% for message in messages %}
    {% if message["role"] == "system" %}
        {% continue %}
    {% elif message["role"] not in ["user", "assistant"] %}
        {{ raise_exception("unknown role " + message["role"]) }}
    {% endif %}
{{ "<|" + message["role"] + "|>" + message["content"] | trim + eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}
"""
CHAT_CONTEXTS = (
  "The key is 42.",
  "  Blanks at the start, dots at the end...\n\n",
  'Quotes "<&>" and é, 中, 🙂 stay as they are.',
)


def build(config, seed: int):
  """A model with weights that no test can mistake for a default."""
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager", dtype=torch.float32
  ).eval()
  random = np.random.default_rng(seed)
  with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
      values = random.standard_normal(parameter.shape)
      if name.endswith("norm.weight"):
        # Gemma adds 1 to the weights of its norms.
        mean = 0 if config.model_type.startswith("gemma") else 1
        values = mean + 0.3 * values
      elif name.endswith("sinks"):
        pass
      elif name.endswith("bias"):
        values = 0.5 * values
      elif config.tie_word_embeddings or "embed_tokens" not in name:
        # Queries and keys large enough for attention to be far from uniform,
        # a tied embedding large enough for the layers not to drown it.
        large = ("q_proj", "k_proj", "qkv_proj", "embed_tokens")
        gain = 1.5 if any(part in name for part in large) else 1.0
        values = gain * values / np.sqrt(parameter.shape[1])
      parameter.copy_(torch.from_numpy(values.astype(np.float32)))
  return model


def run(model, ids, mask, positions):
  """Logits of padded rows; 0 where there is padding."""
  with torch.no_grad():
    logits = (
      model(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(np.maximum(positions, 0)),
        use_cache=False,
      )
      .logits.float()
      .numpy()
    )
  return np.where(mask[:, :, None] == 1, logits, 0).astype(np.float32)


def generate(model, rows, count: int):
  """What greedy decoding appends to each row by itself; no token ends it."""
  model.generation_config.eos_token_id = None
  found = []
  for row in rows:
    ids = torch.from_numpy(np.asarray(row, np.int64)[None])
    whole = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      do_sample=False,
      max_new_tokens=count,
      pad_token_id=PAD_ID,
    )
    found.append(whole[0, len(row) :].numpy().astype(np.int32))
  return np.stack(found)


def pad(rows, side: str):
  """Rows of ids -> ids, mask and positions [B, S] padded on one side."""
  width = max(len(row) for row in rows)
  ids = np.full((len(rows), width), PAD_ID, np.int64)
  positions = np.full((len(rows), width), -1, np.int64)
  for b, row in enumerate(rows):
    at = slice(0, len(row)) if side == "right" else slice(-len(row), None)
    ids[b, at] = row
    positions[b, at] = np.arange(len(row))
  return ids, (positions >= 0).astype(np.int64), positions


def put_in_four_bits(
  model, directory: pathlib.Path, quantization: dict
) -> None:
  """Stores the experts in MXFP4, and takes them as transformers reads them.

  Blocks are [experts, outputs, blocks, 16] with the first of two numbers in the
  lower bits, as in the files of gpt-oss.
  """
  path = directory / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  for name in list(tensors):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
      continue
    rows = tensors.pop(name).swapaxes(1, 2)
    blocks = rows.reshape(*rows.shape[:2], -1, 32)
    # The largest number of a block becomes at most 6.
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=-1) / 6))
    scaled = blocks / 2.0 ** exponents[..., None]
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.abs(np.abs(scaled)[..., None] - numbers).argmin(axis=-1)
    codes = (codes + 8 * (scaled < 0)).astype(np.uint8)
    tensors[f"{name}_blocks"] = codes[..., ::2] | (codes[..., 1::2] << 4)
    tensors[f"{name}_scales"] = (exponents + 127).astype(np.uint8)
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  path = directory / "config.json"
  fields = json.loads(path.read_text())
  _write_json(path, fields | {"quantization_config": quantization})
  # It is in bfloat16, which holds these numbers, but no others.
  read = transformers.AutoModelForCausalLM.from_pretrained(
    directory, quantization_config=transformers.Mxfp4Config(dequantize=True)
  )
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        parameter.copy_(read.get_parameter(name))


def make_family(name: str, published: dict, seed: int) -> None:
  published = dict(published)
  quantization = published.pop("quantization_config", None)
  config = transformers.AutoConfig.for_model(**published)
  config.architectures = published["architectures"]
  model = build(config, seed)
  shard = {"max_shard_size": "30KB"} if name == SHARDED else {}
  model.save_pretrained(OUTPUT / name, **shard)
  if quantization is not None:
    put_in_four_bits(model, OUTPUT / name, quantization)

  random = np.random.default_rng(1000 + seed)
  rows = [random.integers(3, VOCABULARY, length) for length in ROW_LENGTHS]
  long = [random.integers(3, VOCABULARY, LONG_LENGTH)]
  arrays = {}
  for case, batch in {
    "right": pad(rows, "right"),
    "left": pad(rows, "left"),
    "long": pad(long, "right"),
  }.items():
    if name == "llama_dynamic":
      parts = zip(*(array[:, None] for array in batch), strict=True)
      logits = np.concatenate([run(build(config, seed), *p) for p in parts])
    else:
      logits = run(model, *batch)
    ids, mask, positions = (array.astype(np.int32) for array in batch)
    arrays |= {
      f"{case}_ids": ids,
      f"{case}_mask": mask,
      f"{case}_positions": positions,
      f"{case}_logits": logits,
    }
  if name != "llama_dynamic":
    arrays["generated"] = generate(model, rows, GENERATED)
    arrays["right_bfloat16"] = run(model.bfloat16(), *pad(rows, "right"))
  np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
  print(name, "largest logit", abs(arrays["long_logits"]).max())


def make_reference() -> None:
  """The bundled model on a short prompt: ids, last logits, greedy answer."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    REFERENCE, attn_implementation="eager", dtype=torch.float32
  ).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(REFERENCE)
  text = tokenizer.bos_token + REFERENCE_TEXT
  ids = np.array([tokenizer.encode(text, add_special_tokens=False)])
  positions = np.arange(ids.size)[None]
  logits = run(model, ids, np.ones_like(ids), positions)
  generated = generate(model, ids, GENERATED)
  print(tokenizer.decode(generated[0]))
  np.savez_compressed(
    OUTPUT.parent / "reference.npz",
    text=text,
    ids=ids.astype(np.int32),
    logits=logits[:, -8:],
    generated=generated,
  )


def make_chat() -> None:
  """A byte-level tokenizer without merges, and its chat template."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, [])
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token="<|begin|>",
    eos_token="<|end|>",
    pad_token="<|pad|>",
    additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    chat_template=CHAT_TEMPLATE,
  )
  tokenizer.save_pretrained(OUTPUT / "chat")
  special = {
    "bos_id": tokenizer.bos_token_id,
    "eos_id": tokenizer.eos_token_id,
    "pad_id": tokenizer.pad_token_id,
  }
  samples = []
  for context in CHAT_CONTEXTS:
    rendered = tokenizer.apply_chat_template(
      [{"role": "user", "content": context}],
      add_generation_prompt=True,
      tokenize=False,
      enable_thinking=False,
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    samples.append(
      {
        "context": context,
        "rendered": rendered,
        "ids": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=True),
      }
    )
  _write_json(OUTPUT / "chat.json", {"special": special, "samples": samples})


def _write_json(path: pathlib.Path, value) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
  path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
  if sys.argv[1:] == ["reference"]:
    make_reference()
    return
  families = {name: SIZES | fields for name, fields in FAMILIES.items()}
  chosen = sys.argv[1:]
  if chosen:
    for name in chosen:
      shutil.rmtree(OUTPUT / name, ignore_errors=True)
      make_family(name, families[name], list(families).index(name))
    _write_json(OUTPUT / "published_configs.json", families)
    return
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  for seed, (name, published) in enumerate(families.items()):
    make_family(name, published, seed)
  make_chat()
  make_reference()
  _write_json(OUTPUT / "published_configs.json", families)
  _write_json(
    OUTPUT / "versions.json",
    {
      "numpy": np.__version__,
      "safetensors": safetensors.__version__,
      "tokenizers": tokenizers.__version__,
      "torch": str(torch.__version__),
      "transformers": transformers.__version__,
    },
  )


if __name__ == "__main__":
  main()
