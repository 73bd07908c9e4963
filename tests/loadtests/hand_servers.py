"""Targets that a load test must not take for a good one: each answers every request in one way."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar


class _Hand(http.server.BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    body: ClassVar[bytes] = b"{}"
    announced: ClassVar[int] = 2

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(self.status)
        self.send_header("content-length", str(self.announced))
        self.end_headers()
        self.wfile.write(self.body)
        self.close_connection = True

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def answering(status: int, body: bytes, *, announced: int | None = None) -> Iterator[str]:
    """Its URL. `announced`: the Content-Length, if it is not that of the body."""
    fields = {"status": status, "body": body, "announced": len(body) if announced is None else announced}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Hand", (_Hand,), fields))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
