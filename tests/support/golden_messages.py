"""One message of each kind, and the bytes that it has been since protocol 4.

Recorded once, never computed: whoever changes the wire changes ``PROTOCOL_VERSION``.
"""

# ruff: noqa: S106, S108 - neither a password nor a file, only what a message says

from __future__ import annotations

from vllm_bucketsync import handles, messages
from vllm_bucketsync.config import Verify
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import BucketLayout, Entry, TensorMeta
from vllm_bucketsync.messages import Message
from vllm_bucketsync.timeline import Span

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
            "de0013a474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64"
            "a777656967687473a97472616e73706f7274a373686da768616e646c65739285a474797065a37368"
            "6da26964a172a470617468aa2f6465762f73686d2f78a96e756d5f6279746573cd0400a663616e61"
            "7279c420636363636363636363636363636363636363636363636363636363636363636383a47479"
            "7065a6696e70726f63a26964a171a96e756d5f6279746573cd0200a7726567696f6e7392930000cd"
            "02009300cd0200cd0200a66c61796f757482af736c6f745f73697a655f6279746573cd0200ab6d61"
            "785f656e747269657303a86d616e6966657374a16da96e756d5f6d6574617302ab69735f6465636c"
            "61726564c3b07472616e73706f72745f726561736f6ea961736b656420666f72a6706c61636564c0"
            "a77061727469616c91a62a2e62696173a761646170746572c0a969735f747261636564c2a969735f"
            "61746f6d6963c2a6766572696679a46e6f6e65ab6e756d5f776f726b65727301"
        ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="discard", transport="inproc", handles=(), regions=(),
            layout=BucketLayout(256),
        ),
        (
            "de0013a474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64"
            "a764697363617264a97472616e73706f7274a6696e70726f63a768616e646c657390a7726567696f"
            "6e7390a66c61796f757482af736c6f745f73697a655f6279746573cd0100ab6d61785f656e747269"
            "6573cd2000a86d616e6966657374c0a96e756d5f6d6574617300ab69735f6465636c61726564c2b0"
            "7472616e73706f72745f726561736f6ea0a6706c61636564c0a77061727469616c90a76164617074"
            "6572c0a969735f747261636564c2a969735f61746f6d6963c2a6766572696679a46e6f6e65ab6e75"
            "6d5f776f726b65727301"
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
            "de0013a474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64"
            "a777656967687473a97472616e73706f7274a8637564615f697063a768616e646c65739188a47479"
            "7065a8637564615f697063a26964a172a56c6561736585a474797065a373686da26964a172a47061"
            "7468a22f78a96e756d5f6279746573cd0100a663616e617279c42063636363636363636363636363"
            "63636363636363636363636363636363636363a7626f6f745f6964a162ab6465766963655f757569"
            "64a54750552d31a96e756d5f6279746573cd0200a66d656d6f7279c4406d6d6d6d6d6d6d6d6d6d6d"
            "6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d"
            "6d6d6d6d6d6d6d6d6d6d6d6d6da66576656e747392c4406464646464646464646464646464646464"
            "64646464646464646464646464646464646464646464646464646464646464646464646464646464"
            "64646464646464c44065656565656565656565656565656565656565656565656565656565656565"
            "656565656565656565656565656565656565656565656565656565656565656565a7726567696f6e"
            "7392930000cd01009300cd0100cd0100a66c61796f757482af736c6f745f73697a655f6279746573"
            "cd0100ab6d61785f656e7472696573cd2000a86d616e6966657374c0a96e756d5f6d6574617300ab"
            "69735f6465636c61726564c2b07472616e73706f72745f726561736f6ea0a6706c61636564c0a770"
            "61727469616c90a761646170746572c0a969735f747261636564c2a969735f61746f6d6963c2a676"
            "6572696679a46e6f6e65ab6e756d5f776f726b65727301"
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
            "de0013a474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64"
            "a761646170746572a97472616e73706f7274a373686da768616e646c657390a7726567696f6e7390"
            "a66c61796f757482af736c6f745f73697a655f6279746573cd0100ab6d61785f656e7472696573cd"
            "2000a86d616e6966657374c0a96e756d5f6d6574617300ab69735f6465636c61726564c3b0747261"
            "6e73706f72745f726561736f6ea0a6706c61636564c0a77061727469616c90a76164617074657284"
            "a46e616d65a170ab6c6f72615f696e745f6964ce40000000a96c6f72615f70617468b06275636b65"
            "7473796e633a2f2f704037a6636f6e666967a77b2272223a347da969735f747261636564c2a96973"
            "5f61746f6d6963c2a6766572696679a46e6f6e65ab6e756d5f776f726b65727301"
        ),
    ),
    (
        messages.Open(
            update_id="u", version="7", kind="weights", transport="shm", handles=(), regions=(),
            layout=BucketLayout(256), is_declared=True, is_atomic=True, verify=Verify.DIGEST,
        ),
        (
            "de0013a474797065a46f70656ea97570646174655f6964a175a776657273696f6ea137a46b696e64"
            "a777656967687473a97472616e73706f7274a373686da768616e646c657390a7726567696f6e7390"
            "a66c61796f757482af736c6f745f73697a655f6279746573cd0100ab6d61785f656e7472696573cd"
            "2000a86d616e6966657374c0a96e756d5f6d6574617300ab69735f6465636c61726564c3b0747261"
            "6e73706f72745f726561736f6ea0a6706c61636564c0a77061727469616c90a761646170746572c0"
            "a969735f747261636564c2a969735f61746f6d6963c3a6766572696679a6646967657374ab6e756d"
            "5f776f726b65727301"
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
            "86a474797065a56261746368a373657100a6726567696f6e01a7656e7472696573c0a56d65746173"
            "90a764696765737473c400"
        ),
    ),
    (
        messages.Batch(
            seq=70_000, region=1, entries=(Entry(0, 0, 0, 12), Entry(1, 256, 256, 8)),
            metas=(TensorMeta("b", "uint8", (0, 4), 0),),
        ),
        (
            "86a474797065a56261746368a3736571ce00011170a6726567696f6e01a7656e7472696573929400"
            "00000c9401cd0100cd010008a56d657461739195a162a575696e743892000400c2a7646967657374"
            "73c400"
        ),
    ),
    (
        messages.Batch(seq=1, region=0, digests=b"\x01\x02\x03\x04\x05\x06\x07\x08"),
        (
            "86a474797065a56261746368a373657101a6726567696f6e00a7656e7472696573c0a56d65746173"
            "90a764696765737473c4080102030405060708"
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
    (
        messages.Conclude(num_batches=2, num_tensors=3, num_bytes=1 << 40, manifest="m"),
        (
            "85a474797065a8636f6e636c756465ab6e756d5f6261746368657302ab6e756d5f74656e736f7273"
            "03a96e756d5f6279746573cf0000010000000000a86d616e6966657374a16d"
        ),
    ),
    (messages.Prepared(), "81a474797065a87072657061726564"),
    (messages.Commit(), "81a474797065a6636f6d6d6974"),
    (
        messages.Done(),
        (
            "8ba474797065a4646f6e65a573706c697487aa6e756d5f64697265637400ac6469726563745f6279"
            "74657300ad6e756d5f70726f63657373656400af70726f6365737365645f627974657300aa6e756d"
            "5f6c6f6164656400ac6c6f616465645f627974657300a970726f636573735f73cb00000000000000"
            "00a673746167656482a96e756d5f627974657300a5706c616365a0a7636865636b656487ad617272"
            "697665645f627974657300aa6e756d5f64697265637400ac6469726563745f627974657300ad6e75"
            "6d5f70726f63657373656400af70726f6365737365645f627974657300ad6e756d5f756e63686563"
            "6b656400a9756e636865636b656490ac636c6f6e65645f627974657300a7736b697070656490a56e"
            "6f74657390aa6c6566745f61735f697390a5636173747390a97374616765735f6d7380a57370616e"
            "7390"
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
            staged=messages.Staged(num_bytes=70_001, place="cuda:0"),
            checked=messages.Checked(
                arrived_bytes=1, num_direct=2, direct_bytes=3, num_processed=4, processed_bytes=5,
                num_unchecked=6, unchecked=("a.weight",),
            ),
            cloned_bytes=9,
            skipped=("rope.inv_freq",),
            notes=("cast",),
            casts=(
                messages.Cast(sent="float32", held="bfloat16", num_tensors=2, names=("a", "b")),
            ),
            stages_ms={"waiting": 0.25},
            spans=(Span("loading", 1, 2, 3, 0, "m"),),
        ),
        (
            "8ba474797065a4646f6e65a573706c697487aa6e756d5f64697265637401ac6469726563745f6279"
            "746573cd0100ad6e756d5f70726f63657373656402af70726f6365737365645f6279746573ce0001"
            "1170aa6e756d5f6c6f6164656403ac6c6f616465645f627974657304a970726f636573735f73cb3f"
            "e0000000000000a673746167656482a96e756d5f6279746573ce00011171a5706c616365a6637564"
            "613a30a7636865636b656487ad617272697665645f627974657301aa6e756d5f64697265637402ac"
            "6469726563745f627974657303ad6e756d5f70726f63657373656404af70726f6365737365645f62"
            "7974657305ad6e756d5f756e636865636b656406a9756e636865636b656491a8612e776569676874"
            "ac636c6f6e65645f627974657309a7736b697070656491ad726f70652e696e765f66726571a56e6f"
            "74657391a463617374aa6c6566745f61735f697390a563617374739184a473656e74a7666c6f6174"
            "3332a468656c64a862666c6f61743136ab6e756d5f74656e736f727302a56e616d657392a161a162"
            "a97374616765735f6d7381a777616974696e67cb3fd0000000000000a57370616e739196a76c6f61"
            "64696e6701020300a16d"
        ),
    ),
    (
        messages.Abort(reason="rank 1 failed"),
        (
            "82a474797065a561626f7274a6726561736f6ead72616e6b2031206661696c6564"
        ),
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
