"""A folder of answers: written line by line, resumed, summed up."""

import dataclasses
import hashlib
import json
import pathlib
import platform
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiments.candidates import FULL
from kvjax.errors import InputError
from kvjax.schedules import WHOLE

_BLOCKS = 64
_BLOCK_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Settings:
  """What answers must share to stand in one folder.

  Attributes:
    model: name of the model's directory.
    weights: digest of the model's files, see `digest`.
    dtype: of weights and computation.
    length: tokens of prompt and answer, chat template aside.
    seed: of the samples.
    python: version, whose own documentation is the prose of the samples.
    protocol: what is compressed, before or after the question is known.
    schedule: when it is compressed.
    heads: what decides by itself: each "kv head" or each "query head".
  """

  model: str
  weights: str
  dtype: str
  length: int
  seed: int
  python: str = platform.python_version()
  protocol: str = "query-agnostic"
  schedule: str = str(WHOLE)
  heads: str = "kv head"


@dataclasses.dataclass(frozen=True)
class Answer:
  """One sample answered from one cache.

  Attributes:
    task: name of the task.
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
    answers: what should be in the prediction.
    prediction: what the model said.
    score: share of the answers that are in the prediction, times 100.
  """

  task: str
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
  answers: list[str]
  prediction: str
  score: float

  @property
  def key(self) -> "Key":
    """What the answer is the answer to."""
    return Key(self.task, self.sample, self.method, self.options, self.budget)


class Key(NamedTuple):
  """One question to one cache."""

  task: str
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
    """Appends answers, each a line of settings and answer."""
    self.folder.mkdir(parents=True, exist_ok=True)
    with self._path.open("ab") as file:
      file.truncate(self._whole_bytes)
      for answer in answers:
        fields = self._settings | dataclasses.asdict(answer)
        line = json.dumps(fields, ensure_ascii=False) + "\n"
        file.write(line.encode())
        self.answers[answer.key] = answer
        self._whole_bytes += len(line.encode())

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


def summarize(answers: Sequence[Answer]) -> list[dict[str, Any]]:
  """One row per method, budget and task: means over the samples.

  A row's fields are named as those of `Answer`.
  """
  groups: dict[tuple[str, str, str], list[Answer]] = {}
  for answer in answers:
    key = (answer.method, answer.budget, answer.task)
    groups.setdefault(key, []).append(answer)

  def mean(name: str, group: list[Answer], digits: int) -> float:
    values = [getattr(answer, name) for answer in group]
    return round(statistics.fmean(values), digits)

  return [
    {
      "method": method,
      "retention": mean("retention", group, 4),
      "budget": budget,
      "task": task,
      "score": mean("score", group, 2),
      "samples": len(group),
      "context_tokens": mean("context_tokens", group, 2),
      "kept_tokens": mean("kept_tokens", group, 2),
      "read_tokens": mean("read_tokens", group, 2),
      "cache_bytes": round(mean("cache_bytes", group, 0)),
      "host_bytes": round(mean("host_bytes", group, 0)),
    }
    for (method, budget, task), group in groups.items()
  ]


def at_retention_one(
  rows: Sequence[dict[str, Any]], methods: Sequence[str]
) -> list[dict[str, Any]]:
  """The full cache's rows under other names: with everything kept, all agree.

  Args:
    rows: as `summarize` gives them.
    methods: names that the rows are wanted under, the full cache's aside.
  """
  full = [row for row in rows if row["method"] == FULL]
  return [row | {"method": method} for method in methods for row in full]
