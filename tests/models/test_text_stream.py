"""Text that comes token by token equals the decoded whole."""

import random
import re

import pytest
import tokenizers

from kvjax.models.text_stream import TextStream
from kvjax.models.tokenizer import Tokenizer


def _of_bytes_and_words():
  """A tokenizer like Llama 2's: spaces are marked, the first is dropped."""
  vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
  vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
  for word in ("▁", "▁Hello", "▁world", "wor", ",", "é", "▁▁", "a"):
    vocab[word] = len(vocab)
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")
  )
  backend.add_special_tokens(["<s>", "</s>"])
  backend.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
      tokenizers.decoders.Strip(" ", 1, 0),
    ]
  )
  return Tokenizer(backend, {}), len(vocab)


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_is_the_text_in_pieces(seed):
  tokenizer, size = _of_bytes_and_words()
  rng = random.Random(seed)
  ids = []
  for _ in range(40):
    # A character in several bytes, a special token or a word.
    character = [3 + byte for byte in "🦊".encode()]
    ids += rng.choice(
      [character, [rng.randrange(2)], [rng.randrange(259, size)]]
    )
  stream = TextStream(tokenizer.decode)
  pieces = [stream.step(token) for token in ids]
  assert "".join(pieces) == tokenizer.decode(ids)
  assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_do_not_repeat_what_follows():
  """A decoder of whole runs of bytes gives up characters that it had given."""
  tokenizer, _ = _of_bytes_and_words()
  stream = TextStream(tokenizer.decode)
  ids = [3 + byte for byte in "🦊🦊".encode() + b"\xff"] + [260, 3 + 0xF0]
  assert stream.rest() == ""
  pieces = [*map(stream.step, ids), stream.rest()]
  assert re.fullmatch("🦊🦊\ufffd+ Hello\ufffd", "".join(pieces))


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_have_the_text_of_the_whole(seed):
  """If the decoder gives up a character only where one is broken."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  ids = random.Random(seed).choices(range(256), k=50)
  stream = TextStream(backend.decode)
  pieces = [*map(stream.step, ids), stream.rest()]
  assert "".join(pieces) == backend.decode(ids)


def test_a_stream_decodes_each_token_a_few_times():
  tokenizer, _ = _of_bytes_and_words()
  decoded = []

  def counted(ids):
    decoded.append(len(ids))
    return tokenizer.decode(ids)

  step = TextStream(counted).step
  assert "".join(step(260) for _ in range(500)) == " ".join(["Hello"] * 500)
  assert sum(decoded) < 5 * 500
