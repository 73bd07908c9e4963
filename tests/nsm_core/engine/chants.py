"""A text that repeats itself, and stop strings that begin, end and almost end in it at every kind of place."""

from __future__ import annotations

CHANT = "the best of times, the worst of times, €é the best of times, the worst of times, €é "

STOPS = [
    ("worst",),
    ("best of Times", "of time"),
    ("never said",),
    ("times, the best",),
    ("the worst of times, €é the best of times, t",),
    ("€x", "é t"),
    (", €é the best of times, the worst of times, never", "the worst of times, €é the best of times, the worse"),
]
