"""Clients that never stop asking a server, and what they were answered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = ("the engine takes", "new weights", "a bucket")
Answer = tuple[tuple[int, ...], tuple[float, ...]]


def ask(http: httpx.Client, prompt: str, *, model: str = "demo") -> Answer:
    """Return the greedy tokens and log-probabilities that a server answers with."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])


@dataclass
class Traffic:
    """Threads that ask in turn until ``stop``; a context manager.

    Attributes:
        answers: Prompt and answer of every request, in no order.
        failures: What went wrong.
        num_healthy: How often the server said that it is well.
    """

    make_client: Any
    num_clients: int = 3
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_healthy: int = 0

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_in_turn, args=(index,))
            for index in range(self.num_clients)
        ]
        self._threads.append(threading.Thread(target=self._watch_health))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask_in_turn(self, index: int) -> None:
        with self.make_client() as http:
            while not self._stop.is_set():
                index += 1
                prompt = PROMPTS[index % len(PROMPTS)]
                try:
                    self.answers.append((prompt, ask(http, prompt)))
                except httpx.HTTPError as error:
                    self.failures.append(f"{prompt}: {error!r}")
                    return

    def _watch_health(self) -> None:
        with self.make_client() as http:
            while not self._stop.wait(0.05):
                try:
                    http.get("/health").raise_for_status()
                    self.num_healthy += 1
                except httpx.HTTPError as error:
                    self.failures.append(f"health: {error!r}")
                    return
