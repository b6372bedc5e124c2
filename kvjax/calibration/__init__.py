"""The retention that a context can bear."""
