"""Needle tasks in RULER's form, made offline from explicit seeds."""
