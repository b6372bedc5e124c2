"""Model directories of any contents get one sentence, and in bounded time."""

import json
import pathlib
import shutil
import struct

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from odd_files import ODD, UNDECODED, replace

from kvjax.engine.sampling import GREEDY
from kvjax.errors import InputError
from kvjax.models.pretrained import load
from kvjax.models.saving import save
from kvjax.models.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A golden model with a tokenizer and a chat template."""
  target = tmp_path_factory.mktemp("whole") / "model"
  shutil.copytree(GOLDEN / "llama31", target)
  words = {f"w{i}": i for i in range(77)} | {"<s>": 77, "</s>": 78, "<u>": 79}
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="<u>")
  )
  fields = {"bos_token": "<s>", "eos_token": "</s>"}
  tokenizer = Tokenizer(backend, fields, chat_template="{{ messages }}")
  tokenizer.save(target)
  return target


@pytest.fixture
def directory(whole, tmp_path):
  target = tmp_path / "model"
  shutil.copytree(whole, target)
  return target


def not_loaded(path, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    load(path, "float32")
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


JSON = (
  "config.json",
  "generation_config.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "model.safetensors.index.json",
)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", JSON)
def test_json_that_is_something_else(directory, name, kind):
  if name == JSON[-1]:
    (directory / "model.safetensors").unlink()
  replace(directory / name, kind)
  sentence = ODD[kind][1]
  if name == JSON[-1] and not (directory / name).is_file():
    sentence = "has no weights"
  not_loaded(directory, sentence)


@pytest.mark.parametrize("kind", ODD)
def test_a_tokenizer_that_is_something_else(directory, kind):
  replace(directory / "tokenizer.json", kind)
  not_loaded(
    directory, ODD[kind][1] if kind in UNDECODED else "no.* a tokenizer"
  )


@pytest.mark.parametrize("kind", UNDECODED)
def test_a_template_that_is_something_else(directory, kind):
  replace(directory / "chat_template.jinja", kind)
  not_loaded(directory, ODD[kind][1])


@pytest.mark.parametrize("kind", ODD)
def test_weights_that_are_something_else(directory, kind):
  replace(directory / "model.safetensors", kind)
  not_loaded(directory, "has no weights|is not a complete safetensors file")


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_is_something_else(tmp_path, kind):
  path = tmp_path / "model"
  replace(path, kind)
  not_loaded(path, r"has no config\.json|is not a GGUF file|cannot be read")


@pytest.mark.parametrize(
  "path", ["x" * 5000, "a/" * 3000, "", "a\0b"], ids=range(4)
)
def test_paths_that_are_none(path):
  said = r"has no config\.json|has 0 GGUF|There is no model|A model is a name"
  not_loaded(path, said)


def _edit(path, **fields):
  content = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(content | fields))


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize(
  "value", [1, 1.5, True, False, [], ["<s>"], {}, {"content": 1}]
)
def test_special_tokens_that_are_no_texts(directory, name, value):
  _edit(directory / "tokenizer_config.json", **{name: value})
  not_loaded(directory, f"for '{name}', which must be a token")


@pytest.mark.parametrize(
  "value",
  [
    "",
    "</s>",
    1.5,
    NAN,
    True,
    {},
    [[]],
    ["</s>"],
    [None],
    -1,
    80,
    HUGE,
    [2**64],
  ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_that_end_no_answer(directory, name, value):
  (directory / "generation_config.json").unlink()
  _edit(directory / name, eos_token_id=value)
  not_loaded(directory, "'eos_token_id', which|model embeds 80 tokens only")


@pytest.mark.parametrize(
  ("name", "values"),
  [
    ("temperature", ("", "1", NAN, INFINITE, HUGE, -1, True, [], {})),
    ("top_k", ("", "1", NAN, INFINITE, 1.5, -1, True, [], {})),
    ("top_p", ("", "1", NAN, INFINITE, HUGE, 0, -1, 1.5, True, [], {})),
    ("do_sample", ("", "true", 1, 0, [], {})),
  ],
)
def test_sampling_that_is_no_sampling(directory, name, values):
  lm = load(directory, "float32")
  for value in values:
    fields = {"do_sample": True} | {name: value}
    object.__setattr__(lm, "generation", fields)
    with pytest.raises(InputError, match=name):
      _ = lm.sampling
  object.__setattr__(lm, "generation", {"do_sample": None, name: None})
  assert lm.sampling == GREEDY


def _damage_header(content, damage):
  (size,) = struct.unpack("<Q", content[:8])
  header = json.loads(content[8 : 8 + size])
  changed = json.dumps(damage(header)).encode()
  changed += b" " * (-len(changed) % 8)
  return struct.pack("<Q", len(changed)) + changed + content[8 + size :]


NORM = "model.norm.weight"


def _norm(**fields):
  """Changes what the header says of a tensor."""
  return lambda header: header | {NORM: header[NORM] | fields}


CUTS = {
  "empty": lambda content: b"",
  "7 bytes": lambda content: content[:7],
  "8 bytes": lambda content: content[:8],
  "100 bytes": lambda content: content[:100],
  "a byte less": lambda content: content[:-1],
  "no header": lambda content: struct.pack("<Q", 0) + content[8:],
  "a tebibyte": lambda content: struct.pack("<Q", 2**40) + content[8:],
  "all there is": lambda content: struct.pack("<Q", 2**64 - 1) + content[8:],
  "no JSON": lambda content: content[:8] + b"[" + content[9:],
}
HEADERS = {
  "a list": lambda header: [],
  "nothing": lambda header: {},
  "no name": lambda header: header | {"": header[NORM]},
  "metadata": lambda header: header | {"__metadata__": []},
  "one less": lambda header: {k: v for k, v in header.items() if k != NORM},
  "negative": _norm(shape=[-1]),
  "a fraction": _norm(shape=[1.5]),
  "overflow": _norm(shape=[2**62, 4]),
  "too short": _norm(shape=[31]),
  "a dtype": _norm(dtype="F99"),
  "64 bits": _norm(dtype="F64"),
  "8 bits": _norm(dtype="I8"),
  "backwards": _norm(data_offsets=[8, 0]),
  "far": _norm(data_offsets=[0, 2**50]),
  "before": _norm(data_offsets=[-1, 4]),
}


@pytest.mark.parametrize(
  "damage", [*CUTS, *(f"header-{name}" for name in HEADERS)]
)
def test_damaged_safetensors(directory, damage):
  path = directory / "model.safetensors"
  content = path.read_bytes()
  start, _, name = damage.partition("-")
  if start == "header":
    path.write_bytes(_damage_header(content, HEADERS[name]))
  else:
    path.write_bytes(CUTS[damage](content))
  not_loaded(directory, "safetensors|tensor")


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(directory, name, value):
  path = directory / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  tensors[name] = tensors[name].copy()
  tensors[name].flat[-1] = value
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  not_loaded(directory, f"{name} in .* holds NaN or infinite values")


@pytest.mark.parametrize(
  "file",
  [
    "../model/a",
    "/etc/passwd",
    "sub/a",
    "a\0",
    "",
    ".",
    "x" * 300,
    1,
    None,
    [],
  ],
)
def test_an_index_that_names_no_file_beside_it(directory, file):
  (directory / "model.safetensors").rename(directory / "a")
  index = {"weight_map": {NORM: file}}
  (directory / JSON[-1]).write_text(json.dumps(index))
  not_loaded(directory, "must have a weight_map|lacks the shard")


@pytest.mark.parametrize(
  "fields",
  [
    {"model": None},
    {"model": {"type": "None"}},
    {"added_tokens": [{"id": -1}]},
    {"pre_tokenizer": {"type": "Nothing"}},
    {"version": 2},
    {"vocab": []},
    {"vocab": {}},
    {"vocab": {"a": -1}},
    {"vocab": {"a": 1.5}},
    {"vocab": {"a": 2**40}},
  ],
  ids=str,
)
def test_a_damaged_tokenizer(directory, fields):
  path = directory / "tokenizer.json"
  content = json.loads(path.read_text())
  changed = content["model"] if "vocab" in fields else content
  changed |= fields
  path.write_text(json.dumps(content))
  not_loaded(directory, r"is not a tokenizer|tokenizer\.json does not know")


def test_half_a_pair_is_no_character(directory):
  tokenizer = load(directory, "float32").text
  for text in ("w1 \ud800", "\udfff"):
    with pytest.raises(InputError, match="half of a surrogate pair"):
      tokenizer.encode(text)
    with pytest.raises(InputError, match="half of a surrogate pair"):
      tokenizer.pieces(text)


def test_a_save_that_is_cut_short_is_no_model(directory, tmp_path, monkeypatch):
  """Of two models, no mixture can be loaded."""
  lm = load(directory, "float32")
  target = tmp_path / "target"
  save(lm, target)
  moved = []
  move = pathlib.Path.replace

  def stop(path, other):
    if other.parent == target:
      moved.append(other.name)
      if len(moved) == 3:
        raise KeyboardInterrupt
    return move(path, other)

  with monkeypatch.context() as patched:
    patched.setattr(pathlib.Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
      save(lm, target)
  not_loaded(target, r"has no config\.json")
  save(lm, target)
  assert np.all(load(target, "float32").params["norm"]["scale"][...] > -9)
