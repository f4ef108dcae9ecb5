"""One request on one lane: what has come of it so far."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.desk.status import RequestStatus
from appliance.protocol import Event, Generate, PromptProgress, Started, Timings, Tokens


@dataclass(slots=True)
class Run:
    """Counts what the engine reports, so that nothing of it is lost with the engine. Confined to the desk thread."""

    request: Generate
    is_started: bool = False
    cached_tokens: int = 0
    prompt_done: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None

    def note(self, event: Event, now: float) -> None:
        """Takes in one event that is not terminal."""
        match event:
            case Started():
                self.is_started = True
                self.cached_tokens = self.prompt_done = event.cached_tokens
            case PromptProgress():
                self.prompt_done = event.done
            case Tokens():
                self.prompt_done = len(self.request.prompt)
                self.generated_tokens += len(event.ids)
                self.first_token_s = now if self.first_token_s is None else self.first_token_s
                self.last_token_s = now

    @property
    def tokens_per_s(self) -> float:
        """Of decode, from the first token to the last; 0 before the second."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return 0.0
        return (self.generated_tokens - 1) / (self.last_token_s - self.first_token_s)

    def timings(self) -> Timings:
        """What the desk can say of a request whose engine cannot any more; it has not measured times."""
        return Timings(prompt_tokens=len(self.request.prompt), cached_tokens=self.cached_tokens, generated_tokens=self.generated_tokens)

    def status(self) -> RequestStatus:
        return RequestStatus(
            id=self.request.id,
            prompt_tokens=len(self.request.prompt),
            prompt_done=self.prompt_done,
            generated_tokens=self.generated_tokens,
            tokens_per_s=round(self.tokens_per_s, 2),
        )
