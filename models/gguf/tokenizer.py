"""The tokenizer of a GGUF file, equal to the model's tokenizer.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from kvjax.errors import InputError
from kvjax.models.gguf.reader import GgufFile
from kvjax.models.gguf.sentencepiece import make_sentencepiece
from kvjax.models.tokenizer import Tokenizer

_KEYS = gguf.Keys.Tokenizer
# llama.cpp's names of the kinds of tokenizers.
_BYTE_PAIRS, _SCORES = "gpt2", "llama"

# The split pattern of Llama 3 and Qwen2, which differ in the number of digits.
_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Special tokens by their names in tokenizer_config.json.
_SPECIAL = {
  "bos_token": _KEYS.BOS_ID,
  "eos_token": _KEYS.EOS_ID,
  "pad_token": _KEYS.PAD_ID,
  "unk_token": _KEYS.UNK_ID,
}
# Those that no text needs; files may give them ids that do not exist.
_OPTIONAL = (_KEYS.PAD_ID, _KEYS.UNK_ID)
# Tokens that end an answer: end of text, of turn, of message.
_ENDS = (_KEYS.EOS_ID, _KEYS.EOT_ID, _KEYS.EOM_ID)
# Control tokens that end a turn. Many files do not name theirs, such as those
# of Gemma 3; llama.cpp finds it by its text, too (src/llama-vocab.cpp).
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def read_tokenizer(
  file: GgufFile, num_embedded: int | None = None
) -> Tokenizer:
  """Rebuilds the tokenizer from the metadata.

  Args:
    file: the file.
    num_embedded: number of ids that the model embeds; by default all.

  Raises:
    InputError: the tokenizer is neither byte-level BPE nor SentencePiece's BPE,
      its pre-tokenizer is not supported, or a field is missing or invalid.
  """
  tokens = _texts(file, _KEYS.LIST)
  kinds = file.fields.get(_KEYS.TOKEN_TYPE, [TokenType.NORMAL] * len(tokens))
  if not isinstance(kinds, list) or len(kinds) != len(tokens):
    raise InputError(
      f"{file.path} must have a {_KEYS.TOKEN_TYPE} for each of {_KEYS.LIST}."
    )
  backend = _make_backend(file, tokens, kinds)
  for kind in (TokenType.CONTROL, TokenType.UNKNOWN):
    backend.add_special_tokens(_select_tokens(tokens, kinds, kind))
  backend.add_tokens(_select_tokens(tokens, kinds, TokenType.USER_DEFINED))
  config: dict[str, Any] = {
    name: tokens[number]
    for name, key in _SPECIAL.items()
    if (number := _id(file, key, backend)) is not None
  }
  template = file.fields.get(_KEYS.CHAT_TEMPLATE)
  if isinstance(template, str):
    config["chat_template"] = template
  elif file.fields.get(_KEYS.ADD_BOS) is False:
    # Then prompts without a template do not begin with it.
    config.pop("bos_token", None)
  ends = [_id(file, key, backend) for key in _ENDS]
  ends += [
    number
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind == TokenType.CONTROL and token in _TURN_ENDS
  ]
  eos_ids = dict.fromkeys(number for number in ends if number is not None)
  return Tokenizer(
    backend, config, eos_ids=tuple(eos_ids), num_embedded=num_embedded
  )


def _make_backend(
  file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
  """Makes the tokenizer without special and added tokens."""
  model = file.fields.get(_KEYS.MODEL)
  if model not in (_BYTE_PAIRS, _SCORES):
    raise InputError(
      f"{file.path} has a tokenizer of the kind {model!r}; only "
      f"{_BYTE_PAIRS!r}, byte-level BPE, and {_SCORES!r}, BPE by scores, are "
      "supported."
    )
  # Unused tokens only pad the vocabulary; they never occur in texts.
  used = [
    (token, number)
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind != TokenType.UNUSED
  ]
  vocabulary = dict(used)
  if len(vocabulary) < len(used):
    raise InputError(f"{file.path} has a token twice in {_KEYS.LIST}.")
  if model == _SCORES:
    return make_sentencepiece(file, vocabulary, kinds)
  return _make_byte_level(file, vocabulary)


def _make_byte_level(
  file: GgufFile, vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
  """Makes a tokenizer of byte-level BPE."""
  split = file.fields.get(_KEYS.PRE)
  if isinstance(split, str):
    split = _ALIASES.get(split, split)
  if not isinstance(split, str) or split not in _PRE_TOKENIZERS:
    raise InputError(
      f"{file.path} has the pre-tokenizer {split!r}, which is not supported; "
      f"supported are {', '.join(_PRE_TOKENIZERS)}."
    )
  merges = [merge.split(" ") for merge in _texts(file, _KEYS.MERGES)]
  if any(len(parts) != 2 for parts in merges):
    raise InputError(
      f"Each of {_KEYS.MERGES} in {file.path} must be two tokens and a blank."
    )
  pairs = [(parts[0], parts[1]) for parts in merges]
  # As in Llama 3's tokenizer.json: a word in the vocabulary is one token, even
  # where the merges do not lead to it.
  ignore_merges = split == _LLAMA
  try:
    bpe = models.BPE(vocabulary, pairs, ignore_merges=ignore_merges)
  except Exception as error:  # The only type that `tokenizers` raises.
    raise InputError(
      f"The tokens and merges in {file.path} make no tokenizer: {error}."
    ) from error
  backend = tokenizers.Tokenizer(bpe)
  if split == _QWEN:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = _PRE_TOKENIZERS[split]
  backend.decoder = decoders.ByteLevel()
  return backend


def _by_pattern(digits: str) -> PreTokenizer:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_PATTERN % digits), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _digits_alone() -> PreTokenizer:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )


_SMOLLM, _LLAMA, _QWEN = "smollm", "llama-bpe", "qwen2"
# The pre-tokenizer in tokenizer.json for each of llama.cpp's names.
_PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
  _SMOLLM: _digits_alone(),
  _LLAMA: _by_pattern("{1,3}"),
  _QWEN: _by_pattern(""),
}


# Other names in llama.cpp for the same (src/llama-vocab.cpp).
_ALIASES = {"llama3": _LLAMA, "llama-v3": _LLAMA, "deepseek-r1-qwen": _QWEN}


def _select_tokens(
  tokens: Sequence[str], kinds: Sequence[int], selected_kind: TokenType
) -> list[tokenizers.AddedToken]:
  """Selects tokens of a kind, which match before the text is split."""
  special = selected_kind != TokenType.USER_DEFINED
  return [
    tokenizers.AddedToken(token, special=special, normalized=False)
    for token, kind in zip(tokens, kinds, strict=True)
    if kind == selected_kind
  ]


def _texts(file: GgufFile, key: str) -> list[str]:
  texts = file.fields.get(key)
  if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
    raise InputError(f"{file.path} lacks the texts of {key}.")
  return texts


def _id(file: GgufFile, key: str, backend: tokenizers.Tokenizer) -> int | None:
  """Reads the id of a special token, if there is one."""
  number = file.fields.get(key)
  if number is None:
    return None
  known = type(number) is int and 0 <= number < 2**32
  if not known or backend.id_to_token(number) is None:
    if key in _OPTIONAL:
      return None
    raise InputError(
      f"{file.path} has {number!r} for {key}, which is the id of no token."
    )
  return number
