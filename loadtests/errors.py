"""What ends a load test without a result."""

from __future__ import annotations

EXIT_MISSED = 1
EXIT_NO_RESULT = 2


class RunError(Exception):
    """A run that cannot begin or go on. The message is one line that names the option, the file or the server."""
