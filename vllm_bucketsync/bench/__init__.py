"""Measurements without vLLM, between two real processes; nothing here prints."""
