"""Conversations about one context."""
