"""Reads what compiled programs do: traffic, collectives, overlap, memory."""
