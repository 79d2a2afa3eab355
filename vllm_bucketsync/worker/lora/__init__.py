"""Adapters from memory: checked, kept, and swapped into vLLM's own LoRA manager.

``sink`` runs one update; ``settings`` and ``fit`` refuse what cannot work; ``places`` tells
where adapters go; ``shelf`` keeps pristine copies; ``swap`` changes vLLM's manager. What is
done without vLLM because it was seen to do it before: ``image``, ``writes``, ``recipe``,
``contents`` and, first to read, ``replay``.
"""
