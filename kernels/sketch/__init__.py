"""Sketches of keys (keys times a narrow factor), and leverage scores."""

from kvjax.kernels.sketch.api import leverage_rows as leverage_rows
from kvjax.kernels.sketch.api import sketch as sketch
from kvjax.kernels.sketch.sketched import Sketch as Sketch
