"""Kernels of the expert tiers and host cards."""

from collections.abc import Callable, Sequence
import enum
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


def quantise(x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_scale: float = 1.0, isa: str | None = None) -> tuple:
    """
    Activations float32 [values], values a multiple of 32, as (q int8 [groups, 256], d float32 [groups, 8], sum16 int16 [groups, 16]).
    """

def dot(type_id: int, weights: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], isa: str | None = None) -> None:
    """
    out float32 [inputs, rows] = x float32 [inputs, values] . weights uint8 [rows, row bytes]; out may be a view with longer rows.
    """

def dequantise(type_id: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]:
    """The float32 values of whole blocks, exactly as GGUF defines them."""

def swiglu(gate: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], isa: str | None = None) -> None:
    """out = silu(gate) * up, float32 [values] each."""

def first_bad_block(type_id: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int | None:
    """
    Index of the first block whose scale or minimum (or value, of F32, F16 and BF16) is not finite, or None.
    """

def quant_types() -> dict:
    """
    Every weight type: {name: (GGML number, values per block, bytes per block)}.
    """

def isas() -> list[str]:
    """The instruction sets whose kernels run here; the last one is the best."""

class Interrupted(Exception):
    pass

class View:
    """A part of a buffer; keeps it alive."""

    @property
    def nbytes(self) -> int: ...

    def discard(self) -> None:
        """Gives its pages back to the system; its content is lost."""

    def touch(self) -> None:
        """Makes its pages present again."""

    def bytes(self) -> numpy.typing.NDArray[numpy.uint8]:
        """The memory itself, not a copy."""

    def part(self, offset: int, nbytes: int) -> View: ...

def wrap_memory(address: int, nbytes: int) -> View:
    """
    Somebody else's memory, which must stay mapped as long as any view of it lives.
    """

class Pool:
    """The threads of a host card."""

    def __init__(self, num_threads: int) -> None: ...

    @property
    def num_threads(self) -> int: ...

    @property
    def num_held(self) -> int: ...

    def hold(self, num: int) -> None:
        """From the next loop on, the last `num` threads sit out."""

    def parallel_for(self, num_items: int, grain: int, fn: Callable) -> None:
        """
        Calls fn(begin, end) for parts of [0, num_items) on the pool's threads; when all are done, raises what a call raised first.
        """

class HostCard:
    """A card in host memory. Thread-safe."""

    def __init__(self, pool: Pool, isa: str) -> None: ...

    def allocate(self, use: str, nbytes: int) -> View:
        """Zeroed memory, counted under `use`."""

    def allocate_slots(self, nbytes: int, present: bool) -> View:
        """
        Memory for slots, which can be given back in parts; given back already unless `present`.
        """

    def bytes_by_use(self) -> dict[str, int]: ...

    def pin(self, arena: View) -> int:
        """Nothing to do for a host card."""

    def unpin(self) -> None: ...

    def write(self, to: View, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Bytes to the card."""

    def new_table(self, num_layers: int, num_experts: int, memory: View) -> ExpertTable: ...

    def new_program(self, max_rows: int, max_logits: int, context: int, vocab: int, tokens: View, top_k: int, hidden: int) -> Program: ...

    def new_recorder(self, program: Program, ring: View | None) -> Recorder: ...

    def run(self, program: Program, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], position: int, num_logits: int) -> None:
        """
        Runs the program and returns when it is through. Raises Interrupted; ValueError for a window beyond the limits.
        """

    def update(self, table: ExpertTable, entries: Sequence[tuple[int, int, int]]) -> int:
        """Changes (layer, expert, slot) entries; returns a ticket."""

    def wait(self, ticket: int) -> None: ...

    def copy(self, to: View, source: View, after: int) -> int:
        """
        Copies on the copy thread, not before command `after` is through; returns a ticket of copies.
        """

    def copied(self, ticket: int) -> bool: ...

    def wait_copied(self, ticket: int) -> None: ...

class ExpertTable:
    """The residency table of one card."""

    def __init__(self, num_layers: int, num_experts: int, slots: View, uses: View) -> None: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def uses(self) -> View:
        """[layers, experts] uint32 and maybe more behind it."""

    def set_layer(self, layer: int, blobs: View, blob_bytes: int) -> None: ...

    def add_slot(self, slot: View) -> int: ...

    def slot(self, slot: int) -> View: ...

    def blob(self, layer: int, expert: int) -> View: ...

    def layer_blobs(self, layer: int) -> View: ...

    def entry(self, layer: int, expert: int) -> int: ...

    def set_peer(self, peer: ExpertTable) -> None:
        """Looked up where this table has no slot; before the first run."""

    @property
    def rows_by_tier(self) -> dict[str, int]:
        """Routed rows so far, by the tier that computed them."""

class Rows(enum.Enum):
    all = 0

    logits = 1

class KvType(enum.Enum):
    f16 = 0

    f32 = 1

    int8 = 2

class Gating(enum.Enum):
    softmax = 0

    sigmoid = 1

class Matrix:
    """Weights in memory: [rows, columns] of a GGUF type."""

    @staticmethod
    def at(memory: View, type_id: int, rows: int, columns: int) -> Matrix: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

class BlobMatrix:
    """One matrix of every blob of a layer."""

    @staticmethod
    def at(type_id: int, offset: int, rows: int, columns: int) -> BlobMatrix: ...

    @property
    def rows(self) -> int: ...

class KvMemory:
    """One layer's keys and values."""

    @staticmethod
    def at(memory: View, type: KvType, num_heads: int, head_dim: int, context: int) -> KvMemory: ...

    @property
    def memory(self) -> View: ...

class RowsMemory:
    """
    Rows of activations: floats and, where the width allows, quantised; with 1 / rms of each row where a norm is to leave it.
    """

    def __init__(self, values: View, groups: View | None, width: int, inverse: View | None = None) -> None: ...

    @property
    def values(self) -> View: ...

    @property
    def groups(self) -> View: ...

    @property
    def width(self) -> int: ...

class Product:
    """One matrix of a matmul and where its rows go."""

    def __init__(self, matrix: Matrix, out: View, residual: View | None = None) -> None: ...

class Heads:
    """Query, key and value rows before their norms and rotation."""

    def __init__(self, query: View, key: View, value: View, query_heads: int, query_gamma: View | None, key_gamma: View | None, eps: float, angles: View) -> None: ...

class Gate:
    """How a router chooses and weighs."""

    def __init__(self, gating: Gating, renormalise: bool, scale: float, top_k: int) -> None: ...

class Expert:
    """The matrices of a layer's blobs."""

    def __init__(self, gate: BlobMatrix, up: BlobMatrix, down: BlobMatrix) -> None: ...

KV_TILE: int = 64

ATTENTION_SPAN: int = 256

ATTENTION_SPLIT_ROWS: int = 8

class Program:
    """A forward pass, recorded once and run many times."""

    def __init__(self, max_rows: int, max_logits: int, context: int, vocab: int, tokens: View) -> None: ...

    @property
    def num_operations(self) -> int: ...

    def interrupt(self) -> None:
        """
        Ends the run in progress, or else the next one, with Interrupted. Thread-safe.
        """

class Recorder:
    """Records operations into a program and checks every size."""

    def __init__(self, program: Program, card: HostCard) -> None: ...

    def angles(self, frequencies: Sequence[float], magnitude: float, out: View) -> None: ...

    def embed(self, table: Matrix, out: View) -> None: ...

    def norm(self, x: View, gamma: View, eps: float, rows: Rows, out: RowsMemory) -> None: ...

    def quantise(self, rows: RowsMemory) -> None: ...

    def matmul(self, products: Sequence[Product], x: RowsMemory, rows: Rows) -> None: ...

    def rotary(self, heads: Heads, kv: KvMemory) -> None: ...

    def attention(self, query: View, query_heads: int, kv: KvMemory, scale: float, spans: View, out: View) -> None: ...

    def router(self, x: View, gamma: View, weights: Matrix, sums: View) -> None: ...

    def route(self, sums: View, x: RowsMemory, gate: Gate, table: ExpertTable, layer: int, routed: View) -> None: ...

    def experts(self, expert: Expert, table: ExpertTable, layer: int, top_k: int, routed: View, x: RowsMemory, hidden: RowsMemory, expert_rows: View, out: View) -> None: ...

class Chooser:
    """
    How the tokens of an answer are chosen: docs/arithmetic.md. Confined to one thread.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, min_offset: float) -> None:
        """
        temperature 0: the greatest logit; top_k 0, top_p 1, min_offset -inf: off. Logits stay that are at least the greatest plus min_offset. Raises ValueError.
        """

    def change(self, token: int, bias: float, repetition: float, penalty: float) -> None:
        """
        What becomes of a token's logit first: + bias, divided by repetition (multiplied if negative), - penalty. Takes the place of an earlier change.
        """

    def set_fraction(self, fraction: int) -> None:
        """The random number of the next token, in units of 2^-53."""

    def choose(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], isa: str | None = None) -> int:
        """
        The token for finite logits float32 [vocab]. Raises ValueError for a change of a token that is not there.
        """

class LinkGeometry:
    """What both engines of a link must have alike."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int, max_rows: int, hidden: int) -> None: ...

    @property
    def file_bytes(self) -> int:
        """Size of the link file."""

class LinkStatus(enum.Enum):
    computed = 0

    dropped = 1

    refused = 2

LINK_CHANNEL_WORDS_BYTES: int = 128

def link_resident(file: View, role: int, geometry: LinkGeometry) -> View:
    """[layers, experts] bytes: 1 for what that role's card holds."""

def link_format(file: View, fingerprint: str, geometry: LinkGeometry) -> None:
    """Writes the header of a new, zeroed link file."""

def link_may_ask(words: View) -> bool: ...

def link_post(words: View) -> None: ...

def link_has_request(words: View) -> bool: ...

def link_answer(words: View, status: LinkStatus, late: int) -> None: ...

def link_begin_serving(words: View) -> None: ...

def link_status(words: View) -> LinkStatus: ...

class Link:
    """One engine's end of a link on a host card."""

    def __init__(self, file: View, role: int, fingerprint: str, geometry: LinkGeometry, table: ExpertTable, isa: str, num_threads: int, stuck_after_s: float) -> None: ...

    def set_layer(self, layer: int, gate: BlobMatrix, up: BlobMatrix, down: BlobMatrix) -> None: ...

    def attach_to(self, table: ExpertTable) -> None:
        """From now on the table's linked experts are asked of the partner."""

    def serve(self, serving: bool) -> None:
        """Starts or stops to offer this card's experts to the partner."""

    @property
    def serving(self) -> bool: ...

    @property
    def partner_attached(self) -> bool: ...

    def begin_window(self, num_rows: int) -> bool:
        """Before a run: whether the partner is asked in it."""

    def take_loss(self) -> bool:
        """
        Whether the last run is void because the partner did not answer; true once.
        """

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None:
        """Leaves the link. Idempotent."""

    @property
    def served_rows(self) -> int: ...

    @property
    def late_experts(self) -> int: ...

    @property
    def num_losses(self) -> int: ...
