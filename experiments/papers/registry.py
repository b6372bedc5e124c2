"""All experiments by their ids: `experiments.toml`, and what they run."""

import pathlib
import tomllib
from collections.abc import Mapping, Sequence

from kvjax.errors import InputError
from kvjax.experiments.papers import compactor, ctkvr, keydiff, lagkv, protokv
from kvjax.experiments.papers.data_model import Experiment
from kvjax.registry.parsing import suggest

PAPERS = tomllib.loads(
  pathlib.Path(__file__).with_name("experiments.toml").read_text("utf-8")
)
_PARTS = {
  name: parts if isinstance(parts, tuple) else (parts,)
  for module in (protokv, keydiff, compactor, ctkvr, lagkv)
  for name, parts in module.PARTS.items()
}
EXPERIMENTS: Mapping[str, Experiment] = {
  name: Experiment(
    id=name,
    paper=paper,
    parts=_PARTS.get(name, ()),
    **{"models": entry["models"]} | fields,
  )
  for paper, entry in PAPERS.items()
  for name, fields in entry.items()
  if isinstance(fields, dict)
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
