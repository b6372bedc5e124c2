"""Caches on disk."""
