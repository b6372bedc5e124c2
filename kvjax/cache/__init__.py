"""The KV cache: a plain pytree of layers, contiguous, packed or sparse."""
