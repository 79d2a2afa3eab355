"""What vLLM calls in each of its processes: the ``vllm.general_plugins`` entry point.

It runs before vLLM has chosen a device, in processes that may still fork. So nothing
here imports torch or vLLM, asks for a device, starts a thread, or raises.
"""

from __future__ import annotations

import logging

from . import __version__

_logger = logging.getLogger(__name__)
# Set up by vLLM before it loads plugins; that there is one does not import it.
_VLLM_LOGGER = "vllm"


def register() -> None:
    """Take note of what this process can use, and let what we log be seen.

    The worker extension needs no registration: vLLM finds it by the name given as
    ``worker_extension_cls``. Idempotent, and never raises.
    """
    from .probe import own_probe

    _log_where_vllm_does()
    found = own_probe()
    _logger.debug("vllm_bucketsync %s: %s, since %s", __version__, found.kind, found.reason)


def _log_where_vllm_does() -> None:
    """Send this package's log to vLLM's handlers, at vLLM's level.

    vLLM shows its own loggers and no others, so that nobody would see what a worker has
    to say. Where logs of ours already go somewhere, such as to a root logger that the
    trainer has set up, they go on going there.
    """
    ours, theirs = logging.getLogger(__package__), logging.getLogger(_VLLM_LOGGER)
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    # As vLLM's own: a root logger that is set up later would show everything twice.
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
