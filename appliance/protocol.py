"""Every message and control line between desk and engine, in one place.

An engine reads lines on stdin and answers on stdout; one line is one message. Requests and events are JSON behind a word,
control lines are words. `docs/protocol.md` is the reference; a test holds it against this module.

    desk -> engine    GEN {Generate}   CANCEL id   PEER_DETACH   PEER_ATTACH   POOL_HOLD n   LINK_SERVE 0|1
                      VRAM n   VRAM    STATS
    engine -> desk    LOAD {LoadProgress}*   READY {Ready}   EV {Event}*   CTL reply ...   CTL ERR code text   FATAL {Fatal}
    loader -> desk    LOAD {LoadProgress}*   FATAL {Fatal}

Every accepted `GEN` is answered by exactly one terminal `EV` (a `Finished`), whatever happens to it; only the death of the
process can prevent that, and then the desk writes the terminal event itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

PROTOCOL_VERSION = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line either side accepts, newline not counted: some two million token ids."""


class Word(StrEnum):
    """The first word of a line."""

    GEN = "GEN"
    CANCEL = "CANCEL"
    PEER_DETACH = "PEER_DETACH"
    PEER_ATTACH = "PEER_ATTACH"
    POOL_HOLD = "POOL_HOLD"
    LINK_SERVE = "LINK_SERVE"
    VRAM = "VRAM"
    STATS = "STATS"
    LOAD = "LOAD"
    READY = "READY"
    EV = "EV"
    CTL = "CTL"
    FATAL = "FATAL"


class Reply(StrEnum):
    """The second word of a `CTL` line: which control line it answers."""

    PEER = "PEER"
    HOLD = "HOLD"
    LINK = "LINK"
    VRAM = "VRAM"
    STATS = "STATS"
    ERR = "ERR"


class ControlErrorCode(StrEnum):
    """The code in `CTL ERR code text`."""

    UNKNOWN = "unknown"
    """No such control line."""
    MALFORMED = "malformed"
    """The line's arguments are wrong."""
    UNSUPPORTED = "unsupported"
    """This engine, as it was started, cannot do that."""
    BUSY = "busy"
    """A request is running and this engine has one sequence."""
    DUPLICATE = "duplicate"
    """The request id is in use."""
    FAILED = "failed"
    """It was tried, failed and was undone."""


class Message(BaseModel):
    """Base of everything that crosses the pipe as JSON: immutable, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Message):
    """How the next token is chosen. The defaults are greedy decoding without penalties."""

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Token id to a value added to its logit."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """The same seed, prompt and settings give the same tokens."""


class ThinkingLimit(Message):
    """When the thoughts in front of an answer have to end."""

    max_tokens: int = Field(ge=1)
    begin: int | None = Field(default=None, ge=0)
    """The token that begins them, if the answer's first one does. None: they have begun in the prompt."""
    end: int = Field(ge=0)
    """The token that ends them, which is taken when they have had their tokens."""


class Generate(Message):
    """`GEN`: continue a prompt. Token ids in, token ids out; text lives in the web process."""

    id: str = Field(min_length=1, max_length=128, pattern=r"^\S+$")
    prompt: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    max_tokens: int = Field(ge=0)
    sampling: Sampling = Sampling()
    stop_ids: list[int] = Field(default_factory=list)
    """Tokens that end the answer (the end-of-turn tokens of the model); they are reported, then the stream ends."""
    ignore_eos: bool = False
    """Go on past `stop_ids` until `max_tokens`."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """None: no log-probabilities. N: the chosen token's, and those of the N likeliest."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Wall-clock limit of the whole generation; over it the answer ends with reason `length`."""
    thinking: ThinkingLimit | None = None
    """None: thoughts may be as long as the answer."""


class TokenLogprobs(Message):
    """Natural log-probabilities of one position, from the logits before temperature and filters."""

    logprob: float
    top: list[tuple[int, float]] = Field(default_factory=list)
    """(token id, log-probability), likeliest first."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Timings(Message):
    """What a request cost. Times are wall-clock of the engine."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose state was reused."""
    generated_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0


class Queued(Message):
    """The request waits; `place` 1 is next. Sent by the desk whenever the place changes, never by an engine."""

    event: Literal["queued"] = "queued"
    id: str
    place: int = Field(ge=1)


class Started(Message):
    """A lane has taken the request."""

    event: Literal["started"] = "started"
    id: str
    prompt_tokens: int
    cached_tokens: int
    lane: str | None = None
    """Filled in by the desk."""


class PromptProgress(Message):
    """One more chunk of the prompt is done. `done` counts the cached tokens too."""

    event: Literal["prompt"] = "prompt"
    id: str
    done: int
    total: int


class Tokens(Message):
    """One or more new tokens, in order."""

    event: Literal["tokens"] = "tokens"
    id: str
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per id when asked for."""


class Finished(Message):
    """The terminal event; nothing follows it."""

    event: Literal["finished"] = "finished"
    id: str
    reason: FinishReason
    error_code: str | None = None
    """The `code` of an error in `appliance.errors` when reason is `error`."""
    error_text: str | None = None
    timings: Timings = Timings()


Event = Annotated[Queued | Started | PromptProgress | Tokens | Finished, Field(discriminator="event")]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
"""Parses the JSON of an `EV` line."""


class LoadProgress(Message):
    """`LOAD`: how far a start-up stage is. Loader and engines write it; the desk shows it."""

    stage: str
    """`download` of the fetching process; `reserve` or `arena` of the loader; `dense`, `cache` or `warmup` of an engine."""
    done_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    left_s: float | None = None


class Ready(Message):
    """`READY`: the engine takes requests. Everything that can run out of memory has been run once."""

    protocol: int = PROTOCOL_VERSION
    pid: int
    card: str
    context: int
    """Tokens of prompt and answer together."""
    slots: int
    plan_bytes: dict[str, int]
    """Card memory by consumer, as planned and allocated."""


class Fatal(Message):
    """`FATAL`: the last line of an engine or loader that gives up. Its exit code is not 0."""

    code: str
    """The `code` of an error in `appliance.errors`."""
    text: str


class Stats(Message):
    """`CTL STATS`: counters since the engine started. Never blocks on the decode loop."""

    rows_by_tier: dict[str, int]
    """Routed expert rows computed, by tier (`own`, `peer`, `linked`, `fetched`, `streamed`, `host`)."""
    windows: int
    prompt_tokens: int
    generated_tokens: int
    swaps: int
    resident_experts: int
    slots: int
    context_used: int
    busy: bool
    isa: str
    pool_threads: int
    pool_held: int
    peer_experts: int = 0
    """Experts in slots of the peer card."""
    is_filling: bool = False
    """Slots that were taken again are not full yet."""
    link_serving: bool = False
    served_rows: int = 0
    """Routed rows computed for the other engine."""
    late_experts: int = 0
    """Of those, experts that had left their slot when they were asked for."""
    link_losses: int = 0
    """Windows that were run again because the other engine did not answer."""
    prompt_bytes_from_arena: int = 0
    """Bytes of experts that a GPU copied from the arena for prompts."""
    prompt_bytes_from_peer: int = 0
    """The same from the slots of the second card."""
    unpinned_bytes: int = 0
    """Of the arena, on a GPU: what the system would not pin. It is not streamed, and copied more slowly."""
    parked_conversations: int = 0
    """Put into the store of parked conversations."""
    resumed_conversations: int = 0
    """Prompts that went on from that store."""
    stored_conversations: int = 0
    """What lies in that store now, from both engines."""
    stored_bytes: int = 0


def line(word: Word, *parts: str | Message) -> str:
    """One protocol line, newline included."""
    words = [word.value] + [p.model_dump_json(exclude_none=True) if isinstance(p, Message) else p for p in parts]
    return " ".join(words) + "\n"
