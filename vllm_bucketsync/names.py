"""From a trainer's tensor names to checkpoint names, each of them once.

Wrappers leave their own segments in a name (``_orig_mod.``, ``module.``, …), wherever
they are nested. They are taken out first, then the user's ``rename`` is asked.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import SourceError
from .layout import MAX_NAME_BYTES
from .texts import with_article

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT = ["base_model", "model"]


def strip_wrappers(name: str) -> str:
    """Return a name without the segments that trainers' wrappers added.

    These are ``module``, ``_orig_mod``, ``_fsdp_wrapped_module``,
    ``_checkpoint_wrapped_module``, and ``base_model.model``. The last segment is the
    tensor's own and always stays.
    """
    # Most names have none of them, and a model has many names.
    if "module." not in name and "_orig_mod." not in name and "base_model." not in name:
        return name
    *path, leaf = name.split(".")
    kept: list[str] = []
    for segment in path:
        if segment in _WRAPPERS:
            continue
        kept.append(segment)
        if kept[-2:] == _PEFT:
            del kept[-2:]
    return ".".join((*kept, leaf))


class Names:
    """The names of one source."""

    def __init__(self, rename: Callable[[str], str] | None = None) -> None:
        """Begin with none.

        Args:
            rename: Turns a stripped name into a checkpoint name; ``None`` keeps it.
        """
        self._rename = rename
        self._sources: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many names were taken."""
        return len(self._sources)

    def take(self, given: object) -> str:
        """Return the checkpoint name for a trainer's name.

        Raises:
            SourceError: It is no name, or leads to one that was taken before.
        """
        source = _checked(given, given=given)
        name = strip_wrappers(source)
        if self._rename is not None:
            name = self._rename(name)
        if name is not source:
            name = _checked(name, given=given)
        if name in self._sources:
            raise _taken(self._sources[name], source, name=name)
        self._sources[name] = source
        return name


def _taken(first: str, second: str, *, name: str) -> SourceError:
    if first == second:
        return SourceError(f"{first!r} was given twice; send each tensor once", name=name)
    return SourceError(
        f"{first!r} and {second!r} both become {name!r}; tell them apart with rename=, or leave "
        f"one of them out",
        name=name,
    )


def _checked(name: object, *, given: object) -> str:
    """Return a name as a plain ``str``, or say what is wrong with it."""
    become = "" if name is given else f" (what {given!r} becomes)"
    if not isinstance(name, str):
        raise SourceError(
            f"a tensor's name{become} is {name!r}, {with_article(type(name).__name__)}; "
            "expected a str"
        )
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise SourceError(
            f"the name {name!r}{become} cannot be written as UTF-8: {error.reason}"
        ) from None
    if not num_bytes:
        raise SourceError(f"a tensor's name{become} is empty; give it one, or check rename=")
    if num_bytes > MAX_NAME_BYTES:
        raise SourceError(
            f"the name {name[:60]!r}…{become} has {num_bytes} bytes; at most {MAX_NAME_BYTES} "
            f"are allowed"
        )
    return str(name)
