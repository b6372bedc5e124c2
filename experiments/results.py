"""A folder of answers: written line by line and resumed."""

import dataclasses
import hashlib
import pathlib
import platform
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvjax.experiments.answering import QUERY_AGNOSTIC, Protocol
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.line_files import Line, LineFile
from kvjax.experiments.line_files import check_writable as check_writable
from kvjax.experiments.tasks.sample import Sample
from kvjax.options.schedules import WHOLE

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
    kv_dtype: what keys and values are rounded to; empty for as computed.
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
  kv_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Answer(Line):
  """One sample answered from one cache.

  Attributes:
    task: name of the task.
    length: of the sample's `Part`.
    sample: number of the sample.
    asked: digest of the sample.
    method: name of the method.
    options: the method with all its hyper-parameters.
    budget: what it might keep, in words.
    retention: share of the context it might keep.
    context_tokens: tokens of the context; query-aware, with the question, and
      where turns stay in the cache, with all turns so far.
    kept_tokens: tokens of them kept, mean over layers and KV heads.
    read_tokens: tokens that a token attends to, likewise; of what is looked
      up, as many as the prompt's last token has found.
    cache_bytes: allocated for what the context has left.
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
  asked: str
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
    return Key(self.part, self.asked, self.method, self.options, self.budget)


class Key(NamedTuple):
  """One question to one cache.

  Samples go by their digests: a number may be another sample's in a run that
  asks for more of them, or has other files.
  """

  part: Part
  asked: str
  method: str
  options: str
  budget: str


class Results(LineFile[Answer]):
  """The answers in `samples.jsonl` of a folder, old and new.

  A question whose line a killed run left unfinished is asked again.

  Attributes:
    settings: what the answers share.
  """

  def __init__(self, folder: pathlib.Path, settings: Settings):
    """Reads what the folder holds.

    Raises:
      InputError: see `LineFile`.
    """
    super().__init__(folder / "samples.jsonl", settings, Answer, "answer")
    self.settings = settings

  @property
  def answers(self) -> dict[Hashable, Answer]:
    """By what they answer."""
    return self.found


def digest(model: pathlib.Path) -> str:
  """Tells models apart: hashes the files that shape answers.

  Args:
    model: a directory, or a GGUF file.
  """
  if model.is_file():
    return _digest([model])
  names = ["*.safetensors", "*.json", "*.jinja"]
  if not (model / "config.json").is_file():
    names.append("*.gguf")
  return _digest(sorted(p for name in names for p in model.glob(name)))


def data_name(path: pathlib.Path) -> str:
  """What tables call a file or folder of samples; tells it from others."""
  published = hub.name_of(path)
  if published is not None:
    return published
  files = [path] if path.is_file() else sorted(path.rglob("*"))
  found = _digest([file for file in files if file.is_file()])
  return f"{path.resolve().name} (sha256 {found})"


def _digest(paths: Iterable[pathlib.Path]) -> str:
  """Of the names and contents of files.

  Of files over 4 MiB evenly spaced blocks; all of a large model would take
  minutes.
  """
  digest = hashlib.sha256()
  for path in paths:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
      for block in range(_BLOCKS):
        file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK_BYTES))
  return digest.hexdigest()[:12]
