"""Whole generations on a card: `python3 -m benchmarks.gpu.generation --out DIR`.

A model of the shape of Llama 3 8B with random weights in bf16 answers prompts of 2,048 tokens in
batches of 1, 16 and 64, new ones every time: through `BatchGenerator`, and through transformers'
`generate` with its own cache, `generate_batch`, and `generate` with a static cache and compiled
forwards. The time of a decode step is how much longer twice as many new tokens take, a token; its
share is the time of reading weights and cached tokens once, over the step's. Each figure is written
to `DIR/generation.json` as soon as it is there; needs transformers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.gpu.streaming import LLAMA_8B, TINY, begin
from benchmarks.measuring import ceilings
from pagedkv import BatchGenerator

LENGTH, NEW = 2048, 32
BATCHES = (1, 16, 64)
Texts = list[list[int]]
Answer = Callable[[Texts, int], Texts]  # so many new tokens of every prompt


def spent(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call and of what it leaves to the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def ours(model: Any, tokens: int) -> tuple[Answer, Callable[[], None]]:
    generator = BatchGenerator(model, max_tokens=tokens)

    def answer(texts: Texts, new: int) -> Texts:
        results = generator.generate(texts, max_new_tokens=new, do_sample=False)
        assert not any(result.error for result in results)
        return [list(result.tokens) for result in results]

    return answer, generator.close


def plain(model: Any, tokens: int, **more: Any) -> tuple[Answer, Callable[[], None]]:
    model.set_attn_implementation("sdpa")

    def answer(texts: Texts, new: int) -> Texts:
        ids = torch.tensor(texts, device=model.device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **more}
        made = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        return made[:, ids.shape[1] :].tolist()

    return answer, lambda: None


def continuous(model: Any, tokens: int) -> tuple[Answer, Callable[[], None]]:
    model.set_attn_implementation("sdpa")

    def answer(texts: Texts, new: int) -> Texts:
        chosen = transformers.GenerationConfig(
            max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        made = model.generate_batch(texts, generation_config=chosen, progress_bar=False)
        return [list(each.generated_tokens) for each in made.values()]

    return answer, lambda: None


def static(model: Any, tokens: int) -> tuple[Answer, Callable[[], None]]:
    return plain(model, tokens, cache_implementation="static")


MAKE = {"ours": ours, "generate": plain, "generate_batch": continuous, "static": static}


def main() -> None:
    asked, note = begin("generation", MAKE)
    device = torch.device(asked.device)
    config = transformers.LlamaConfig(**(TINY if asked.tiny else LLAMA_8B), dtype=torch.bfloat16)
    torch.manual_seed(0)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    rate = ceilings(device)["read_gbs"] * 1e9
    note("read stream, GB/s", round(rate / 1e9))
    length, new = (64, 8) if asked.tiny else (LENGTH, NEW)
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * 2
    for rows in BATCHES:
        floor = (weights + rows * (length + 1.5 * new) * token) / rate
        for name in asked.parts:
            where = f"{name}, {rows} rows"
            try:
                answer, close = MAKE[name](model, rows * (length + 2 * new + 32))

                def seconds(new: int, answer: Answer = answer, rows: int = rows) -> float:
                    texts = torch.randint(1, config.vocab_size, (rows, length)).tolist()
                    return spent(lambda: answer(texts, new), device)

                for count in (2 * new, new):  # compiles, captures; a static cache keeps its length
                    seconds(count)
                first, whole = (min(seconds(count) for _ in range(2)) for count in (new, 2 * new))
                close()
            except Exception as error:
                note(where, repr(error)[:500])
                continue
            step = (whole - first) / new  # of all rows: by then all prompts are computed
            note(f"{where}: seconds", round(whole, 3))
            note(f"{where}: ms a step", round(1e3 * step, 2))
            note(f"{where}: share of the read stream", round(floor / step, 3))
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
