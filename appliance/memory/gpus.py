"""Which GPUs CUDA will show and what is free on them, asked of the driver's management library: no context is made on any card.

That library knows nothing of `CUDA_VISIBLE_DEVICES`, so the variable is read here as CUDA reads it: `cuda:N` is the N-th GPU that
an engine will see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from appliance.errors import SettingsError
from appliance.settings import gpu_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


def is_built_for_gpus() -> bool:
    """Whether the native module was built with CUDA; the build leaves a list of its architectures beside it."""
    return files("cuda_ext").joinpath("cuda_architectures.txt").is_file()


def free_gpu_bytes(environment: Mapping[str, str] | None = None) -> dict[str, int]:
    """Free memory by GPU, such as {"cuda:0": ...}, in CUDA's order. Empty without a driver. `environment`: None is this process's.

    Raises SettingsError for a driver that does not answer, and for an order that only CUDA knows.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return {}
    except pynvml.NVMLError as error:
        raise SettingsError(f"the GPU driver does not answer: {error}; use cards = host:0,host:1", param="cards") from None
    try:
        return {f"cuda:{index}": gpu.free_bytes for index, gpu in enumerate(_shown(gpu_environment(environment)))}
    except pynvml.NVMLError as error:
        raise SettingsError(f"the GPU driver does not say what is free: {error}; use cards = host:0,host:1", param="cards") from None
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class _Gpu:
    uuid: str
    name: str
    free_bytes: int

    @classmethod
    def of(cls, handle: object) -> _Gpu:
        import pynvml

        free_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        return cls(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), free_bytes)


def _shown(environment: Mapping[str, str]) -> list[_Gpu]:
    """The GPUs that CUDA shows, in its order. The library is open."""
    visible = environment.get(VISIBLE)
    if visible is not None and visible.startswith("MIG-"):
        return _part_of_gpu(visible.partition(",")[0].strip())
    gpus = _all_gpus()
    if visible is not None and visible.startswith("GPU-"):
        return _listed([_by_uuid(entry.strip(), gpus) for entry in visible.split(",")])
    _check_order(environment[ORDER], gpus)
    if visible is None:
        return gpus
    return _listed([_by_index(entry.strip(), gpus) for entry in visible.split(",")])


def _all_gpus() -> list[_Gpu]:
    """In the order of the bus."""
    import pynvml

    return [_Gpu.of(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]


def _part_of_gpu(mig_id: str) -> list[_Gpu]:
    """Of several parts CUDA shows a process the first alone."""
    import pynvml

    try:
        return [_Gpu.of(pynvml.nvmlDeviceGetHandleByUUID(mig_id))]
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return []


def _check_order(order: str, gpus: Sequence[_Gpu]) -> None:
    """GPUs of one kind stand in the order of the bus in any case; how fast different ones are, CUDA alone decides."""
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise SettingsError(
            f"{ORDER} = {order!r} puts GPUs of different kinds into an order that CUDA alone knows, so nothing can be planned; "
            f"leave it out, set it to PCI_BUS_ID, or list UUIDs in {VISIBLE}",
            param="cards",
        )


def _listed(named: Sequence[_Gpu | None]) -> list[_Gpu]:
    """The first entry that names no GPU ends the list; a GPU that is named twice before makes it empty."""
    gpus: list[_Gpu] = []
    for gpu in named:
        if gpu is None:
            break
        gpus.append(gpu)
    return gpus if len({gpu.uuid for gpu in gpus}) == len(gpus) else []


def _by_uuid(entry: str, gpus: Sequence[_Gpu]) -> _Gpu | None:
    """The beginning of a UUID is enough where it is that of one GPU."""
    found = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _by_index(entry: str, gpus: Sequence[_Gpu]) -> _Gpu | None:
    """The number at the beginning counts, as in C."""
    number = re.match(r"\+?[0-9]+", entry)
    return gpus[int(number[0])] if number and int(number[0]) < len(gpus) else None
