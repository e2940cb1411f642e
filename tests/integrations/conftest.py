"""A checkpoint whose tokenizer has a token for each letter, and lm-eval's own model of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.conftest import tiny_path  # noqa: F401
from tests.threads import one_thread  # noqa: F401

LETTERS = "abcdefghijklmnopqrstuvwxyz .:\n"
END = "</s>"
CHAT = "{% for m in messages %}{{ m['content'] }}:\n{% endfor %}"


def made(folder: Path) -> Path:
    """Saves a tiny llama and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.hf.tiny import tiny

    ids = {letter: i for i, letter in enumerate([END, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT
    ).save_pretrained(folder)
    torch.manual_seed(0)
    tiny(vocab_size=len(ids), eos_token_id=0, bos_token_id=None, head_dim=32).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stock(checkpoint):
    """lm-eval's own model, which is what ours is held against."""
    from lm_eval.models.huggingface import HFLM

    def load(**arguments: Any) -> Any:
        return HFLM(pretrained=str(checkpoint), device="cpu", **arguments)

    return load


@pytest.fixture
def paged(checkpoint):
    from pagedkv.integrations.lm_eval import PagedLM

    loaded = []

    def load(pretrained: Any = None, **arguments: Any) -> Any:
        loaded.append(PagedLM(pretrained or str(checkpoint), device="cpu", **arguments))
        return loaded[-1]

    yield load
    for lm in loaded:
        lm.generator.close()


def asked(*arguments: tuple[Any, ...]) -> list[Any]:
    """Requests as lm-eval makes them, as far as a model looks at them."""
    return [SimpleNamespace(args=each, task_name="task") for each in arguments]
