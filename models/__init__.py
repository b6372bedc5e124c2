"""Decoders of the Llama kind in Flax nnx, with weights and tokenizers."""

from models.pretrained import Pretrained as Pretrained
from models.pretrained import load as load
from models.pretrained import save as save
from models.tokenizer import Tokenizer as Tokenizer
