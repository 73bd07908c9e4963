"""The model whose figures stand in results/ and on the pages, where they name no other.

It was the default of `nsm serve` until `pulse-books-keyed` took its place. The commands of the pages measure it, so
that they print the figures of the pages.
"""

from __future__ import annotations

from nsm_core.model.bundled import CHECKPOINTS

MEASURED_MODEL = CHECKPOINTS / "pulse-books"
