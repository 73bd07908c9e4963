"""`nsm top`: live figures of a server, from its /metrics."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from nsm_core.errors import NsmError
from service.cli.output import console
from service.cli.scrape import Interval, Scrape, scrape
from service.cli.top_view import render

WINDOW_S = 30.0  # quantiles of fewer seconds jump about


def top(
    url: Annotated[str | None, typer.Option(help="The server.", show_default="that of NSM_HOST and NSM_PORT")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, of the first interval; then exit.")] = False,
    key_file: Annotated[
        Path | None, typer.Option(help="File with an API key that may read metrics, where the server has keys.")
    ] = None,
) -> None:
    """Watch a server's sessions, batch, latency and energy until Ctrl-C; the numbers are those of Prometheus."""
    from service.settings import load_settings

    settings = load_settings()  # refuses misspelt variables
    url = url or f"http://{settings.host}:{settings.port}"
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must begin with http:// or https://, got {url!r}", param_hint="'--url'")
    key = None if key_file is None else key_file.read_text("utf-8").strip()
    watch = Watch(url, key)
    if once:
        time.sleep(interval)
        console().print(render(watch.sample(), url))
    else:
        _follow(watch, url, interval)


class Watch:
    """The answers of one server within the last WINDOW_S."""

    def __init__(self, url: str, key: str | None) -> None:
        """Asks once. Raises NsmError when the server does not answer."""
        self._url, self._key = url, key
        self._scrapes: deque[Scrape] = deque([scrape(url, key)])

    def first(self) -> Interval:
        """An interval of no length: current values, no rates."""
        return Interval(self._scrapes[0], self._scrapes[0])

    def sample(self) -> Interval:
        """Ask again: from the oldest answer within the window to this one. Raises NsmError."""
        now = scrape(self._url, self._key)
        while len(self._scrapes) > 1 and now.at - self._scrapes[0].at > WINDOW_S:
            self._scrapes.popleft()
        self._scrapes.append(now)
        return Interval(self._scrapes[0], now)


def _follow(watch: Watch, url: str, interval: float) -> None:
    """A screen that changes; where no terminal shows it, one frame after the other."""
    from rich.live import Live

    screen = console()
    try:
        if not sys.stdout.isatty():
            while True:
                time.sleep(interval)
                screen.print(render(watch.sample(), url))
        latest = watch.first()
        with Live(render(latest, url), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    latest, trouble = watch.sample(), ""
                except NsmError as error:  # it may come back: a restart, or a proxy's
                    trouble = str(error)
                live.update(render(latest, url, trouble), refresh=True)
    except KeyboardInterrupt:
        pass  # how one leaves
