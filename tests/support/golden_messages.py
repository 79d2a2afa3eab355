"""One message of each kind, and the bytes that it has been since protocol 3.

Recorded once, never computed: whoever changes the wire changes ``PROTOCOL_VERSION``.
"""

# ruff: noqa: S106, S108 - neither a password nor a file, only what a message says

from __future__ import annotations

from vllm_bucketsync import handles, messages
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import BucketLayout, Entry, TensorMeta
from vllm_bucketsync.messages import Message

GOLDEN: list[tuple[Message, str]] = [
    (
        messages.Hello(
            token="t", protocol=2, plugin_version="0.1.0", engine=0, rank=1, dp_index=2,
            world_size=4, instance_id="i", pid=4711, host_id="h", boot_id="b", device="cuda:0",
            device_uuid="u", transports=("shm",), transport_reason="no GPU", regions=("r",),
            manifests=("m",), version="7", adapters={"p": "8"},
        ),
        (
            "de0014a474797065a568656c6c6fa5746f6b656ea174a870726f746f636f6c02ae706c7567696e5f"
            "76657273696f6ea5302e312e30a6656e67696e6500a472616e6b01a864705f696e64657802aa776f"
            "726c645f73697a6504ab696e7374616e63655f6964a169a3706964cd1267a7686f73745f6964a168"
            "a7626f6f745f6964a162a6646576696365a6637564613a30ab6465766963655f75756964a175aa74"
            "72616e73706f72747391a373686db07472616e73706f72745f726561736f6ea66e6f20475055a772"
            "6567696f6e7391a172a96d616e69666573747391a16da776657273696f6ea137a861646170746572"
            "7381a170a138"
        ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="weights", transport="shm",
            handles=(
                handles.ShmHandle(id="r", path="/dev/shm/x", num_bytes=1024, canary=b"c" * 32),
                handles.InprocHandle(id="q", num_bytes=512),
            ),
            regions=(messages.Region(0, 0, 512), messages.Region(0, 512, 512)),
            layout=BucketLayout(512, 3), manifest="m", num_metas=2, is_declared=True,
            transport_reason="asked for", partial=("*.bias",),
        ),
        (
            "8fa474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64a777"
            "656967687473a97472616e73706f7274a373686da768616e646c65739285a474797065a373686da2"
            "6964a172a470617468aa2f6465762f73686d2f78a96e756d5f6279746573cd0400a663616e617279"
            "c420636363636363636363636363636363636363636363636363636363636363636383a474797065"
            "a6696e70726f63a26964a171a96e756d5f6279746573cd0200a7726567696f6e7392930000cd0200"
            "9300cd0200cd0200a66c61796f757482af736c6f745f73697a655f6279746573cd0200ab6d61785f"
            "656e747269657303a86d616e6966657374a16da96e756d5f6d6574617302ab69735f6465636c6172"
            "6564c3b07472616e73706f72745f726561736f6ea961736b656420666f72a6706c61636564c0a770"
            "61727469616c91a62a2e62696173a761646170746572c0"
    ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="discard", transport="inproc", handles=(), regions=(),
            layout=BucketLayout(256),
        ),
        (
            "8fa474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64a764"
            "697363617264a97472616e73706f7274a6696e70726f63a768616e646c657390a7726567696f6e73"
            "90a66c61796f757482af736c6f745f73697a655f6279746573cd0100ab6d61785f656e7472696573"
            "cd2000a86d616e6966657374c0a96e756d5f6d6574617300ab69735f6465636c61726564c2b07472"
            "616e73706f72745f726561736f6ea0a6706c61636564c0a77061727469616c90a761646170746572"
            "c0"
    ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="weights", transport="cuda_ipc",
            handles=(
                handles.CudaIpcHandle(
                    id="r", boot_id="b", device_uuid="GPU-1", num_bytes=512, memory=b"m" * 64,
                    lease=handles.ShmHandle(id="r", path="/x", num_bytes=256, canary=b"c" * 32),
                    events=(b"d" * 64, b"e" * 64),
                ),
            ),
            regions=(messages.Region(0, 0, 256), messages.Region(0, 256, 256)),
            layout=BucketLayout(256),
        ),
        (
            "8fa474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64a777"
            "656967687473a97472616e73706f7274a8637564615f697063a768616e646c65739188a474797065"
            "a8637564615f697063a26964a172a56c6561736585a474797065a373686da26964a172a470617468"
            "a22f78a96e756d5f6279746573cd0100a663616e617279c420636363636363636363636363636363"
            "6363636363636363636363636363636363a7626f6f745f6964a162ab6465766963655f75756964a5"
            "4750552d31a96e756d5f6279746573cd0200a66d656d6f7279c4406d6d6d6d6d6d6d6d6d6d6d6d6d"
            "6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d"
            "6d6d6d6d6d6d6d6d6d6d6da66576656e747392c44064646464646464646464646464646464646464"
            "64646464646464646464646464646464646464646464646464646464646464646464646464646464"
            "6464646464c440656565656565656565656565656565656565656565656565656565656565656565"
            "65656565656565656565656565656565656565656565656565656565656565a7726567696f6e7392"
            "930000cd01009300cd0100cd0100a66c61796f757482af736c6f745f73697a655f6279746573cd01"
            "00ab6d61785f656e7472696573cd2000a86d616e6966657374c0a96e756d5f6d6574617300ab6973"
            "5f6465636c61726564c2b07472616e73706f72745f726561736f6ea0a6706c61636564c0a7706172"
            "7469616c90a761646170746572c0"
    ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="adapter", transport="shm", handles=(), regions=(),
            layout=BucketLayout(256), is_declared=True,
            adapter=messages.AdapterSpec(
                name="p", lora_int_id=1 << 30, lora_path="bucketsync://p@7", config='{"r":4}'
            ),
        ),
        (
            "8fa474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64a761"
            "646170746572a97472616e73706f7274a373686da768616e646c657390a7726567696f6e7390a66c"
            "61796f757482af736c6f745f73697a655f6279746573cd0100ab6d61785f656e7472696573cd2000"
            "a86d616e6966657374c0a96e756d5f6d6574617300ab69735f6465636c61726564c3b07472616e73"
            "706f72745f726561736f6ea0a6706c61636564c0a77061727469616c90a76164617074657284a46e"
            "616d65a170ab6c6f72615f696e745f6964ce40000000a96c6f72615f70617468b06275636b657473"
            "796e633a2f2f704037a6636f6e666967a77b2272223a347d"
        ),
    ),
    (
        messages.Metas(
            metas=(
                TensorMeta("a.weight", "bfloat16", (2, 3), 12),
                TensorMeta("a.count", "int64", (), 8, True),
            )
        ),
        (
            "82a474797065a56d65746173a56d657461739295a8612e776569676874a862666c6f617431369202"
            "030cc295a7612e636f756e74a5696e7436349008c3"
        ),
    ),
    (messages.Ready(), "81a474797065a57265616479"),
    (
        messages.Fallback(transport="cuda_ipc", reason="no peer access"),
        (
            "83a474797065a866616c6c6261636ba97472616e73706f7274a8637564615f697063a6726561736f"
            "6eae6e6f207065657220616363657373"
        ),
    ),
    (
        messages.Batch(seq=0, region=1),
        (
            "85a474797065a56261746368a373657100a6726567696f6e01a7656e7472696573c0a56d65746173"
            "90"
        ),
    ),
    (
        messages.Batch(
            seq=70_000, region=1, entries=(Entry(0, 0, 0, 12), Entry(1, 256, 256, 8)),
            metas=(TensorMeta("b", "uint8", (0, 4), 0),),
        ),
        (
            "85a474797065a56261746368a3736571ce00011170a6726567696f6e01a7656e7472696573929400"
            "00000c9401cd0100cd010008a56d657461739195a162a575696e743892000400c2"
        ),
    ),
    (messages.Ack(seq=3), "82a474797065a361636ba373657103"),
    (messages.Busy(num_tensors=5), "82a474797065a462757379ab6e756d5f74656e736f727305"),
    (messages.Deviate(index=5), "82a474797065a764657669617465a5696e64657805"),
    (
        messages.Finish(num_batches=2, num_tensors=3, num_bytes=1 << 40, manifest="m"),
        (
            "85a474797065a666696e697368ab6e756d5f6261746368657302ab6e756d5f74656e736f727303a9"
            "6e756d5f6279746573cf0000010000000000a86d616e6966657374a16d"
        ),
    ),
    (messages.Prepared(), "81a474797065a87072657061726564"),
    (messages.Commit(), "81a474797065a6636f6d6d6974"),
    (
        messages.Done(),
        (
            "88a474797065a4646f6e65a573706c697487aa6e756d5f64697265637400ac6469726563745f6279"
            "74657300ad6e756d5f70726f63657373656400af70726f6365737365645f627974657300aa6e756d"
            "5f6c6f6164656400ac6c6f616465645f627974657300a970726f636573735f73cb00000000000000"
            "00ac636c6f6e65645f627974657300a7736b697070656490a56e6f74657390aa6c6566745f61735f"
            "697390a66c6f61645f73cb0000000000000000a6776169745f73cb0000000000000000"
        ),
    ),
    (
        messages.Done(
            split=messages.LoadSplit(
                num_direct=1,
                direct_bytes=256,
                num_processed=2,
                processed_bytes=70_000,
                num_loaded=3,
                loaded_bytes=4,
                process_s=0.5,
            ),
            cloned_bytes=9,
            skipped=("rope.inv_freq",),
            notes=("cast",),
            left_as_is=("*.bias",),
            load_s=0.5,
            wait_s=0.25,
        ),
        (
            "88a474797065a4646f6e65a573706c697487aa6e756d5f64697265637401ac6469726563745f6279"
            "746573cd0100ad6e756d5f70726f63657373656402af70726f6365737365645f6279746573ce0001"
            "1170aa6e756d5f6c6f6164656403ac6c6f616465645f627974657304a970726f636573735f73cb3f"
            "e0000000000000ac636c6f6e65645f627974657309a7736b697070656491ad726f70652e696e765f"
            "66726571a56e6f74657391a463617374aa6c6566745f61735f697391a62a2e62696173a66c6f6164"
            "5f73cb3fe0000000000000a6776169745f73cb3fd0000000000000"
        ),
    ),
    (
        messages.Abort(reason="rank 1 failed"),
        "82a474797065a561626f7274a6726561736f6ead72616e6b2031206661696c6564",
    ),
    (
        messages.Aborted(state=EngineState.UNCHANGED),
        "82a474797065a761626f72746564a57374617465a9756e6368616e676564",
    ),
    (
        messages.Error(
            code="load", message="2 problems", details={"name": None, "problems": ["a", "b"]},
            state=EngineState.TORN,
        ),
        (
            "85a474797065a56572726f72a4636f6465a46c6f6164a76d657373616765aa322070726f626c656d"
            "73a764657461696c7382a46e616d65c0a870726f626c656d7392a161a162a57374617465a4746f72"
            "6e"
        ),
    ),
]  # fmt: skip
