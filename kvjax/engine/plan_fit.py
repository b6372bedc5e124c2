"""Whether a plan fits a model."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.layers import KV_DTYPES
from kvjax.cache.sharding import context_size, heads_fill_mesh
from kvjax.calibration.record import Calibrated
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import compressed_layers, kv_heads
from kvjax.engine.rerotation import check_rotary
from kvjax.errors import InputError, warn
from kvjax.kernels.mesh_axes import MODEL, axis_size, spread_over, whole
from kvjax.labels import name_of
from kvjax.model import Geometry, Model, check_tokens
from kvjax.prompts import Prompts


def check_plan(model: Model, plan: Plan) -> None:
  """Refuses a method that does not fit the model's layers.

  A warning says if there is no layer to compress.

  Raises:
    InputError: the method or its allocation refuses the model, names a layer
      that it does not have, keys cannot be rotated again, or layers that share
      a selection or join their scores differ in their heads.
  """
  _warn_of_windows(plan, model.geometry)
  traits = plan.method.traits
  plan.method.check_model(model.geometry)
  plan.spread.check_model(model.geometry)
  _check_named_layers(plan, model.geometry)
  _check_joined(plan, model.geometry)
  if plan.decoding is not None:
    plan.decoding.method.check_model(model.geometry)
    _check_named_layers(plan.decoding, model.geometry)
    _check_joined(plan.decoding, model.geometry)
  if traits.renumbers:
    check_rotary(model)
  heads: dict[int, int] = {}
  compressed = compressed_layers(plan, model.geometry)
  for layer, spec in enumerate(model.geometry.layers):
    source, own = traits.source_layer(layer), kv_heads(plan, spec)
    # A selection lists slots for every head, so layers that share one need
    # equally many.
    if compressed[layer] and heads.setdefault(source, own) != own:
      raise InputError(
        f"{plan.name} uses the selection of layer {source} in layer {layer}, "
        "which has another number of heads; give each layer its own."
      )


def _check_joined(plan: Plan, geometry: Geometry) -> None:
  """Refuses to join the scores of layers that differ in their heads."""
  if not plan.method.traits.joins_layers:
    return
  compressed = compressed_layers(plan, geometry)
  layers = zip(geometry.layers, compressed, strict=True)
  found = {
    (spec.heads, kv_heads(plan, spec)) for spec, evicts in layers if evicts
  }
  if len(found) > 1:
    raise InputError(
      f"With these options, {name_of(plan.method)} joins the scores of all "
      "layers, and those of this model differ in their heads; use options or a "
      "method whose layers select by themselves."
    )


def _check_named_layers(plan: Plan, geometry: Geometry) -> None:
  """Refuses layers that the method or the retrieval names in vain."""
  named: list[tuple[object, tuple[int, ...]]] = [
    (plan.method, plan.method.traits.keeps_layers)
  ]
  if plan.sparse is not None:
    retrieval = plan.sparse.retrieval
    named.append((retrieval, retrieval.dense_layers))
  last = geometry.num_layers - 1
  for method, layers in named:
    if max(layers, default=0) > last:
      raise InputError(
        f"{name_of(method)} leaves layer {max(layers)} whole, and this "
        f"model's last layer is {last}; name other layers."
      )


def recites(plan: Plan) -> bool:
  """Whether the budget depends on what caches recite of a prompt."""
  budget = plan.budget
  return (
    isinstance(budget, Calibrated) and budget.calibration.preset == "recite"
  )


def repeats(plan: Plan) -> bool:
  """Whether the model is asked to repeat prompts, by method or budget."""
  return plan.method.traits.replay is not None or recites(plan)


def check_repeat_request(
  model: Model, plans: Iterable[Plan], prompts: Prompts
) -> None:
  """Refuses a request to repeat that has tokens which a model does not embed.

  Raises:
    InputError: it has, and a plan uses it.
  """
  request = prompts.repeat_request
  ids = np.array([[*request.first, *request.later, *request.suffix]], np.int32)
  if any(map(repeats, plans)):
    check_tokens(model, ids, np.array([ids.size]))


def warn_without_request(plans: Iterable[Plan], prompts: Prompts) -> None:
  """Warns if prompts do not say how to ask the model to repeat them."""
  if prompts.repeat_request.asks:
    return
  for plan in plans:
    if plan.method.traits.replay is not None:
      warn(
        f"{plan.name} asks the model to repeat the prompt, and these prompts "
        "do not say how; lm.prompts(text) does, or give kvjax.Prompts "
        "repeat_request=kvjax.RepeatRequest.of(lm.text)."
      )
      return


def check_context_axis(
  model: Model, params: PyTree, plan: Plan, padded: int
) -> None:
  """Checks what the axis "context" of the mesh shares out.

  A warning says if its devices will all have the same cache, and what that
  takes.

  Args:
    model: the model.
    params: its weights.
    plan: the plan.
    padded: tokens that prompts are padded to.

  Raises:
    InputError: the axis does not divide the tokens, or they come in blocks.
  """
  devices = context_size()
  if devices == 1:
    return
  if plan.schedule.block is not None:
    raise InputError(
      "The axis 'context' of the mesh shares out the tokens of whole prompts, "
      f"and these come in blocks of {plan.schedule.block}; give its devices to "
      "'data' or 'model'."
    )
  if padded % devices:
    raise InputError(
      f"The axis 'context' of the mesh has {devices} devices, which do not "
      f"divide the {padded} tokens that prompts are padded to; pad them to a "
      "multiple, as kvjax.Prompts.of(rows, padded=...) does, or choose another "
      "size of the axis."
    )
  heads = {
    kv_heads(plan, spec) for spec in model.geometry.layers if spec.compressible
  }
  if not plan.pageable and not all(map(heads_fill_mesh, heads)):
    warn(
      f"The {devices} devices of the axis 'context' will all have the same "
      f"cache: {max(heads)} KV heads cannot be shared out over 'model' and "
      "'context' together, and this plan's cache is not in pages, so that each "
      f"device takes about {_copied_bytes(model, params, plan):,} bytes more "
      "per cached token."
    )


def _copied_bytes(model: Model, params: PyTree, plan: Plan) -> int:
  """Bytes of a token's keys and values that other devices have, too.

  It is what a device has beyond an even share of all layers of full attention.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  stored = plan.kv_dtype and KV_DTYPES[plan.kv_dtype]
  dtype = jnp.dtype(stored or jax.tree.leaves(params)[0].dtype)
  share = 1 / axis_size(whole(MODEL, sizes), sizes)
  numbers = 0.0
  for spec in model.geometry.layers:
    if spec.compressible:
      heads = kv_heads(plan, spec)
      own = 1 / axis_size(spread_over(MODEL, [heads], sizes), sizes)
      numbers += heads * (spec.key_dim + spec.value_width) * (own - share)
  return round(numbers * dtype.itemsize)


def _warn_of_windows(plan: Plan, geometry: Geometry) -> None:
  """Warns if a method is to evict from a model with windows in all layers.

  Its layers keep their windows, whatever the plan says.
  """
  if plan.method.traits.keeps_all:
    return
  if not any(spec.compressible for spec in geometry.layers):
    warn(
      f"All layers of this model have a window, which methods leave alone: "
      f"{plan.name} compresses nothing."
    )
