"""Mutual help: one engine's end of the link, through which two engines compute each other's rows.

Experts that neither the own card nor the peer has, but the other engine's card, are computed there: the tier `linked`. The other
engine may end or hang at any time: the window is then void, and is run again without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.engine.graph import Graph
from appliance.engine.link_options import LinkOptions
from appliance.errors import EngineError
from appliance.memory.layout import ArenaLayout, BlobPart
from appliance.memory.link_file import MAX_ROWS, LinkFile
from appliance.memory.workspace import WINDOW_ROWS
from appliance.models.config import ModelConfig
from cuda_ext import _native as native


class Rows(Protocol):
    """The native end of a link, on one kind of card or the other."""

    @property
    def serving(self) -> bool: ...
    @property
    def partner_attached(self) -> bool: ...
    @property
    def served_rows(self) -> int: ...
    @property
    def late_experts(self) -> int: ...
    @property
    def num_losses(self) -> int: ...
    def serve(self, serving: bool) -> None: ...
    def take_loss(self) -> bool: ...
    def close(self) -> None: ...


class LinkEnd:
    """Confined to the engine loop."""

    def __init__(self, options: LinkOptions, config: ModelConfig, layout: ArenaLayout, content_id: str, isa: str, graph: Graph) -> None:
        """Linked experts of the graph's table are asked of the other engine from now on.

        Raises EngineError, MemoryBudgetError.
        """
        max_rows = min(WINDOW_ROWS if graph.is_gpu else graph.sizes.max_rows, MAX_ROWS)
        geometry = native.LinkGeometry(config.layers, config.experts, config.top_k, max_rows, config.hidden)
        fingerprint = layout.digest()[:32] + content_id[:32]
        self._file = LinkFile(
            options.path, options.role, geometry.file_bytes, lambda memory: native.link_format(_view(memory), fingerprint, geometry)
        )
        self._memory: NDArray[np.uint8] = self._file.memory
        self._on_host: native.Link | None = None
        try:
            if graph.is_gpu:
                self._rows: Rows = native.CudaLink(  # type: ignore[attr-defined]
                    _view(self._memory), options.role, fingerprint, geometry, graph.program, graph.table, options.stuck_after_s
                )
            else:
                self._rows = self._on_host = self._open_on_host(options, fingerprint, geometry, isa, layout, graph)
        except ValueError as error:
            self._file.close()
            raise EngineError(f"the link file {options.path} cannot be used: {error}") from None
        self._resident = (
            native.link_resident(_view(self._memory), 1 - options.role, geometry).bytes().reshape(config.layers, config.experts)
        )

    def _open_on_host(
        self, options: LinkOptions, fingerprint: str, geometry: native.LinkGeometry, isa: str, layout: ArenaLayout, graph: Graph
    ) -> native.Link:
        table = graph.table
        assert isinstance(table, native.ExpertTable)
        link = native.Link(_view(self._memory), options.role, fingerprint, geometry, table, isa, options.num_threads, options.stuck_after_s)
        for blobs in layout.layers:
            link.set_layer(blobs.layer, *(_matrix(blobs.blob.part(name)) for name in ("gate", "up", "down")))
        link.attach_to(table)
        return link

    @property
    def is_serving(self) -> bool:
        return self._rows.serving

    @property
    def served_rows(self) -> int:
        return self._rows.served_rows

    @property
    def late_experts(self) -> int:
        return self._rows.late_experts

    @property
    def num_losses(self) -> int:
        return self._rows.num_losses

    def partner_holds(self) -> NDArray[np.bool_] | None:
        """[layers, experts]: what the other engine's card has; None while there is no other engine."""
        return self._resident != 0 if self._rows.partner_attached else None

    def serve(self, serving: bool) -> None:
        """Offers this card's experts, or no longer; what is asked already is still computed."""
        self._rows.serve(serving)

    @contextmanager
    def drained(self) -> Iterator[None]:
        """A GPU has nothing to do for the other engine inside: memory may go, for which its system waits."""
        is_paused = self._on_host is None and self.is_serving
        if is_paused:
            self._rows.serve(False)
        try:
            yield
        finally:
            if is_paused:
                self._rows.serve(True)

    def begin_window(self, num_rows: int) -> None:
        """Before every run of so many rows. A GPU's windows begin it themselves, and its prompts ask nobody."""
        if self._on_host is not None:
            self._on_host.begin_window(num_rows)

    def take_loss(self) -> bool:
        """Whether the last run is void because the other engine did not answer; true once."""
        return self._rows.take_loss()

    def close(self) -> None:
        """Leaves the link. Idempotent."""
        self._rows.close()
        self._file.close()


def _matrix(part: BlobPart) -> native.BlobMatrix:
    return native.BlobMatrix.at(part.type_id, part.offset, part.rows, part.columns)


def _view(memory: NDArray[np.uint8]) -> native.View:
    return native.wrap_memory(memory.ctypes.data, memory.nbytes)
