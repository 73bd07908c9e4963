"""Asks a server the requests of its arguments, in a process of its own (gevent); prints samples and answers as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from loadtests.asking import Reader, ask, begin
from loadtests.client import Client

TIMEOUT_S = 30.0


def main(url: str, requests: str) -> None:
    """`requests`: a list of {"path", "late_s"?, "reader"?}."""
    client = Client(url, timeout_s=TIMEOUT_S)
    results = []
    for request in json.loads(requests):
        sample = begin("x", intended_at=time.monotonic() - request.get("late_s", 0.0))
        answer = ask(client, request["path"], {}, sample, reader=Reader(**request.get("reader", {})))
        results.append({"sample": dataclasses.asdict(sample), "text": answer.text, "ids": answer.event_ids})
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
