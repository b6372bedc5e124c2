"""Published models without their weights, which take up to 54 GB."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from kvjax.errors import InputError
from kvjax.files import read_json
from kvjax.models import other_families
from kvjax.models.config import DecoderConfig
from kvjax.models.features import text_fields
from kvjax.models.language_model import DecoderModel, as_shapes
from kvjax.models.sharding import param_shardings
from kvjax.registry.parsing import suggest

# The sizes of published models, as fields of their config.json; see its page at
# https://huggingface.co. Fields that no size depends on are left out.
_FOLDER = pathlib.Path(__file__).parent / "configs"
SHIPPED = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
  """A model.

  Attributes:
    name: its name.
    fields: fields of its config.json.
  """

  name: str
  fields: Mapping[str, Any]

  @classmethod
  def shipped(cls, name: str) -> "Published":
    """Returns a model whose sizes come with kvjax, one of `SHIPPED`."""
    return cls(name, read_json(_FOLDER / f"{name}.json"))

  @classmethod
  def find(cls, text: str) -> "Published":
    """Finds a model by the name of a shipped one or by its config.json.

    Args:
      text: a name in upper or lower case, or the path of a config.json or of
        its folder.

    Raises:
      InputError: it is neither, or no decoder is made from the fields.
    """
    path = pathlib.Path(text)
    if text.lower() in SHIPPED and not path.exists():
      return cls.shipped(text.lower())
    if not path.exists():
      raise InputError(
        f"There is no model {text!r}{suggest(text.lower(), SHIPPED)}; --model "
        f"is the path of a config.json, or one of {', '.join(SHIPPED)}."
      )
    path = path / "config.json" if path.is_dir() else path
    fields = text_fields(read_json(path))
    if other_families.find(fields.get("model_type")) is not None:
      raise InputError(f"{path} {other_families.NO_DECODER}.")
    DecoderConfig.from_hf(fields)
    return cls(path.resolve().parent.name, fields)

  def config(self, layers: int) -> DecoderConfig:
    """Returns the configuration of the first layers."""
    fields = dict(self.fields)
    # Fields with a value for each layer.
    for name, value in self.fields.items():
      if isinstance(value, list) and len(value) == self.layers:
        fields[name] = value[:layers]
    return DecoderConfig.from_hf({**fields, "num_hidden_layers": layers})

  @property
  def layers(self) -> int:
    """Number of its layers."""
    layers: int = self.fields["num_hidden_layers"]
    return layers

  @property
  def kv_heads(self) -> int:
    """KV heads of a layer."""
    return self.config(self.layers).num_kv_heads

  def shapes(self, mesh: Mesh, layers: int) -> tuple[DecoderModel, nnx.State]:
    """Returns the model's functions, and its bfloat16 weights as shapes.

    Args:
      mesh: a mesh with an axis "model".
      layers: number of layers, the first ones.
    """
    config = self.config(layers)
    model, params = as_shapes(config, jnp.bfloat16)
    places = param_shardings(params, model.geometry, mesh)
    return model, jax.tree.map(
      lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      params,
      places,
    )


LLAMA = dataclasses.replace(
  Published.shipped("llama-3.1-8b"), name="Llama-3.1-8B"
)
GEMMA = dataclasses.replace(
  Published.shipped("gemma-3-27b"), name="Gemma 3 27B"
)
GPT_OSS = Published.shipped("gpt-oss-20b")
