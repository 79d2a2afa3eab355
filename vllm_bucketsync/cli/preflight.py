"""What a command needs of this environment, checked before anything is started."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from .exits import CommandError, ExitCode

# transformers imports these where they are installed, and fails with them.
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def require_vllm() -> None:
    """Refuse an environment in which vLLM cannot start.

    Raises:
        CommandError: vLLM is missing, or a companion of torch was built for another
            torch than the one that is installed. The text says what to type.
    """
    if find_spec("vllm") is None:
        raise CommandError(
            "vLLM is not installed here; pip install 'vllm-bucketsync[cpu]' for its CPU build, "
            "or 'vllm-bucketsync[vllm]' beside a GPU",
            code=ExitCode.UNAVAILABLE,
        )
    broken = {name: problem for name in _COMPANIONS if (problem := _import_problem(name))}
    if broken:
        raise CommandError(
            f"{', '.join(broken)} does not load beside the torch that is installed "
            f"({'; '.join(broken.values())}), and vLLM cannot be imported with it; "
            f"pip uninstall -y {' '.join(broken)}",
            code=ExitCode.UNAVAILABLE,
        )


def _import_problem(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # Loading a library can fail with a page of linker output.
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
