"""The demo itself: real engines, a real push from another process, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_bucketsync.cli.exits import ExitCode

COMMAND = [sys.executable, "-c", "from vllm_bucketsync.cli import main; raise SystemExit(main())"]


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[StartDemo]:
    ...
