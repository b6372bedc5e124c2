"""TPU chips to compile for without attached hardware."""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh

from kvjax.cache.base import AXES
from kvjax.errors import InputError

# By libtpu's names: eight chips of a host, or the smallest topologies that fit
# the models in bfloat16 with memory to spare. A tpu7x chip is two devices.
TOPOLOGIES = {
  "v5e": "v5e:2x4",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x4",
  "tpu7x": "tpu7x:1x1x1",
}

# libtpu reads these from its machine, which is no TPU host here.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  # Compiling uses no hardware, so several processes may load libtpu.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of chip, and a topology of several.

  Sizes are per JAX device: the two cores of a v5p are one device, those of a
  tpu7x are two.

  Attributes:
    name: one of `TOPOLOGIES`.
    devices: devices of the topology, which can only be compiled for.
    hbm_bytes: memory of a device.
    vmem_bytes: fast memory of a core.
    bytes_per_second: bandwidth between a device and its memory.
  """

  name: str
  devices: tuple[Any, ...]
  hbm_bytes: int
  vmem_bytes: int
  bytes_per_second: int

  @classmethod
  def load(cls, name: str) -> "Chip":
    """Loads the chip of a name with JAX's facts about it."""
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=TOPOLOGIES[name]
    )
    devices = tuple(topology.devices)
    with jax.set_mesh(_mesh(devices[:1])):
      core = pltpu.get_tpu_info()
    return cls(
      name,
      devices,
      core.hbm_capacity_bytes * core.num_cores,
      core.vmem_capacity_bytes,
      core.mem_bw_bytes_per_second * core.num_cores,
    )

  @property
  def topology(self) -> str:
    """Libtpu's name of the topology."""
    return TOPOLOGIES[self.name]

  @property
  def mesh(self) -> Mesh:
    """A mesh of all devices along "model"."""
    return _mesh(self.devices)

  @property
  def lone(self) -> Mesh:
    """A mesh of one device."""
    return _mesh(self.devices[:1])


def prepare_libtpu() -> None:
  """Makes libtpu load without a TPU; call it before `Chip.load`.

  Raises:
    InputError: libtpu is not installed.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise InputError(
      "Compiling for TPUs takes libtpu, which is not installed; "
      "`make tpu-compile` fetches it."
    )
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def _mesh(devices: tuple[Any, ...]) -> Mesh:
  return Mesh(
    np.asarray(devices).reshape(1, -1),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
  )
