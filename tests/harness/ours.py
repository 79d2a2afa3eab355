"""Our own tests, which use nothing but vLLM's fixtures."""

from __future__ import annotations

import time
from pathlib import Path

from harness.running import Place, pytest
from support import junit

_HERE = Path(__file__).parent


def run(place: Place) -> list[str]:
    """Run them where this package is installed, and return what is wrong."""
    began_s = time.monotonic()
    arguments = ["-c", str(_HERE / "pytest.ini"), "--rootdir", str(_HERE), "-p", "tests.conftest"]
    ended = pytest(
        place, place.with_plugin, [*arguments, str(_HERE)], name="ours", path=[_HERE.parent]
    )
    found = ended.run
    told = "nothing was run" if found is None else found.summary()
    print(f"our tests, with vLLM's fixtures: {told} ({time.monotonic() - began_s:.0f} s)")
    if found is not None and ended.code == 0 and set(found.outcomes.values()) == {junit.PASSED}:
        return []
    # Nothing of ours is skipped on any machine.
    print(ended.tail())
    return [f"our tests: {told}, pytest's exit code {ended.code}; see {ended.log}"]
