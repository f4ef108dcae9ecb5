"""The waiting line: requests that no lane has taken yet, first come, first served."""

from __future__ import annotations

from appliance.errors import QueueFullError
from appliance.protocol import Generate, Queued


class WaitingLine:
    """Bounded and in order of arrival. Remembers which place each request was last told. Confined to the desk thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[str, Generate] = {}
        self._told: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def head(self) -> Generate | None:
        """The request that goes next."""
        return next(iter(self._waiting.values()), None)

    @property
    def ids(self) -> tuple[str, ...]:
        """In order of arrival."""
        return tuple(self._waiting)

    def check_room(self) -> None:
        """Raises QueueFullError at the limit."""
        if len(self) >= self.limit:
            raise QueueFullError(
                f"{len(self)} requests wait already, and max_queue is {self.limit}; send the request again later, or raise max_queue"
            )

    def append(self, request: Generate) -> None:
        """Puts the request last. Does not look at the limit: who goes straight to a lane needs no room."""
        self._waiting[request.id] = request

    def remove(self, request_id: str) -> Generate:
        """Takes one request out, wherever it stands; those behind it move up. KeyError if it does not wait."""
        self._told.pop(request_id, None)
        return self._waiting.pop(request_id)

    def tell_places(self) -> list[Queued]:
        """One `Queued` for each request whose place is not the one it was last told."""
        news = [
            Queued(id=request_id, place=place)
            for place, request_id in enumerate(self._waiting, start=1)
            if self._told.get(request_id) != place
        ]
        self._told.update({queued.id: queued.place for queued in news})
        return news
