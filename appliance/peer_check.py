"""Do two GPUs reach each other directly? Asked of the driver, and then tried: what is written must arrive.

    python -m appliance.peer_check 0 1     prints one line of JSON, a `PeerReport`; exit code 0 unless it could not be found out

Peer access that is advertised is not always there: some boards drop writes or never finish them. So a pattern goes both ways and is
read back, in a process of its own that can be given up. Only the driver's library is needed, and some 100 MB on each card for a second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.lifeline import end_with_parent
from appliance.settings import gpu_environment
from appliance.units import GIB, MIB

DRIVER = "libcuda.so.1"
LIMIT_S = 60.0
TRIAL_BYTES = 64 * MIB
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: with NVLink, not over PCIe."""
_ALREADY_ENABLED = 704


class PeerReport(BaseModel):
    """What was found. `reason` is a clause that says why not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reaches: bool
    reason: str | None = None
    is_nvlink: bool = False
    gib_per_s: float | None = None
    """The slower direction."""


def check_peers(first: int, second: int, *, driver: str = DRIVER, limit_s: float = LIMIT_S) -> PeerReport:
    """Asks in another process, so that a hanging driver holds up nobody for longer than `limit_s`. Never raises."""
    command = [sys.executable, "-m", "appliance.peer_check", str(first), str(second), "--driver", driver, "--parent", str(os.getpid())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False, env=gpu_environment()
        )
        return PeerReport.model_validate_json(done.stdout.strip())
    except subprocess.TimeoutExpired:
        return PeerReport(reaches=False, reason=f"a copy between them did not end within {limit_s:.0f} s")
    except ValidationError:
        words = done.stderr.strip().splitlines()
        return PeerReport(reaches=False, reason=f"the check ended with code {done.returncode}: {words[-1] if words else 'without a word'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m appliance.peer_check", description="Tries whether two GPUs reach each other.")
    parser.add_argument("first", type=int)
    parser.add_argument("second", type=int)
    parser.add_argument("--driver", default=DRIVER)
    parser.add_argument("--parent", type=int, help="process that this one ends with")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        end_with_parent(options.parent)
    try:
        report = _report(_Driver(options.driver), options.first, options.second)
    except _DriverError as error:
        report = PeerReport(reaches=False, reason=str(error))
    print(report.model_dump_json())
    return 0


class _DriverError(Exception):
    """A call to the driver failed; a clause."""


class _Driver:
    """The few calls that are needed. Its handles live as long as the process."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            raise _DriverError(f"there is no driver ({library})") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object, accept: int = 0) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (0, accept):
            raise _DriverError(f"{name} failed with code {code}")

    def device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        return device

    def number(self, name: str, *arguments: object) -> int:
        """The int that a call writes into its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def context(self, device: ctypes.c_int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def enter(self, context: ctypes.c_void_p) -> None:
        self.call("cuCtxSetCurrent", context)

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer


def _report(driver: _Driver, first: int, second: int) -> PeerReport:
    devices = [driver.device(number) for number in (first, second)]
    for source, target, number, other in ((0, 1, first, second), (1, 0, second, first)):
        if not driver.number("cuDeviceCanAccessPeer", devices[source], devices[target]):
            return PeerReport(reaches=False, reason=f"the driver allows GPU {number} no access to GPU {other}")
    is_nvlink = driver.number("cuDeviceGetP2PAttribute", _NATIVE_ATOMICS, devices[0], devices[1]) == 1
    contexts = [driver.context(device) for device in devices]
    pointers = []
    for own, other in ((0, 1), (1, 0)):
        driver.enter(contexts[own])
        driver.call("cuCtxEnablePeerAccess", contexts[other], 0, accept=_ALREADY_ENABLED)
        pointers.append(driver.allocate(TRIAL_BYTES))
    speeds = []
    for source, target in ((0, 1), (1, 0)):
        arrived, seconds = _send(driver, contexts, pointers, source, target)
        if not arrived:
            names = (first, second)
            return PeerReport(reaches=False, reason=f"what GPU {names[source]} writes to GPU {names[target]} does not arrive")
        speeds.append(TRIAL_BYTES / GIB / seconds)
    return PeerReport(reaches=True, is_nvlink=is_nvlink, gib_per_s=round(min(speeds), 1))


def _send(
    driver: _Driver, contexts: list[ctypes.c_void_p], pointers: list[ctypes.c_uint64], source: int, target: int
) -> tuple[bool, float]:
    """Writes a pattern into the source's memory and zeros into the target's, copies, reads back: whether it arrived, and seconds."""
    nbytes = ctypes.c_size_t(TRIAL_BYTES)
    pattern = bytes((position * 37 + source + 1) % 251 for position in range(4096)) * (TRIAL_BYTES // 4096)
    for index, content in ((source, pattern), (target, bytes(TRIAL_BYTES))):
        driver.enter(contexts[index])
        driver.call("cuMemcpyHtoD_v2", pointers[index], content, nbytes)
        driver.call("cuCtxSynchronize")
    driver.enter(contexts[source])
    began = time.perf_counter()
    driver.call("cuMemcpyPeer", pointers[target], contexts[target], pointers[source], contexts[source], nbytes)
    driver.call("cuCtxSynchronize")
    seconds = time.perf_counter() - began
    driver.enter(contexts[target])
    driver.call("cuCtxSynchronize")
    received = ctypes.create_string_buffer(TRIAL_BYTES)
    driver.call("cuMemcpyDtoH_v2", received, pointers[target], nbytes)
    return received.raw == pattern, seconds


if __name__ == "__main__":
    sys.exit(main())
