"""Llama-like decoders in Flax nnx, with weights and tokenizers."""

from kvjax.models.chat import Chat as Chat
from kvjax.models.other_families import register as register
from kvjax.models.pretrained import Pretrained as Pretrained
from kvjax.models.pretrained import load as load
from kvjax.models.saving import save as save
from kvjax.models.tokenizer import Tokenizer as Tokenizer
