"""The metrics by name; each returns shares, 0 to 1, the main one "score"."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvjax.experiments.metrics import (
  longbench,
  math,
  passkey,
  rouge,
  string_match,
)
from kvjax.experiments.metrics.libraries import library
from kvjax.experiments.tasks.sample import Sample


class Said(NamedTuple):
  """What a model says.

  Attributes:
    text: its answer.
    is_cut: whether it has as many tokens as it may have.
  """

  text: str
  is_cut: bool = False


Metric = Callable[[Sample, Said], dict[str, float]]

# A prediction and one reference.
_Measure = Callable[[str, str], float]


def score(
  sample: Sample, prediction: str, is_cut: bool = False
) -> dict[str, float]:
  """Scores a prediction by the sample's metric.

  Args:
    sample: the sample.
    prediction: the model's answer.
    is_cut: whether it has as many tokens as it may have.

  Returns:
    Shares from 0 to 1, the main one under "score"; an empty prediction has 0.

  Raises:
    InputError: the metric needs a library that is not installed; see `check`.
  """
  return METRICS[sample.metric](sample, Said(prediction, is_cut))


def register(name: str, metric: Metric) -> None:
  """Adds a metric, as a benchmark with one of its own does.

  Args:
    name: its name, for `Sample.metric`.
    metric: computes the scores; an empty answer has 0.

  Raises:
    ValueError: another metric has the name.
  """
  if METRICS.get(name, metric) is not metric:
    raise ValueError(f"There is a metric {name!r} already.")
  METRICS[name] = metric


def check(metrics: Iterable[str]) -> None:
  """Rejects metrics whose libraries are missing, before a run starts.

  Raises:
    InputError: a library is not installed.
  """
  for metric in metrics:
    if metric in _LIBRARIES:
      library(_LIBRARIES[metric])


def _ruler(measure: Callable[[str, Sequence[str]], float]) -> Metric:
  """Wraps a measure of all references."""
  return lambda sample, said: {"score": measure(said.text, sample.answers)}


def _longbench(measure: _Measure, official: bool = False) -> Metric:
  """Returns the best score over references; blanks get 0 unless official."""

  def metric(sample: Sample, said: Said) -> dict[str, float]:
    text = _scored_text(sample, said.text)
    scores = [measure(text, answer) for answer in sample.answers]
    return {"score": max(scores) if official or text.strip() else 0.0}

  return metric


def _named(measure: Callable[[str, str, Sequence[str]], float]) -> Metric:
  """Wraps a measure of predictions that name a class."""

  def metric(sample: Sample, said: Said) -> dict[str, float]:
    classes = sample.metadata["all_classes"]
    best = _longbench(lambda text, answer: measure(text, answer, classes))
    return best(sample, said)

  return metric


def _code(sample: Sample, said: Said) -> dict[str, float]:
  """Computes both similarities of fuzzywuzzy, the main one by Levenshtein."""
  names = {"score": longbench.code_sim, "difflib": longbench.code_sim_difflib}
  return {
    name: _longbench(measure)(sample, said)["score"]
    for name, measure in names.items()
  }


def _scored_text(sample: Sample, prediction: str) -> str:
  """Returns the first line for few-shot tasks, where models add examples."""
  if not sample.metadata.get("first_line", False):
    return prediction
  return prediction.lstrip("\n").split("\n")[0]


def _needle(sample: Sample, said: Said) -> dict[str, float]:
  """Computes the share of answers found, and ROUGE-1 of the needle."""
  contained = string_match.string_match_all(said.text, sample.answers)
  overlap = rouge.rouge_1(said.text, sample.metadata["needle"])
  return {"score": contained, "rouge_1": overlap}


def _passkey(sample: Sample, said: Said) -> dict[str, float]:
  (key,) = sample.answers
  return {
    "score": passkey.exact(said.text, key),
    "partial": passkey.partial(said.text, key),
  }


def _math(sample: Sample, said: Said) -> dict[str, float]:
  """Computes whether the answer is right, boxed, or cut off before it."""
  (answer,) = sample.answers
  prediction = _own_answer(sample, said.text)
  found = math.boxed(prediction)
  ended = prediction != said.text.lstrip("\n")
  cut = said.is_cut and not ended and found is None
  return {
    "score": 0.0 if cut else float(math.is_right(prediction, answer)),
    "same_text": float(found == answer),
    "boxed": float(found is not None),
    "cut": float(cut),
  }


def _own_answer(sample: Sample, prediction: str) -> str:
  """Leaves out what a model adds after the end of its answer."""
  end = sample.metadata.get("until")
  return prediction if end is None else prediction.lstrip("\n").split(end)[0]


METRICS: dict[str, Metric] = {
  "string_match_all": _ruler(string_match.string_match_all),
  "string_match_part": _ruler(string_match.string_match_part),
  "qa_f1": _longbench(longbench.qa_f1),
  "qa_f1_zh": _longbench(longbench.qa_f1_zh),
  "rouge": _longbench(rouge.rouge_l),
  "rouge_zh": _longbench(rouge.rouge_l_zh),
  "classification": _named(longbench.classification),
  "count": _longbench(longbench.count),
  "retrieval": _longbench(longbench.retrieval),
  "retrieval_zh": _longbench(longbench.retrieval_zh),
  "code_sim": _code,
  "needle": _needle,
  "passkey": _passkey,
  "math": _math,
  "rouge_official": _longbench(rouge.rouge_l_official, official=True),
  "rouge_zh_official": _longbench(rouge.rouge_l_zh_official, official=True),
  "classification_official": _named(longbench.classification_official),
}

# The metrics that differ in LongBench's own code, with their counterparts.
OFFICIAL: Mapping[str, str] = {
  name: f"{name}_official" for name in ("rouge", "rouge_zh", "classification")
}

_LIBRARIES = {
  "qa_f1_zh": "jieba",
  "rouge_zh": "jieba",
  "rouge_zh_official": "jieba",
  "code_sim": "rapidfuzz.fuzz",
  "needle": "rouge_score.rouge_scorer",
  "math": "math_verify",
}
