"""Models of other JAX libraries, as models of kvjax."""

import dataclasses
from collections.abc import Callable
from typing import Any

from kvjax.models.adapters.bonsai import from_bonsai as from_bonsai
from kvjax.models.adapters.gemma import from_gemma as from_gemma
from kvjax.models.adapters.keras_hub import from_keras_hub as from_keras_hub
from kvjax.models.adapters.maxtext import from_maxtext as from_maxtext
from kvjax.models.adapters.maxtext_names import MODULES


@dataclasses.dataclass(frozen=True)
class Adapter:
  """Reads the models of a library.

  Attributes:
    function: makes a model of kvjax.
    families: model types that it reads, of `kvjax.models.families.FAMILIES`.
  """

  function: Callable[..., Any]
  families: tuple[str, ...]


ADAPTERS = {
  "bonsai": Adapter(from_bonsai, ("qwen3",)),
  "gemma": Adapter(from_gemma, ("gemma3_text",)),
  "Keras Hub": Adapter(from_keras_hub, ("llama",)),
  "MaxText": Adapter(from_maxtext, tuple(MODULES)),
}
