"""Names that other libraries have for what is called otherwise here.

Dtypes are taken by them. Others are refused with the name that they have here, because they mean
nearly the same at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

DTYPES = {
    "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16",
    "half": "float16", "bf16": "bfloat16",
}  # fmt: skip

# Options of transformers' `generate`, as vLLM, OpenAI and llama.cpp call them.
OPTIONS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "best_of": "num_return_sequences",
    "samples": "num_return_sequences",
    "stop": "stop_strings",
    "stop_token_ids": "eos_token_id",
    "temp": "temperature",
    "topk": "top_k",
    "topp": "top_p",
    "minp": "min_p",
    "repeat_penalty": "repetition_penalty",
}

# Fields of a cache.
FIELDS = {
    "block_size": "page_size",
    "kv_cache_dtype": "kv_format",
    "cache_dtype": "kv_format",
    "cache_type": "kv_format",
    "max_num_seqs": "max_sequences",
    "max_batch_size": "max_sequences",
    "max_model_len": "max_sequence_length",
    "max_seq_len": "max_sequence_length",
    "n_ctx": "max_tokens",
    "max_cache_len": "max_tokens",
    "policy": "retention",
}

FORMATS = {
    "q4": "int4", "q4_0": "int4", "4bit": "int4", "nf4": "int4", "q8": "int8", "q8_0": "int8",
    "8bit": "int8", "float8": "fp8", "fp8_e4m3": "fp8", "auto": "dense", "none": "dense",
    **dict.fromkeys((*DTYPES, *DTYPES.values()), "dense"),
}  # fmt: skip

POLICIES = {
    "h2o": "importance", "heavy_hitter": "importance", "streamingllm": "sinks",
    "streaming_llm": "sinks", "sink": "sinks", "window": "fifo", "sliding_window": "fifo",
}  # fmt: skip


def meant(
    word: object, known: Iterable[str], borrowed: Mapping[str, str] | None = None, before: str = ""
) -> str:
    """The end of a message: the known name that a word stands for, or that is spelt nearly like it.

    Args:
        borrowed: of the known names those that other libraries have, by theirs.
        before: what the name is given with, such as the option of a command.
    """
    said = str(word).lower().replace("-", "_")
    spelt = {name.lower().replace("-", "_"): name for name in known}
    close = get_close_matches(said, spelt, n=1, cutoff=0.7)
    found = (borrowed or {}).get(said) or (spelt[close[0]] if close else "")
    return f"; did you mean {before}{found}?" if found else ""
