"""Forms that were made to do harm: refused or followed, within bounds of time and memory."""

from __future__ import annotations

import random
import time

import numpy as np
import psutil
import pytest

from nsm_core.errors import GrammarFailed, InvalidRequest
from nsm_core.grammars import trial
from nsm_core.grammars.compiler import CompilePool, GrammarCompiler
from nsm_core.grammars.grammar import Grammar
from nsm_core.grammars.matcher import TokenMatcher, fill_masks, mask_width
from nsm_core.tokenizer import Tokenizer
from tests.support.counts import scaled
from tests.support.hostile_grammars import HOSTILE

MAX_GROWTH_BYTES = 128 * 1024 * 1024  # of all hostile grammars together, compiled and followed


def follow(matcher: TokenMatcher, vocab_size: int, num_tokens: int) -> float:
    """Random tokens of the grammar; the longest CPU time of one, in seconds. GrammarFailed is an end as good as any."""
    chance, longest = random.Random(1), 0.0
    words = np.zeros((1, mask_width(vocab_size)), np.int32)
    for _ in range(num_tokens):
        started = time.thread_time()
        fill_masks(words, [(matcher, 0, ())])
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[1:].tolist()
        if matcher.inner.is_error() or not allowed:
            break
        try:
            matcher.advance(chance.choice(allowed))
        except GrammarFailed:
            break
        longest = max(longest, time.thread_time() - started)
    return longest


def test_hostile_grammars_are_refused_or_followed_within_bounds(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(trial, "TRIAL_TIMEOUT_S", 2.0)
    compiler = GrammarCompiler(tiny_tokenizer)
    pool = CompilePool(compiler)
    pool.submit(Grammar(kind="regex", source="a")).result(60)
    before, refused = psutil.Process().memory_info().rss, set()
    for name, grammar in HOSTILE.items():
        try:
            matcher = pool.submit(grammar).result(60)
        except InvalidRequest:
            refused.add(name)
            continue
        assert follow(matcher, tiny_tokenizer.vocab_size, scaled(reduced=60, full=2000)) < 0.5, name
    assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
    assert {"nested 900 deep", "a loop of references", "many patterns at once"} <= refused
    pool.close()


def test_a_process_that_is_killed_by_a_grammar_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer
) -> None:
    tried = trial.GrammarTrial(tiny_tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "TRIAL_TIMEOUT_S", 0.05)
        with pytest.raises(InvalidRequest, match="takes too long") as refusal:
            tried.check(HOSTILE["many patterns at once"])
        assert refusal.value.code == "grammar_too_complex"
    tried.check(Grammar(kind="regex", source="[a-z]+"))
    tried.close()
