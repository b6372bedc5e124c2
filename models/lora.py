"""Low-rank adapters of a decoder: LoRA (Hu et al. 2021, arXiv 2106.09685).

A projection x W becomes x W + x A B, where A is [in, rank] and B [rank, out].
W stays as it is. A is drawn (He et al. 2015, uniform) and B is zero, so that at
first nothing changes. The paper's factor alpha / rank is 1.
"""

import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.errors import InputError
from kvjax.models.decoder import Decoder, kernel_of
from kvjax.models.json_files import write_json
from kvjax.models.language_model import DecoderModel, from_decoder

# Where in a layer the projections are.
TARGETS = {
  "q": ("self_attn", "q_proj"),
  "k": ("self_attn", "k_proj"),
  "v": ("self_attn", "v_proj"),
  "o": ("self_attn", "o_proj"),
  "gate": ("mlp", "gate_proj"),
  "up": ("mlp", "up_proj"),
  "down": ("mlp", "down_proj"),
}


def check(rank: int, targets: Sequence[str]) -> None:
  """Refuses adapters that cannot be made.

  Raises:
    InputError: the rank is below 1, there is no target, or one is not in
      `TARGETS`.
  """
  if rank < 1:
    raise InputError(f"The rank of an adapter is 1 or more; it is {rank}.")
  if not targets:
    raise InputError(f"Name a projection to adapt: {', '.join(TARGETS)}.")
  for target in targets:
    if target not in TARGETS:
      raise InputError(
        f"There is no projection {target!r} to adapt; projections are "
        f"{', '.join(TARGETS)}."
      )


def adapted(
  model: DecoderModel,
  params: nnx.State,
  rank: int,
  targets: Sequence[str],
  seed: int = 0,
) -> tuple[DecoderModel, nnx.State]:
  """Puts adapters beside the projections of every layer.

  Args:
    model: the functions.
    params: the weights, which are shared with the result, not copied.
    rank: of A B; more than the projection has changes nothing but the cost.
    targets: names in `TARGETS`.
    seed: of the matrices A.

  Returns:
    A model that computes the same, and its weights: those given, and the
    adapters in float32, split on a mesh as the projections are. `split` tells
    them apart.

  Raises:
    InputError: see `check`.
  """
  check(rank, targets)
  decoder = nnx.merge(model.graphdef, params)
  rngs = nnx.Rngs(seed)
  for module, name in _places(decoder, targets):
    base = getattr(module, name)
    lora = _stacked(base, rank, rngs)
    _place(lora, base.kernel[...].sharding)
    setattr(module, name, lora)
  return from_decoder(decoder)


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
  """The adapters, and the weights below them."""
  adapter, frozen = nnx.split_state(params, nnx.LoRAParam, ...)
  return adapter, frozen


def merged(
  model: DecoderModel, params: nnx.State
) -> tuple[DecoderModel, nnx.State]:
  """The plain decoder with the weights W + A B, in the dtype of W."""
  decoder = nnx.merge(model.graphdef, params)
  for module, name in _places(decoder, tuple(TARGETS)):
    lora = getattr(module, name)
    if isinstance(lora, nnx.LoRA):
      linear = lora.base_module
      assert isinstance(linear, nnx.Linear)
      # In place it would change the weights that were given.
      old = linear.kernel[...].sharding
      linear.kernel = nnx.Param(jax.device_put(kernel_of(lora), old))
      setattr(module, name, linear)
  return from_decoder(decoder)


def write_adapter(
  adapter: nnx.State, directory: pathlib.Path, base: str
) -> None:
  """Writes adapters alone, as PEFT's `PeftModel.from_pretrained` reads them.

  Args:
    adapter: the first part of what `split` returns.
    directory: an existing directory.
    base: name or directory of the model that they belong to.
  """
  tensors = {}
  modules, rank = set(), 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(adapter)[0]:
    stack, *names, kind = [
      str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)
    ]
    name = {"lora_a": "lora_A", "lora_b": "lora_B"}[kind]
    for layer, matrix in enumerate(np.asarray(leaf)):
      place = ".".join([stack, str(layer), *names, name])
      # It is stored as what multiplies from the left.
      tensors[f"base_model.model.model.{place}.weight"] = np.ascontiguousarray(
        matrix.T
      )
    modules.add(names[-1])
    rank = leaf.shape[-1] if name == "lora_A" else rank
  metadata = {"format": "pt"}
  (directory / "adapter_model.safetensors").write_bytes(
    safetensors.numpy.save(tensors, metadata)
  )
  write_json(
    directory / "adapter_config.json",
    {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": base,
      "r": rank,
      "lora_alpha": rank,
      "target_modules": sorted(modules),
      "inference_mode": True,
    },
  )


def _places(
  decoder: Decoder, targets: Sequence[str]
) -> Iterator[tuple[nnx.Module, str]]:
  """Modules and their attributes, however the targets are ordered."""
  for target, (module, name) in TARGETS.items():
    if target in targets:
      yield getattr(decoder.layers, module), name


def _stacked(base: nnx.Linear, rank: int, rngs: nnx.Rngs) -> nnx.LoRA:
  """Adapters of a projection, with its leading axis of layers."""

  def adapter(rngs: nnx.Rngs) -> nnx.LoRA:
    return nnx.LoRA(
      base.in_features,
      rank,
      base.out_features,
      dtype=base.dtype,
      param_dtype=jnp.float32,
      rngs=rngs,
    )

  lora: nnx.LoRA = nnx.vmap(adapter)(rngs.split(base.kernel.shape[0]))
  lora.base_module = nnx.data(base)
  return lora


def _place(lora: nnx.LoRA, kernel: jax.sharding.Sharding) -> None:
  """Splits A as the kernel's inputs are split, and B as its outputs."""
  if isinstance(kernel, NamedSharding):
    # A specification may leave out what is whole.
    layers, inputs, outputs = (*kernel.spec, None, None, None)[:3]
    for matrix, spec in (
      (lora.lora_a, PartitionSpec(layers, inputs, None)),
      (lora.lora_b, PartitionSpec(layers, None, outputs)),
    ):
      sharding = NamedSharding(kernel.mesh, spec)
      matrix[...] = jax.device_put(matrix[...], sharding)
