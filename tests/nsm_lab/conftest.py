"""Models of these tests may have baseline layers."""

from __future__ import annotations

from nsm_lab.baselines.register import register_baselines

register_baselines()
