"""The parts of `scripts/image.py`: base image, build, run, smoke test, and a docker engine of its own where none runs."""
