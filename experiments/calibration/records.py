"""The calibrations of a model, a file for each method, beside its weights."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

import kvjax
from kvjax.errors import InputError

AUTO = "auto"
# Within a model's directory.
FOLDER = "calibrations"


@dataclasses.dataclass(frozen=True, eq=False)
class Auto:
  """A budget for every method: what each context can bear.

  Attributes:
    tau: the share of quality that is to be left.
    folder: of the records.
    records: by the label of a plan, and by whether each query head chooses for
      itself.
  """

  tau: float
  folder: pathlib.Path
  records: Mapping[tuple[str, bool], kvjax.Calibration]

  @classmethod
  def read(cls, tau: float, folder: pathlib.Path, model_id: str) -> "Auto":
    """Reads the records of a folder, if there are any.

    Raises:
      InputError: a JSON file is no record, or another model's.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
      found = kvjax.Calibration.load(path, model_id=model_id)
      records[found.method, found.per_query_head] = found
    return cls(tau, folder, records)

  def of(self, name: str, plan: kvjax.Plan) -> kvjax.Calibrated:
    """The budget of a method.

    Args:
      name: of the method, as the user gave it.
      plan: what it stands for at any other budget.

    Raises:
      InputError: it evicts nothing, or there is no record of it.
    """
    if plan.sparse is not None:
      raise InputError(
        f"{AUTO} is the share that a context can bear to keep, and this keeps "
        "everything; give the share that is looked up."
      )
    record = self.records.get((plan.label, plan.per_query_head))
    if record is None:
      heads = " --heads=query" if plan.per_query_head else ""
      raise InputError(
        f"{self.folder} has no calibration of it; make one by python -m "
        f"kvjax.experiments.calibrate --methods={name}{heads}, and name its "
        "folder by --calibrations."
      )
    return kvjax.Calibrated(record, self.tau)


def file_name(method: str, per_query_head: bool) -> str:
  """Of a method's record: `lagkv--lag=128.json`."""
  heads = "--query-heads" if per_query_head else ""
  return re.sub(r"[/:]", "--", method) + heads + ".json"
