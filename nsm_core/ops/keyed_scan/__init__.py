"""Slots that are written by key: each write first removes their value for the key (benchmarks/notes/layers.md)."""
