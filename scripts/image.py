"""The container image: `build`, `run` and `smoke`, through the docker SDK.

    python scripts/image.py build  [--cuda ON|OFF] [--architectures 80;90] [--jobs N] [--tag TAG]
                                   [--base IMAGE --build-base IMAGE | --local-base]
    python scripts/image.py run    [--gpus] [--shm SIZE] [--models DIR] [--tag TAG] [-- OPTIONS OF tandem serve]
    python scripts/image.py smoke  [--tag TAG]
    python scripts/image.py all    build with a local base, then smoke; what CI does

Without a running engine one is started for the command where that is possible, and stopped after it; `--keep FOLDER` keeps its images.
Exit code 0: done; 1: failed, with a sentence; 3: skipped, since this machine can have no engine or no base, with a sentence.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEFAULT_TAG = "tandem:dev"
SKIPPED = 3
STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parse(arguments)
    try:
        from scripts.container.base import NoBaseError, missing_for_local_base
        from scripts.container.build import BuildFailedError
        from scripts.container.engine import NoEngineError, running_engine
        from scripts.container.smoke import SmokeFailedError
    except ModuleNotFoundError as error:
        return _skip(
            f"the package {error.name} is not installed; make image installs what is missing, and docker build . needs none of this"
        )
    if options.verb == "all" and (missing := missing_for_local_base()):
        return _skip(missing)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an engine of our own must not outlive us
    try:
        with running_engine(options.keep) as engine:
            return _do(options, engine)
    except (NoEngineError, NoBaseError) as error:
        return _skip(str(error))
    except (BuildFailedError, SmokeFailedError) as error:
        print(f"image: {options.verb} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("image: stopped", file=sys.stderr)
        return STOPPED


def _do(options: argparse.Namespace, engine: object) -> int:
    from scripts.container.build import BuildOptions, build_image
    from scripts.container.engine import Engine
    from scripts.container.run import run_image
    from scripts.container.smoke import smoke_image

    assert isinstance(engine, Engine)
    if options.verb in ("build", "all"):
        began = time.monotonic()
        wanted = BuildOptions(
            ROOT,
            options.tag,
            options.cuda,
            options.architectures,
            options.base,
            options.build_base,
            options.jobs,
            options.local_base or options.verb == "all",
        )
        built = build_image(engine.client(), wanted, print)
        print(f"image: built {options.tag}, {built / 1e6:.0f} MB, in {time.monotonic() - began:.0f} s", flush=True)
    if options.verb == "run":
        return run_image(engine, options.tag, options.gpus, options.shm, options.models, options.serve)
    if options.verb in ("smoke", "all"):
        for line in smoke_image(engine, options.tag):
            print(f"image: {line}", flush=True)
    return 0


def _skip(reason: str) -> int:
    print(f"image: SKIPPED: {reason}", file=sys.stderr)
    return SKIPPED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/image.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("build", "run", "smoke", "all"))
    parser.add_argument("--tag", default=DEFAULT_TAG)
    parser.add_argument("--keep", type=Path, help="folder of an own engine's images; empty: gone afterwards")
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="ON", help="with CUDA kernels")
    parser.add_argument("--architectures", help="for CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--jobs", type=int, help="compilers that run at once; default: two more than there are cores")
    parser.add_argument("--base", help="image of the run-time stage")
    parser.add_argument("--build-base", help="image of the build stage")
    parser.add_argument("--local-base", action="store_true", help="a base of this machine's Debian by debootstrap, for both stages")
    parser.add_argument("--gpus", action="store_true", help="give the container all GPUs")
    parser.add_argument("--shm", default="2g", help="size of its /dev/shm")
    parser.add_argument("--models", type=Path, help="folder that is /models in it")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.serve = words[end + 1 :]
    return options


if __name__ == "__main__":
    sys.exit(main())
