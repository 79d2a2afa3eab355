"""Measurements of a running vLLM engine: ours, vLLM's own, and plain copies, side by side."""
