"""Messages as bytes: each is one msgpack map with a ``type`` tag.

msgspec checks every type and bound that ``messages.py`` names while it decodes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import RemoteProtocolError
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    Aborted,
    Ack,
    Batch,
    Busy,
    Command,
    Commit,
    Conclude,
    Deviate,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Message,
    Metas,
    Open,
    Prepared,
    Ready,
    Reply,
)

# Fits MAX_METAS metas with names of MAX_NAME_BYTES.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

T = TypeVar("T")

_COMMANDS = Open | Metas | Batch | Deviate | Busy | Finish | Conclude | Commit | Abort
_REPLIES = Hello | Ready | Fallback | Ack | Prepared | Done | Aborted | Error
_ENCODER = msgspec.msgpack.Encoder()
_COMMAND_DECODER = msgspec.msgpack.Decoder(_COMMANDS)
_REPLY_DECODER = msgspec.msgpack.Decoder(_REPLIES)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def decode_command(data: bytes) -> Command:
    """Return the command that ``data`` holds.

    Raises:
        RemoteProtocolError: It holds no command of this protocol version.
    """
    return _decode(_COMMAND_DECODER, data, "command")


def decode_reply(data: bytes) -> Reply:
    """Return the reply that ``data`` holds.

    Raises:
        RemoteProtocolError: It holds no reply of this protocol version.
    """
    return _decode(_REPLY_DECODER, data, "reply")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"a {what} of {len(data)} bytes arrived; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"no {what} of protocol {PROTOCOL_VERSION}: {error}; both ends must run the "
            f"same version of vllm_bucketsync"
        ) from error
