"""The tokens that a lane holds, for finding the lane that can go on with a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.protocol import Event, Generate, PromptProgress, Started, Tokens

_BLOCK = 1024


class Conversation:
    """Prompt and answer of the lane's last request, as far as they were computed. Confined to the desk thread."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def note(self, request: Generate, event: Event) -> None:
        """Follows the engine through a request."""
        match event:
            case Started():
                self._tokens = request.prompt[: event.cached_tokens]
            case PromptProgress():
                self._tokens = request.prompt[: event.done]
            case Tokens():
                self._end_prompt(request)
                self._tokens += event.ids

    def clear(self) -> None:
        self._tokens = []

    def shared_prefix(self, prompt: Sequence[int]) -> int:
        """How many tokens at the start of `prompt` are these."""
        limit = min(len(self._tokens), len(prompt))
        for start in range(0, limit, _BLOCK):
            held, wanted = self._tokens[start : start + _BLOCK], prompt[start : start + _BLOCK]
            if held != wanted:
                return start + _first_difference(held, wanted)
        return limit

    def _end_prompt(self, request: Generate) -> None:
        if len(self._tokens) < len(request.prompt):
            self._tokens = list(request.prompt)


def _first_difference(left: Iterable[int], right: Iterable[int]) -> int:
    same = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        same += 1
    return same
