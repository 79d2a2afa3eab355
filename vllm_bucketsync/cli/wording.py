"""What the package says, in the words of the command line.

Its texts name the arguments of ``WeightSync`` and of its methods, which is what a program
has. Here some of these are options, others are variables of the environment alone.
"""

from __future__ import annotations

import re
from dataclasses import fields

from vllm_bucketsync.config import API_KEY_ENV, ENV_PREFIX, Settings

OPTIONS = {
    "api_key=": f"--api-key or {API_KEY_ENV}",
    "partial=": "--partial",
    "name=": "--name",
    "version=": "--version",
    "pause=": "--pause ",
}
_SETTINGS = {field.name: ENV_PREFIX + field.name.upper() for field in fields(Settings)}
# Those that can be told from plain English by themselves.
_TELLING = "|".join(name for name in _SETTINGS if "_" in name)
_RULES = (
    # A setting with its variable beside it: only the variable is left.
    (re.compile(rf"(?:it as )?\b({'|'.join(_SETTINGS)})= or (?:in )?(?={ENV_PREFIX})"), ""),
    (re.compile(rf"\bset ({'|'.join(_SETTINGS)})\b"), lambda match: f"set {_SETTINGS[match[1]]}"),
    (re.compile(rf"(?<!-)\b({_TELLING})\b=?"), lambda match: _SETTINGS[match[1]]),
    # The key may be beside its variable as well.
    (re.compile(rf"\bapi_key=,? or (?:in )?(?={API_KEY_ENV})"), "--api-key or "),
    (re.compile(rf"\b({'|'.join(OPTIONS)})'?(\w*)'?"), lambda match: OPTIONS[match[1]] + match[2]),
    (re.compile(r"\bwith rename="), "in the checkpoint"),
    (re.compile(r"\bpush_lora\b"), "push-lora"),
)


def as_options(text: str) -> str:
    """Return a text with arguments as options, and settings as variables."""
    for pattern, words in _RULES:
        text = pattern.sub(words, text)
    return text
