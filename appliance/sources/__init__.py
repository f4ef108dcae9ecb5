"""Where a model comes from: a path, a folder with several quantisations, or a repository of a hub."""
