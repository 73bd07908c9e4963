"""The parts of a report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_lab.evaluation.losses import SUMMARY_EDGES, BucketLoss, PositionLosses
from nsm_lab.evaluation.markdown import position_range, rate, short, table
from nsm_lab.evaluation.passkey import PasskeyCell, PasskeyResult
from nsm_lab.evaluation.samples import Sample
from nsm_lab.evaluation.slots import LayerSlots, SlotUsage
from nsm_lab.evaluation.splits import SplitResult
from nsm_lab.evaluation.stored_state_quality import EDGES, StoredFormat, StoredStateBucket, StoredStateResult


def documents_read(count: int) -> str:
    """The end of the heading's sentence."""
    return f", {count} document{'' if count == 1 else 's'}, each read from its start with the state carried on."


def loss_tables(losses: PositionLosses) -> str:
    """Every bucket; then, from 1K tokens on, the short table by which models are compared."""
    heads = ("position (tokens)", "tokens", "bytes", "words", "nats/token", "bits/byte", "word perplexity")
    total = _loss_row("**all**", losses.total)
    full = table(heads, [*(_loss_row(position_range(b.start, b.stop), b) for b in losses.buckets), total])
    summary = losses.by(SUMMARY_EDGES)
    if len(summary) < 2:
        return full
    rows = [_loss_row(position_range(bucket.start, bucket.stop), bucket) for bucket in summary]
    return f"{full}\n\nIn short:\n\n{table(heads, [*rows, total])}"


def _loss_row(label: str, bucket: BucketLoss) -> list[str]:
    counts = [f"{value:,}" for value in (bucket.num_tokens, bucket.num_bytes, bucket.num_words)]
    rates = [rate(bucket.nats_per_token, 4), rate(bucket.bits_per_byte, 4), rate(bucket.word_perplexity, 1)]
    return [label, *counts, *rates]


def passkey_lines(result: PasskeyResult) -> str:
    depths = sorted({cell.depth for cell in result.cells})
    rows = []
    for length in sorted({cell.length for cell in result.cells}):
        cells = {cell.depth: cell for cell in result.cells if cell.length == length}
        rows.append(
            [
                short(length),
                *(_passkey_cell(cells[depth]) if depth in cells else "–" for depth in depths),
            ]
        )
    heads = ("length (tokens)", *(f"depth {depth:.0%}" for depth in depths))
    return (
        "## Passkey\n\nA five-digit key in a book, asked for at the end: how often it is the likeliest of "
        f"{result.num_choices} keys (chance {1 / result.num_choices:.0%}), and in brackets how often the model writes "
        f"it. {result.cells[0].num_examples} prompts a cell; depth 0% is the beginning of the text.\n\n"
        + table(heads, rows)
    )


def _passkey_cell(cell: PasskeyCell) -> str:
    return f"{cell.num_chosen / cell.num_examples:.0%} ({cell.num_written / cell.num_examples:.0%})"


def stored_state_lines(result: StoredStateResult) -> str:
    heads = (
        "stored as",
        "bytes",
        *(f"{b.start}–{b.stop}" for b in result.formats[0].buckets[:-1]),
        f"all {EDGES[-1]:,}",
    )
    return (
        f"## Stored and resumed\n\nPerplexity of the tokens after a resume, against a run with the exact state "
        f"(95 % interval over documents). {result.num_documents} documents, stored {result.num_saves} times each, "
        f"every {result.prefix_len:,} tokens; in fp32.\n\n"
        + table(heads, [_stored_row(stored) for stored in result.formats])
    )


def _stored_row(stored: StoredFormat) -> list[str]:
    return [stored.format, f"{stored.state_bytes:,}", *(_change(bucket) for bucket in stored.buckets)]


def _change(bucket: StoredStateBucket) -> str:
    return f"{bucket.change:+.4%} ({bucket.low:+.4%} … {bucket.high:+.4%})"


def split_lines(result: SplitResult) -> str:
    rows = [
        [
            row.split,
            f"{row.num_pieces:,}",
            f"{row.logits:.2e}",
            f"{row.state:.2e}",
            "equal" if row.is_same_continuation else "**different**",
        ]
        for row in result.splits
    ]
    heads = ("read", "pieces", "logits", "state", f"greedy {result.continuation_len} tokens")
    return (
        f"## Split invariance\n\n{result.num_tokens:,} tokens in fp32 against reading them whole: largest absolute "
        f"differences (of logits up to {result.max_logit:.1f}, state values up to {result.max_state:.1f}).\n\n"
        + table(heads, rows)
    )


def slot_lines(slots: SlotUsage) -> str:
    heads = (
        "layer",
        "dead",
        "effective",
        "by weight",
        "busiest / mean",
        "written/token",
        "half-life 10 %",
        "median",
        "90 %",
    )
    return (
        f"## Memory slots\n\nOn {slots.num_tokens:,} tokens, means over layers and heads: "
        f"{slots.dead_fraction:.2%} of the slots are dead (written to by less than a hundredth of their fair share "
        f"of tokens), {slots.effective_slots:.1f} of {slots.slots_per_head} are effective (exp of the entropy of the "
        f"load; {slots.effective_by_weight:.1f} by write weight), the busiest has {slots.max_over_mean_load:.1f} times "
        "the mean load. By layer, with half-lives in tokens as quantiles over slots:\n\n"
        + table(heads, [_slot_row(layer) for layer in slots.layers])
    )


def _slot_row(layer: LayerSlots) -> list[str]:
    half_lives = (layer.half_life_p10, layer.half_life_median, layer.half_life_p90)
    return [
        str(layer.layer),
        f"{layer.dead_fraction:.2%}",
        f"{layer.effective_slots:.1f}",
        f"{layer.effective_by_weight:.1f}",
        f"{layer.max_over_mean_load:.1f}",
        f"{layer.written_per_token:.3f}",
        *(_half_life(value) for value in half_lives),
    ]


def _half_life(value: float | None) -> str:
    return "never written" if value is None else f"{value:,.0f}" if value < 1e6 else "over 1M"


def sample_lines(samples: Sequence[Sample]) -> str:
    return "## Samples\n\n" + "\n\n".join(_sample(sample) for sample in samples)


def _sample(sample: Sample) -> str:
    how = "greedy" if sample.temperature == 0 else f"temperature {sample.temperature:g}, seed {sample.seed}"
    quoted = "\n".join(f"> {line}".rstrip() for line in f"**{sample.prompt}**{sample.text}".split("\n"))
    return f"{how[0].upper()}{how[1:]}:\n\n{quoted}"
