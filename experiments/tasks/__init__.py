"""RULER's tasks and the passkey, generated offline from explicit seeds."""
