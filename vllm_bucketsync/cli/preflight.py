"""What a command needs of this environment, checked before anything is started."""

from __future__ import annotations

from vllm_bucketsync.doctor.environment import broken_companions, is_there

from .exits import CommandError, ExitCode


def require_vllm() -> None:
    """Refuse an environment in which vLLM cannot start.

    Raises:
        CommandError: vLLM is missing, or a companion of torch was built for another
            torch than the one that is installed. The text says what to type.
    """
    if not is_there("vllm"):
        raise CommandError(
            "vLLM is not installed here; pip install 'vllm-bucketsync[cpu]' for its CPU build, "
            "or 'vllm-bucketsync[vllm]' beside a GPU",
            code=ExitCode.UNAVAILABLE,
        )
    if broken := broken_companions():
        raise CommandError(
            f"{', '.join(broken)} does not load beside the torch that is installed "
            f"({'; '.join(broken.values())}), and vLLM cannot be imported with it; "
            f"pip uninstall -y {' '.join(broken)}",
            code=ExitCode.UNAVAILABLE,
        )


def require_package(name: str, *, why: str) -> None:
    """Refuse an environment without a package that a command needs.

    Args:
        name: As it is imported, and as pip calls it.
        why: What it does for the command.

    Raises:
        CommandError: It is missing. The text says what to type.
    """
    if not is_there(name):
        raise CommandError(
            f"{name} is not installed here, and {why}; pip install {name}",
            code=ExitCode.UNAVAILABLE,
        )
