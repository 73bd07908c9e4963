"""Which meters a machine has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nsm_core.energy.estimate import CORE_WATTS, EstimateMeter
from nsm_core.energy.meter import CombinedMeter, EnergyMeter
from nsm_core.energy.nvml import NvmlMeter
from nsm_core.energy.rapl import RaplMeter
from nsm_core.errors import ConfigError

logger = logging.getLogger("nsm.energy")


def make_meter(*, gpu_uuids: Sequence[str] = (), core_watts: float = CORE_WATTS, num_engines: int = 1) -> EnergyMeter:
    """The GPUs that are named, and the CPUs: measured where the machine tells, else estimated.

    `num_engines`: that share the CPUs and make such a meter each. A counter is of the whole machine, so each gets its
    part.

    A GPU that does not tell is left out, with a warning: its share would be most of the energy.
    """
    meters: list[EnergyMeter] = []
    if gpu_uuids:
        try:
            meters.append(NvmlMeter(gpu_uuids))
        except ConfigError as error:
            logger.warning("the energy of the GPU is not counted: %s", error)
    try:
        meters.append(RaplMeter(share=1 / num_engines))
    except ConfigError as error:
        logger.debug("the energy of the CPU is estimated: %s", error)
        meters.append(EstimateMeter(core_watts))
    return CombinedMeter(meters)
