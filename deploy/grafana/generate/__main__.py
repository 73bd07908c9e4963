"""Write the dashboards: `python -m deploy.grafana.generate`; Grafana reads what is in deploy/grafana/dashboards."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.expressions import DASHBOARDS
from deploy.grafana.generate.boards import boards


def rendered() -> dict[str, str]:
    """File name -> JSON."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    built = [board.build() for board in boards()]
    return {f"{board.uid}.json": encoder.encode(board) + "\n" for board in built}


def main() -> None:
    for name, text in rendered().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")
        print(DASHBOARDS / name)


if __name__ == "__main__":
    main()
