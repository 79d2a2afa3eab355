"""Pieces of the texts that people read."""

from __future__ import annotations


def with_article(noun: str) -> str:
    """Return a noun with its article, for texts: an int, a dict."""
    return f"{'an' if noun[:1].lower() in set('aeiou') else 'a'} {noun}"


def utf8(text: str) -> str:
    """Return a text that can be encoded: file names that are no UTF-8 get ``?`` in places."""
    return text.encode(errors="replace").decode()
