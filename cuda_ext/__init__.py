"""The native module and its slow twin: kernels of the expert tiers, host cards, and `reference.py`."""
