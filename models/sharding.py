"""Sharding of weights over the axis "model" of a mesh."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.kernels.mesh_axes import (
  MODEL,
  Spread,
  axis_size,
  spread_over,
  whole,
  without_context,
)
from kvjax.model import Geometry

# Logical axes of every parameter by the last two parts of its path. Parameters
# of the layers also have leading axes of layers and of experts, which are not
# sharded: every device has a part of each expert.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
  "embed_tokens.embedding": ("vocab", "embed"),
  "lm_head.kernel": ("embed", "vocab"),
  "q_proj.kernel": ("embed", "heads"),
  "q_proj.bias": ("heads",),
  "k_proj.kernel": ("embed", "kv_heads"),
  "k_proj.bias": ("kv_heads",),
  "v_proj.kernel": ("embed", "kv_heads"),
  "v_proj.bias": ("kv_heads",),
  "o_proj.kernel": ("heads", "embed"),
  "o_proj.bias": ("embed",),
  "gate_proj.kernel": ("embed", "mlp"),
  "gate_proj.bias": ("mlp",),
  "up_proj.kernel": ("embed", "mlp"),
  "up_proj.bias": ("mlp",),
  "down_proj.kernel": ("mlp", "embed"),
  "down_proj.bias": ("embed",),
  "self_attn.sinks": ("heads",),
  "router.kernel": ("embed", None),
  "router.bias": (None,),
  "q_norm.scale": (None,),
  "k_norm.scale": (None,),
  "input_layernorm.scale": ("embed",),
  "post_attention_layernorm.scale": ("embed",),
  "pre_feedforward_layernorm.scale": ("embed",),
  "post_feedforward_layernorm.scale": ("embed",),
  "norm.scale": ("embed",),
}

# The logical axes that the mesh axis "model" shards; others are replicated.
SHARDED = frozenset(["vocab", "heads", "kv_heads", "mlp"])


def param_shardings(
  template: nnx.State, geometry: Geometry, mesh: Mesh
) -> PyTree[NamedSharding]:
  """Shards heads, MLP and vocabulary of every parameter over "model".

  They are also sharded over "group", if the mesh has it, except KV heads; see
  `kvjax.cache.sharding.split_mesh`. An axis that does not divide evenly is
  replicated. A head is never split.

  Args:
    template: the decoder's state; only paths and shapes are read.
    geometry: sizes of the model.
    mesh: a mesh with an axis "model".
  """
  # All layers have the same number of heads.
  layer = geometry.layers[0]
  units = {"heads": layer.heads, "kv_heads": layer.kv_heads}

  def shard(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    return NamedSharding(mesh, _spec(path, leaf, units, mesh.shape))

  return jax.tree_util.tree_map_with_path(shard, template)


def expert_specs(
  state: nnx.State, sizes: Mapping[str, int]
) -> PyTree[PartitionSpec]:
  """Says which axes `param_shardings` shards of a layer's sparse MLP.

  Args:
    state: the state of the MLP; only paths and shapes are read.
    sizes: sizes of the mesh's axes.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: _spec(path, leaf, {}, sizes), state
  )


def _spec(
  path: tuple[Any, ...],
  leaf: Any,
  units: Mapping[str, int],
  sizes: Mapping[str, int],
) -> PartitionSpec:
  """Shards the axes of a parameter that may be, where they divide evenly.

  Args:
    path: path of the parameter.
    leaf: the parameter; only its shape is read.
    units: number of units that must not be split, by logical axes.
    sizes: sizes of the mesh's axes.
  """
  spec: list[Spread] = []
  for axis, size in zip(_logical(path, leaf), leaf.shape, strict=True):
    # Heads must divide, not their channels, or one would be split.
    parts = units.get(axis or "", size)
    is_whole = axis not in SHARDED
    within = without_context(sizes)
    spec.append(None if is_whole else spread_over(MODEL, [parts], within))
  return PartitionSpec(*spec)


class Copies(NamedTuple):
  """What the devices along "model" have of weights beyond an even share.

  Attributes:
    axes: logical axes that could not be shared out over all of them.
    bytes: bytes of a device, of the weights that have these axes.
  """

  axes: frozenset[str]
  bytes: int


def copies(template: nnx.State, geometry: Geometry, mesh: Mesh) -> Copies:
  """Finds the weights that several devices along "model" have.

  Arguments are those of `param_shardings`.
  """
  sizes = without_context(mesh.shape)
  parts = axis_size(whole(MODEL, sizes), sizes)
  shardings = param_shardings(template, geometry, mesh)
  axes, more = set(), 0
  leaves = jax.tree_util.tree_leaves_with_path(template)
  for (path, leaf), sharding in zip(
    leaves, jax.tree.leaves(shardings), strict=True
  ):
    logical = _logical(path, leaf)
    copied = {
      axis
      for axis, spread in zip(logical, sharding.spec, strict=True)
      if axis in SHARDED and axis_size(spread, sizes) < parts
    }
    if copied:
      axes |= copied
      own = math.prod(sharding.shard_shape(leaf.shape))
      more += (own - leaf.size // parts) * leaf.dtype.itemsize
  return Copies(frozenset(axes), more)


def _logical(path: tuple[Any, ...], leaf: Any) -> tuple[str | None, ...]:
  """Returns the logical axes of a parameter."""
  names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
  logical = LOGICAL_AXES[".".join(str(name) for name in names[-2:])]
  return (None,) * (len(leaf.shape) - len(logical)) + logical
