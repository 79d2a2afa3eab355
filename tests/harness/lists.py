"""Which of vLLM's own test files touch what this package touches, and what each one needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestFile:
    """One of vLLM's test files: run in a process of its own, as vLLM does.

    Attributes:
        path: Below vLLM's ``tests``.
        is_short: It is in the short list: minutes in all, and something of it runs everywhere.
        select: Arguments for pytest that choose among its tests.
        plugins: vLLM's example plugins that it expects to be installed.
        is_alone: It uses ports that are fixed, so it never runs beside itself.
        needs: Modules without which it cannot be collected.
    """

    __test__ = False

    path: str
    is_short: bool = False
    select: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    is_alone: bool = False
    needs: tuple[str, ...] = ()


# By what they touch: plugins, worker, collective_rpc, weight transfer, reload, adapters,
# pause and resume, weight checker, sleep, executor.
FILES = (
    TestFile(
        "plugins_tests/test_endpoint_plugins.py",
        is_short=True,
        plugins=("vllm_add_dummy_endpoint_plugin",),
    ),
    TestFile("plugins_tests/test_scheduler_plugins.py"),
    TestFile("plugins_tests/test_stats_logger_plugins.py", plugins=("vllm_add_dummy_stat_logger",)),
    TestFile("plugins_tests/test_io_processor_plugins.py"),
    TestFile("plugins_tests/lora_resolvers"),
    TestFile("v1/worker/test_gpu_worker_weight_transfer.py", is_short=True),
    TestFile("v1/worker/test_sleep_mode_backend.py"),
    TestFile("v1/engine/test_wake_up_contract.py"),
    TestFile("entrypoints/serve/dev/rpc/test_collective_rpc.py"),
    TestFile("entrypoints/llm/test_collective_rpc.py", is_short=True),
    TestFile("entrypoints/rl/weight_transfer/test_offline.py"),
    TestFile("entrypoints/rl/weight_transfer_metrics/test_weight_operation_metrics.py"),
    TestFile("entrypoints/rl/state_transitions/test_pause_resume.py", is_alone=True),
    TestFile("entrypoints/rl/state_transitions/test_weight_checker.py", is_alone=True),
    TestFile("entrypoints/rl/state_transitions/test_sleep.py", is_alone=True),
    TestFile("distributed/test_weight_transfer.py", needs=("ray",)),
    TestFile("distributed/test_packed_tensor.py"),
    TestFile(
        "model_executor/model_loader/test_reload.py",
        is_short=True,
        # What is left out downloads models of many sizes, or starts a dozen engines.
        select=("-k", "not test_reload_weights and not online_quantize and not kv_scale"),
    ),
    TestFile(
        "model_executor/model_loader/test_reload.py",
        select=("-k", "test_reload_weights and Qwen3-0.6B"),
    ),
    # Their fixtures end ray after each test, whether it was begun or not.
    TestFile("lora/test_peft_helper.py", needs=("ray",)),
    TestFile("lora/test_lora_manager.py", is_short=True, needs=("ray",)),
    TestFile("lora/test_worker.py", needs=("ray",)),
    TestFile("v1/executor/test_executor.py"),
)
