"""The engine: prefill, sweep, block prefill, decoding."""
