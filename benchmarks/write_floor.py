"""What a write of a token costs without a gateway: `python -m benchmarks.write_floor`. A line of JSON.

A loop that sleeps for a step and then writes one prepared event to each of some TCP sockets, which another process
reads; and the same loop without the writes. CPU microseconds of the writing process a token: no gateway that writes
each token by itself needs less on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import time
from collections.abc import Sequence

from nsm_lab.provenance import command_line, source_commit

EVENT = b"data: " + b"x" * 250 + b"\n\n"


def read_all(port: int, number: int) -> None:
    """So many connections, to their ends."""
    selector = selectors.DefaultSelector()
    for _ in range(number):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if isinstance(key.fileobj, socket.socket) and not key.fileobj.recv(65_536):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def cpu_us(writers: Sequence[socket.socket], num_tokens: int, num_streams: int, step_s: float) -> float:
    """Of each token; `writers`: none to count the loop alone."""
    started = time.process_time()
    for _ in range(num_tokens):
        time.sleep(step_s)
        for writer in writers:
            writer.send(EVENT)
    return (time.process_time() - started) * 1e6 / (num_tokens * num_streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sizes = (args.tokens, args.streams, args.step_ms / 1e3)
    with socket.create_server(("127.0.0.1", 0), backlog=args.streams) as server, contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        reader = context.Process(target=read_all, args=(server.getsockname()[1], args.streams))
        reader.start()
        writers = [stack.enter_context(server.accept()[0]) for _ in range(args.streams)]
        for writer in writers:
            writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = {
            name: sorted(round(cpu_us(used, *sizes), 2) for _ in range(args.repeats))
            for name, used in (("loop_us", []), ("write_us", writers))
        }
    reader.join()
    about = {"command": command_line(), "commit": source_commit(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **found}))


if __name__ == "__main__":
    main()
