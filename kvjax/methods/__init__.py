"""Eviction methods, one file each."""

from kvjax.heads import Head as Head
from kvjax.methods.around import Around as Around
from kvjax.methods.base import LayerBudget as LayerBudget
from kvjax.methods.base import Method as Method
from kvjax.methods.base import ScoringMethod as ScoringMethod
from kvjax.methods.chunk_attention import ChunkAttention as ChunkAttention
from kvjax.methods.chunked import Chunked as Chunked
from kvjax.methods.chunkkv import ChunkKV as ChunkKV
from kvjax.methods.compactor import Compactor as Compactor
from kvjax.methods.critical import Critical as Critical
from kvjax.methods.cur import Cur as Cur
from kvjax.methods.dropkv import DropKV as DropKV
from kvjax.methods.expected_attention import (
  ExpectedAttention as ExpectedAttention,
)
from kvjax.methods.fast_kvzip import FastKVzip as FastKVzip
from kvjax.methods.finch import Finch as Finch
from kvjax.methods.full import FullKV as FullKV
from kvjax.methods.h2o import H2O as H2O
from kvjax.methods.headwise import HeadwiseMethod as HeadwiseMethod
from kvjax.methods.key_norm import KeyL2Norm as KeyL2Norm
from kvjax.methods.keydiff import KeyDiff as KeyDiff
from kvjax.methods.kvzap import KVzap as KVzap
from kvjax.methods.kvzip import KVzip as KVzip
from kvjax.methods.lagkv import LagKV as LagKV
from kvjax.methods.last_queries import window_mass as window_mass
from kvjax.methods.last_queries import window_queries as window_queries
from kvjax.methods.last_queries import window_weights as window_weights
from kvjax.methods.leverage_scores import LeverageScores as LeverageScores
from kvjax.methods.protokv import ProtoKV as ProtoKV
from kvjax.methods.q_filters import QFilters as QFilters
from kvjax.methods.random import Random as Random
from kvjax.methods.rerotated import Rerotated as Rerotated
from kvjax.methods.rkv import RKV as RKV
from kvjax.methods.simlayer import SimLayer as SimLayer
from kvjax.methods.snapkv import SnapKV as SnapKV
from kvjax.methods.snapkv import pool as pool
from kvjax.methods.snapkv import value_norms as value_norms
from kvjax.methods.streaming import StreamingLLM as StreamingLLM
from kvjax.methods.think import Think as Think
from kvjax.methods.tova import Tova as Tova
from kvjax.methods.traits import Traits as Traits
from kvjax.methods.triattention import TriAttention as TriAttention
from kvjax.methods.whole_chunks import WholeChunks as WholeChunks
