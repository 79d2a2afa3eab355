"""A parser that says which word was probably meant, where it was given another."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """``ArgumentParser`` for a command, whose errors name the nearest option or choice."""

    def parse_known_args(  # type: ignore[override]  # of two overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse what is unknown where its neighbours are known: in its command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [one for one in unknown if one.startswith("-")]
            near = [_nearest(one.partition("=")[0], self._option_string_actions) for one in options]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(near)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, and the nearest of the choices."""
        if match := _CHOICE.search(message):
            known = re.findall(r"[\w.-]+", match["known"])
            message += _meant([_nearest(match["given"], known)])
        super().error(message)


def _nearest(given: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(given, list(known), n=1)), None)


def _meant(names: Iterable[str | None]) -> str:
    found = [name for name in names if name is not None]
    return f"; did you mean {' '.join(found)}?" if found else ""
