"""How a supervisor tells a worker that its server is about to stop.

Triton tells it too late: it calls `finalize` only when every stream has ended, and those that have not when its exit
time-out passes are cut off.
"""

from __future__ import annotations

import os
import signal

STOP_SIGNAL = signal.SIGUSR1


class StopSignal:
    """Catches STOP_SIGNAL from now on. To be made on the main thread, asked on any.

    That thread sits in Triton's code and would not run a handler of Python's; what Python's own handler writes into a
    pipe is there at once.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.signal(STOP_SIGNAL, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def has_come(self) -> bool:
        """Whether it came since the last time this was asked."""
        try:
            return STOP_SIGNAL in os.read(self._read, 64)
        except BlockingIOError:
            return False
