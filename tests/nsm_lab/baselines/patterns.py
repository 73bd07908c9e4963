"""Small models whose layers are baselines, by name."""

from __future__ import annotations

PATTERNS: dict[str, dict[str, object]] = {
    "baselines without attention": {"layer_pattern": "lrm"},
    "state spaces": {"layer_pattern": "ds", "num_layers": 2},
    "delta rule": {"layer_pattern": "gr", "num_layers": 2, "slot_width": 24},
    "baselines like attention": {"layer_pattern": "fp", "num_layers": 2},
}
