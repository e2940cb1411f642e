"""The namespace in which the blocks of a page run: a model, its tokenizer, prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LETTERS = ["\n", *map(chr, range(32, 127))]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """Folder of a tiny random llama with a tokenizer of one token for each letter."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.hf.tiny import tiny

    folder = tmp_path_factory.mktemp("tiny")
    ids = {letter: i for i, letter in enumerate(LETTERS)}
    letters = Tokenizer(models.WordLevel(ids, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, chat_template=CHAT, pad_token=" ", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    # Heads of 32, which is what int4 needs.
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny(vocab_size=len(LETTERS), max_position_embeddings=8192, **shape)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def prelude() -> Callable[[Path], dict[str, Any]]:
    """The names that every page may use without having made them."""
    import transformers

    def names(path: Path) -> dict[str, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        texts = ["The sea is salty. Why?", "The sea is salty. Since when?"]
        return {
            "__name__": "__main__",
            "path": str(path),
            "model": model,
            "hf_config": model.config,
            "tokenizer": tokenizer,
            "prompts": [tokenizer(text)["input_ids"] for text in texts],
        }

    return names
