"""The benchmark of the host engine: model files, engines in child processes, and what the memory gives."""
