"""A tiny random checkpoint whose tokens are English words, built without a network."""

from __future__ import annotations

from pathlib import Path

# The vocabulary: generated text reads as words, so a change of weights can be seen.
UNKNOWN, END = "<unk>", "<end>"
WORDS = tuple(
    """
    the a one this that every some no old new red blue green black white small large quiet
    loud warm cold young wild tame river mountain forest garden house road bridge window door
    table chair lamp book letter song story dream cloud rain snow wind storm star moon sun
    morning evening night summer winter fox bear wolf horse bird fish cat dog owl crow child
    king queen sailor baker farmer doctor poet painter runs walks sings sleeps dances falls
    rises shines burns grows waits listens speaks reads writes paints builds finds loses keeps
    gives takes sees hears knows loves fears and or but while because under over behind beside
    near far into through again always never often slowly quickly softly gladly alone together
    """.split()  # noqa: SIM905 - a list of 128 quoted words cannot be read
)
PROMPTS = (
    "the old fox sleeps under",
    "a small bird sings while",
    "every sailor knows the",
    "one cold morning the poet",
)


def build_checkpoint(folder: Path, *, seed: int) -> None:
    """Write a small Qwen3 with random weights and its tokenizer to ``folder``.

    Two seeds give two checkpoints that differ in every tensor, far enough that greedy
    generation differs.

    Args:
        folder: Created where missing.
        seed: Decides every weight. torch's global generator is left as it was.
    """
    import torch
    import transformers

    # Nobody needs to watch a megabyte being written.
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3Config(
        vocab_size=2 + len(WORDS),
        hidden_size=160,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        # The attention kernel of the CPU build takes 80 and no smaller multiple of 16.
        head_dim=80,
        intermediate_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        # Far above what is trained with: an untrained model then has opinions.
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            # Norms start as ones whatever the seed; then a lost one would not be seen.
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    import tokenizers
    import transformers

    vocabulary = {word: index for index, word in enumerate((UNKNOWN, END, *WORDS))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=UNKNOWN, eos_token=END, pad_token=UNKNOWN
    ).save_pretrained(folder)
