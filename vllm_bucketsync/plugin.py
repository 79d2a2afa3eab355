"""What vLLM calls in each of its processes: the ``vllm.general_plugins`` entry point.

It runs before vLLM has chosen a device, in processes that may still fork. So nothing
here imports torch or vLLM, asks for a device, starts a thread, or raises.
"""

from __future__ import annotations

import logging

from . import __version__

_logger = logging.getLogger(__name__)


def register() -> None:
    """Take note that the plugin is loaded, and of what this process can use.

    The worker extension needs no registration: vLLM finds it by the name given as
    ``worker_extension_cls``. Idempotent, and never raises.
    """
    from .probe import own_probe

    found = own_probe()
    _logger.debug("vllm_bucketsync %s: %s, since %s", __version__, found.kind, found.reason)
