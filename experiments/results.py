"""A folder of answers: written line by line and resumed."""

import dataclasses
import hashlib
import json
import pathlib
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.answering import QUERY_AGNOSTIC, Protocol
from experiments.tasks.sample import Sample
from kvjax.errors import InputError
from kvjax.schedules import WHOLE

_BLOCKS = 64
_BLOCK_BYTES = 2**16


class Part(NamedTuple):
  """The samples of one task at one length.

  Attributes:
    task: its name.
    length: bound on the tokens of a prompt, in the benchmark's own measure.
  """

  task: str
  length: int


# A sample's number is its place in its part.
Samples = Mapping[Part, Sequence[Sample]]


@dataclasses.dataclass(frozen=True)
class Settings:
  """What answers must share to stand in one folder.

  Attributes:
    model: name of the model's directory.
    weights: digest of the model's files, see `digest`.
    dtype: of weights and computation.
    seed: of the samples.
    benchmark: what the samples belong to.
    data: where their texts come from, and other choices in words.
    python: version, whose own documentation is the prose of the samples.
    protocol: what is compressed, before or after the question is known.
    schedule: when it is compressed.
    heads: what decides by itself: each "kv head" or each "query head".
  """

  model: str
  weights: str
  dtype: str
  seed: int
  benchmark: str = "needles"
  data: Mapping[str, str] = dataclasses.field(default_factory=dict)
  python: str = platform.python_version()
  protocol: Protocol = QUERY_AGNOSTIC
  schedule: str = str(WHOLE)
  heads: str = "kv head"


@dataclasses.dataclass(frozen=True)
class Answer:
  """One sample answered from one cache.

  Attributes:
    task: name of the task.
    length: of the sample's `Part`.
    sample: number of the sample.
    method: name of the method.
    options: the method with all its hyper-parameters.
    budget: what it might keep, in words.
    retention: share of the context it might keep.
    context_tokens: tokens of the context; query-aware, with the question.
    kept_tokens: tokens kept, mean over layers and KV heads.
    read_tokens: tokens that a token attends to, likewise; of what is looked
      up, as many as the prompt's last token has found.
    cache_bytes: allocated for the sample's cache.
    host_bytes: those of them that live with the host.
    question: what was asked.
    answer_prefix: how the model's turn began.
    answers: references.
    prediction: what the model said.
    first_token: id of the first token of it; None where it said nothing.
    depth: where the answer stands in the context, 0 to 1, if in one place.
    turn: number of the question in its conversation, if there is one.
    scores: by the sample's metric, 0 to 100; the main one is "score".
  """

  task: str
  length: int
  sample: int
  method: str
  options: str
  budget: str
  retention: float
  context_tokens: int
  kept_tokens: float
  read_tokens: float
  cache_bytes: int
  host_bytes: int
  question: str
  answer_prefix: str
  answers: list[str]
  prediction: str
  first_token: int | None
  depth: float | None
  turn: int | None
  scores: dict[str, float]

  @property
  def score(self) -> float:
    """The main score, 0 to 100."""
    return self.scores["score"]

  @property
  def part(self) -> Part:
    """The part that the sample belongs to."""
    return Part(self.task, self.length)

  @property
  def key(self) -> "Key":
    """What the answer is the answer to."""
    return Key(self.part, self.sample, self.method, self.options, self.budget)


class Key(NamedTuple):
  """One question to one cache."""

  part: Part
  sample: int
  method: str
  options: str
  budget: str


class Results:
  """The answers in `samples.jsonl` of a folder, old and new.

  The folder is made with the first answer. A line that a killed run left
  unfinished is dropped and its question asked again.

  Attributes:
    folder: where the answers are.
    settings: what they share.
    answers: by what they answer.
  """

  def __init__(self, folder: pathlib.Path, settings: Settings):
    """Reads what the folder holds.

    Raises:
      InputError: the folder cannot be written to, holds answers of other
        settings, or holds lines that no run has written.
    """
    check_writable(folder)
    self.folder = folder
    self.answers: dict[Key, Answer] = {}
    self.settings = settings
    self._settings = dataclasses.asdict(settings)
    self._path = folder / "samples.jsonl"
    self._whole_bytes = 0
    if self._path.exists():
      text = self._read()
      self._whole_bytes = text.rfind(b"\n") + 1
      lines = text[: self._whole_bytes].splitlines()
      for number, line in enumerate(lines, start=1):
        answer = self._parse(line, number)
        self.answers[answer.key] = answer

  def _read(self) -> bytes:
    try:
      with self._path.open("r+b") as file:
        return file.read()
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}."
      ) from error

  def add(self, answers: Iterable[Answer]) -> None:
    """Appends answers, each a line of settings and answer.

    Raises:
      InputError: the disk is full, or the folder has become read-only.
    """
    answers = list(answers)
    lines = b"".join(self._line(answer) for answer in answers)
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      with self._path.open("ab") as file:
        file.truncate(self._whole_bytes)
        file.write(lines)
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}; what it holds is "
        "kept, and the same command goes on from there."
      ) from error
    self._whole_bytes += len(lines)
    self.answers |= {answer.key: answer for answer in answers}

  def _line(self, answer: Answer) -> bytes:
    fields = self._settings | dataclasses.asdict(answer)
    return f"{json.dumps(fields, ensure_ascii=False)}\n".encode()

  def _parse(self, line: bytes, number: int) -> Answer:
    try:
      fields = json.loads(line)
      answer = Answer(
        **{f.name: fields.pop(f.name) for f in dataclasses.fields(Answer)}
      )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise InputError(
        f"Line {number} of {self._path} is not an answer; remove the file or "
        "choose another --output."
      ) from error
    for name, value in self._settings.items():
      if fields.get(name) != value:
        raise InputError(
          f"{self.folder} holds answers with {name} {fields.get(name)}, and "
          f"this run has {name} {value}; remove it or choose another --output."
        )
    return answer


def digest(directory: pathlib.Path) -> str:
  """Tells models apart: hashes the files that shape answers.

  Of files over 4 MiB evenly spaced blocks; all of a large model would take
  minutes.
  """
  digest = hashlib.sha256()
  names = ("*.safetensors", "*.json", "*.jinja")
  for path in sorted(p for name in names for p in directory.glob(name)):
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
      for block in range(_BLOCKS):
        file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK_BYTES))
  return digest.hexdigest()[:12]


def check_writable(folder: pathlib.Path) -> None:
  """Refuses a folder that cannot be made or written to; makes nothing.

  Raises:
    InputError: the nearest folder that exists does not admit new files.
  """
  nearest = folder.absolute()
  while not nearest.exists() and nearest != nearest.parent:
    nearest = nearest.parent
  if not nearest.is_dir():
    raise InputError(f"{folder} cannot be written: {nearest} is no folder.")
  try:
    with tempfile.TemporaryFile(dir=nearest):
      pass
  except OSError as error:
    raise InputError(
      f"{folder} cannot be written: {error.strerror}."
    ) from error
