"""Names of pushed adapters in an API server: requests have them as their ``model``.

They lie where vLLM keeps those of adapters that it was started with or told to load. A name
that is not there is a 404 before any worker hears of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .adapters import check_spec, is_ours
from .errors import AdapterError
from .messages import AdapterSpec


class Names:
    """The names of one API server process."""

    def __init__(self, models: Any, *, make_request: Callable[..., Any]) -> None:
        """Begin with those that vLLM has.

        Args:
            models: vLLM's ``OpenAIServingModels``; ``None`` where the server has none.
            make_request: Makes vLLM's ``LoRARequest`` from its fields.
        """
        self._models = models
        self._make_request = make_request

    @property
    def _requests(self) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self._models, "lora_requests", {})
        return found

    def refusal(self, adapter: AdapterSpec, *, version: str) -> AdapterError | None:
        """Return why requests could not have an adapter's name, or ``None`` where they could."""
        try:
            check_spec(adapter, version=version)
        except AdapterError as error:
            return error
        other = self._requests.get(adapter.name)
        if not hasattr(self._models, "lora_requests"):
            why = "this server keeps no names of adapters"
        elif self._models.is_base_model(adapter.name):
            why = "this server's base model has that name"
        elif other is not None and not is_ours(other.lora_path):
            why = f"this server has that name for the adapter in {other.lora_path!r}"
        else:
            return None
        return AdapterError(
            f"adapter {adapter.name!r} cannot be served: {why}; nothing was changed; give it "
            f"another name",
            adapter=adapter.name,
        )

    def register(self, adapter: AdapterSpec) -> None:
        """Let requests have an adapter's name: every rank of every replica has it now."""
        self._requests[adapter.name] = self._make_request(
            lora_name=adapter.name,
            lora_int_id=adapter.lora_int_id,
            lora_path=adapter.lora_path,
        )

    def forget(self, name: str) -> Any:
        """Take the name of a pushed adapter away, and return what ``restore`` needs."""
        known = self._requests.get(name)
        if known is None or not is_ours(known.lora_path):
            return None
        return self._requests.pop(name)

    def restore(self, name: str, known: Any) -> None:
        """Give a name back that ``forget`` has taken."""
        if known is not None:
            self._requests[name] = known
