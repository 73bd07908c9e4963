"""Kills a server in the middle of a stream and reads the rest at another one: `python -m examples.failover`.

Two replicas of `nsm serve` share one store in a temporary folder. The text from the second replica is coloured. At the
end the whole text is compared with a turn that nothing interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx  # of the packages that serve

PROMPT = "The old house stood at the end of the lane."
BODY = {"input": PROMPT, "temperature": 0.8, "seed": 4, "stream": True, "ignore_eos": True}
LOST = (httpx.RemoteProtocolError, httpx.ReadError)
DIM, GREEN, RED, PLAIN = "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[0m"


class Replica:
    """A process of `nsm serve` and a client of it."""

    def __init__(self, name: str, data_dir: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NSM_")}
        environment |= {"NSM_DATA_DIR": str(data_dir), "NSM_PORT": "0", "NSM_NUM_THREADS": "1"}
        command = [str(Path(sys.executable).with_name("nsm")), "serve"]
        self.name = name
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=self._url(), timeout=60.0, trust_env=False)

    def _url(self) -> str:
        """From the line that the server logs when it is ready."""
        for line in self.process.stderr or ():
            if "serving" in line:
                return line.partition(" on ")[2].split()[0]
        raise RuntimeError(f"replica {self.name} did not start")

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def frames_of(response: httpx.Response) -> Iterator[tuple[int, str, str]]:
    """(number, id of the stream, text) of each event with text."""
    number = 0
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: {"):
            frame = json.loads(line[6:])
            yield number, frame["id"], frame["choices"][0]["text"] if frame["choices"] else ""


def say(text: str) -> None:
    print(text, end="", flush=True)


def read_and_kill(replica: Replica, session: str, num_tokens: int, kill_after: int) -> tuple[str, int, str]:
    """The text that arrived, the number of its last frame, and the stream's id."""
    text, number, stream_id = "", 0, ""
    body = {**BODY, "max_tokens": num_tokens}
    with (
        contextlib.suppress(*LOST),
        replica.client.stream("POST", f"/v1/sessions/{session}/generate", json=body) as response,
    ):
        for frame_number, frame_stream, piece in frames_of(response):
            text, number, stream_id = text + piece, frame_number, frame_stream
            say(piece)
            if number >= kill_after and replica.process.poll() is None:
                replica.process.send_signal(signal.SIGKILL)
    return text, number, stream_id


def read_rest(replica: Replica, stream_id: str, last: int) -> str:
    text = ""
    with replica.client.stream("GET", f"/v1/streams/{stream_id}", params={"starting_after": last}) as response:
        response.raise_for_status()
        for _, _, piece in frames_of(response):
            text += piece
            say(piece)
    return text


def undisturbed(replica: Replica, num_tokens: int) -> str:
    """The same turn in a session of its own."""
    replica.client.post("/v1/sessions", json={"id": "unbroken"}).raise_for_status()
    body = {**BODY, "max_tokens": num_tokens, "stream": False}
    answer = replica.client.post("/v1/sessions/unbroken/generate", json=body).raise_for_status().json()
    return str(answer["choices"][0]["text"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.failover", description=__doc__)
    parser.add_argument("--tokens", type=int, default=160, help="length of the answer")
    parser.add_argument("--kill-after", type=int, default=60, help="tokens that arrive before the kill")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        first, second = (Replica(name, Path(folder)) for name in "AB")
        for replica in (first, second):
            stack.callback(replica.close)
        return run(first, second, options.tokens, options.kill_after)


def run(first: Replica, second: Replica, num_tokens: int, kill_after: int) -> int:
    for replica in (first, second):
        say(f"{DIM}replica {replica.name}: pid {replica.process.pid}, {replica.client.base_url}{PLAIN}\n")
    first.client.post("/v1/sessions", json={"id": "novel"}).raise_for_status()
    say(f"\n{PROMPT}")
    text, last, stream_id = read_and_kill(first, "novel", num_tokens, kill_after)
    pid, lost_at = first.process.pid, time.monotonic()
    say(f"\n{RED}$ kill -9 {pid}  # A is gone; {last} tokens had arrived{PLAIN}\n{GREEN}")
    text += read_rest(second, stream_id, last)
    took = time.monotonic() - lost_at
    say(f"{PLAIN}\n{DIM}B gave the rest, {took:.2f} s after the kill{PLAIN}\n")
    head = second.client.get("/v1/sessions/novel").json()
    is_same = text == undisturbed(second, num_tokens)
    verdict = "the same text" if is_same else "another text"
    say(f"session: version {head['version']}, position {head['position']}. A turn without a kill gives {verdict}.\n")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
