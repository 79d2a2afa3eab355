"""Push weights into a real engine from another process, and prove that outputs follow.

Two tiny random checkpoints are built; nothing is downloaded. One engine starts from
the old one, another from the new one. A trainer, in a process of its own, pushes the
new weights into the first, through this package's own route and with a key made for the
run; from then on both must generate the same, to the last bit of every log-probability.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_bucketsync.config import API_KEY_ENV

from . import screen
from .demo_model import PROMPTS, build_checkpoint
from .exits import CommandError, ExitCode
from .preflight import require_vllm
from .progress import Advance, Steps
from .servers import STOP_TIMEOUT_S, Completion, Server, environment, with_logs
from .tables import report_table

NUM_TOKENS = 8
PUSH_TIMEOUT_S = 120.0
VERSION = "step-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo saw.

    Attributes:
        before: What the engine generated with the weights that it started with.
        after: What it generated after the push.
        expected: What an engine generated that was started from the new checkpoint.
        report: The trainer's ``PushReport``, as plain data.
    """

    before: Sequence[Completion]
    after: Sequence[Completion]
    expected: Sequence[Completion]
    report: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Leave the parser as it is: there is nothing to choose."""


def run(args: argparse.Namespace) -> ExitCode:
    """Run the demo, and show what came of it.

    Returns:
        ``FAILED`` where the outputs are not those of the new checkpoint.

    Raises:
        CommandError: vLLM is missing, or an engine or the push failed.
    """
    started = time.monotonic()
    outcome, folder = _see(args)
    problems = differences(outcome)
    console = screen.stdout(args)
    console.print(_outputs_table(outcome), report_table(outcome.report))
    if problems:
        console.print(*(f"[red]wrong:[/red] {problem}" for problem in problems), sep="\n")
        console.print(f"the logs of the engines and of the trainer are in {folder}")
        return ExitCode.FAILED
    shutil.rmtree(folder)
    num_tokens = sum(len(completion.token_ids) for completion in outcome.after)
    console.print(
        f"[green]ok:[/green] {num_tokens} tokens and their log-probabilities are those of an "
        f"engine started from the new checkpoint; {time.monotonic() - started:.0f} s in all"
    )
    return ExitCode.OK


def differences(outcome: Outcome) -> list[str]:
    """Return what is wrong with an outcome, a sentence each; nothing where all is well."""
    problems = []
    for after, expected in zip(outcome.after, outcome.expected, strict=True):
        if after.token_ids != expected.token_ids:
            problems.append(
                f"after {after.prompt!r} the engine generates {after.text!r}, and one started "
                f"from the new checkpoint {expected.text!r}"
            )
        elif after.logprobs != expected.logprobs:
            pairs = zip(after.logprobs, expected.logprobs, strict=True)
            distance = max(abs(one - other) for one, other in pairs)
            problems.append(
                f"after {after.prompt!r} the words are right, but a log-probability is off by "
                f"{distance:.3g}"
            )
    pairs_of_tokens = zip(outcome.before, outcome.after, strict=True)
    if all(before.token_ids == after.token_ids for before, after in pairs_of_tokens):
        problems.append("the push changed no output at all, so nothing is proved")
    return problems


def _see(args: argparse.Namespace) -> tuple[Outcome, Path]:
    """Return what happened, and the folder that holds the logs of it.

    The folder also stays where an error, whose text names a log, ends the demo.
    """
    with Steps(screen.stderr(args)) as steps:
        with steps.step("look at this environment"):
            require_vllm()
        os.environ.update(environment(os.environ))
        # Short: sockets are made in it, whose paths may have 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="bucketsync-"))
        try:
            return _push_and_generate(folder, steps), folder
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            raise


def _push_and_generate(folder: Path, steps: Steps) -> Outcome:
    old, new = folder / "old-checkpoint", folder / "new-checkpoint"
    with steps.step("build two random checkpoints"):
        build_checkpoint(old, seed=1)
        build_checkpoint(new, seed=2)
    extension = ["--worker-extension-cls", "vllm_bucketsync.WorkerExtension"]
    with (
        Server.start(old, log=folder / "engine.log", arguments=extension) as engine,
        Server.start(new, log=folder / "reference.log") as reference,
        _stopping(steps, engine, reference),
    ):
        with steps.step("start an engine from the old checkpoint, and one from the new"):
            engine.wait_until_ready()
            reference.wait_until_ready()
        with steps.step("generate with the old weights"):
            before = _generate(engine)
        with steps.step(f"a trainer process pushes the new weights as {VERSION!r}") as advance:
            report = _train(new, engine, log=folder / "trainer.log", advance=advance)
        with steps.step("generate with both engines"):
            after, expected = _generate(engine), _generate(reference)
    return Outcome(before=before, after=after, expected=expected, report=report)


@contextmanager
def _stopping(steps: Steps, *servers: Server) -> Iterator[None]:
    """Stop servers at the end, all at once, and say so: it takes seconds."""
    try:
        yield
    except KeyboardInterrupt:
        steps.say(f"interrupted: stopping the engines, for {STOP_TIMEOUT_S:g} s at most")
        raise
    finally:
        for server in servers:
            server.ask_to_stop()
        with steps.step("stop the engines"):
            for server in servers:
                server.stop()


def _generate(engine: Server) -> list[Completion]:
    # One at a time: what shares a batch may change the last bit.
    return [engine.complete(prompt, num_tokens=NUM_TOKENS) for prompt in PROMPTS]


def _train(checkpoint: Path, engine: Server, *, log: Path, advance: Advance) -> dict[str, Any]:
    module = "vllm_bucketsync.cli.demo_trainer"
    command = [sys.executable, "-m", module, str(checkpoint), engine.url, VERSION]
    last: dict[str, Any] = {}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, API_KEY_ENV: engine.api_key},
        ) as trainer,
        _killed_after(trainer, timeout_s=PUSH_TIMEOUT_S),
    ):
        for line in trainer.stdout or ():
            last = json.loads(line)
            if "done" in last:
                advance(last["done"], last["total"])
    if "report" not in last:
        reason = last.get("error", f"the trainer ended with code {trainer.returncode}")
        raise CommandError(with_logs(f"the push failed: {reason}", engine.log, log))
    return dict(last["report"])


@contextmanager
def _killed_after(process: subprocess.Popen[str], *, timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()


def _outputs_table(outcome: Outcome) -> Table:
    table = Table(
        title="What the engine generates",
        caption="reference: an engine that was started from the new checkpoint",
        show_lines=True,
    )
    for heading in ("prompt", "before", "after the push", "reference"):
        table.add_column(heading, ratio=1)
    rows = zip(outcome.before, outcome.after, outcome.expected, strict=True)
    for before, after, expected in rows:
        table.add_row(before.prompt, before.text, after.text, expected.text)
    return table
