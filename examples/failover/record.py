"""Records `python -m examples.failover` in a terminal, as an animated SVG: `python -m examples.failover.record FILE`.

The clock starts with the first output. Nothing is edited; `--slower` stretches the time between outputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import html
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

COLUMNS, FONT_PX, CHARACTER_PX, LINE_PX, MARGIN_PX = 96, 14, 8.43, 20, 16
SHORTEST_S = 0.01
HOLD_S = 5.0  # at the end, before the recording starts again
CONTROL = re.compile(r"\x1b\[(\d*)m|\r|\n")
COLOURS = {"": "#d0d7de", "0": "#d0d7de", "2": "#8b949e", "31": "#ff7b72", "32": "#7ee787"}
PROMPT = "$ python -m examples.failover\r\n"
COMMAND = [sys.executable, "-m", "examples.failover"]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A piece of text in one colour and one line of the screen. `at_s`: seconds from the start of the recording."""

    at_s: float
    row: int
    column: int
    colour: str
    text: str


def record(command: Sequence[str]) -> Iterator[tuple[float, str]]:
    """(seconds since the first output, text) of a program in a pseudo terminal. Raises RuntimeError if it fails."""
    terminal, other_side = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(command, stdin=other_side, stdout=other_side, stderr=other_side)
    os.close(other_side)
    began = None
    while True:
        try:
            raw = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of the other side as an error
            break
        began = began or time.monotonic()
        yield time.monotonic() - began, raw.decode()
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")


def screen(pieces: Iterator[tuple[float, str]]) -> Iterator[Output]:
    """Breaks the text at the width of the terminal, as a terminal does."""
    row, column, colour = 0, 0, COLOURS[""]
    for at_s, text in pieces:
        start = 0
        for control in [*CONTROL.finditer(text), None]:
            plain = text[start : control.start() if control else len(text)]
            while plain:
                if column == COLUMNS:
                    row, column = row + 1, 0
                part, plain = plain[: COLUMNS - column], plain[COLUMNS - column :]
                yield Output(at_s, row, column, colour, part)
                column += len(part)
            if control is None:
                break
            start = control.end()
            if control[0] == "\n":
                row += 1
            elif control[0] == "\r":
                column = 0
            else:
                colour = COLOURS[control[1]]


def svg(outputs: Sequence[Output], title: str) -> str:
    """Every output is hidden until its time in each round; where nothing moves, all of it is visible."""
    width = 2 * MARGIN_PX + round(COLUMNS * CHARACTER_PX)
    height = 2 * MARGIN_PX + (outputs[-1].row + 2) * LINE_PX
    total_s = outputs[-1].at_s + HOLD_S
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117">',
        f'<animate id="t" attributeName="rx" values="8;8" dur="{total_s:.2f}s" begin="0s;t.end"/></rect>',
        f'<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="{FONT_PX}" xml:space="preserve">',
    ]
    lines += [_element(output) for output in outputs if output.text.strip()]
    return "\n".join([*lines, "</g>", "</svg>"]) + "\n"


def _element(output: Output) -> str:
    """Blanks at the start move the text, because browsers drop them."""
    blanks = len(output.text) - len(output.text.lstrip())
    text = output.text.strip()
    x = MARGIN_PX + (output.column + blanks) * CHARACTER_PX
    y = MARGIN_PX + (output.row + 1) * LINE_PX
    hidden = f'<set attributeName="visibility" to="hidden" begin="t.begin" dur="{output.at_s:.3f}s"/>'
    size = f'textLength="{len(text) * CHARACTER_PX:.1f}" lengthAdjust="spacingAndGlyphs"'
    moves = hidden if output.at_s >= SHORTEST_S else ""
    return f'<text x="{x:.1f}" y="{y}" fill="{output.colour}" {size}>{html.escape(text)}{moves}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.failover.record", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--slower", type=float, default=4.0, help="times as slow as it was")
    options = parser.parse_args()
    pieces = ((at_s * options.slower, text) for at_s, text in record(COMMAND))
    outputs = list(screen(itertools.chain([(0.0, PROMPT)], pieces)))
    title = f"Terminal recording of python -m examples.failover, {options.slower:g} times as slow as it was"
    options.file.write_text(svg(outputs, title), "utf-8")


if __name__ == "__main__":
    main()
