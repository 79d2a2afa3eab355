"""How properties are tried: reproducibly, and without a stopwatch on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")
