from __future__ import annotations

import importlib.metadata

from nsm_core.distribution import DISTRIBUTION, version_of


def test_version_is_that_of_the_installed_package() -> None:
    assert version_of() == importlib.metadata.version(DISTRIBUTION)


def test_version_without_metadata_is_unknown() -> None:
    assert version_of("no-such-package") == "unknown"
