"""How long it takes to empty a card: by the lines of the protocol through a real engine's pipe, and by the driver's checkpoints, which
move all that a process has on its card into host memory. Times are reported; what must hold is that answers stay the same.

    vram      `VRAM n` gives all slots back, `VRAM` takes them again, and they fill
    freeze    the process is locked and checkpointed, then restored and unlocked (GPUs only)
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.errors import TandemError
from appliance.memory.gpus import free_gpu_bytes
from appliance.protocol import Generate, Reply, Word
from appliance.settings import Settings
from appliance.units import GIB, MIB
from scripts.gpu_cases.engine_pipe import EngineEndedError, EnginePipe, engine_of
from scripts.gpu_cases.findings import Findings, Part
from scripts.host_bench.model import BenchModel, qwen3_shape, write_model
from tests.gguf_writing import ModelShape

QUICK_SHAPE = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=3, width=256, vocab=320, context=512)
LAYERS, CONTEXT = 8, 4096
REPEAT = 3
TOO_MUCH_MIB = 1_000_000
LOCK_MS = 20_000
FILL_S = 60.0
REQUEST = Generate(id="r", prompt=[1, 2, 3, 4], max_tokens=24, ignore_eos=True)


def run(cards: tuple[str, ...], *, quick: bool) -> Iterator[Part]:
    card = cards[0]
    with tempfile.TemporaryDirectory(prefix="tandem-check-", dir="/dev/shm") as folder:
        shape = QUICK_SHAPE if quick else qwen3_shape(LAYERS, CONTEXT)
        model = BenchModel(Path(folder) / "m.gguf", shape, "Q4_K", "Q4_K")
        write_model(model)
        slots = shape.layers * shape.experts
        settings = Settings.model_validate(
            {"model": model.path, "cards": card, "slots": slots, "pool_threads": 4, "shm_dir": folder, "state_dir": folder}
            | {"context": shape.context, "log_level": "warning"}
        )
        start = time.monotonic()
        vram, frozen = Findings(), Findings()
        try:
            with engine_of(settings) as engine:
                sizes = {"arena MiB": round(model.expert_bytes / MIB), "slots MiB": _slots_mib(engine)}
                vram.notes |= {**sizes, "ready s": round(time.monotonic() - start, 1)}
                _give_and_take(engine, vram)
                yield Part("vram", time.monotonic() - start, vram)
                if card.startswith("cuda:"):
                    start = time.monotonic()
                    frozen.notes |= sizes
                    _freeze_and_thaw(engine, card, frozen)
                    yield Part("freeze", time.monotonic() - start, frozen)
        except (EngineEndedError, TandemError, OSError) as error:
            yield Part("engine", time.monotonic() - start, Findings([str(error)]))


def _slots_mib(engine: EnginePipe) -> int:
    return -(-engine.ready.plan_bytes["expert slots"] // MIB)


def _give_and_take(engine: EnginePipe, found: Findings) -> None:
    expected = engine.answer(REQUEST)
    refused = engine.ask(Word.VRAM, str(TOO_MUCH_MIB))
    found.expect(refused.startswith(f"{Reply.ERR} failed"), f"VRAM {TOO_MUCH_MIB} was answered by {refused}")
    times: dict[str, list[float]] = {"give back s": [], "take again s": [], "full again s": []}
    for _ in range(REPEAT):
        start = time.monotonic()
        gone = engine.ask(Word.VRAM, str(_slots_mib(engine)))
        times["give back s"].append(time.monotonic() - start)
        found.expect(gone.startswith(f"{Reply.VRAM} ") and engine.stats().slots == 0, f"VRAM was answered by {gone}")
        found.expect(engine.answer(REQUEST) == expected, "another answer without slots")
        start = time.monotonic()
        found.expect(engine.ask(Word.VRAM).startswith(f"{Reply.VRAM} "), "the slots could not be taken again")
        times["take again s"].append(time.monotonic() - start)
        while engine.stats().is_filling and time.monotonic() < start + FILL_S:
            time.sleep(0.002)
        times["full again s"].append(time.monotonic() - start)
        found.expect(engine.answer(REQUEST) == expected, "another answer with the slots taken again")
    found.notes |= {name: [round(one, 4) for one in seconds] for name, seconds in times.items()}


def _freeze_and_thaw(engine: EnginePipe, card: str, found: Findings) -> None:
    expected = engine.answer(REQUEST)
    driver = ctypes.CDLL("libcuda.so.1")
    _call(driver, "cuInit", 0)
    times: dict[str, list[float]] = {"freeze s": [], "thaw s": [], "first answer s": []}
    for _ in range(REPEAT):
        before, start = free_gpu_bytes()[card], time.monotonic()
        try:
            _call(driver, "cuCheckpointProcessLock", engine.pid, _arguments(LOCK_MS))
            _call(driver, "cuCheckpointProcessCheckpoint", engine.pid, _arguments())
        except OSError as error:
            found.notes["freeze"] = str(error)  # a driver may not do it; nothing depends on it
            driver.cuCheckpointProcessUnlock(engine.pid, _arguments())
            return
        times["freeze s"].append(time.monotonic() - start)
        found.notes["free GiB, running and frozen"] = [round(free / GIB, 2) for free in (before, free_gpu_bytes()[card])]
        start = time.monotonic()
        _call(driver, "cuCheckpointProcessRestore", engine.pid, _arguments())
        _call(driver, "cuCheckpointProcessUnlock", engine.pid, _arguments())
        times["thaw s"].append(time.monotonic() - start)
        start = time.monotonic()
        found.expect(engine.answer(REQUEST) == expected, "another answer after the thaw")
        times["first answer s"].append(time.monotonic() - start)
    found.notes |= {name: [round(one, 4) for one in seconds] for name, seconds in times.items()}


def _arguments(first: int = 0) -> ctypes.Array[ctypes.c_uint32]:
    """What all four calls take: 64 bytes, of which the lock reads the first word as a limit in milliseconds."""
    return (ctypes.c_uint32 * 16)(first)


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Raises OSError with the driver's number for what went wrong."""
    try:
        code = getattr(driver, name)(*arguments)
    except AttributeError:
        raise OSError(f"this driver has no {name}") from None
    if code != 0:
        raise OSError(f"{name} gave error {code}")
