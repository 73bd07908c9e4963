"""What /openapi.json says of answers. They are made elsewhere, as plain values; tests hold them against this.

A field with a default may be absent.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Object = dict[str, Any]


class Answer(BaseModel):
    """A description, which nobody may ask for: pydantic prepares it then."""

    model_config = ConfigDict(defer_build=True)


class EnergyAnswer(Answer):
    """Of all choices together."""

    joules: float
    joules_per_token: float | None
    sources: list[Object]


class PromptTokens(Answer):
    """Tokens of the prompt that a state covered and those of a session that were read again, absent where none were."""

    cached_tokens: int
    replayed_tokens: int | None = None


class UsageAnswer(Answer):
    """`energy`: with `include_energy`; null where nothing measures it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    energy: EnergyAnswer | None = None


class CommitPoint(Answer):
    """Where a turn left its session."""

    id: str
    version: int
    position: int
    taken_over_from: str | None = None
    rebuilt: str | None = None
    energy_joules: float | None = None


class ReturnedStateAnswer(Answer):
    """The state at the end of a request with `return_state`; `data` is a file in base64."""

    object: Literal["state"]
    position: int
    num_tokens: int
    model_fingerprint: str
    num_bytes: int
    data: str


class TextChoice(Answer):
    """`routing`: with `include_routing`."""

    index: int
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"] | None
    routing: list[Object] | None = None


class CompletionAnswer(Answer):
    """A completion; that of a session's turn has `session`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageAnswer
    session: CommitPoint | None = None
    state: ReturnedStateAnswer | None = None


class AnswerMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Object] = []


class ChatChoice(Answer):
    """`routing`: with `include_routing`."""

    index: int
    message: AnswerMessage
    logprobs: Object | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    routing: list[Object] | None = None


class ChatAnswer(Answer):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    state: ReturnedStateAnswer | None = None


class ItemAnswer(Answer):
    """A message of a response or a conversation, or a thought: that has `summary`, and no role."""

    id: str
    type: Literal["message", "reasoning"]
    role: Literal["system", "developer", "user", "assistant"] | None = None
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[Object]
    summary: list[Object] | None = None


class ItemPage(Answer):
    """A page of messages; the ids of an empty one are empty."""

    object: Literal["list"]
    data: list[ItemAnswer]
    first_id: str
    last_id: str
    has_more: bool


class ResponseObject(Answer):
    """A response of the Responses API, as it is now. `include_energy`: if it was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    conversation: Object | None
    error: Object | None
    incomplete_details: Object | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[ItemAnswer]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Object
    service_tier: str
    store: bool
    temperature: float
    text: Object
    tool_choice: str
    tools: list[Object]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: Object | None
    include_energy: bool | None = None
    state: ReturnedStateAnswer | None = None


class InputTokens(Answer):
    """How many tokens a response would stand on."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ConversationAnswer(Answer):
    """A list of messages that responses read and add to."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class SessionAnswer(Answer):
    """A session at its newest commit; `model` is null for a session of a model that is not served here, and
    `unserved_model` then names that one, in the answer about one session.

    `cancelled`: after a cancel, whether there was a turn. `rebuilt`: after an import, why its log was read. `mark` and
    `num_appended`: after an append, the version before it and the tokens that were read. `num_bytes_read`: of a live
    body.
    """

    id: str
    object: Literal["session"]
    version: int
    position: int
    created_at: int
    updated_at: int
    model: str | None
    model_fingerprint: str
    state_bytes: int | None
    snapshot_bytes: int
    metadata: dict[str, str]
    ttl_s: float | None
    expires_at: int | None
    forked_from: str | None
    replica: str | None
    unserved_model: str | None = None
    cancelled: bool | None = None
    rebuilt: str | None = None
    mark: int | None = None
    num_appended: int | None = None
    num_bytes_read: int | None = None


class NamedStateAnswer(Answer):
    """A version of a named state; `model` is null for a state of a model that is not served here."""

    id: str
    object: Literal["state"]
    name: str
    version: int
    published: bool
    created_at: int
    model: str | None
    model_fingerprint: str
    position: int
    num_tokens: int
    num_bytes: int
    source: Literal["text", "messages", "session", "file"]
    metadata: dict[str, str]


class NamedStatePage(Answer):
    """All versions, by name."""

    object: Literal["list"]
    data: list[NamedStateAnswer]


class SessionPage(Answer):
    """Newest first."""

    object: Literal["list"]
    data: list[SessionAnswer]
    has_more: bool
    next_cursor: str | None


class DeletedAnswer(Answer):
    """The deleted object."""

    id: str
    object: Literal["session.deleted", "response", "conversation.deleted", "state.deleted", "file"]
    deleted: Literal[True]


class StatesAnswer(Answer):
    """What a session's states hold; `recent`: what its last tokens did, if that was asked for."""

    object: Literal["session.states"]
    session_id: str
    version: int
    model_fingerprint: str
    numerics: str
    dtype: str | None
    rounded_to: str | None
    position: int
    state_bytes: int
    detail: Literal["layer", "head", "slot"]
    layers: list[Object]
    recent: Object | None = None


class ModelAnswer(Answer):
    """A model, and the traits of this server: a state of constant size, no longest context.

    `error`: why it could not be loaded. What only a loaded model tells is null while it is not loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    status: Literal["loaded", "loading", "unloaded", "failed"]
    error: str | None
    max_model_len: None
    fingerprint: str
    system_fingerprint: str | None
    numerics: str | None
    state_bytes: int | None
    state_dtype: str
    vocab_size: int | None
    num_parameters: int | None
    chat_template: str | None
    prefix_cache: bool
    retained_snapshots: int
    limits: dict[str, int]


class ModelPage(Answer):
    """The models: the first, then those that are loaded on demand."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokensAnswer(Answer):
    """`token_strs`: with `return_token_strs`."""

    count: int
    max_model_len: None
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerAnswer(Answer):
    """A `tokenizer_config.json`. `chat_template`: in Jinja."""

    tokenizer_class: str
    bos_token: str
    eos_token: str
    pad_token: str
    add_prefix_space: bool
    clean_up_tokenization_spaces: bool
    split_special_tokens: bool
    chat_template: str


class TextAnswer(Answer):
    """The text of ids."""

    prompt: str


class LiveAnswer(Answer):
    """The process answers."""

    status: Literal["live"]


class ReadyAnswer(Answer):
    """Whether new work is welcome, and what says so; `reasons`: of checks that failed, where one is known."""

    status: Literal["ready", "not ready"]
    checks: dict[str, bool]
    reasons: dict[str, str] | None = None
    replica: str


class FileAnswer(Answer):
    """A file without its bytes."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed"]
    status_details: None


class FilePage(Answer):
    """A page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RequestCounts(Answer):
    """Of a batch: `completed` were answered with 200, `failed` with another status."""

    total: int
    completed: int
    failed: int


class BatchAnswer(Answer):
    """A batch, as it is now."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Object | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class JobError(Answer):
    """Why a job has failed. `param`: `training_file` or `validation_file` for a fault of a file."""

    code: str
    message: str
    param: str | None


class JobHyperparameters(Answer):
    """As they are used."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float


class JobAnswer(Answer):
    """A fine-tuning job, as it is now. `fine_tuned_model`: `ft:MODEL:NAME@VERSION`, for the field `model`."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: Literal["queued", "validating_files", "running", "paused", "succeeded", "failed", "cancelled"]
    model: str
    fine_tuned_model: str | None
    training_file: str
    validation_file: str | None
    hyperparameters: JobHyperparameters
    method: Object
    seed: int
    trained_tokens: int | None
    error: JobError | None
    result_files: list[str]
    integrations: list[Object]
    organization_id: str
    metadata: dict[str, str] | None


class JobPage(Answer):
    """A page of fine-tuning jobs, the newest first."""

    object: Literal["list"]
    data: list[JobAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobEventAnswer(Answer):
    """What a fine-tuning job said. `data`: the losses, of the type `metrics`."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: Object | None


class JobEventPage(Answer):
    """A page of events, the newest first."""

    object: Literal["list"]
    data: list[JobEventAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobCheckpointAnswer(Answer):
    """The state of a fine-tuning job's lowest held-out loss."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: Object
    step_number: int


class JobCheckpointPage(Answer):
    """At most one."""

    object: Literal["list"]
    data: list[JobCheckpointAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchPage(Answer):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EmbeddingAnswer(Answer):
    """The vector of one text: numbers, or little-endian fp32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    """The vectors in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: Object
