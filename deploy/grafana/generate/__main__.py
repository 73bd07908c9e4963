"""Write the dashboards: `python -m deploy.grafana.generate`; Grafana reads what is in deploy/grafana/dashboards."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.expressions import DASHBOARDS
from deploy.grafana.generate import energy, load_test, model, overview, sessions

MODULES = (overview, sessions, model, energy, load_test)


def rendered() -> dict[str, str]:
    """File name -> JSON."""
    boards = [module.build().build() for module in MODULES]
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{board.uid}.json": encoder.encode(board) + "\n" for board in boards}


def main() -> None:
    for name, text in rendered().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")
        print(DASHBOARDS / name)


if __name__ == "__main__":
    main()
