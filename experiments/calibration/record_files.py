"""The calibration records of a model, one file per method."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.run import method_files

AUTO = "auto"
# The folder in a model's directory.
FOLDER = "calibrations"


@dataclasses.dataclass(frozen=True, eq=False)
class Auto:
  """The automatic budget: the retention depends on the context.

  Attributes:
    tau: the share of quality to preserve.
    folder: folder of the records.
    records: records by the label of a plan and by `per_query_head`.
  """

  tau: float
  folder: pathlib.Path
  records: Mapping[tuple[str, bool], kvjax.Calibration]

  @classmethod
  def read(cls, tau: float, folder: pathlib.Path, model_id: str) -> "Auto":
    """Reads the records of a folder, if there are any.

    Raises:
      InputError: a JSON file is no record, or belongs to another model, or two
        files differ about one method.
    """
    records: dict[tuple[str, bool], kvjax.Calibration] = {}
    paths: dict[tuple[str, bool], pathlib.Path] = {}
    for path in sorted(folder.glob("*.json")):
      loaded = kvjax.Calibration.load(path, model_id=model_id)
      key = loaded.method, loaded.per_query_head
      first = paths.setdefault(key, path)
      if records.setdefault(key, loaded) != loaded:
        raise InputError(
          f"{first} and {path} are different calibrations of {loaded.method}; "
          "keep one of them in the folder."
        )
    return cls(tau, folder, records)

  def of(self, name: str, plan: kvjax.Plan) -> kvjax.Calibrated:
    """Returns the budget of a method.

    Args:
      name: name of the method as the user wrote it.
      plan: its plan at any other budget.

    Raises:
      InputError: the method evicts nothing, has no record, or has one that was
        made with other files. Records that name no files are for any.
    """
    if plan.sparse is not None:
      raise InputError(
        f"{AUTO} is the share that a context can bear to keep, and this keeps "
        "everything; give the share that is retrieved."
      )
    record = self.records.get((plan.label, plan.per_query_head))
    if record is None:
      heads = " --heads=query" if plan.per_query_head else ""
      raise InputError(
        f"{self.folder} has no calibration of it; make one with kvjax "
        f"calibrate --methods={name}{heads}, and give its folder as "
        "--calibrations."
      )
    made_with, found = record.method_files, method_files.joined(plan)
    if made_with and made_with != found:
      raise InputError(
        f"the calibration in {self.folder} was made with {made_with}, and "
        f"its files are {found} now; calibrate it anew, or restore its files."
      )
    return kvjax.Calibrated(record, self.tau)


def file_name(method: str, per_query_head: bool) -> str:
  """Names the file of a method's record: `lagkv--lag=128.json`."""
  heads = "--query-heads" if per_query_head else ""
  return re.sub(r"[/:]", "--", method) + heads + ".json"
