"""Sessions of a model whose slots come and go: what is stored is what the log makes it, wherever turns ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsm_core.config import EngineConfig
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.verify import verify
from tests.support.gateway import Gateway, gateway
from tests.support.models import RandomModel, as_loaded

ALLOCATING: dict[str, Any] = {
    "router": "sigmoid", "write_top_k": 8, "allocation": True, "start_slots": 6, "min_slots": 2,
    "communication_interval": 64, "prune_age": 1, "prune_share": 0.8, "allocate_pressure": 0.003,
}  # fmt: skip
STORY = "The night was long and dark. " * 6  # past a boundary
SESSIONS = ("whole", "rewound")


async def say(server: Gateway, session_id: str, text: str) -> str:
    body = {"input": text, "max_tokens": 7, "temperature": 1.0, "seed": 3}
    response = await server.client.post(f"/v1/sessions/{session_id}/generate", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def active_slots(server: Gateway, model: RandomModel, session_id: str) -> list[int]:
    """Of each layer, in all heads together."""
    stored = await server.store.load(SessionKey("default", session_id))
    assert stored.snapshot is not None
    state = model.state_spec.unpack(Snapshot.decode(stored.snapshot).state)
    return [int(state[f"layers.{layer}.active"].sum()) for layer in range(2)]


async def test_turns_restarts_and_rewinds_leave_the_slots_of_one_run(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = RandomModel(tiny_tokenizer.vocab_size, layer_pattern="NC", **ALLOCATING).eval()

    def start_gateway() -> Any:
        backend = LocalBackend(as_loaded(model, tiny_tokenizer), EngineConfig(max_slots=3, token_budget=40))
        return gateway(backend, store=SqliteSessionStore(tmp_path / "sessions.db"))

    async with start_gateway() as server:
        for name in SESSIONS:
            await server.client.post("/v1/sessions", json={"id": name})
            for text in (STORY, "", STORY):
                await say(server, name, text)
        wanted = await say(server, "rewound", STORY)
    async with start_gateway() as server:
        await server.client.post("/v1/sessions/rewound/rewind", json={"to_version": 3})
        assert await say(server, "rewound", STORY) == wanted
        await say(server, "whole", STORY)
        names = [SessionKey("default", name) for name in SESSIONS]
        results = [result async for result in verify(server.store, server.services.backend, names)]
        assert [result.verdict for result in results] == ["same"] * 2
        assert await active_slots(server, model, "whole") != [12, 12]
