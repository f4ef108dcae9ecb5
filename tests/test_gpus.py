"""Which GPUs CUDA will show: the variables that it obeys, over a management library that knows nothing of them."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable

import pytest

from appliance.desk.child_process import ChildProcess
from appliance.errors import SettingsError
from appliance.memory.gpus import free_gpu_bytes
from appliance.settings import gpu_environment

BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
GPUS = {"GPU-aa11": 10, "GPU-ab22": 20, "GPU-cc33": 30}
"""Free bytes by UUID, in the order of the bus."""
PARTS = {"MIG-1111": 3, "MIG-2222": 4}


class NvmlError(Exception):
    pass


class NotFoundError(NvmlError):
    pass


class MissingError(NvmlError):
    pass


class FakeNvml(types.ModuleType):
    """As much of pynvml as is asked for. A handle is a UUID."""

    NVMLError = NvmlError
    NVMLError_NotFound = NVMLError_InvalidArgument = NotFoundError
    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = MissingError

    def __init__(self, *, names: tuple[str, ...] = ("H200",) * 3, init_error: NvmlError | None = None) -> None:
        super().__init__("pynvml")
        self.names = dict(zip(GPUS, names, strict=True))
        self.init_error = init_error
        self.num_open = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(GPUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(GPUS)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in PARTS:
            raise NotFoundError
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.names.get(handle, "a part of an H200")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(free=(GPUS | PARTS)[handle])


Install = Callable[[FakeNvml], FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(nvml: FakeNvml) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def free(visible: str | None, **more: str) -> list[int]:
    shown = free_gpu_bytes(({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) | more)
    assert list(shown) == [f"cuda:{index}" for index in range(len(shown))]
    return list(shown.values())


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [10, 20, 30]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("1", [20]),
        ("2,0", [30, 10]),
        (" 2, 0", [30, 10]),
        ("1gpu2,2ampere", [20, 30]),
        ("0,2,-1,1", [10, 30]),
        ("0,3,1", [10]),
        ("1,0,1", []),
        ("1,-1,1", [20]),
        ("0,GPU-cc33", [10]),
        ("GPU-cc33,GPU-aa11", [30, 10]),
        ("GPU-c,GPU-aa", [30, 10]),
        ("GPU-cc33,GPU-a,GPU-aa11", [30]),
        ("GPU-cc33,", [30]),
        ("GPU-cc33,0", [30]),
        ("GPU-ff", []),
        ("MIG-2222", [4]),
        ("MIG-2222,MIG-1111", [4]),
        ("MIG-3333", []),
    ],
)
def test_gpus_are_those_that_cuda_shows_in_its_order(install: Install, visible: str | None, expected: list[int]) -> None:
    nvml = install(FakeNvml())
    assert free(visible) == expected
    assert nvml.num_open == 0


def test_an_order_that_only_cuda_knows_is_refused_with_a_sentence(install: Install) -> None:
    install(FakeNvml(names=("H200", "A2", "H200")))
    assert free("1,0") == [20, 10]
    assert free("GPU-ab,GPU-aa", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [20, 10]
    for visible in (None, "1,0"):
        with pytest.raises(SettingsError, match="CUDA_DEVICE_ORDER = 'FASTEST_FIRST'"):
            free(visible, CUDA_DEVICE_ORDER="FASTEST_FIRST")


def test_equal_gpus_stand_in_the_order_of_the_bus_whatever_is_set(install: Install) -> None:
    install(FakeNvml())
    assert free("2,0", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [30, 10]


def test_without_a_driver_there_are_no_gpus(install: Install) -> None:
    install(FakeNvml(init_error=MissingError()))
    assert free(None) == []


def test_a_driver_that_does_not_answer_is_named(install: Install) -> None:
    install(FakeNvml(init_error=NvmlError("it hangs")))
    with pytest.raises(SettingsError, match="the GPU driver does not answer: it hangs"):
        free(None)


def test_children_count_gpus_by_the_bus_unless_told_otherwise() -> None:
    assert gpu_environment({"A": "b"}) == {"A": "b", **BUS_ORDER}
    assert gpu_environment({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def test_the_desk_starts_engines_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    lines: list[str] = []
    ended = threading.Event()
    argv = [sys.executable, "-c", "import os; print(os.environ['CUDA_DEVICE_ORDER'])"]
    child = ChildProcess("lead", argv, lambda _child, text: lines.append(text), lambda _child, _ending: ended.set())
    assert ended.wait(60)
    child.join(60)
    assert lines == ["PCI_BUS_ID"]
