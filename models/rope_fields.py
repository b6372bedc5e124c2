"""Reading of rotary embeddings from the fields of a config.json."""

from collections.abc import Mapping
from typing import Any

from kvjax.errors import warn
from kvjax.models.families import Family
from kvjax.models.fields import (
  LARGEST,
  ConfigError,
  Fields,
  format_value,
  is_number,
)
from kvjax.models.layer_fields import FULL, SLIDING
from kvjax.models.rope import Rope
from kvjax.models.rope_kinds import FREQUENCIES

KINDS = tuple(FREQUENCIES)

# Fields that each kind requires, and those that it may have.
_REQUIRED = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
  "yarn": ("factor",),
  "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
  "default": ("original_max_position_embeddings",),
  "linear": ("original_max_position_embeddings",),
  "dynamic": ("original_max_position_embeddings",),
  "llama3": (),
  "yarn": (
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "truncate",
  ),
  "longrope": (
    "attention_factor",
    "factor",
    "original_max_position_embeddings",
  ),
}
_LISTS = ("short_factor", "long_factor")
_NUMBERS = {"rope_theta", "partial_rotary_factor"}.union(
  *_REQUIRED.values(), *_OPTIONAL.values()
)
# Frequencies are float32, and so are their products with positions.
_TINY, _HUGE = 1e-6, 1e30
# These multiply queries and keys, so that logits have their square.
_SCALES = ("attention_factor", "mscale", "mscale_all_dim")
_LARGE = 1e4
# Fields about the origin of the file.
_WITHOUT_EFFECT = ("finetuned",)


def read_ropes(
  fields: Fields, family: Family, head_dim: int, max_positions: int
) -> tuple[Rope, Rope | None]:
  """Reads `rope_parameters`, or the older pair of fields, or both.

  Returns:
    The rotary embedding, and that of layers with a window if it is another.
  """
  theta = fields.take("rope_theta")
  local: dict[str, Any] = {}
  if family.rope == "local":
    local["rope_theta"] = fields.take("rope_local_base_freq")
  original = fields.take("original_max_position_embeddings")
  says_nothing = not (
    "rope_parameters" in fields.rest or fields.rest.get("rope_scaling")
  )
  if family.scaling and says_nothing:
    # As in transformers 5, with its own original context.
    fields.rest["rope_scaling"], original = dict(family.scaling), None
  older, rope = map(fields.object, ("rope_scaling", "rope_parameters"))
  if family.rope in ("local", "unscaled") and set(rope) & {FULL, SLIDING}:
    nested = Fields(rope)
    rope = nested.object(FULL)
    local |= nested.object(SLIDING)
    fields.faults += nested.faults
  fields.faults += _find_contradictions(older, rope)
  rope = older | rope
  for name, value in (
    ("rope_theta", theta),
    (
      "partial_rotary_factor",
      fields.take("partial_rotary_factor") if family.partial else None,
    ),
  ):
    if value is not None:
      rope.setdefault(name, value)
  # As in transformers 5; other kinds do not use it.
  kind = rope.get("rope_type") or rope.get("type")
  if isinstance(kind, str) and kind in family.rope_names:
    kind = family.rope_names[kind]
    rope |= {"rope_type": kind}
  if original is not None and kind in ("llama3", "yarn", "longrope"):
    found = rope.setdefault("original_max_position_embeddings", original)
    if found != original:
      # transformers 4 took the inner one, and transformers 5 the outer one.
      fields.faults.append(
        f"has {format_value(found)} for the rope field "
        f"'original_max_position_embeddings' and {format_value(original)} for "
        "the field outside, which must agree"
      )

  def read(found: Mapping[str, Any]) -> Rope:
    try:
      return read_rope(
        found,
        head_dim,
        max_positions,
        partial=family.partial,
        interleaved=family.interleaved,
      )
    except ConfigError as error:
      # Go on with the default, so that one error names all faults;
      # `refuse_faults` raises before it is used.
      fields.faults += error.faults
      return read_rope({}, head_dim, max_positions)

  whole = read(rope)
  if family.rope == "unscaled":
    local = {"rope_theta": whole.theta} | local
  return whole, read(local) if local else None


def _find_contradictions(
  older: Mapping[str, Any], rope: Mapping[str, Any]
) -> list[str]:
  """Lists what rope_scaling and rope_parameters say differently."""
  one, other = (
    {"rope_type" if name == "type" else name: x[name] for name in x}
    for x in (older, rope)
  )
  return [
    f"has {format_value(one[name])} for {name!r} in rope_scaling and "
    f"{format_value(other[name])} in rope_parameters, which must agree"
    for name in sorted(one.keys() & other.keys())
    if one[name] != other[name]
  ]


def read_rope(
  fields: Mapping[str, Any],
  head_dim: int,
  max_positions: int,
  *,
  partial: bool = False,
  interleaved: bool = False,
) -> Rope:
  """Reads `rope_parameters` (or rope_scaling with rope_theta).

  Args:
    fields: the fields.
    head_dim: D.
    max_positions: the field `max_position_embeddings`.
    partial: whether a part of each head may be rotated.
    interleaved: whether neighboring channels are rotated.

  Raises:
    ConfigError: the kind is unknown, or fields are missing or invalid.
  """
  rest = {k: v for k, v in fields.items() if v is not None}
  kind = rest.pop("rope_type", None) or rest.get("type", "default")
  for name in ("type", *_WITHOUT_EFFECT):
    rest.pop(name, None)
  if not isinstance(kind, str) or kind not in KINDS:
    raise ConfigError(
      [
        f"has rope type {format_value(kind)}, which is not supported; "
        f"supported are {', '.join(KINDS)}"
      ]
    )
  if kind == "default" and rest.get("factor") == 1:
    rest.pop("factor")
  faults = _find_faults(kind, rest, max_positions)
  share = rest.pop("partial_rotary_factor", 1)
  if not partial and share != 1 and not faults:
    faults = [
      "rotates a part of each head only (partial_rotary_factor), which is not "
      "supported"
    ]
  if faults:
    raise ConfigError(faults)
  theta = rest.pop("rope_theta", 10000.0)
  if kind == "yarn" and theta <= 1:
    raise ConfigError(
      [f"has rope_theta {theta}, which rope type 'yarn' needs above 1"]
    )
  if kind == "dynamic" and head_dim < 4:
    raise ConfigError(
      [
        f"has heads of {head_dim} dimensions; rope type 'dynamic' needs 4 or "
        "more"
      ]
    )
  dim = int(head_dim * share)
  if share != 1 and (dim % 2 or not 2 <= dim <= head_dim):
    raise ConfigError(
      [
        f"rotates {dim} of {head_dim} dimensions of a head; it must be an even "
        "part"
      ]
    )
  if kind == "dynamic":
    # It equals `max_positions`.
    rest.pop("original_max_position_embeddings", None)
  ignored = rest.pop("attn_factor", 1)
  if ignored != 1:
    # Some engines multiply by it what transformers takes alone.
    warn(
      f"config.json has {ignored} for the rope field 'attn_factor', which is "
      "passed over, as by transformers; to choose the factor of queries and "
      "keys, give it as 'attention_factor'."
    )
  original = rest.get("original_max_position_embeddings", max_positions)
  # Positions are int32.
  if original * rest.get("factor", 1.0) > LARGEST:
    raise ConfigError(
      [f"scales {original} positions by {rest['factor']}, which is too much"]
    )
  if kind == "longrope":
    rest |= {"original_max_position_embeddings": original}
    rest.setdefault("factor", max_positions / original)
    faults = _check_longrope(rest, dim)
    if faults:
      raise ConfigError(faults)
  scaling = () if kind == "default" else tuple(sorted(rest.items()))
  return Rope(kind, float(theta), dim, original, scaling, interleaved)


def _check_longrope(rest: dict[str, Any], dim: int) -> list[str]:
  """Makes the divisors hashable; lists the errors."""
  for name in _LISTS:
    rest[name] = tuple(float(number) for number in rest[name])
  if rest["original_max_position_embeddings"] < 2:
    return ["has a context of 1 token, which rope type 'longrope' cannot scale"]
  return [
    f"has {len(rest[name])} numbers for the rope field {name!r}, where a head "
    f"has {dim // 2} frequencies"
    for name in _LISTS
    if len(rest[name]) != dim // 2
  ]


def _find_faults(
  kind: str, fields: Mapping[str, Any], max_positions: int
) -> list[str]:
  """Lists the errors in the fields of a kind."""
  faults = []
  for name, value in fields.items():
    expected = _describe_expected(name, value)
    if expected:
      faults.append(
        f"has {format_value(value)} for the rope field {name!r}, which must be "
        f"{expected}"
      )
  original = fields.get("original_max_position_embeddings", max_positions)
  if kind == "dynamic" and original != max_positions:
    faults.append(
      f"has {format_value(original)} for the rope field "
      "'original_max_position_embeddings', which rope type 'dynamic' does not "
      f"use; only {max_positions}, max_position_embeddings, is supported"
    )
  known = {"rope_theta", "partial_rotary_factor"}
  known |= {*_REQUIRED[kind], *_OPTIONAL[kind]}
  faults += [
    f"has the rope field {name!r}, which rope type {kind!r} does not use"
    for name in sorted(set(fields) - known)
  ]
  faults += [
    f"lacks {name!r}, which rope type {kind!r} needs"
    for name in _REQUIRED[kind]
    if name not in fields
  ]
  low, high = fields.get("low_freq_factor"), fields.get("high_freq_factor")
  if is_number(low) and is_number(high) and low >= high:
    faults.append(
      f"has low_freq_factor {low} and high_freq_factor {high}; the first must "
      "be the smaller"
    )
  return faults


def _describe_expected(name: str, value: Any) -> str | None:
  """Describes what a field must be if its value is invalid, else None."""
  if name in _LISTS:
    valid = isinstance(value, list | tuple) and all(
      is_number(number) and _TINY <= number < _HUGE for number in value
    )
    return None if valid else "a list of numbers above 0"
  if name == "truncate":
    return None if isinstance(value, bool) else "true or false"
  if name == "original_max_position_embeddings":
    valid = type(value) is int and 0 < value <= LARGEST
    return None if valid else "a whole number of 1 or more, and no huge one"
  most = _LARGE if name in _SCALES else _HUGE
  if name in _NUMBERS and not (is_number(value) and 0 < value < most):
    return "a number above 0, and no huge one"
  if name in _NUMBERS and value < _TINY:
    return "a number above 0, and no tiny one"
  return None
