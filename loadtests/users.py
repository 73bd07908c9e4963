"""The kinds of users. Each does one whole thing, says whether the answers were right, and begins again."""

from __future__ import annotations

import itertools

from gevent import sleep
from locust import User, task

from loadtests.asking import Reader, ask, begin, expect_text
from loadtests.client import Client
from loadtests.conversations import Conversation, Refused
from loadtests.run_state import RunState, wait_retry_after
from loadtests.samples import Sample
from loadtests.scripts import GREEDY, Script
from loadtests.together import all_results
from loadtests.troubles import cancel_turn, leave_and_read_on, leave_for_good, send_twice

SLOW_RECEIVE_BYTES = 2048  # of a slow reader's window: unread bytes soon wait in the server
SLOW_BLOCK_BYTES = 512


class ScriptedUser(User):
    """`act` is one whole thing; how long it takes depends on the server alone."""

    abstract = True
    receive_bytes: int | None = None
    run_state: RunState  # set by the locustfile, for all users of the process
    clients: list[Client]

    def on_start(self) -> None:
        self.clients = self.run_state.clients(receive_bytes=self.receive_bytes)

    def on_stop(self) -> None:
        for client in self.clients:
            client.close()

    @task
    def act_unless_over(self) -> None:
        if self.run_state.is_over:
            sleep(0.1)
            return
        self.run_state.num_busy += 1
        try:
            self.act()
        except Refused as refusal:
            self._note(refusal)
        except OSError as error:
            self._note(error)
            sleep(0.5)
        finally:
            self.run_state.num_busy -= 1
        self.run_state.think()

    def act(self) -> None:
        raise NotImplementedError

    def complete(self, scenario: str, script: Script, *, reader: Reader | None = None) -> Sample:
        """A stateless completion that is read from its start."""
        sample = begin(scenario)
        body = {**GREEDY, "prompt": script.inputs[0], "max_tokens": script.max_tokens, "cache_prompt": False}
        try:
            client = self.run_state.turn_of(self.clients)
            answer = ask(client, "/v1/completions", body, sample, reader=reader)
            expect_text(sample, answer, script.answers[0])
        finally:
            self.run_state.recorder.add(sample)
        return sample

    def _note(self, error: Exception) -> None:
        """What went wrong outside of a turn counts as well, unless the run is over and servers are full."""
        sample = begin("calls")
        sample.outcome, sample.problem, sample.e2e_ms = "failed", str(error), 0.0
        if not self.run_state.is_over:
            self.run_state.recorder.add(sample)


class WaitingUser(User):
    """Locust stops when it has no users; while arrivals come from a trace there is one that waits in each process."""

    @task
    def wait(self) -> None:
        sleep(0.1)


class CompletionUser(ScriptedUser):
    """Single completions."""

    def act(self) -> None:
        sample = self.complete("completion", self.run_state.script("completion"))
        if sample.outcome == "rejected":
            wait_retry_after(sample)


class ChatUser(ScriptedUser):
    """A stateless chat: everything said is sent again with each message."""

    def act(self) -> None:
        script = self.run_state.script("chat")
        messages: list[dict[str, str]] = []
        for text, expected in zip(script.inputs, script.answers, strict=True):
            messages.append({"role": "user", "content": text})
            sample = self._say(messages, script.max_tokens, expected)
            if sample.outcome == "rejected":
                wait_retry_after(sample)
            if sample.outcome != "ok" or self.run_state.is_over:
                return
            messages.append({"role": "assistant", "content": expected})
            self.run_state.think()

    def _say(self, messages: list[dict[str, str]], max_tokens: int, expected: str) -> Sample:
        sample = begin("chat")
        body = {**GREEDY, "messages": messages, "max_completion_tokens": max_tokens}
        try:
            client = self.run_state.turn_of(self.clients)
            answer = ask(client, "/v1/chat/completions", body, sample)
            expect_text(sample, answer, expected)
        finally:
            self.run_state.recorder.add(sample)
        return sample


class SessionUser(ScriptedUser):
    """A session whose turns go to one replica after the other; a few are cancelled first, or sent twice."""

    def act(self) -> None:
        behaviour = self.run_state.profile.behaviour
        with Conversation(self.run_state, self.clients, self.run_state.script("session")) as conversation:
            for _ in conversation.script.inputs:
                chance = self.run_state.rng.random()
                if chance < behaviour.cancel_share:
                    cancel_turn(conversation, "session_cancel")
                elif chance < behaviour.cancel_share + behaviour.retry_share:
                    send_twice(conversation, "session_retry")
                else:
                    conversation.insist("session")
                if self.run_state.is_over:
                    return
                self.run_state.think()


class LongContextUser(ScriptedUser):
    """A session that reads more and more; the cost of a turn must follow its new tokens alone."""

    def act(self) -> None:
        with Conversation(self.run_state, self.clients, self.run_state.script("long")) as conversation:
            for _ in conversation.script.inputs:
                conversation.insist("long_context", step=f"{conversation.position // 1000}K")
                if self.run_state.is_over:
                    return


class ForkStormUser(ScriptedUser):
    """Many forks of one session, all continued at once: as many equal answers."""

    def act(self) -> None:
        with Conversation(self.run_state, self.clients, self.run_state.script("session")) as trunk:
            trunk.insist("fork_trunk")
            count = self.run_state.profile.behaviour.forks
            all_results([lambda: self._branch(trunk)] * count)

    @staticmethod
    def _branch(trunk: Conversation) -> None:
        branch = trunk.fork()
        try:
            branch.insist("fork_turn")
        finally:
            branch.__exit__()


class SlowReaderUser(ScriptedUser):
    """Reads an answer in small pieces with pauses between them: nobody else may have to wait for it."""

    receive_bytes = SLOW_RECEIVE_BYTES

    def act(self) -> None:
        pause_s = self.run_state.profile.behaviour.slow_pause_s
        reader = Reader(pause_s=pause_s, block_bytes=SLOW_BLOCK_BYTES)
        sample = self.complete("slow_reader", self.run_state.script("slow"), reader=reader)
        if sample.outcome == "rejected":
            wait_retry_after(sample)


class TroubleUser(ScriptedUser):
    """One thing after the other that goes wrong between a client and a server; no two users begin with the same."""

    troubles = itertools.cycle((None, leave_and_read_on, cancel_turn, send_twice))

    def act(self) -> None:
        trouble = next(self.troubles)
        if trouble is None:
            leave_for_good(self.run_state, self.clients)
            return
        with Conversation(self.run_state, self.clients, self.run_state.script("session")) as conversation:
            conversation.insist("trouble_first_turn")
            trouble(conversation, trouble.__name__)


USERS: dict[str, type[ScriptedUser]] = {
    "completion": CompletionUser,
    "chat": ChatUser,
    "session": SessionUser,
    "long_context": LongContextUser,
    "fork_storm": ForkStormUser,
    "slow_reader": SlowReaderUser,
    "trouble": TroubleUser,
}
