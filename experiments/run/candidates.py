"""The candidates of a comparison: methods, each at several budgets."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.calibration.record_files import AUTO, Auto
from kvjax.experiments.run import method_files, plugin_files
from kvjax.methods.base import Method
from kvjax.options.schedules import WHOLE
from kvjax.retrieval.base import Retrieval

FULL = "full"
_SHARE = re.compile(r"0?\.[0-9]+")
# The methods that a comparison takes by default: all that evict, but for those
# that need a file or the question, and TriAttention, which is for decoding.
DEFAULT = [
  *(FULL, "random", "streaming", "key_norm", "h2o", "tova", "snapkv"),
  *("snapkv:kernel=15", "pyramidkv", "adakv", "chunkkv", "keydiff"),
  # Its own default, a lag of 1,024, would keep all of a context this short;
  # this keeps as much as the others.
  "lagkv:lag=32:retention_of=row",
  *("compactor", "leverage", "noncausal", "protokv", "kvzip", "kvzip.plus"),
  *("expected_attention", "qfilters", "rkv", "criticalkv", "criticaladakv"),
  *("cur", "dropkv", "duoattention", "simlayerkv"),
]

# Budgets of the command line.
Given = kvjax.Budget | kvjax.PerLayer | kvjax.Threshold | Auto
# Those of a plan.
_Planned = kvjax.Budget | kvjax.PerLayer | kvjax.Calibrated | kvjax.Threshold


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method at a budget.

  Attributes:
    method: the name as the user wrote it.
    plan: the plan for the name and the budget.
  """

  method: str
  plan: kvjax.Plan

  @property
  def changes_all(self) -> bool:
    """Whether a cache of all tokens differs from the full one.

    It has another dtype or fewer channels of keys, or loses tokens later.
    """
    plan = self.plan
    return bool(plan.kv_dtype or plan.decoding or plan.method.traits.channels)

  @functools.cached_property
  def options(self) -> str:
    """The method with all its hyperparameters.

    It includes the cache that a retrieval method reads, the calibration, a
    rounding other than up, and files of --plugins and of options with their
    digests, which stay those of the first call.
    """
    plan = self.plan
    files = [*plugin_files.origins(plan), *method_files.contents(plan)]
    label = " of ".join([plan.label, *dict.fromkeys(files)])
    if _rounding(plan.budget) != "up":
      label = f"{label}, rounded as {_rounding(plan.budget)}"
    if isinstance(plan.budget, kvjax.Calibrated):
      line = plan.budget.calibration
      quality = line.curve_target(plan.budget.tau)
      return f"{label}, {line.formula} at {quality:g}"
    if plan.sparse is None:
      return label
    return f"{plan.sparse.retrieval} on {label}, {plan.budget}"

  @property
  def budget(self) -> str:
    """The budget in words.

    As in `0.25`, `0.5+0.1`, `128 tokens`, `auto at 0.95` or `threshold -4`.
    """
    return str(self._budget)

  @property
  def _budget(self) -> _Planned:
    """The number of keys to keep, or to retrieve per token."""
    sparse = self.plan.sparse
    return self.plan.budget if sparse is None else sparse.budget

  def retention(self, context_tokens: int) -> float:
    """Computes the share of a context that the budget keeps or retrieves.

    A calibrated budget depends on the context's likelihood instead, and a
    threshold on its scores.
    """
    budget = self._budget
    assert not isinstance(budget, kvjax.Calibrated | kvjax.Threshold)
    layers = budget.layers if isinstance(budget, kvjax.PerLayer) else [budget]
    shares = [
      own.share
      if isinstance(own, kvjax.Retention)
      else own.num_kept(context_tokens) / context_tokens
      for own in layers
    ]
    return sum(shares) / len(shares)


def _rounding(budget: _Planned) -> str:
  """How a budget rounds its retention."""
  if isinstance(budget, kvjax.PerLayer):
    roundings = map(_rounding, budget.layers)
    return next((name for name in roundings if name != "up"), "up")
  if isinstance(budget, kvjax.Tokens | kvjax.Threshold):
    return "up"
  return budget.rounding


def candidates(
  methods: Sequence[str],
  budgets: Sequence[Given],
  schedule: kvjax.Schedule = WHOLE,
  per_query_head: bool = False,
  kv_dtype: str | None = None,
  seed: int = 0,
  decoding: kvjax.Plan | None = None,
) -> tuple[Candidate, ...]:
  """Lists every method at every budget, the full cache first as the baseline.

  Methods at a retention of 1 equal the full cache and are left out, unless they
  store it in another dtype, drop channels, or evict while decoding.

  Args:
    methods: names as `kvjax.get_plan` reads them.
    budgets: how much the methods keep, or retrieve per token.
    schedule: when they evict.
    per_query_head: see `kvjax.Plan`.
    kv_dtype: see `kvjax.Plan`; the full cache is not quantized.
    seed: seed of random methods, sketches and hashes whose names have none. A
      calibration holds for all seeds.
    decoding: see `kvjax.Plan`, with a seed of its own; the full cache does not
      evict while decoding.

  Raises:
    InputError: a name stands for no method, a method is not defined for the
      schedule or not calibrated, either list is empty, or nothing but the full
      cache is to evict while decoding.
  """
  names = dict.fromkeys(name.strip() for name in methods)
  if not names or not budgets:
    raise InputError("There is nothing to compare; name a method and a budget.")
  everything = kvjax.Retention(1.0)
  check_names(names)
  full = kvjax.get_plan(FULL, everything, per_query_head=per_query_head)
  result = [Candidate(FULL, full)]
  for name in names:
    if name == FULL:
      continue
    of_method = [
      Candidate(
        name,
        seeded(
          name,
          _plan(name, budget, schedule, per_query_head, kv_dtype, decoding),
          seed,
        ),
      )
      for budget in dict.fromkeys(budgets)
    ]
    # Some retrieval methods have a fixed budget: list each budget once.
    distinct = {
      c.budget: c
      for c in of_method
      if c.changes_all or c.budget != str(everything)
    }
    result.extend(distinct.values())
  if decoding is not None and len(result) == 1:
    raise InputError(
      "--decoding goes on where a method has compressed the prompt, and "
      f"{FULL} is the baseline, which evicts nothing; name a method besides "
      "it, with --retention=1 to keep the whole prompt."
    )
  return tuple(result)


def check_names(names: Iterable[str]) -> None:
  """Refuses names that cannot be read, all at once.

  Raises:
    InputError: there are some; a sentence tells of each.
  """
  sentences = []
  for name in names:
    try:
      kvjax.get_plan(name, kvjax.Retention(1.0))
    except InputError as error:
      sentences.append(str(error))
  if sentences:
    raise InputError(" ".join(sentences))


def parse_thresholds(texts: Sequence[str]) -> list[Given]:
  """Parses --threshold.

  Raises:
    InputError: a value is not a number.
  """
  takes = "--threshold takes scores such as -4,-6"
  return [kvjax.Threshold(_number(text, float, takes)) for text in texts]


def parse_budgets(
  retention: Sequence[str],
  tokens: Sequence[str] | None,
  auto: Auto | None = None,
) -> list[Given]:
  """Parses --retention, or --budget in its place.

  Numbers that are joined by plus signs are those of the layers of a model.

  Args:
    retention: shares, or "auto".
    tokens: numbers of tokens.
    auto: the budget for "auto", if it is allowed.

  Raises:
    InputError: a value is not a number in range.
  """
  if tokens is not None:
    return [_parse(text, _tokens) for text in tokens]
  return [
    _parse(text, _share) if auto is None or text.strip() != AUTO else auto
    for text in retention
  ]


def _share(text: str) -> kvjax.Retention:
  takes = "--retention takes numbers such as 0.5,0.25"
  return kvjax.Retention(_number(text, float, takes))


def _tokens(text: str) -> kvjax.Tokens:
  if _SHARE.fullmatch(text.strip()):
    raise InputError(
      f"--budget counts tokens (did you mean --retention={text.strip()}?)."
    )
  takes = "--budget takes whole numbers such as 256,64"
  return kvjax.Tokens(_number(text, int, takes))


def _number[Number: (int, float)](
  text: str, kind: type[Number], takes: str
) -> Number:
  """Parses a number of a flag; `takes` says which flag takes what."""
  try:
    return kind(text)
  except ValueError as error:
    raise InputError(f"{takes}; {text[:60]!r} is not one.") from error


def _parse(
  text: str, parse: Callable[[str], kvjax.Budget]
) -> kvjax.Budget | kvjax.PerLayer:
  """Parses a budget for all layers, or one for each."""
  layers = [parse(part) for part in text.split("+")]
  return layers[0] if len(layers) == 1 else kvjax.PerLayer(layers)


def _plan(
  name: str,
  budget: Given,
  schedule: kvjax.Schedule,
  per_query_head: bool,
  kv_dtype: str | None,
  decoding: kvjax.Plan | None,
) -> kvjax.Plan:
  try:
    given: _Planned
    if isinstance(budget, Auto):
      everything = kvjax.get_plan(
        name, kvjax.Retention(1.0), per_query_head=per_query_head
      )
      given = budget.of(name, everything)
    else:
      given = budget
    return kvjax.get_plan(
      name,
      given,
      schedule=schedule,
      per_query_head=per_query_head,
      kv_dtype=kv_dtype,
      decoding=decoding,
    )
  except InputError as error:
    raise InputError(f"--methods has {name}: {error}") from error


def seeded(name: str, plan: kvjax.Plan, seed: int) -> kvjax.Plan:
  """Gives a plan's random choices a seed, unless its name has one.

  Those while decoding have another name, and so remain as they are.
  """
  if seed == 0 or "seed=" in name:
    return plan
  method, sparse = _with_seed(plan.method, seed), plan.sparse
  if sparse is not None:
    retrieval = _with_seed(sparse.retrieval, seed)
    sparse = dataclasses.replace(sparse, retrieval=retrieval)
  if not isinstance(plan.budget, kvjax.Calibrated):
    return dataclasses.replace(plan, method=method, sparse=sparse)
  everything = kvjax.Retention(1.0)
  uncalibrated = dataclasses.replace(plan, method=method, budget=everything)
  calibration = dataclasses.replace(
    plan.budget.calibration, method=uncalibrated.prompt_label
  )
  budget = dataclasses.replace(plan.budget, calibration=calibration)
  return dataclasses.replace(uncalibrated, budget=budget)


def _with_seed[Drawn: Method | Retrieval](drawn: Drawn, seed: int) -> Drawn:
  """Sets the seeds of a method and of those that it wraps."""
  changes: dict[str, Any] = {}
  for field in dataclasses.fields(drawn):
    value: Any = getattr(drawn, field.name)
    if field.name == "seed":
      changes["seed"] = seed
    elif isinstance(value, Method):
      changes[field.name] = _with_seed(value, seed)
  return dataclasses.replace(drawn, **changes)
