"""The fields of a calibration's JSON file."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from kvjax.errors import InputError
from kvjax.files import Path, is_json_number

Preset = Literal["paper", "prefill", "recite"]
PRESETS = get_args(Preset)
# Shown of a wrong value.
_LONGEST = 60


def _is_integer(value: Any) -> bool:
  return type(value) is int and is_json_number(value)


def _is_string(value: Any) -> bool:
  return type(value) is str


def _is_truth(value: Any) -> bool:
  return type(value) is bool


def _is_pair(value: Any) -> bool:
  return (
    isinstance(value, list)
    and len(value) == 2
    and all(map(is_json_number, value))
  )


def _is_weight(value: Any) -> bool:
  return _is_pair(value) and _is_integer(value[0])


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, list) and all(map(of, value))


def _is_object(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, dict) and all(map(of, value.values()))


# NaN and infinity are refused later.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
  "alpha": is_json_number,
  "beta": is_json_number,
  "model_id": _is_string,
  "method": _is_string,
  "per_query_head": _is_truth,
  "tau_range": _is_pair,
  "error": is_json_number,
  "triples": _is_integer,
  "promises": _is_list(_is_pair),
  "preset": lambda value: value in PRESETS,
  "slopes": _is_object(is_json_number),
  "ranges": _is_object(_is_pair),
  "grid": _is_list(is_json_number),
  "shape": _is_list(is_json_number),
  "r2": _is_object(is_json_number),
  "data": _is_string,
  "seed": _is_integer,
  "token_weights": _is_list(_is_weight),
  "method_files": _is_string,
}
# Of fields that older files lack.
_DEFAULTS: Mapping[str, Any] = {"token_weights": [], "method_files": ""}


def to_json(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Converts the fields of a calibration to those of its file."""
  return {
    **fields,
    "slopes": dict(fields["slopes"]),
    "ranges": {name: [low, high] for name, low, high in fields["ranges"]},
    "r2": dict(fields["r2"]),
  }


def checked(saved: Any, path: Path) -> dict[str, Any]:
  """Checks the fields of a file and converts them to those of a calibration.

  Raises:
    InputError: one is missing, unknown, or of another kind.
  """
  wrong = ""
  if isinstance(saved, dict):
    saved = saved | {k: v for k, v in _DEFAULTS.items() if k not in saved}
  if not isinstance(saved, dict):
    wrong = "it holds no fields"
  elif saved.keys() != _KINDS.keys():
    names = ", ".join(saved)[: 4 * _LONGEST]
    wrong = f"its fields are {names}, not {', '.join(_KINDS)}"
  else:
    for name, is_right in _KINDS.items():
      if not is_right(saved[name]):
        wrong = f"{name} is {repr(saved[name])[:_LONGEST]}"
  if wrong:
    raise InputError(
      f"{path} is no calibration, for {wrong}; give a file that "
      "Calibration.save has written."
    )
  return saved | {
    "tau_range": tuple(saved["tau_range"]),
    "promises": tuple(map(tuple, saved["promises"])),
    "slopes": tuple(saved["slopes"].items()),
    "ranges": tuple((name, *pair) for name, pair in saved["ranges"].items()),
    "grid": tuple(saved["grid"]),
    "shape": tuple(saved["shape"]),
    "r2": tuple(saved["r2"].items()),
    "token_weights": tuple(map(tuple, saved["token_weights"])),
  }
