"""One valid message of each kind that takes more than a line to write."""

from __future__ import annotations

from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.layout import BucketLayout
from vllm_bucketsync.messages import PROTOCOL_VERSION, Hello, Open, Region

HELLO = Hello(
    token="t",  # noqa: S106
    protocol=PROTOCOL_VERSION,
    plugin_version="0.1.0",
    engine=0,
    rank=0,
    dp_index=0,
    world_size=1,
    instance_id="i",
    pid=1,
    host_id="h",
    boot_id="b",
    device="cpu",
    device_uuid="",
    transports=("shm",),
)
OPEN = Open(
    update_id="u",
    version="1",
    kind="weights",
    transport="shm",
    handles=(ShmHandle(id="r", path="/r.seg", num_bytes=512, canary=bytes(32)),),
    regions=(Region(0, 0, 256), Region(0, 256, 256)),
    layout=BucketLayout(256),
)
