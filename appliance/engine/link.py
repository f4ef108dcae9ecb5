"""Mutual help: one engine's end of the link, through which two engines compute each other's rows.

Experts that neither the own card nor the peer has, but the other engine's card, are computed there: the tier `linked`. The other
engine may end or hang at any time: the window is then void, and is run again without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from appliance.engine.link_options import LinkOptions
from appliance.errors import EngineError
from appliance.memory.layout import ArenaLayout, BlobPart
from appliance.memory.link_file import MAX_ROWS, LinkFile
from appliance.models.config import ModelConfig
from cuda_ext import _native as native


class LinkEnd:
    """Confined to the engine loop."""

    def __init__(
        self,
        options: LinkOptions,
        config: ModelConfig,
        layout: ArenaLayout,
        max_rows: int,
        content_id: str,
        isa: str,
        table: native.ExpertTable,
    ) -> None:
        """`table`: the own card's; its linked experts are asked of the other engine from now on.

        Raises EngineError, MemoryBudgetError.
        """
        geometry = native.LinkGeometry(config.layers, config.experts, config.top_k, min(max_rows, MAX_ROWS), config.hidden)
        nbytes = geometry.file_bytes
        fingerprint = layout.digest()[:32] + content_id[:32]
        self._file = LinkFile(options.path, options.role, nbytes, lambda memory: native.link_format(_view(memory), fingerprint, geometry))
        self._memory: NDArray[np.uint8] = self._file.memory
        try:
            self._link = native.Link(
                _view(self._memory), options.role, fingerprint, geometry, table, isa, options.num_threads, options.stuck_after_s
            )
        except ValueError as error:
            self._file.close()
            raise EngineError(f"the link file {options.path} cannot be used: {error}") from None
        for blobs in layout.layers:
            self._link.set_layer(blobs.layer, *(_matrix(blobs.blob.part(name)) for name in ("gate", "up", "down")))
        self._link.attach_to(table)
        self._resident = (
            native.link_resident(_view(self._memory), 1 - options.role, geometry).bytes().reshape(config.layers, config.experts)
        )

    @property
    def is_serving(self) -> bool:
        return self._link.serving

    @property
    def served_rows(self) -> int:
        return self._link.served_rows

    @property
    def late_experts(self) -> int:
        return self._link.late_experts

    @property
    def num_losses(self) -> int:
        return self._link.num_losses

    def partner_holds(self) -> NDArray[np.bool_] | None:
        """[layers, experts]: what the other engine's card has; None while there is no other engine."""
        return self._resident != 0 if self._link.partner_attached else None

    def serve(self, serving: bool) -> None:
        """Offers this card's experts, or no longer; what is asked already is still computed."""
        self._link.serve(serving)

    def begin_window(self, num_rows: int) -> None:
        """Before every run of so many rows."""
        self._link.begin_window(num_rows)

    def take_loss(self) -> bool:
        """Whether the last run is void because the other engine did not answer; true once."""
        return self._link.take_loss()

    def close(self) -> None:
        """Leaves the link. Idempotent."""
        self._link.close()
        self._file.close()


def _matrix(part: BlobPart) -> native.BlobMatrix:
    return native.BlobMatrix.at(part.type_id, part.offset, part.rows, part.columns)


def _view(memory: NDArray[np.uint8]) -> native.View:
    return native.wrap_memory(memory.ctypes.data, memory.nbytes)
