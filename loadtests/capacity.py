"""How many requests a second the servers can do, before anything is offered in multiples of that."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from loadtests.arrivals import TRACES, plan_arrivals, read_trace
from loadtests.plain_http import call
from loadtests.run_profile import OpenLoop, Profile
from loadtests.scripts import GREEDY, Scripts
from loadtests.steps import EXTRACTS

NUM_ROUNDS = 4  # requests for each slot


def measure_capacity(urls: Sequence[str], profile: Profile, loop: OpenLoop, scripts: Scripts) -> float:
    """Requests a second with every slot busy and nobody waiting; their lengths are those of the trace."""
    slots = profile.service.max_slots * len(urls)
    rows = read_trace(loop.trace_file or TRACES / EXTRACTS[loop.trace])
    count = NUM_ROUNDS * slots
    plan = plan_arrivals(rows, [("", count, 1.0)], length_scale=loop.length_scale, max_output=profile.texts.max_tokens)
    bodies = [
        {
            **GREEDY,
            "prompt": scripts.nearest(arrival.prompt_tokens)[0].inputs[0],
            "max_tokens": arrival.output_tokens,
            "cache_prompt": False,
        }
        for arrival in plan
    ]
    started_at = time.monotonic()
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(lambda body, url: call(url, "POST", "/v1/completions", body), bodies, itertools.cycle(urls)))
    return len(bodies) / (time.monotonic() - started_at)
