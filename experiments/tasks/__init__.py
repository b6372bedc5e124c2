"""RULER's tasks and the passkey, made offline from explicit seeds."""
