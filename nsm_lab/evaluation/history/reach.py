"""How far back a model sees without a recurrent state."""

from __future__ import annotations

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import LayerPlan, parse_layer_pattern


def attention_reach(config: ModelConfig) -> int:
    """Tokens before the current one that its attention layers reach together: the sum of their windows.

    What a token gets from farther back came through a recurrent state. Short convolutions add a few tokens for each
    layer that has one, and are left out.
    """
    plans = parse_layer_pattern(config.layer_pattern)
    return sum(_layer_reach(config, plans[layer % len(plans)]) for layer in range(config.num_layers))


def _layer_reach(config: ModelConfig, plan: LayerPlan) -> int:
    windows = {"W": config.window, "A": config.max_context, "f": config.max_context}  # f: Linformer
    reaches = [windows.get(kind, 0) for kind in plan.kinds]
    return max(reaches) if plan.in_parallel else sum(reaches)
