"""Which GPUs this machine shows and what is free on them, asked of the driver's management library: no context is made on any card."""

from __future__ import annotations

from importlib.resources import files

from appliance.errors import SettingsError


def is_built_for_gpus() -> bool:
    """Whether the native module was built with CUDA; the build leaves a list of its architectures beside it."""
    return files("cuda_ext").joinpath("cuda_architectures.txt").is_file()


def free_gpu_bytes() -> dict[str, int]:
    """Free memory by GPU, such as {"cuda:0": ...}, in the order of the bus. Empty without a driver.

    Raises SettingsError for a driver that does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return {}
    except pynvml.NVMLError as error:
        raise SettingsError(f"the GPU driver does not answer: {error}; use cards = host:0,host:1", param="cards") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {f"cuda:{index}": int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for index, handle in enumerate(handles)}
    except pynvml.NVMLError as error:
        raise SettingsError(f"the GPU driver does not say what is free: {error}; use cards = host:0,host:1", param="cards") from None
    finally:
        pynvml.nvmlShutdown()
