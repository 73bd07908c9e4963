"""Which energy is a model's: that of the GPU it is on, and of the CPUs."""

from __future__ import annotations

import torch
from torch import nn

from nsm_core.energy.estimate import CORE_WATTS
from nsm_core.energy.factory import make_meter
from nsm_core.energy.meter import EnergyMeter


def meter_of(model: nn.Module, *, core_watts: float = CORE_WATTS) -> EnergyMeter:
    """`core_watts`: of one busy core, for an estimate where nothing is measured."""
    device = next(model.parameters()).device
    uuids = [str(torch.cuda.get_device_properties(device).uuid)] if device.type == "cuda" else []
    return make_meter(gpu_uuids=uuids, core_watts=core_watts)
