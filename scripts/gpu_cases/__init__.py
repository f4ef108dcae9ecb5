"""Cases that `scripts/gpu_check.py` runs on a card, each in a process of its own: python -m scripts.gpu_cases NAME --native FILE"""
