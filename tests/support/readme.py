"""README's code blocks, as tests find and run them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(*languages: str) -> list[str]:
    """Return the blocks in these languages, in their order."""
    return [body for language, body in _BLOCK.findall(TEXT) if language in languages]


def block(beginning: str) -> str:
    """Return the one block that begins so."""
    (found,) = [one for one in blocks("python", "sh") if one.startswith(beginning)]
    return found


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a block with what a user would put in for README's names; each has to be there."""
    for name, here in names.items():
        if name not in text:
            raise ValueError(f"README's block has no {name!r}: {text}")
        text = text.replace(name, here)
    return text
