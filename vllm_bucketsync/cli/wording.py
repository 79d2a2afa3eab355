"""What the package says, in the words of the command line.

Its texts name the arguments of ``WeightSync`` and of its methods, which is what a program
has. Here some of these are options, others are variables of the environment alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields

from vllm_bucketsync.config import API_KEY_ENV, ENV_PREFIX, Settings

# Arguments that are options of every command that could be told of them.
OPTIONS = {
    "api_key": f"--api-key or {API_KEY_ENV}",
    "partial": "--partial",
    "rename": "--rename or --strip-prefix",
    "atomic": "--atomic",
    "dry_run": "--dry-run",
    "require_newer": "--require-newer",
    "name": "--name",
    "version": "--version",
    "pause": "--pause",
}
_SETTINGS = [field.name for field in fields(Settings)]
_ANY = "|".join(_SETTINGS)
# Those that can be told from plain English by themselves.
_TELLING = "|".join(name for name in _SETTINGS if "_" in name)
# With its variable beside it, as what is to be set, or by its name alone.
_SETTING = re.compile(
    rf"(?:it as )?\b({_ANY})= or (?:in )?{ENV_PREFIX}\w+|(?<=\bset )({_ANY})\b|\b({_TELLING})\b=?"
)
_ARGUMENT = re.compile(
    rf"\b({'|'.join(OPTIONS)})=(?: or (?:in )?{API_KEY_ENV})?(?:'(?P<value>\w+)'|True)?"
)
# Of those that can be told from plain English by themselves.
_FLAG = re.compile(r"\b(require_newer|dry_run)\b|(?<=push without )atomic\b")
_OTHERS = {"use push_lora": "use push-lora"}


def as_options(text: str, *, settings: Collection[str] = ()) -> str:
    """Return a text with arguments as options, and settings as variables.

    Args:
        text: What the package says.
        settings: Those that the command has an option for.
    """

    def setting(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[3]
        if name in settings:
            return f"--{name.replace('_', '-')}"
        return f"{ENV_PREFIX}{name.upper()}"

    text = _ARGUMENT.sub(_option, _SETTING.sub(setting, text))
    text = _FLAG.sub(lambda match: OPTIONS[match[0]], text)
    for words, others in _OTHERS.items():
        text = text.replace(words, others)
    return text


def _option(match: re.Match[str]) -> str:
    return OPTIONS[match[1]] + (f" {match['value']}" if match["value"] else "")
