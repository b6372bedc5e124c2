"""TPU chips and GPUs to compile for without attached hardware."""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh

from kvjax.cache.sharding import mesh_shape, split_mesh
from kvjax.errors import InputError
from kvjax.kernels.programs import Platform

# By libtpu's names: eight chips of a host, or the smallest topologies that fit
# the models in bfloat16 with memory to spare. A tpu7x chip is two devices.
TOPOLOGIES = {
  "v5e": "v5e:2x4",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x4",
  "tpu7x": "tpu7x:1x1x1",
}
# Kinds of GPUs, and the peak of their products of bfloat16 per second. Besides
# that, NAME.textproto is what is known of one.
GPUS = {"h100": 989 * 10**12}
# In the order in which they are compiled for.
NAMES: Mapping[Platform, Sequence[str]] = {
  "tpu": tuple(TOPOLOGIES),
  "gpu": tuple(GPUS),
}

# libtpu reads these from its machine, which is no TPU host here.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  # Compiling uses no hardware, so several processes may load libtpu.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
_PLUGIN = "jax_cuda13_plugin"


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of TPU chip, and a topology of several, or a GPU.

  Sizes are per JAX device: the two cores of a v5p are one device, those of a
  tpu7x are two.

  Attributes:
    name: name of the kind of chip, or of a slice.
    topology: libtpu's or JAX's name of the topology.
    devices: devices of the topology, which can only be compiled for.
    hbm_bytes: memory of a device.
    vmem_bytes: fast memory of a core; 0 for a GPU.
    bytes_per_second: bandwidth between a device and its memory.
    flops_per_second: peak of a device's products of bfloat16.
    rows: size of the axis "data" of the mesh.
    kv_heads: KV heads that the axis "model" is split for, if it is.
    tokens: size of the axis "context" of the mesh.
    platform: "tpu" or "gpu".
  """

  name: str
  topology: str
  devices: tuple[Any, ...]
  hbm_bytes: int
  vmem_bytes: int
  bytes_per_second: int
  flops_per_second: int
  rows: int = 1
  kv_heads: int | None = None
  tokens: int = 1
  platform: Platform = "tpu"

  @classmethod
  def load(cls, name: str, topology: str | None = None) -> "Chip":
    """Loads devices with JAX's facts about them.

    Args:
      name: one of `TOPOLOGIES` or `GPUS`, or any name if there is a topology.
      topology: libtpu's name of it; None for that in `TOPOLOGIES`.
    """
    if name in GPUS:
      return cls._load_gpu(name)
    topology = topology or TOPOLOGIES[name]
    described = topologies.get_topology_desc(
      platform="tpu", topology_name=topology
    )
    devices = tuple(described.devices)
    with jax.set_mesh(_mesh(devices[:1])):
      core = pltpu.get_tpu_info()
    return cls(
      name,
      topology,
      devices,
      core.hbm_capacity_bytes * core.num_cores,
      core.vmem_capacity_bytes,
      core.mem_bw_bytes_per_second * core.num_cores,
      core.bf16_ops_per_second * core.num_cores,
    )

  @classmethod
  def _load_gpu(cls, name: str) -> "Chip":
    topology = "1x1x1"  # one device of one process on one host
    target = pathlib.Path(__file__).with_name(f"{name}.textproto").read_text()

    def fact(field: str) -> int:
      found = re.search(rf"\b{field}: (\d+)", target)
      assert found is not None
      return int(found[1])

    described = topologies.get_topology_desc(
      platform="cuda", topology=topology, target_config=target
    )
    return cls(
      name,
      topology,
      tuple(described.devices),
      hbm_bytes=fact("device_memory_size"),
      vmem_bytes=0,
      bytes_per_second=fact("memory_bandwidth"),
      flops_per_second=GPUS[name],
      platform="gpu",
    )

  @property
  def mesh(self) -> Mesh:
    """A mesh of all devices: those that are left are along "model"."""
    mesh = _mesh(self.devices, self.rows, self.tokens)
    return mesh if self.kv_heads is None else split_mesh(mesh, self.kv_heads)

  @property
  def lone(self) -> Mesh:
    """A mesh of one device."""
    return _mesh(self.devices[:1])


def prepare(platform: Platform) -> None:
  """Calls `prepare_libtpu` or `prepare_cuda`."""
  {"tpu": prepare_libtpu, "gpu": prepare_cuda}[platform]()


def prepare_libtpu() -> None:
  """Makes libtpu load without a TPU; call it before `Chip.load`.

  Raises:
    InputError: libtpu is not installed.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise InputError(
      "Compiling for TPUs takes libtpu, which is not installed; "
      "`make tpu-compile` and `make plan` fetch it, or `pip install libtpu`."
    )
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  _without_cache()


def prepare_cuda() -> None:
  """Makes JAX compile for GPUs without one; call it before `Chip.load`.

  Raises:
    InputError: JAX's plugin for GPUs is not installed.
  """
  if importlib.util.find_spec(_PLUGIN) is None:
    raise InputError(
      "Compiling for GPUs takes JAX's plugin for them, which is not installed; "
      '`make gpu-compile` fetches it, or `pip install "jax[cuda13]"`.'
    )
  # Otherwise the plugin looks for a GPU and for all libraries of CUDA.
  jax.config.update("jax_platforms", "cpu")
  _without_cache()
  # Only the version of cuDNN is asked for, but its library is larger than all
  # that compiling takes.
  versions: Any = importlib.import_module(f"{_PLUGIN}._versions")
  versions.cudnn_get_version = versions.cudnn_build_version


def _without_cache() -> None:
  # Without a chip, programs for one can be written to the cache but not read.
  jax.config.update("jax_enable_compilation_cache", False)


def _mesh(devices: tuple[Any, ...], rows: int = 1, tokens: int = 1) -> Mesh:
  others = len(devices) // (rows * tokens)
  shape = mesh_shape({"data": rows, "context": tokens, "model": others})
  return Mesh(
    np.asarray(devices).reshape(tuple(shape.values())),
    tuple(shape),
    axis_types=(AxisType.Auto,) * len(shape),
  )
