"""The name and version under which this software is installed."""

from __future__ import annotations

import functools
import importlib.metadata

DISTRIBUTION = "nsm-serve"
UNKNOWN_VERSION = "unknown"


@functools.cache
def version_of(package: str = DISTRIBUTION) -> str:
    """The installed version; `unknown` without metadata, as for a source tree on PYTHONPATH. A server runs without."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN_VERSION
