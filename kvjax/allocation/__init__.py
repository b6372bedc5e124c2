"""Allocations: how many tokens each layer and head keeps."""

from kvjax.allocation.adaptive import Adaptive as Adaptive
from kvjax.allocation.base import Allocation as Allocation
from kvjax.allocation.base import LayerBudget as LayerBudget
from kvjax.allocation.base import Sizes as Sizes
from kvjax.allocation.base import Uniform as Uniform
from kvjax.allocation.floored import Floored as Floored
from kvjax.allocation.lag_law import LagLaw as LagLaw
from kvjax.allocation.middle import Middle as Middle
from kvjax.allocation.per_chunk import PerChunk as PerChunk
from kvjax.allocation.pyramid import Pyramid as Pyramid
from kvjax.allocation.rounded_pyramid import RoundedPyramid as RoundedPyramid
from kvjax.allocation.streaming_heads import StreamingHeads as StreamingHeads
from kvjax.allocation.whole_chunks import WholeChunkCounts as WholeChunkCounts
from kvjax.allocation.whole_layer import WholeLayer as WholeLayer
from kvjax.allocation.whole_model import WholeModel as WholeModel
