"""TPU chips that programs are compiled for without having one."""

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

# Smallest pieces of each kind that hold an 8B model in bfloat16 with room to
# spare, as libtpu names them. Of tpu7x a chip is two devices.
TOPOLOGIES = {
  "v5e": "v5e:2x4",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:1x1x1",
}

# libtpu takes these from the machine that it runs on, which is no TPU host.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  # Compiling shares nothing that two processes could not use at once.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of chip, and some of them joined.

  Sizes are those of a device as JAX counts them: the two cores of a v5p are
  one, those of a tpu7x are two.

  Attributes:
    name: one of `TOPOLOGIES`.
    devices: those of the topology; programs can be compiled for them alone.
    hbm_bytes: memory of a device.
    vmem_bytes: fast memory of a core.
    bytes_per_second: between a device and its memory.
  """

  name: str
  devices: tuple[Any, ...]
  hbm_bytes: int
  vmem_bytes: int
  bytes_per_second: int

  @classmethod
  def load(cls, name: str) -> "Chip":
    """The chip of that name, with the facts that JAX has about it."""
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
    """What libtpu calls the devices."""
    return TOPOLOGIES[self.name]

  @property
  def mesh(self) -> Mesh:
    """All devices along "model"."""
    return _mesh(self.devices)

  @property
  def lone(self) -> Mesh:
    """One device."""
    return _mesh(self.devices[:1])


def prepare_libtpu() -> None:
  """Makes libtpu load where there is no TPU; to be called before `Chip.load`.

  Raises:
    InputError: there is no libtpu.
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
