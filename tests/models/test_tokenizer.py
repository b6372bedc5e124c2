"""Texts, ids and chat templates: as transformers has them (tests/golden)."""

import datetime
import json
import pathlib
import shutil
import warnings

import pytest
import tokenizers

from kvjax.errors import InputError, InputWarning
from kvjax.models.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
CHAT = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))
SPECIAL = CHAT["special"]


@pytest.fixture
def directory(tmp_path):
  target = tmp_path / "model"
  shutil.copytree(GOLDEN / "chat", target)
  return target


def _with_template(directory, source):
  (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
  return Tokenizer.load(directory)


def _edit_config(directory, **fields):
  path = directory / "tokenizer_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("sample", CHAT["samples"], ids=lambda s: s["context"])
def test_chats_equal_those_of_transformers(sample):
  tokenizer = Tokenizer.load(GOLDEN / "chat")
  left, right = tokenizer.split_chat(sample["context"])
  # The template trims its message: at the end the separator takes the edge.
  assert left.endswith(sample["context"].lstrip())
  context = sample["context"].rstrip()
  trailing = sample["context"][len(context) :]
  assert left.removesuffix(trailing) + right == sample["rendered"]
  ids = tokenizer.encode(sample["rendered"])
  assert ids == sample["ids"]
  assert tokenizer.decode(ids) == sample["decoded"]


def _byte_level():
  """As GPT-2: offsets leave out the blanks around a word."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  ids = {token: number for number, token in enumerate([*alphabet, "Ġc", "ĠĠ"])}
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(ids, [("Ġ", "c"), ("Ġ", "Ġ")])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.post_processor = tokenizers.processors.ByteLevel(
    add_prefix_space=False, trim_offsets=True
  )
  return Tokenizer(backend, {})


def _sentence_pieces():
  """As Llama 2 and Mistral: blanks are letters, what is unknown is bytes."""
  known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
  ids = {token: number for number, token in enumerate(known)}
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      ids, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
  )
  backend.normalizer = tokenizers.normalizers.Sequence(
    [
      tokenizers.normalizers.Prepend("▁"),
      tokenizers.normalizers.Replace(" ", "▁"),
    ]
  )
  return Tokenizer(backend, {})


@pytest.mark.parametrize(
  ("make", "text", "pieces"),
  [
    (_byte_level, "a c  c", ["a", " c", " ", " c"]),
    (
      _byte_level,
      " é日\n c   ",
      [" ", "é", "", "日", "", "", "\n", " c", "  ", " "],
    ),
    (_byte_level, "", []),
    (_sentence_pieces, "a aé  a\n", ["a", " a", "é", "", " ", " a", "\n"]),
  ],
)
def test_pieces_are_the_parts_of_the_text(make, text, pieces):
  tokenizer = make()
  assert tokenizer.pieces(text) == pieces
  assert "".join(pieces) == text
  assert len(pieces) == tokenizer.count(text)


@pytest.mark.parametrize("sample", CHAT["samples"], ids=lambda s: s["context"])
def test_pieces_of_a_chat(sample):
  tokenizer = Tokenizer.load(GOLDEN / "chat")
  pieces = tokenizer.pieces(sample["rendered"])
  assert "".join(pieces) == sample["rendered"]
  assert len(pieces) == len(sample["ids"])
  assert pieces.count("<|user|>") == sample["rendered"].count("<|user|>")


def test_special_tokens_equal_those_of_transformers():
  tokenizer = Tokenizer.load(GOLDEN / "chat")
  assert tokenizer.bos_id == SPECIAL["bos_id"]
  assert tokenizer.eos_ids == (SPECIAL["eos_id"],)
  assert tokenizer.pad_id == SPECIAL["pad_id"]
  assert tokenizer.vocab_size == 262


def test_nothing_is_added_to_a_text(directory):
  backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|begin|> $A", special_tokens=[("<|begin|>", SPECIAL["bos_id"])]
  )
  backend.enable_truncation(3)
  backend.enable_padding(length=9)
  backend.save(str(directory / "tokenizer.json"))
  tokenizer = Tokenizer.load(directory)
  assert len(tokenizer.encode("twelve bytes")) == 12


@pytest.mark.parametrize(
  "context", ["#", "ends in ##", "<context ends here>", "<context ends here>>"]
)
def test_no_context_is_taken_for_the_separator(context):
  tokenizer = Tokenizer.load(GOLDEN / "chat")
  left, right = tokenizer.split_chat(context)
  assert left.endswith("<|user|>" + context)
  assert right.startswith("<|end|>")


def test_a_template_may_think():
  tokenizer = Tokenizer.load(GOLDEN / "chat")
  _, before_answer = tokenizer.split_chat("text")
  _, before_thoughts = tokenizer.split_chat("text", thinking=True)
  # The template closes the thoughts of a model that is not to think.
  assert before_answer == before_thoughts + "<think>\n\n</think>\n\n"


def test_without_a_template_there_is_bos_and_a_newline(directory):
  (directory / "chat_template.jinja").unlink()
  assert Tokenizer.load(directory).split_chat("text") == ("<|begin|>text", "\n")
  _edit_config(directory, bos_token=None)
  tokenizer = Tokenizer.load(directory)
  assert tokenizer.bos_id is None
  assert tokenizer.split_chat("text") == ("text", "\n")


def test_templates_in_the_config(directory):
  (directory / "chat_template.jinja").unlink()
  inline = "{{ bos_token }}<{{ messages[0].content }}>"
  _edit_config(directory, chat_template=inline)
  assert Tokenizer.load(directory).split_chat("a") == ("<|begin|><a", ">")
  named = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": inline},
  ]
  _edit_config(directory, chat_template=named)
  assert Tokenizer.load(directory).split_chat("a") == ("<|begin|><a", ">")
  tokenizer = _with_template(directory, "({{ messages[0].content }})")
  assert tokenizer.split_chat("a") == ("(a", ")")


def test_a_list_of_templates_has_one_or_a_default(directory):
  (directory / "chat_template.jinja").unlink()
  inline = "{{ bos_token }}<{{ messages[0].content }}>"
  named = [{"name": "chat", "template": inline}]
  _edit_config(directory, chat_template=named)
  assert Tokenizer.load(directory).split_chat("a") == ("<|begin|><a", ">")
  named.append({"name": "tool_use", "template": "tools"})
  _edit_config(directory, chat_template=named)
  with pytest.warns(InputWarning, match="chat, tool_use, but none named defau"):
    tokenizer = Tokenizer.load(directory)
  assert tokenizer.split_chat("a") == ("<|begin|>a", "\n")
  _edit_config(directory, chat_template=[])
  assert Tokenizer.load(directory).split_chat("a") == ("<|begin|>a", "\n")


def test_a_template_that_is_not_read_is_said(directory):
  template = directory / "chat_template.jinja"
  source = template.read_text()
  (directory / "chat_template.json").write_text(
    json.dumps({"chat_template": source})
  )
  with warnings.catch_warnings(action="error"):
    Tokenizer.load(directory)
  template.unlink()
  with pytest.warns(InputWarning, match="Save one for texts as chat_template."):
    tokenizer = Tokenizer.load(directory)
  assert tokenizer.split_chat("a") == ("<|begin|>a", "\n")


def test_answers_marked_for_training_are_plain_text(directory):
  source = (
    "{{ messages[0].content }}{% generation %}A{{ eos_token }}"
    "{% endgeneration %}"
  )
  tokenizer = _with_template(directory, source)
  assert tokenizer.split_chat("a") == ("a", "A<|end|>")


def test_templates_can_ask_for_the_date(directory):
  source = "{{ strftime_now('%Y') }} {{ messages[0].content }}"
  year = str(datetime.datetime.now().year)
  assert _with_template(directory, source).split_chat("a")[0] == year + " a"


def test_special_tokens_may_be_objects(directory):
  _edit_config(directory, eos_token={"content": "<|pad|>", "lstrip": False})
  assert Tokenizer.load(directory).eos_ids == (SPECIAL["pad_id"],)


def test_older_files_may_name_special_tokens_in_a_map(directory):
  """As transformers 5.2 reads it, unless the config lists added tokens."""
  names = ("bos_token", "eos_token", "pad_token")
  config = json.loads((directory / "tokenizer_config.json").read_text())
  tokens = {name: config.pop(name) for name in names}
  tokens["bos_token"] = {"content": tokens["bos_token"], "lstrip": False}
  (directory / "tokenizer_config.json").write_text(json.dumps(config))
  (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
  tokenizer = Tokenizer.load(directory)
  ids = (tokenizer.bos_id, *tokenizer.eos_ids, tokenizer.pad_id)
  assert ids == (SPECIAL["bos_id"], SPECIAL["eos_id"], SPECIAL["pad_id"])
  sample = CHAT["samples"][0]
  text = "".join(tokenizer.split_chat(sample["context"]))
  assert text == sample["rendered"]
  _edit_config(directory, added_tokens_decoder={})
  assert Tokenizer.load(directory).bos_id is None


def test_padding_without_a_pad_token(directory):
  _edit_config(directory, pad_token=None)
  assert Tokenizer.load(directory).pad_id is None


def test_which_file_says_what_ends_an_answer(directory):
  (directory / "config.json").write_text('{"eos_token_id": 7}')
  assert Tokenizer.load(directory).eos_ids == (7,)
  generation = directory / "generation_config.json"
  generation.write_text('{"eos_token_id": [8, 9]}')
  assert Tokenizer.load(directory).eos_ids == (8, 9)
  generation.write_text('{"eos_token_id": null}')
  assert Tokenizer.load(directory).eos_ids == (7,)


def test_a_saved_tokenizer_is_the_same(directory, tmp_path):
  before = Tokenizer.load(directory)
  target = tmp_path / "saved"
  target.mkdir()
  before.save(target)
  after = Tokenizer.load(target)
  for sample in CHAT["samples"]:
    assert after.split_chat(sample["context"]) == before.split_chat(
      sample["context"]
    )
    assert after.encode(sample["rendered"]) == sample["ids"]
  assert (after.bos_id, after.eos_ids, after.pad_id) == (
    before.bos_id,
    before.eos_ids,
    before.pad_id,
  )
  config = json.loads((target / "tokenizer_config.json").read_text())
  assert config == json.loads((directory / "tokenizer_config.json").read_text())


def _damage_missing(directory):
  (directory / "tokenizer.json").unlink()


def _damage_broken(directory):
  (directory / "tokenizer.json").write_text('{"version": "1.0"}')


def _damage_special(directory):
  _edit_config(directory, bos_token="<s>")


def _damage_syntax(directory):
  (directory / "chat_template.jinja").write_text("{% if %}")


def _damage_encoding(directory):
  (directory / "chat_template.jinja").write_bytes(b"{{ \xff }}")


def _damage_templates(directory):
  (directory / "chat_template.jinja").unlink()
  _edit_config(directory, chat_template=[{"template": "a"}])


def _damage_template_type(directory):
  (directory / "chat_template.jinja").unlink()
  _edit_config(directory, chat_template={"default": "a"})


def _damage_eos(directory):
  (directory / "config.json").write_text('{"eos_token_id": ["</s>"]}')


@pytest.mark.parametrize(
  ("damage", "sentence"),
  [
    (_damage_missing, r"has no tokenizer\.json; save the model with its fast"),
    (_damage_broken, r"tokenizer\.json is not a tokenizer"),
    (_damage_special, r"has bos_token '<s>', which tokenizer\.json does not"),
    (_damage_syntax, r"The chat template is not valid"),
    (_damage_encoding, r"chat_template\.jinja is not text in UTF-8"),
    (_damage_templates, r"a list of objects that each have a name and a temp"),
    (_damage_template_type, r"must be a text, or a list of objects"),
    (_damage_eos, r"\['</s>'\] for 'eos_token_id', which must be a whole"),
  ],
)
def test_broken_files_get_one_sentence(directory, damage, sentence):
  damage(directory)
  with pytest.raises(InputError, match=sentence) as caught:
    Tokenizer.load(directory)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("source", "sentence"),
  [
    ("{{ raise_exception('no users') }}", "a single user message: no users"),
    ("{{ messages[0].content.upper() }}", "it holds it 0 times"),
    ("{{ messages[0].content * 2 }}", "it holds it 2 times"),
    ("{{ messages[0].content + missing.field }}", "'missing' is undefined"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
  ],
)
def test_templates_that_do_not_serve(directory, source, sentence):
  tokenizer = _with_template(directory, source)
  with pytest.raises(InputError, match=sentence):
    tokenizer.split_chat("text")
