"""Choice of a rule by how well it predicts contexts that it has not seen."""

import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float

from kvjax.calibration.fitting import Fit, Rule, fit
from kvjax.calibration.measured import Triples
from kvjax.errors import InputError

# Parts that contexts are split into for cross-validation.
_FOLDS = 5
# Without a ridge, contexts of quality 0 or 1 determine slopes of any size. With
# the weaker one, a slope of 10 per standard deviation counts as an error of
# 0.03. With the stronger one, a slope of 1 counts as one of 0.1, so that curves
# hardly differ.
_RIDGES = (1e-2, 1e-5)
# Features besides NLL(c) that a rule has or has not, those of a line together.
_GROUPS = (
  ("tail_nll",),
  ("concentration",),
  ("skewness", "kurtosis"),
  ("log_length",),
)


def r2(
  predicted: Float[np.ndarray, " M"], ratio: Float[np.ndarray, " M"]
) -> float:
  """Computes the coefficient of determination of predicted qualities.

  It is 1 minus the mean square of the errors over the variance of the measured
  qualities, hence below 0 where their mean would predict better. Without any
  variance it is 1 for no error, else 0.
  """
  squares = float(np.sum((ratio - predicted) ** 2))
  variance = float(np.sum((ratio - np.mean(ratio)) ** 2))
  if variance == 0:
    return float(squares == 0)
  return 1.0 - squares / variance


def r2_by_task(
  predicted: Float[np.ndarray, " M"], triples: Triples
) -> tuple[tuple[str, float], ...]:
  """Computes R2 of all triples and of those of each task."""
  result = [("all", r2(predicted, triples.ratio))]
  if triples.task is not None:
    tasks = np.array(triples.task)
    for task in dict.fromkeys(triples.task):
      of_task = tasks == task
      result.append((task, r2(predicted[of_task], triples.ratio[of_task])))
  return tuple(result)


def folds(
  triples: Triples, rule: Rule
) -> Iterator[tuple[Fit, Bool[np.ndarray, " M"]]]:
  """Yields fits, and which triples each was not fitted to.

  Contexts are split into five parts, every fifth in their order; with fewer
  contexts, each is a part.

  Raises:
    InputError: there are fewer than two contexts, or see `fit`.
  """
  contexts = np.unique(triples.contexts, return_inverse=True)[1]
  count = int(contexts.max()) + 1
  if count < 2:
    raise InputError(
      "Held-out contexts need at least two contexts; the triples have one."
    )
  for part in range(min(_FOLDS, count)):
    # Whole contexts, as the triples of one are alike.
    held_out = contexts % _FOLDS == part
    yield fit(triples, rule, (~held_out).astype(np.float64)), held_out


def cross_validate(triples: Triples, rule: Rule) -> Float[np.ndarray, " M"]:
  """Predicts each triple by a fit to other contexts; see `folds`."""
  predicted = np.empty(len(triples.ratio))
  for fitted, held_out in folds(triples, rule):
    predicted[held_out] = fitted.predict(triples)[held_out]
  return predicted


def candidates(triples: Triples) -> Iterator[Rule]:
  """Lists the rules with NLL(c) and any further measured features.

  Each is fitted by least squares, with a strong and with a weak ridge: the
  caution that the paper's loss builds in is left to the promises. The first is
  for contexts that nothing tells apart. These keep nearly the same, and NLL(c)
  decides which of them keep a little more: a single retention for all could
  meet a promise only by much more than is needed.
  """
  known = {*triples.known_features}
  groups = [group for group in _GROUPS if known.issuperset(group)]
  for count in range(len(groups) + 1):
    for chosen in itertools.combinations(groups, count):
      names = ("nll", *itertools.chain(*chosen))
      for ridge in _RIDGES:
        yield Rule(names, shaped=True, too_high=1.0, ridge=ridge)


def choose(triples: Triples) -> Rule:
  """Returns the simplest rule that predicts held-out contexts well.

  These are the rules whose mean squared error exceeds the lowest by no more
  than one standard error of the difference. Of those with the fewest features,
  it is the one with the lowest error. For a single context, it is that of
  NLL(c) with the strong ridge.

  Raises:
    InputError: see `fit`.
  """
  rules = list(candidates(triples))
  if len(np.unique(triples.contexts)) < 2:
    return rules[0]
  errors = np.stack([_errors(triples, rule) for rule in rules])
  means = errors.mean(axis=1)
  excess = errors - errors[np.argmin(means)]
  spread = excess.std(axis=1, ddof=1) / np.sqrt(excess.shape[1])
  # Rounding does not tell rules apart.
  good = np.flatnonzero(excess.mean(axis=1) <= spread + 1e-12)
  # Of equals, `min` takes the first.
  return rules[min(good, key=lambda i: (len(rules[i].features), means[i]))]


def _errors(triples: Triples, rule: Rule) -> Float[np.ndarray, " C"]:
  """Computes the mean squared error of each context, predicted by others."""
  squares = (cross_validate(triples, rule) - triples.ratio) ** 2
  context = np.unique(triples.contexts, return_inverse=True)[1]
  return np.bincount(context, squares) / np.bincount(context)
