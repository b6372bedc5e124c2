"""Tokenization, with the model's chat template."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from kvjax import files
from kvjax.errors import InputError, warn
from kvjax.files import is_present, read_json_if_present, read_text, write_json
from kvjax.models.fields import format_value
from kvjax.models.templates import ChatTemplate, ChatTemplateError
from kvjax.models.tokenizer_growth import check_growth

_PANIC = "PanicException"
_READ = ("bos_token", "eos_token", "pad_token")

_CHATS = {
  1: "a single user message",
  3: "a second user message after an answer",
}


class Tokenizer:
  """A fast tokenizer, its special tokens and its chat template.

  Encoding adds no special tokens, since `split_chat` inserts them according to
  the chat template. Special tokens in the text are encoded as such, as in
  transformers.

  Attributes:
    bos_id: id of the token that begins a sequence, if there is one.
    eos_ids: ids that end an answer.
    pad_id: id of the padding token, if there is one.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    *,
    chat_template: str | None = None,
    eos_ids: Sequence[int] = (),
    num_embedded: int | None = None,
  ) -> None:
    """Wraps a tokenizer.

    Args:
      backend: tokenizer that `tokenizers` reads from tokenizer.json.
      config: fields of tokenizer_config.json, and of special_tokens_map.json
        if it counts; bos_token, eos_token and pad_token are used, and all
        fields are preserved for `save`.
      chat_template: Jinja source, which takes precedence over the config's.
      eos_ids: ids that end an answer; by default that of the eos_token.
      num_embedded: number of ids that the model embeds; by default all.

    Raises:
      InputError: a special token is not in the vocabulary or no text, the
        chat template is not valid Jinja, or the normalizer or decoder could
        make a text more than 1,024 times as long.
    """
    # A tokenizer.json may carry the truncation and padding of its training.
    backend.no_truncation()
    backend.no_padding()
    check_growth(backend)
    self._backend = backend
    self._config = dict(config)
    self._special = _special_tokens(config)
    source = chat_template or _default_template(config)
    self._template = None if source is None else _compile(source)
    self.bos_id = self._special_id("bos_token")
    eos_id = self._special_id("eos_token")
    self.eos_ids = tuple(eos_ids) or (() if eos_id is None else (eos_id,))
    self.pad_id = self._special_id("pad_token")
    self._num_embedded = (
      self.vocab_size if num_embedded is None else num_embedded
    )

  @classmethod
  def load(
    cls, directory: pathlib.Path, num_embedded: int | None = None
  ) -> "Tokenizer":
    """Loads the tokenizer of a model directory.

    The ids that end an answer are those of generation_config.json, else of
    config.json, else of the tokenizer.

    Args:
      directory: the model directory.
      num_embedded: number of ids that the model embeds; by default all.

    Raises:
      InputError: a file is missing or broken.
    """
    path = directory / "tokenizer.json"
    if not is_present(path):
      raise InputError(
        f"{directory} has no tokenizer.json; save the model with its fast "
        "tokenizer."
      )
    text = read_text(path)
    with _refused(f"{path} is not a tokenizer"):
      backend = tokenizers.Tokenizer.from_str(text)
    template = directory / "chat_template.jinja"
    config = read_json_if_present(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
      # As in transformers: older files may name special tokens there alone.
      config |= read_json_if_present(directory / "special_tokens_map.json")
    unread = directory / "chat_template.json"
    if (
      is_present(unread)
      and not is_present(template)
      and config.get("chat_template") is None
    ):
      warn(
        f"{unread} is the chat template of a processor of images, which kvjax "
        "does not read: prompts have no template. Save one for texts as "
        f"{template.name}."
      )
    return cls(
      backend,
      config,
      chat_template=read_text(template) if is_present(template) else None,
      eos_ids=_read_eos_ids(directory),
      num_embedded=num_embedded,
    )

  def save(self, directory: pathlib.Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template.

    Raises:
      InputError: a file cannot be written.
    """
    files.write_text(
      directory / "tokenizer.json", self._backend.to_str(pretty=True)
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._config
    config.pop("chat_template", None)
    if self._template is not None:
      files.write_text(directory / "chat_template.jinja", self._template.source)
    write_json(directory / "tokenizer_config.json", config)

  @property
  def vocab_size(self) -> int:
    """The largest id plus one."""
    return max(self._backend.get_vocab().values(), default=-1) + 1

  def encode(self, text: str) -> list[int]:
    """Encodes a text, without adding special tokens.

    Raises:
      InputError: the model does not embed one of them, the text has half of a
        surrogate pair, or the tokenizer fails.
    """
    ids = self._encode(text).ids
    if max(ids, default=-1) >= self._num_embedded:
      raise InputError(
        f"The text holds {self._backend.id_to_token(max(ids))!r}, whose id is "
        f"{max(ids)}, but the model embeds {self._num_embedded} tokens only; "
        "leave it out."
      )
    return ids

  def count(self, text: str) -> int:
    """Counts the tokens of a text."""
    return len(self.encode(text))

  def pieces(self, text: str) -> list[str]:
    """Splits a text at its tokens; the pieces joined are the text.

    A character that spans several tokens is in the piece of the first.
    """
    encoding = self._encode(text)
    if not encoding.ids:
      return []
    # Use the ends of tokens: their starts may skip a preceding space.
    ends = itertools.accumulate((end for _, end in encoding.offsets[:-1]), max)
    borders = (0, *ends, len(text))
    return [text[start:end] for start, end in itertools.pairwise(borders)]

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes ids to text, without special tokens.

    The text is exact: clean_up_tokenization_spaces of transformers, which joins
    punctuation to the preceding word, is not applied.

    Raises:
      InputError: an id is negative or has more than 32 bits, or the tokenizer
        fails.
    """
    try:
      with _refused("The tokenizer does not decode the tokens"):
        return self._backend.decode([int(i) for i in ids])
    except OverflowError as error:
      raise InputError(
        f"Token ids are from 0 to {2**32 - 1}; {min(ids)} to {max(ids)} are "
        "given."
      ) from error

  @property
  def bos(self) -> str:
    """The prefix of prompts without a chat template."""
    return self._special.get("bos_token", "")

  def split_chat(
    self, context: str, *, thinking: bool = False
  ) -> tuple[str, str]:
    """Formats a chat with a context and splits it after the context.

    This follows kvpress 0.5 (`pipeline.py`), but the separator never occurs in
    the context.

    Args:
      context: the user's message before any question.
      thinking: whether the model is to think before it answers, if the template
        leaves the choice.

    Returns:
      The text to prefill, which ends with the context, and the text that
      follows a question: end of turn and start of the answer. Without a chat
      template they are BOS + context and a newline.

    Raises:
      InputError: the chat template refuses a single user message, or does not
        repeat it once.
    """
    if self._template is None:
      return self.bos + context, "\n"
    # The template is a program: only rendering shows where the context ends.
    separator = "<context ends here>"
    while separator in context:
      separator += ">"
    text = self._render(context + separator, thinking=thinking)
    parts = text.split(separator)
    if len(parts) != 2:
      raise InputError(
        "The chat template must hold the user's message exactly once; it "
        f"holds it {len(parts) - 1} times."
      )
    return parts[0], parts[1]

  def between_turns(self) -> str:
    """Returns the text between an answer and the user's next message.

    Without a chat template it is the end-of-answer token and a newline.

    Raises:
      InputError: the chat template refuses an answer between two messages, or
        does not repeat each once.
    """
    if self._template is None:
      return self._special.get("eos_token", "") + "\n"
    answer, message = "<answer ends here>", "<message begins here>"
    text = self._render("<message>", answer, message)
    after = text.split(answer)[-1]
    if text.count(answer) != 1 or after.count(message) != 1:
      raise InputError(
        "The chat template must hold an answer and the message after it "
        "exactly once each."
      )
    return after.split(message)[0]

  def _encode(self, text: str) -> tokenizers.Encoding:
    try:
      with _refused("The tokenizer does not encode the text"):
        return self._backend.encode(text, add_special_tokens=False)
    except TypeError as error:  # What `tokenizers` says of it is misleading.
      half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
      if half is None:
        raise
      raise InputError(
        "The text has half of a surrogate pair, which is no character; remove "
        f"{half!r}."
      ) from error

  def _render(self, *contents: str, thinking: bool = False) -> str:
    """Renders a chat in which user and assistant alternate."""
    assert self._template is not None
    roles = itertools.cycle(("user", "assistant"))
    variables = self._special | {
      "messages": [
        {"role": role, "content": content}
        for role, content in zip(roles, contents, strict=False)
      ],
      "tools": None,
      "documents": None,
      "add_generation_prompt": True,
      "enable_thinking": thinking,
    }
    try:
      return self._template.render(variables)
    except ChatTemplateError as error:
      raise InputError(
        f"The chat template fails for {_CHATS[len(contents)]}: {error}; "
        "correct the template."
      ) from error

  def _special_id(self, name: str) -> int | None:
    token = self._special.get(name)
    if token is None:
      return None
    token_id = self._backend.token_to_id(token)
    if token_id is None:
      raise InputError(
        "tokenizer_config.json or special_tokens_map.json has "
        f"{name} {format_value(token)}, which "
        "tokenizer.json does not know."
      )
    return token_id


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
  """Makes a sentence of what `tokenizers` raises.

  It has one type only, besides those of Python, and a panic of its Rust code,
  such as that a pattern goes back too often, is no `Exception`.

  Raises:
    InputError: it has raised something.
  """
  try:
    yield
  except BaseException as error:
    if type(error) is Exception or type(error).__name__ == _PANIC:
      said = str(error).removesuffix(".")
      raise InputError(f"{what}: {said}; repair the tokenizer.") from error
    raise


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  """Reads fields such as bos_token, which are strings or objects."""
  tokens = {}
  for name, value in config.items():
    content = value.get("content") if isinstance(value, dict) else value
    if name.endswith("_token") and isinstance(content, str):
      tokens[name] = content
    # Others, such as add_bos_token, may be anything.
    elif name in _READ and value is not None:
      raise InputError(
        "tokenizer_config.json or special_tokens_map.json has "
        f"{format_value(value)} for {name!r}, which "
        "must be a token, or an object with its content."
      )
  return tokens


def _default_template(config: Mapping[str, Any]) -> str | None:
  template = config.get("chat_template")
  if isinstance(template, list):
    fields = [entry if isinstance(entry, dict) else {} for entry in template]
    pairs_by_name = [
      (entry.get("name"), entry.get("template")) for entry in fields
    ]
    if all(isinstance(part, str) for pair in pairs_by_name for part in pair):
      named = {str(name): source for name, source in pairs_by_name}
      if len(named) == 1:
        return next(iter(named.values()))
      if not named or "default" in named:
        return named.get("default")
      warn(
        "tokenizer_config.json has the chat templates "
        f"{', '.join(sorted(named))}, but none named default: prompts have no "
        "template. Save the one to use as chat_template.jinja."
      )
      return None
  elif template is None or isinstance(template, str):
    return template
  raise InputError(
    "The chat_template in tokenizer_config.json must be a text, or a list of "
    "objects that each have a name and a template."
  )


def _read_eos_ids(directory: pathlib.Path) -> list[int]:
  for name in ("generation_config.json", "config.json"):
    eos = read_json_if_present(directory / name).get("eos_token_id")
    if eos is None:
      continue
    ids = eos if isinstance(eos, list) else [eos]
    if all(type(token_id) is int for token_id in ids):
      return ids
    raise InputError(
      f"{directory / name} has {format_value(eos)} for 'eos_token_id', which "
      "must be a whole number or a list of them."
    )
  return []


def _compile(source: str) -> ChatTemplate:
  try:
    return ChatTemplate(source)
  except ChatTemplateError as error:
    raise InputError(
      f"The chat template is not valid: {error}; correct it."
    ) from error
