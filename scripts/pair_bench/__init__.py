"""The benchmark of two cards: the model, its arena, what is asked of a pair, llama.cpp beside it, the wires between the cards."""
