"""Arrays that a host reads; the tests of programs have several hosts."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.sharding import parse_mesh
from kvjax.hosts import read, spanned


def test_what_is_spread_over_a_mesh_is_read_whole():
  mesh = parse_mesh("data:4")
  assert not spanned()
  with jax.set_mesh(mesh):
    assert not spanned()
    rows = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P("data")))
    found = read({"rows": rows, "host": np.ones(2)})
  assert isinstance(found["rows"], np.ndarray)
  assert found["rows"].tolist() == list(range(8))
  assert found["host"].tolist() == [1, 1]
