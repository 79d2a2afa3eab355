"""Errors as plain data: a code, a text, and primitives.

No exception object travels; ``from_wire`` builds the class anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import BucketSyncError, Details, EngineState, RemoteError, made
from .texts import utf8


def error_classes() -> dict[str, type[BucketSyncError]]:
    """Return every class of the tree by its code, the root included."""
    found: dict[str, type[BucketSyncError]] = {}
    waiting = [BucketSyncError]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.code, cls)  # a user's subclass may have no code of its own
        waiting.extend(cls.__subclasses__())
    return found


def to_wire(error: BaseException) -> tuple[str, str, Details]:
    """Return an error as code, text and details; a stranger becomes ``remote``."""
    if isinstance(error, BucketSyncError):
        return error.code, utf8(error.message), error.details()
    text = f"{type(error).__name__}: {error}"
    return RemoteError.code, utf8(text), {"remote_type": type(error).__name__}


def from_wire(
    code: str,
    message: str,
    details: Details,
    *,
    rank: int | None = None,
    engine_state: EngineState | None = None,
) -> BucketSyncError:
    """Build the error that the other end described.

    An unknown code, as a newer peer may send, becomes a ``RemoteError`` that keeps
    the code as its ``remote_type``.
    """
    cls = error_classes().get(code)
    if cls is None:
        cls, details = RemoteError, {"remote_type": code}
    error = made(cls, (message,))
    for field in cls.fields:
        value: Any = details.get(field)
        setattr(error, field, tuple(value) if isinstance(value, list) else value)
    error.rank = rank
    error.engine_state = engine_state
    return error


def to_dict(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON and an RPC's answer carry it."""
    return as_dict(*to_wire(error))


def as_dict(code: str, message: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of ``to_wire`` as ``to_dict`` has them."""
    return {"code": code, "message": message, "details": dict(details)}


def from_dict(found: Mapping[str, Any], *, rank: int | None = None) -> BucketSyncError:
    """Build the error that ``to_dict`` described.

    Raises:
        KeyError: A part of it is missing.
        TypeError: Its details are none.
        ValueError: Its details are none.
    """
    code, message = str(found["code"]), str(found["message"])
    return from_wire(code, message, dict(found["details"]), rank=rank)
