"""The benchmark of a card: what the engine does there, what llama.cpp does, what the bytes allow, and the page about it."""
