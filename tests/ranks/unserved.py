"""Calls that ranks refuse; each function runs on all of them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pagedkv import BatchGenerator, PagedCache, PagedKVCache
from pagedkv.hf.model import cache_config

from .differing import error_of
from .jobs import model_of, rank


def asked(folder: str, what: str, store: str) -> tuple[str, str]:
    if what == "layers":
        from transformers.distributed import DistributedConfig

        parts = DistributedConfig(pp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=parts)
        return error_of(lambda: PagedCache(model))
    model = model_of(folder)
    if what == "growth_step":
        return error_of(lambda: BatchGenerator(model, max_tokens=512, growth_step=64))
    if what == "prefix_store":
        return error_of(lambda: PagedCache(model, max_tokens=512, prefix_store=store))
    if what == "on_pressure":
        config = cache_config(model, 512)
        own = PagedKVCache(config, device="cpu", on_pressure=lambda cache, pressure: False)
        return error_of(lambda: PagedCache(model, cache=own))
    with BatchGenerator(model, max_tokens=512) as batched:
        batched.encoder.processor = object()
        prompt: Any = {"input_ids": [[5, 6]], "pixel_values": torch.zeros(1)}
        return error_of(lambda: batched.generate([[5, 6, 7], prompt]))


def exchanged(folder: str, files: str) -> tuple[str, str]:
    """Whether a rank loads what it saved, and what another one saved."""
    with PagedCache.prefill(model_of(folder), list(range(5, 25)), max_tokens=512) as paged:
        paged.kv.save(paged.rows[0], Path(files) / f"{rank()}.safetensors")
        dist.barrier()
        own = error_of(lambda: paged.kv.load(Path(files) / f"{rank()}.safetensors"))
        other = error_of(lambda: paged.kv.load(Path(files) / f"{1 - rank()}.safetensors"))
    dist.barrier()
    return own[0], other[0]


def unlike(folder: str) -> tuple[str, str]:
    """A model whose attention is cut, as if the names of its projections were unknown."""
    from pagedkv.hf import shards

    with (
        mock.patch.object(shards, "PROJECTIONS", ()),
        BatchGenerator(model_of(folder), max_tokens=64) as batched,
    ):
        return error_of(lambda: batched.generate([[5, 6, 7]], max_new_tokens=2))


def adds_half(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(mlp).forward(mlp, x) + 0.5


def adds_mean(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(mlp).forward(mlp, x) + x.mean(1, keepdim=True)


def stranger_on_one(folder: str) -> tuple[str, str]:
    """The error of a generator of a model in which code of others runs on the second rank alone."""
    model = model_of(folder)
    if os.environ["RANK"] == "1":
        mlp: Any = model.model.layers[1].mlp
        mlp.forward = partial(adds_mean, mlp)
    return error_of(lambda: BatchGenerator(model, max_tokens=256).close())


def stranger(folder: str) -> list[tuple[str, str]]:
    """Errors of generators of a model in which code of others is right, and then wrong."""
    model, found = model_of(folder), []
    mlp: Any = model.model.layers[1].mlp
    for code in (adds_half, adds_mean):
        with mock.patch.object(mlp, "forward", partial(code, mlp)):
            found.append(error_of(lambda: BatchGenerator(model, max_tokens=256).close()))
    return found
