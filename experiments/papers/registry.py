"""All experiments by their ids."""

from collections.abc import Mapping, Sequence

from kvjax.errors import InputError
from kvjax.experiments.papers import compactor, ctkvr, keydiff, lagkv, protokv
from kvjax.experiments.papers.data_model import Experiment
from kvjax.registry.naming import suggest

EXPERIMENTS: Mapping[str, Experiment] = {
  experiment.id: experiment
  for module in (protokv, keydiff, compactor, ctkvr, lagkv)
  for experiment in module.EXPERIMENTS
}


def find(ids: Sequence[str]) -> list[Experiment]:
  """Looks up experiments by id.

  Raises:
    InputError: an id is unknown.
  """
  for name in ids:
    if name not in EXPERIMENTS:
      raise InputError(
        f"There is no experiment {name!r}{suggest(name, EXPERIMENTS)}; "
        "kvjax reproduce lists them."
      )
  return [EXPERIMENTS[name] for name in dict.fromkeys(ids)]
