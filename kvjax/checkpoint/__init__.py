"""Saving and loading of caches."""
