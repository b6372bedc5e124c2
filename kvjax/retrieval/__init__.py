"""Retrieval methods, one file each: they keep all keys and read a few."""

from kvjax.retrieval.base import Candidates as Candidates
from kvjax.retrieval.base import Entry as Entry
from kvjax.retrieval.base import KeyBudget as KeyBudget
from kvjax.retrieval.base import Prompt as Prompt
from kvjax.retrieval.base import Ranking as Ranking
from kvjax.retrieval.base import Retrieval as Retrieval
from kvjax.retrieval.base import Selection as Selection
from kvjax.retrieval.base import Store as Store
from kvjax.retrieval.clusterkv import ClusterKV as ClusterKV
from kvjax.retrieval.ctkvr import CTkvr as CTkvr
from kvjax.retrieval.flat import Flat as Flat
from kvjax.retrieval.magicpig import MagicPIG as MagicPIG
from kvjax.retrieval.quest import Quest as Quest
from kvjax.retrieval.shadowkv import ShadowKV as ShadowKV
from kvjax.retrieval.squeezed import SqueezedAttention as SqueezedAttention
from kvjax.retrieval.weights import best_slots as best_slots
