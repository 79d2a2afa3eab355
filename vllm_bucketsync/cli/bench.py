"""Measure what this machine does: transfers alone, or with a running engine.

"transfer" moves tensors of the shapes of a model between two processes, without vLLM,
beside plain copies of the same bytes. "engine" brings weights into a vLLM engine.
"""

from __future__ import annotations

import argparse

from . import bench_engine, bench_transfer, screen
from .exits import ExitCode

BENCHMARKS = {"transfer": bench_transfer, "engine": bench_engine}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, each with its options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, module in BENCHMARKS.items():
        text = module.TEXT
        benchmark = benchmarks.add_parser(name, help=text, description=text)
        screen.add_arguments(benchmark, default=argparse.SUPPRESS)
        module.add_arguments(benchmark)


def run(args: argparse.Namespace) -> ExitCode:
    """Run the benchmark that was named.

    Raises:
        CommandError: See its module.
    """
    code: ExitCode = BENCHMARKS[args.benchmark].run(args)
    return code
