"""First tokens of many equal prompts at once, by the order of reading: `python -m benchmarks.prompt_order`.

A simulation with the engine's own scheduler, and costs of a step in milliseconds that `--step`, `--token` and `--row`
give (those of an EPYC with AVX2 alone, int4, one thread). "round robin": every step reads the same number of tokens of
each prompt. "fewest unread": the order as it is. "decode every n": rows decode in each n-th of the steps that read
prompts. A table of first tokens, gaps between two tokens and the whole time, then one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.about import about_this_run
from benchmarks.http_gpu import quantile
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler

EVERY = (1, 2, 4)


@dataclasses.dataclass(slots=True)
class Request:
    """What has become of a request, in tokens and ms."""

    unread: int
    tokens_left: int
    num_read: int = 0
    tokens_at: list[float] = dataclasses.field(default_factory=list)


def share_equally(plan: Plan, slots: dict[int, Request], budget: int) -> Plan:
    """The plan with the tokens that it reads shared out evenly, the first prompts one more."""
    reading = sorted(slot for slot, request in slots.items() if request.unread)
    each, more = divmod(budget - len(plan.decode), len(reading))
    lengths = [min(slots[slot].unread, each + (index < more)) for index, slot in enumerate(reading)]
    chunks = (
        Chunk(slot, slots[slot].num_read, length) for slot, length in zip(reading, lengths, strict=True) if length
    )
    return dataclasses.replace(plan, prefill=tuple(chunks))


def simulate(args: argparse.Namespace, *, is_round_robin: bool, every: int) -> dict[str, float]:
    scheduler = Scheduler(max_slots=args.prompts, token_budget=args.budget, queue_limit=args.prompts)
    waiting = {str(number): Request(args.length, args.tokens) for number in range(args.prompts)}
    requests, slots, names, now, num_steps = list(waiting.values()), dict[int, Request](), dict[int, str](), 0.0, 0
    for name in waiting:
        scheduler.add(name, prompt_len=args.length)
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.plan()
        for assignment in plan.admitted:
            slots[assignment.slot] = waiting.pop(assignment.request_id)
            names[assignment.slot] = assignment.request_id
        if plan.prefill and is_round_robin:
            plan = share_equally(plan, slots, args.budget)
        if plan.prefill and num_steps % every:
            plan = dataclasses.replace(plan, decode=())
        num_steps += 1
        now += args.step + args.token * sum(chunk.length for chunk in plan.prefill) + args.row * len(plan.decode)
        scheduler.apply(plan)
        for chunk in plan.prefill:
            slots[chunk.slot].unread -= chunk.length
            slots[chunk.slot].num_read += chunk.length
        for slot in (*plan.decode, *(chunk.slot for chunk in plan.prefill if not slots[chunk.slot].unread)):
            request = slots[slot]
            request.tokens_at.append(now)
            request.tokens_left -= 1
            if not request.tokens_left:
                scheduler.remove(names.pop(slot))
                del slots[slot]
    firsts = [request.tokens_at[0] for request in requests]
    gaps = [b - a for request in requests for a, b in zip(request.tokens_at, request.tokens_at[1:], strict=False)]
    return {
        "first_ms_p50": quantile(firsts, 0.5),
        "first_ms_p95": quantile(firsts, 0.95),
        "gap_ms_p50": quantile(gaps, 0.5),
        "gap_ms_p99": quantile(gaps, 0.99),
        "all_ms": now,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=280, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="that each request decodes")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a step")
    parser.add_argument("--step", type=float, default=0.3, help="ms of a step, whatever it reads")
    parser.add_argument("--token", type=float, default=0.47, help="ms of a prompt's token")
    parser.add_argument("--row", type=float, default=0.85, help="ms of a row that decodes")
    args = parser.parse_args(argv)
    orders = {"round robin": simulate(args, is_round_robin=True, every=1)}
    orders |= {
        f"fewest unread, decode every {every}": simulate(args, is_round_robin=False, every=every) for every in EVERY
    }
    print(f"{'':<32}{'first p50':>16}{'p95':>16}{'gap p50':>10}{'p99':>8}{'all':>14}   ms, beside round robin")
    base = orders["round robin"]
    for name, found in orders.items():
        shown = [
            f"{found[key]:,.0f} ({found[key] / base[key]:.2f}x)" for key in ("first_ms_p50", "first_ms_p95", "all_ms")
        ]
        gaps = f"{found['gap_ms_p50']:>10.0f}{found['gap_ms_p99']:>8.0f}"
        print(f"{name:<32}{shown[0]:>16}{shown[1]:>16}{gaps}{shown[2]:>14}")
    result = {**about_this_run(), "orders": orders}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
