"""Copies of a golden model with a tokenizer, to be changed or damaged."""

import json
import pathlib
import shutil

import safetensors.numpy
import tokenizers

from kvjax.models.tokenizer import Tokenizer

_GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"


def copied_model(folder):
  """A model directory in a folder."""
  target = folder / "model"
  shutil.copytree(_GOLDEN / "llama31", target)
  word_tokenizer().save(target)
  return target


def word_tokenizer(size=80):
  words = {f"w{i}": i for i in range(size - 3)}
  words |= {"<s>": size - 3, "</s>": size - 2, "<unk>": size - 1}
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="<unk>")
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def edit(path, change):
  """Applies `change` to the tensors of a file."""
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def edit_config(directory, **fields):
  path = directory / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
