"""The interface of what drops channels of the kept keys."""

import abc

from jaxtyping import Array, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache


class Channels(abc.ABC):
  """Says which channels of the kept keys a cache stores; a hashable value."""

  @abc.abstractmethod
  def choose(
    self, cache: LayerCache, activations: Activations
  ) -> Int[Array, "B K C"]:
    """Chooses the C channels of each head to store, ascending.

    Args:
      cache: the kept tokens.
      activations: activations of the prompt.
    """
