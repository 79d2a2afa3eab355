"""All checks, in the order in which a reader wants them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError
from vllm_bucketsync.probe import machine_probe

from . import environment, machine, plugins
from .findings import Finding
from .transports import Deadline, check_transports


def check_machine(
    *, is_cleaning: bool, deadline: Deadline, environ: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield what will work on this machine and why not.

    Args:
        is_cleaning: Remove what dead owners of our user left.
        deadline: Until when transports are tried.
        environ: The environment; the process's own where ``None``.
    """
    environ = os.environ if environ is None else environ
    yield environment.check_package()
    yield environment.check_torch()
    yield environment.check_companions()
    yield environment.check_vllm()
    yield plugins.check_plugin(environ)
    yield plugins.check_route(environ)
    yield environment.check_settings(environ)
    yield machine.check_namespaces(environ)
    yield machine.check_ptrace_scope()
    settings, probe = _settings(environ), machine_probe()
    yield machine.check_memlock(has_gpu=probe.kind == "cuda_ipc")
    yield machine.check_shared_memory(settings)
    yield machine.check_private_dir(settings)
    look = machine.clean_stale_files if is_cleaning else machine.check_stale_files
    yield look(settings)
    yield from check_transports(settings, probe=probe, deadline=deadline)


def check_servers(urls: Sequence[str], *, api_key: str | None) -> Iterator[Finding]:
    """Yield whether running servers can be updated from here.

    Args:
        urls: Their base URLs.
        api_key: What they were started with; the environment's where ``None``.
    """
    # Needs ZeroMQ and more, which a machine without them is to be told of first.
    from .server import check_server

    for url in urls:
        yield from check_server(url, api_key=api_key)


def _settings(environ: Mapping[str, str]) -> Settings:
    """Return the environment's settings, or the defaults where those cannot be meant."""
    try:
        return Settings.from_env(environ)
    except ConfigError:
        return Settings()
