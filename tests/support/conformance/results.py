"""What came of each row, as JSON: what the table in the README is made from.

``VLLM_BUCKETSYNC_TEST_CONFORMANCE`` names a folder; every row that is tried leaves a file of
its own there, so that rows can be tried by several processes at a time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .rows import Row

VARIABLE = "VLLM_BUCKETSYNC_TEST_CONFORMANCE"
RIGHT, REFUSED, NOT_RUN, WRONG = "right", "refused", "not run", "wrong"


class NotRunError(Exception):
    """A row cannot be tried here, whoever pushes: with the reason."""


@contextmanager
def recorded(row: Row) -> Iterator[list[str]]:
    """Write down what comes of a row; skip the test of one that cannot be tried.

    Yields:
        A list, for why the row was refused, if that is what has to come of it.
    """
    begin_s, reasons = time.monotonic(), list[str]()
    try:
        yield reasons
    except NotRunError as error:
        _write(row, NOT_RUN, str(error), begin_s)
        pytest.skip(str(error))
    except pytest.skip.Exception as skipped:
        # By who starts the engines: this vLLM has none for the row.
        _write(row, NOT_RUN, str(skipped), begin_s)
        raise
    except BaseException as error:
        _write(row, WRONG, f"{type(error).__name__}: {error}"[:2000], begin_s)
        raise
    else:
        _write(row, REFUSED if reasons else RIGHT, " ".join(reasons), begin_s)


def _write(row: Row, result: str, reason: str, begin_s: float) -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    line = {
        "model": row.model,
        "mode": row.mode,
        "dtype": row.dtype,
        "result": result,
        "reason": " ".join(reason.split()),
        "seconds": round(time.monotonic() - begin_s, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **platform(),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"{line['device']}-{line['vllm']}-{row.name}.json".replace(" ", "_")
    (Path(folder) / name).write_text(json.dumps(line, indent=1) + "\n")


def platform() -> dict[str, Any]:
    """Return what a result holds for: the device, and the version of vLLM."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    number = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    return {"device": device.removeprefix("NVIDIA "), "vllm": number}
