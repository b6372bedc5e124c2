"""Where weights live on a mesh of the axes "data" and "model"."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.model import Geometry

# Logical axes of every parameter, by the last two parts of its path. Those of
# the layers have an axis of layers before them, which stays whole.
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
  "q_norm.scale": (None,),
  "k_norm.scale": (None,),
  "input_layernorm.scale": ("embed",),
  "post_attention_layernorm.scale": ("embed",),
  "norm.scale": ("embed",),
}

# The mesh axis of each logical axis; the others are whole on every device.
RULES = {
  "vocab": "model",
  "heads": "model",
  "kv_heads": "model",
  "mlp": "model",
}


def param_shardings(
  template: nnx.State, geometry: Geometry, mesh: Mesh
) -> PyTree[NamedSharding]:
  """A sharding for every parameter: heads, MLP and vocabulary over "model".

  An axis that the mesh does not divide evenly stays whole; heads are never
  split within.

  Args:
    template: the decoder's state; only paths and shapes are read.
    geometry: the model's numbers of heads.
    mesh: has an axis "model".
  """
  # One stack of weights: all layers have as many heads.
  layer = geometry.layers[0]
  units = {"heads": layer.heads, "kv_heads": layer.kv_heads}

  def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    logical = LOGICAL_AXES[".".join(str(name) for name in names[-2:])]
    if names[0] == "layers":
      logical = (None, *logical)
    spec: list[str | None] = []
    for axis, size in zip(logical, leaf.shape, strict=True):
      target = RULES.get(axis or "")
      parts = units.get(axis or "", size)
      whole = target is None or parts % mesh.shape[target]
      spec.append(None if whole else target)
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(place, template)
