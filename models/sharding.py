"""Sharding of weights over the axis "model" of a mesh."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.kernels.mesh_axes import MODEL, Spread, spread_over, without_context
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
  sizes = without_context(mesh.shape)

  def shard(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    logical = LOGICAL_AXES[".".join(str(name) for name in names[-2:])]
    logical = (None,) * (len(leaf.shape) - len(logical)) + logical
    spec: list[Spread] = []
    for axis, size in zip(logical, leaf.shape, strict=True):
      # Heads must divide, not their channels, or one would be split.
      parts = units.get(axis or "", size)
      is_whole = axis not in SHARDED
      spec.append(None if is_whole else spread_over(MODEL, [parts], sizes))
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(shard, template)
