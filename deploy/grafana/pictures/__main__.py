"""The dashboards as pictures, without Grafana: `python -m deploy.grafana.pictures --minutes 5 --into docs/images`.

Asks a running Prometheus for what the panels would ask it, over the last minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import httpx

from deploy.grafana.expressions import boards
from deploy.grafana.pictures.drawing import Period, draw_board


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back")
    parser.add_argument("--ago", type=float, default=0.0, help="minutes before now at which the pictures end")
    parser.add_argument("--window", default="20s", help="for rates: at least four scrapes")
    parser.add_argument("--into", type=Path, default=Path("docs/images"), help="a folder")
    args = parser.parse_args()
    end = time.time() - args.ago * 60
    try:
        draw(args.prometheus, (end - args.minutes * 60, end), args.window, args.into)
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
        sys.stderr.write(f"no pictures: {args.prometheus}: {error}\n")
        return 2
    return 0


def draw(prometheus: str, span: tuple[float, float], window: str, into: Path) -> None:
    """`span`: from, to, in Unix seconds. Raises what httpx raises, and RuntimeError with Prometheus's own words."""
    with httpx.Client(base_url=prometheus, timeout=60.0, trust_env=False) as client:
        period = Period(client, *span, window)
        into.mkdir(parents=True, exist_ok=True)
        for board in boards():
            path = into / f"{board['uid']}.png"
            draw_board(board, period, path)
            print(path)


if __name__ == "__main__":
    sys.exit(main())
