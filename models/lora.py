"""Low-rank adapters of a decoder: LoRA (Hu et al. 2021, arXiv 2106.09685).

A projection x W becomes x W + x A B, where A is [in, rank] and B [rank, out]. W
is frozen. A is random (He et al. 2015, uniform) and B is zero, so that the
initial adapter has no effect. The paper's factor alpha / rank is 1.
"""

import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kvjax import files
from kvjax.errors import InputError
from kvjax.files import write_json
from kvjax.hosts import read, writes
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder, get_kernel
from kvjax.models.language_model import DecoderModel, from_decoder

# No projection is as wide.
_MOST_RANK = 2**16

# The module and the attribute of each projection of a layer.
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
  """Checks the rank and the targets of adapters.

  Raises:
    InputError: the rank is below 1 or huge, there is no target, or one is not
      in `TARGETS`.
  """
  if rank < 1:
    raise InputError(f"The rank of an adapter is 1 or more; it is {rank}.")
  if rank > _MOST_RANK:
    raise InputError(
      f"The rank of an adapter is at most {_MOST_RANK}; it is {rank}."
    )
  if not targets:
    raise InputError(f"Name a projection to adapt: {', '.join(TARGETS)}.")
  for target in targets:
    if target not in TARGETS:
      raise InputError(
        f"There is no projection {target!r} to adapt; projections are "
        f"{', '.join(TARGETS)}."
      )


def add_adapters(
  model: DecoderModel,
  params: nnx.State,
  rank: int,
  targets: Sequence[str],
  seed: int = 0,
) -> tuple[DecoderModel, nnx.State]:
  """Adds adapters to projections of every layer.

  Args:
    model: the functions.
    params: the weights, which are shared with the result, not copied.
    rank: rank of A B; a rank above that of the projection has no benefit.
    targets: names in `TARGETS`.
    seed: seed of the matrices A.

  Returns:
    A model that computes the same, and its weights: the given ones, and the
    adapters in float32, sharded like the projections. `split` separates them.

  Raises:
    InputError: see `check`; or a target is a projection of experts.
  """
  check(rank, targets)
  if any(kind.sparse for kind in model.config.kinds):
    experts = [name for name in targets if TARGETS[name][0] == "mlp"]
    if experts:
      raise InputError(
        f"The projection {experts[0]!r} of experts cannot be adapted; adapt "
        "those of the attention: q, k, v, o."
      )
  decoder = nnx.merge(model.graphdef, params)
  rngs = nnx.Rngs(seed)
  for module, name in _find_modules(decoder, targets):
    base = getattr(module, name)
    lora = _stack_adapters(base, rank, rngs)
    _shard_like(lora, base.kernel[...].sharding)
    setattr(module, name, lora)
  return from_decoder(decoder)


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
  """Splits weights into those of the adapters and the frozen ones."""
  adapter, frozen = nnx.split_state(params, nnx.LoRAParam, ...)
  return adapter, frozen


def merge_adapters(
  model: DecoderModel, params: nnx.State
) -> tuple[DecoderModel, nnx.State]:
  """Merges adapters into a plain decoder with the weights W + A B."""
  decoder = nnx.merge(model.graphdef, params)
  for module, name in _find_modules(decoder, tuple(TARGETS)):
    lora = getattr(module, name)
    if isinstance(lora, nnx.LoRA):
      linear = lora.base_module
      assert isinstance(linear, nnx.Linear)
      # A new parameter, so that the given weights do not change.
      sharding = linear.kernel[...].sharding
      linear.kernel = nnx.Param(jax.device_put(get_kernel(lora), sharding))
      setattr(module, name, linear)
  return from_decoder(decoder)


def write_adapter(
  adapter: nnx.State, config: DecoderConfig, directory: pathlib.Path, base: str
) -> None:
  """Saves adapters in the format of PEFT's `PeftModel.from_pretrained`.

  If they are spread over several hosts, all of them must call it, and the first
  one writes.

  Args:
    adapter: the first result of `split`.
    config: configuration of the base model.
    directory: the directory, which is created if it does not exist.
    base: name or directory of the base model.

  Raises:
    InputError: the base model's files store the projections of one input as one
      tensor, for which PEFT has one adapter.
  """
  if config.family.fused:
    raise InputError(
      f"Adapters of a model of the type {config.model_type!r} cannot be "
      "written: its files store several projections as one. Write the merged "
      "model instead."
    )
  tensors = {}
  modules, rank = set(), 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(adapter)[0]:
    layers, stack, *names, kind = [
      str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)
    ]
    name = {"lora_a": "lora_A", "lora_b": "lora_B"}[kind]
    numbers = config.layers_of(int(stack))
    for layer, matrix in zip(numbers, read(leaf), strict=True):
      place = ".".join([layers, str(layer), *names, name])
      # PEFT stores matrices that multiply from the left.
      tensors[f"base_model.model.model.{place}.weight"] = np.ascontiguousarray(
        matrix.T
      )
    modules.add(names[-1])
    rank = leaf.shape[-1] if name == "lora_A" else rank
  if not writes(adapter):
    return
  directory.mkdir(parents=True, exist_ok=True)
  metadata = {"format": "pt"}
  files.write_bytes(
    directory / "adapter_model.safetensors",
    safetensors.numpy.save(tensors, metadata),
  )
  write_json(
    directory / "adapter_config.json",
    {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": base,
      "r": rank,
      # PEFT multiplies by alpha / r, which is 1 here.
      "lora_alpha": rank,
      "target_modules": sorted(modules),
      "inference_mode": True,
    },
  )


def _find_modules(
  decoder: Decoder, targets: Sequence[str]
) -> Iterator[tuple[nnx.Module, str]]:
  """Yields modules and attributes of targets, in a fixed order."""
  for stack in decoder.layers:
    for target, (part, name) in TARGETS.items():
      module = getattr(stack, part)
      if target in targets and hasattr(module, name):
        yield module, name


def _stack_adapters(base: nnx.Linear, rank: int, rngs: nnx.Rngs) -> nnx.LoRA:
  """Makes the adapters of a projection, with its leading axis of layers."""

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
  # It starts as None, which nnx takes for a static attribute.
  lora.base_module = nnx.data(base)
  return lora


def _shard_like(lora: nnx.LoRA, kernel: jax.sharding.Sharding) -> None:
  """Shards A like the kernel's inputs, and B like its outputs."""
  if isinstance(kernel, NamedSharding):
    # A specification may omit trailing axes that are not sharded.
    layers, inputs, outputs = (*kernel.spec, None, None, None)[:3]
    for matrix, spec in (
      (lora.lora_a, PartitionSpec(layers, inputs, None)),
      (lora.lora_b, PartitionSpec(layers, None, outputs)),
    ):
      sharding = NamedSharding(kernel.mesh, spec)
      matrix[...] = jax.device_put(matrix[...], sharding)
