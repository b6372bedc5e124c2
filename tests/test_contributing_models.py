"""The recipes of CONTRIBUTING.md for models are followed to the letter."""

import numpy as np
import pytest
import safetensors.numpy
from recipes import blocks, run_in, section

import kvjax


def test_programs_run_on_a_model(tmp_path, monkeypatch):
  """By the recipe's files, with weights that are saved as it reads them."""
  (_, model), _ = blocks(section("Plug in a model"))
  ((file, family),) = blocks(section("Run programs on your model"))
  (tmp_path / "small_model.py").write_text(model)
  (tmp_path / file).write_text(family)
  directory = tmp_path / "small"
  directory.mkdir()
  (directory / "config.json").write_text('{"model_type": "small"}')
  names = {}
  exec(model, names)
  params = names["params"]
  weights = params["layers"] | {"embedding": params["embedding"]}
  safetensors.numpy.save_file(
    {name: np.asarray(array) for name, array in weights.items()},
    directory / "weights.safetensors",
  )
  done = run_in(
    tmp_path,
    "-c",
    "import small, kvjax; lm = kvjax.load('small', 'float32'); "
    "kvjax.testing.check_model(lm.model, lm.params); print(lm.model)",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("Small()\n")


def test_a_model_plugs_in(capsys):
  (_, code), (_, check) = blocks(section("Plug in a model"))
  names = {}
  exec(code, names)
  exec(check, names)
  assert isinstance(names["model"], kvjax.Model)
  assert [len(row) for row in names["answers"].rows()] == [5, 5]
  assert capsys.readouterr().out.startswith("[[")
  # The local layer keeps its window, the other one a quarter.
  assert names["cache"].lengths[:, :, 0].tolist() == [[8, 8], [10, 5]]

  class Misfit(names["Small"]):
    @property
    def geometry(self):
      layers = super().geometry.layers
      return kvjax.Geometry((*layers, layers[0]), max_positions=512)

  arguments = (names["params"], names["context"], names["plan"])
  with pytest.raises(
    kvjax.InputError, match=r"must hold the 3 layers.* 2 layers"
  ):
    kvjax.prefill(Misfit(), *arguments)

  class Wider(names["Small"]):
    @property
    def geometry(self):
      spec = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=16)
      return kvjax.Geometry((spec, spec), max_positions=512)

  with pytest.raises(kvjax.InputError, match=r"\(4, 2, 8, 8\), and its spec"):
    kvjax.prefill(Wider(), *arguments)
