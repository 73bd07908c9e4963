"""Two acts at once, of which the first fails while the second waits; in a process of its own (gevent)."""

from __future__ import annotations

from gevent.event import Event

from loadtests.conversations import Refused
from loadtests.together import all_results


def main() -> None:
    has_failed = Event()

    def refuse() -> None:
        has_failed.set()
        raise Refused("the run is over")

    def answer() -> None:
        has_failed.wait()
        for _ in range(3):
            Event().wait(0.01)
        print("answered")  # noqa: T201

    try:
        all_results([refuse, answer])
    except Refused as refusal:
        print(type(refusal).__name__)  # noqa: T201


if __name__ == "__main__":
    main()
