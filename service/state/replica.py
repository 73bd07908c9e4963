"""The name of this server in the heads of the sessions whose turns it took: their states may be in its memory."""

from __future__ import annotations

import socket

from nsm_core.hashing import identity_of

NAME_BYTES = 4  # clients see it, and learn nothing of the machine


def replica_name(port: int) -> str:
    """8 hexadecimal digits for the server on this port of this machine: the same after a restart."""
    return identity_of(socket.gethostname(), str(port), num_bytes=NAME_BYTES)
