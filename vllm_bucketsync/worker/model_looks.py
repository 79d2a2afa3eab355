"""How a worker's model looks: whether it is as it was costs less to ask than to walk it.

Whatever a dry run and a plan depend on besides the manifest is looked at: which modules
there are and where, their tensors, quant methods and expert maps, where each tensor's
bytes lie and what they mean, and which part of the model this worker has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch

from ..looks import Looks
from . import compat
from .finalised import Finalised

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


class ModelLooks:
    """One model, as it was when it was looked at.

    Keeps what it saw: an identity that no other object can have needs no more than ``is``.
    """

    def __init__(self, worker: Any) -> None:
        """Look at the model of ``worker``, which is live."""
        self._model = worker.model_runner.get_model()
        self._part = _part(worker)
        self._modules = list(self._model.modules())
        tables = _tables_of(self._modules)
        self._sizes = list(map(len, tables))
        # Twice the first name: of one name alone, an item getter makes no tuple. In whatever
        # order: a reload takes tensors away and puts them back.
        self._getters = [itemgetter(*table, next(iter(table))) for table in tables if table]
        self._values = self._get_values(tables)
        self._entries = _entries_of(tables)
        self._methods = _methods_of(self._modules)
        tensors = [one for one in self._values if isinstance(one, torch.Tensor)]
        # Each once: for as long as the values are the same, so are their twins.
        self._tensors = list({id(one): one for one in tensors}.values())
        self._looks = Looks(self._tensors)
        self._finalised: Finalised | None = None

    def are_those_of(self, worker: Any) -> bool:
        """Whether the model of ``worker`` is still the same, to the last address."""
        if worker.model_runner.get_model() is not self._model or _part(worker) != self._part:
            return False
        # Children are in tables: while those are the same, so is the list of modules.
        return (
            self._has_same_tables()
            and _are_same(_methods_of(self._modules), self._methods)
            # The very same objects, so that these are among them.
            and self._looks.are_those_of(self._tensors)
        )

    @property
    def finalised(self) -> Finalised:
        """The modules that have to be finalised after all others."""
        if self._finalised is None:
            self._finalised = Finalised(filter(compat.is_processed_last, self._modules))
        return self._finalised

    def _has_same_tables(self) -> bool:
        tables = _tables_of(self._modules)
        entries = _entries_of(tables)
        if _are_same(entries, self._entries):
            return True
        if list(map(len, tables)) != self._sizes:
            return False
        try:
            values = self._get_values(tables)
        except KeyError:
            return False
        if not _are_same(values, self._values):
            return False
        # The same in another order, which is the one to expect from now on.
        self._entries = entries
        return True

    def _get_values(self, tables: Sequence[dict[str, Any]]) -> list[Any]:
        filled = compress(tables, self._sizes)
        return [
            one
            for getter, table in zip(self._getters, filled, strict=True)
            for one in getter(table)
        ]


def _part(worker: Any) -> tuple[Any, ...]:
    parallel = worker.vllm_config.parallel_config
    return (
        worker.rank,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        bool(parallel.enable_expert_parallel),
    )


def _tables_of(modules: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Return every module's tables of tensors and children."""
    return list(chain.from_iterable(map(table, modules) for table in _TABLES))


def _entries_of(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """Return all names, then all that they stand for, in the tables' order."""
    values = map(methodcaller("values"), tables)
    return [*chain.from_iterable(tables), *chain.from_iterable(values)]


def _methods_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    # One that is a module itself is in a table.
    return [vars(module).get("quant_method") for module in modules]


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
