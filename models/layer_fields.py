"""The fields of a config.json that say how layers differ from one another."""

from typing import Any

from kvjax.models.families import Family
from kvjax.models.fields import Fields, format_value
from kvjax.models.structure import ExpertSizes, LayerKind

FULL, SLIDING = "full_attention", "sliding_attention"
# What other types of layers are, for messages.
_TYPES = {
  "linear_attention": "linear attention",
  "chunked_attention": "attention in chunks",
}


def read_kinds(
  fields: Fields, model_type: str, family: Family, layers: int, context: int
) -> tuple[LayerKind, ...]:
  """Reads the kind of every layer.

  Args:
    fields: the fields, which are removed as they are read.
    model_type: the model type.
    family: what the model type fixes.
    layers: L.
    context: number of tokens that a row can have; a window as long is none.
  """
  rotated = _read_rotated(fields, family, layers)
  window = _read_window(fields, family)
  sliding = _read_sliding(fields, model_type, family, layers, window, rotated)
  sparse = _read_sparse(fields, model_type, layers)
  hides = bool(window and window < context)
  kinds = []
  for layer in range(layers):
    local = sliding[layer]
    rope: Any = "global"
    if family.rope in ("local", "unscaled") and local:
      rope = "local"
    if (family.rope == "windowed" and not local) or not rotated[layer]:
      rope = None
    own = window if local and hides else None
    kinds.append(LayerKind(own, rope, sparse[layer]))
  if any(sliding) and not window:
    fields.faults.append(
      "has layers of the type 'sliding_attention', but no sliding_window"
    )
  return tuple(kinds)


def read_experts(fields: Fields, model_type: str) -> ExpertSizes | None:
  """Reads the sizes of experts, if the model type has them."""
  if model_type == "qwen3_moe":
    # `transformers` writes its newer name.
    newer = fields.take("num_local_experts")
    if newer is not None:
      fields.rest["num_experts"] = newer
    sizes = ExpertSizes(
      fields.count("num_experts"),
      fields.count("num_experts_per_tok"),
      fields.count("moe_intermediate_size"),
      fields.flag("norm_topk_prob"),
    )
  elif model_type == "gpt_oss":
    # The file of the maker has both names.
    fields.take("experts_per_token")
    sizes = ExpertSizes(
      fields.count("num_local_experts"),
      fields.count("num_experts_per_tok"),
      fields.count("intermediate_size"),
      normalized=True,
      bias=True,
    )
  else:
    return None
  if sizes.per_token > sizes.count:
    fields.faults.append(
      f"has {sizes.per_token} experts per token where there are {sizes.count}"
    )
  return sizes


def write_kinds(
  kinds: tuple[LayerKind, ...], family: Family, context: int
) -> dict[str, Any]:
  """Returns the fields that `read_kinds` reads."""
  windows = [kind.window for kind in kinds]
  window = next((w for w in windows if w), None)
  fields: dict[str, Any] = {}
  if family.windows == "all":
    fields["sliding_window"] = window
  elif family.windows != "never":
    # One that hides nothing where there is none, for the types of layers.
    fields["sliding_window"] = window or context
    fields["use_sliding_window"] = window is not None
  if family.layer_types:
    local = [_is_local(kind, family) for kind in kinds]
    fields["layer_types"] = [SLIDING if one else FULL for one in local]
  if isinstance(family.windows, int):
    del fields["use_sliding_window"]
  if family.rope == "listed":
    fields["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
  return fields


def _is_local(kind: LayerKind, family: Family) -> bool:
  """Whether a layer is of the type with a window, even if that is too long."""
  by_rope = {"local": "local", "unscaled": "local", "windowed": "global"}
  if family.rope in by_rope:
    return kind.rope == by_rope[family.rope]
  return kind.window is not None


def write_experts(
  sizes: ExpertSizes, kinds: tuple[LayerKind, ...], model_type: str
) -> dict[str, Any]:
  """Returns the fields that `read_experts` and `read_kinds` read."""
  fields: dict[str, Any] = {"num_experts_per_tok": sizes.per_token}
  if model_type == "gpt_oss":
    return fields | {"num_local_experts": sizes.count}
  return fields | {
    "num_experts": sizes.count,
    "moe_intermediate_size": sizes.width,
    "norm_topk_prob": sizes.normalized,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [
      layer for layer, kind in enumerate(kinds) if not kind.sparse
    ],
  }


def _read_window(fields: Fields, family: Family) -> int | None:
  """Reads the size of the window; None if there is none or it is off."""
  window = fields.take("sliding_window")
  enabled = fields.flag("use_sliding_window")
  if not _is_whole(fields, "sliding_window", window):
    return None
  if enabled and window and family.windows == "never":
    fields.faults.append(
      "asks for sliding-window attention, which its model type does not have"
    )
  switched = family.windows in ("never", "enabled", "late")
  return window if enabled or not switched else None


def _is_whole(fields: Fields, name: str, value: Any) -> bool:
  if value is None or (type(value) is int and value >= 0):
    return True
  fields.faults.append(
    f"has {format_value(value)} for {name!r}, which must be a whole number or "
    "null"
  )
  return False


def _read_sliding(
  fields: Fields,
  model_type: str,
  family: Family,
  layers: int,
  window: int | None,
  rotated: tuple[bool, ...],
) -> tuple[bool, ...]:
  """Reads which layers are of the type with a window."""
  kinds = fields.names("layer_types")
  first = fields.take("max_window_layers")
  if not _is_whole(fields, "max_window_layers", first):
    first = None
  pattern = family.windows
  if isinstance(pattern, int):
    period = fields.count("sliding_window_pattern", pattern)
    # A name of the same number that is private to `transformers`.
    fields.take("_sliding_window_pattern")
  other = sorted(set(kinds) - {FULL, SLIDING})
  if other:
    what = _TYPES.get(other[0], "another kind")
    fields.faults.append(
      f"has layers of {what}, of the type {format_value(other[0])}, which is "
      "not supported; 'full_attention' and 'sliding_attention' are"
    )
    return (False,) * layers
  if kinds and len(kinds) != layers:
    fields.faults.append(
      f"has {len(kinds)} layer_types for {layers} layers; give one for each"
    )
    return (False,) * layers
  found = {
    "never": (False,) * layers,
    "all": (bool(window),) * layers,
    "enabled": tuple(
      bool(window) and not (family.rope == "listed" and turned)
      for turned in rotated
    ),
    "late": tuple(
      bool(window) and layer >= (first or 0) for layer in range(layers)
    ),
  }
  usual = (
    tuple(bool((layer + 1) % period) for layer in range(layers))
    if isinstance(pattern, int)
    else found[pattern]
  )
  if not kinds:
    return usual
  said = tuple(kind == SLIDING for kind in kinds)
  if not family.layer_types and said != usual:
    fields.faults.append(
      "has layer_types that ask for sliding-window attention in other layers "
      f"than {model_type} has it"
    )
  return said


def _read_rotated(
  fields: Fields, family: Family, layers: int
) -> tuple[bool, ...]:
  """Reads which layers have a rotary embedding, where a list says so."""
  if family.rope != "listed":
    return (True,) * layers
  interval = fields.count("no_rope_layer_interval")
  listed = fields.take("no_rope_layers")
  if listed is None:
    return tuple(bool((layer + 1) % interval) for layer in range(layers))
  if (
    isinstance(listed, list)
    and len(listed) == layers
    and all(type(one) is int and one in (0, 1) for one in listed)
  ):
    return tuple(map(bool, listed))
  fields.faults.append(
    f"has {format_value(listed)} for 'no_rope_layers', which must be a list of "
    f"{layers} numbers: 1 for a layer with a rotary embedding, else 0"
  )
  return (True,) * layers


def _read_sparse(
  fields: Fields, model_type: str, layers: int
) -> tuple[bool, ...]:
  """Reads which layers have experts."""
  if model_type != "qwen3_moe":
    return (model_type == "gpt_oss",) * layers
  step = fields.count("decoder_sparse_step", 1)
  dense = fields.take("mlp_only_layers", [])
  dense = [] if dense is None else dense
  if not isinstance(dense, list) or not all(type(n) is int for n in dense):
    fields.faults.append(
      f"has {format_value(dense)} for 'mlp_only_layers', which must be a list "
      "of numbers of layers"
    )
    dense = []
  return tuple(
    layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
  )
