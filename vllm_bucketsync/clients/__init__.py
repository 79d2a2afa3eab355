"""How a trainer asks an engine: one file for each kind of engine, and one contract.

Nothing here imports vllm: an engine object is known by what it can do.
"""
