"""Retrieval methods, one file each: keep everything, read a little."""

from kvjax.retrieval.base import Found as Found
from kvjax.retrieval.base import Prompt as Prompt
from kvjax.retrieval.base import Reads as Reads
from kvjax.retrieval.base import Retrieval as Retrieval
from kvjax.retrieval.base import Store as Store
from kvjax.retrieval.ctkvr import CTkvr as CTkvr
from kvjax.retrieval.flat import Flat as Flat
from kvjax.retrieval.registry import RETRIEVAL_PRESETS as RETRIEVAL_PRESETS
from kvjax.retrieval.registry import RETRIEVALS as RETRIEVALS
from kvjax.retrieval.registry import get_retrieval as get_retrieval
