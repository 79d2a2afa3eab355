"""Measurements: transfers between two real processes, and engines (``engine``); nothing prints."""
