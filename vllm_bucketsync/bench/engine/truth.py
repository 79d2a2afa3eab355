"""Whether an engine holds the trainer's weights, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_bucketsync.errors import LoadError

from .extension import COMPARE, LEARN, RELOAD_FILES, RELOAD_HANDLES, REMEMBER
from .handles import export
from .method import Stage, ask

_PROMPTS = ([5, 17, 123, 42, 260], [301, 2, 77], [9] * 12)
_NUM_TOKENS = 8


class Truth:
    """What the engine must hold in each of the trainer's two versions.

    vLLM's own reload makes it: from handles on a GPU, from a file on a CPU. Where not every
    byte can be seen (the CPU build packs weights away), greedy outputs are compared, too.

    Attributes:
        compared_bytes: Bytes of the model that are compared, and change with every push.
        compares_outputs: Whether outputs are compared, too.
        unlike: Some tensors that vLLM derives in ways that are not followed here.
    """

    def __init__(self, stage: Stage, *, folder: Path) -> None:
        """Have vLLM load both versions; the engine then holds the trainer's own.

        Args:
            stage: The engine, whose weights are replaced, and the trainer, which steps.
            folder: Where a file can be written.

        Raises:
            LoadError: vLLM could not.
        """
        self._stage = stage
        self._outputs: dict[bool, Any] = {}
        deliver = self._by_handles if stage.has_gpu else self._by_file
        path = folder / "truth.safetensors"
        try:
            deliver(path)
            ask(stage.llm, REMEMBER)
            self._note_outputs()
            stage.trainer.step()
            deliver(path)
            learnt = ask(stage.llm, LEARN)
            self._note_outputs()
        finally:
            path.unlink(missing_ok=True)
        self.compared_bytes = int(learnt["compared_bytes"])
        self.unlike: list[str] = learnt["unlike"]
        outputs = list(self._outputs.values())
        self.compares_outputs = bool(outputs) and self.compared_bytes < stage.trainer.num_bytes
        if self.compares_outputs and outputs[0] == outputs[1]:
            raise LoadError(
                "the engine generates the same with both versions of the weights, and not all of "
                "its bytes can be seen: nothing would be proved"
            )

    def check(self) -> None:
        """Compare the engine with the trainer.

        Raises:
            LoadError: It holds something else. The text names some of it.
        """
        trainer = self._stage.trainer
        found = ask(self._stage.llm, COMPARE, trainer.is_flipped)
        if found["num_different"]:
            raise LoadError(
                f"{found['num_different']} tensors of the engine hold wrong bytes, such as "
                f"{', '.join(found['different'])}"
            )
        if self.compares_outputs and self._greedy() != self._outputs[trainer.is_flipped]:
            raise LoadError("the engine's outputs are not those of the trainer's weights")

    def _by_handles(self, path: Path) -> None:
        ask(self._stage.llm, RELOAD_HANDLES, export(self._stage.trainer.tensors.items()))

    def _by_file(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._stage.trainer.tensors, path)
        ask(self._stage.llm, RELOAD_FILES, str(path))

    def _note_outputs(self) -> None:
        # On a GPU every byte is seen; there, generating would first compile kernels.
        if not self._stage.has_gpu:
            self._outputs[self._stage.trainer.is_flipped] = self._greedy()

    def _greedy(self) -> list[list[tuple[int, float]]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=_NUM_TOKENS, logprobs=1, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
        found = []
        for output in self._stage.llm.generate(prompts, params, use_tqdm=False):
            tokens = output.outputs[0]
            pairs = zip(tokens.token_ids, tokens.logprobs, strict=True)
            found.append([(token, logprobs[token].logprob) for token, logprobs in pairs])
        return found
