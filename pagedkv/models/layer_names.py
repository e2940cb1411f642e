"""Finds the kind of each layer of a decoder, from a file or by the rule of its type.

A file may list layers by older names or by a pattern. If it says nothing, the class of its type
makes the list, by a rule that `facts.py` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .facts import facts_of

NEWER = {
    "attention": "full_attention", "mamba": "linear_attention", "global": "full_attention",
    "local": "sliding_attention",
}  # fmt: skip
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def layer_names(found: Mapping[str, Any]) -> list[str] | None:
    """Returns the kind of each layer by its newer name; None for a model whose layers all attend.

    Args:
        found: a decoder's configuration.
    """
    listed = found.get("layer_types") or found.get("layers_block_type") or reaches(found)
    count = found.get("num_hidden_layers")
    if listed is not None:
        more = found.get("num_nextn_predict_layers") or 0  # some files list them, too
        listed = listed[:count] if more and len(listed) == (count or 0) + more else listed
        newer = {**NEWER, "full_attention": "indexed_attention"} if chooses(found) else NEWER
        return [newer.get(name, name) for name in listed]
    if sparse := (found.get("sparse_attention_config") or {}).get("sparse_attention_freq"):
        return ["minimax_m3_sparse" if one else "full_attention" for one in sparse]
    if pattern := found.get("hybrid_override_pattern"):
        return [LETTERS.get(letter, letter) for letter in pattern]
    facts = facts_of(found.get("model_type"))
    rule = facts.layers
    if rule in (None, "listed") or not isinstance(count, int):
        return None
    layers, attends, other = range(count), "full_attention", "linear_attention"
    chosen: set[int] = set()
    if rule == "every nth":
        every = found.get("full_attention_interval") or found.get("layer_group_size") or 4
        chosen = {i for i in layers if (i + 1) % every == 0}
    elif rule == "indices":
        chosen = set(found.get("attn_layer_indices") or ())
    elif rule == "periods":
        period, offset = found.get("attn_layer_period") or 8, found.get("attn_layer_offset", 4)
        chosen = {i for i in layers if i % period == offset}
    elif rule == "convolutions":
        chosen, other = set(found.get("full_attn_idxs") or layers), "conv"
    elif rule == "all":
        chosen, attends = set(layers), "hybrid"
    elif rule == "local":
        attends, other = "hybrid", "hybrid_sliding"
        told = found.get("local_layer_ids")
        ends = {i for i in layers if (i + 1) % facts.full_every == 0}
        chosen = ends if told is None else {*layers} - {*told}
    elif rule == "no window":
        chosen = set(layers)
    elif rule == "second of four":
        attends, other = attends if not chooses(found) else "indexed_attention", "sliding_attention"
        chosen = {i for i in layers if i < 2 or i % 4 == 1}
    elif rule == "kimi":
        told = (found.get("linear_attn_config") or {}).get("full_attn_layers")
        chosen = {i - 1 for i in told} if told else {i for i in layers if i and i % 4 == 0}
    elif rule == "chunks":
        other = "chunked_attention"
        chosen = {i for i, has in enumerate(rotated(found) or ()) if not has}
        chosen = chosen if found.get("attention_chunk_size") else set(layers)
    elif rule != "none":
        other, last = "sliding_attention", count - 1
        every = found.get("global_attn_every_n_layers") or facts.full_every
        chosen = {
            "first of each": {i for i in layers if i % every == 0},
            "last of each": {i for i in layers if (i + 1) % every == 0},
            "from behind": {i for i in layers if (last - i) % every == 0},
        }[rule.partition(",")[0]]
        chosen |= {0} if rule.endswith("the first") else set()
        chosen |= {last} if rule.endswith("the last") else set()
    return [attends if i in chosen else other for i in layers]


def reaches(found: Mapping[str, Any]) -> list[str] | None:
    """How far each layer of gpt_neo sees, where it is listed, or told by patterns and counts."""
    listed, patterns = found.get("attention_layers"), found.get("attention_types") or []
    return listed or [name for names, count in patterns for name in [*names] * count] or None


def chooses(found: Mapping[str, Any]) -> bool:
    """Whether layers without a window choose among all tokens, while others have windows."""
    slides = facts_of(found.get("model_type")).layers == "second of four"
    return slides and found.get("use_dsa") is not False


def add_windows(found: dict[str, Any]) -> None:
    """Adds which layers slide, if the configuration leaves that to the model's class."""
    facts = facts_of(found.get("model_type"))
    window = found.setdefault("sliding_window", facts.window or None)
    if window is None and facts.layers == "second of four":  # its class reads null as the default
        found["sliding_window"] = window = facts.window
    before = found.get("sliding_window_size") if facts.twice_in_windows else None
    if before is not None:  # it does not count the query's own token
        found["sliding_window"] = window = before + 1
    if window is None and (around := found.get("local_attention")):  # of modernbert-decoder
        found["sliding_window"] = window = around // 2
    if window is None and "sliding_attention" in (found.get("layer_types") or ()):
        found["sliding_window"] = window = found.get("window_size")  # of gpt_neo
    if found.get("layer_types") is not None:
        return
    count = found["num_hidden_layers"]
    names = "sliding_window_pattern", "global_attn_every_n_layers"
    every = next((found[name] for name in names if found.get(name)), facts.full_every)
    from_a_layer = "max_window_layers" in found
    if not found.get("use_sliding_window", not from_a_layer) or not window:
        slides = [False] * count
        found["sliding_window"] = None
    elif isinstance(every, str):
        slides = [every[i % len(every)] == "L" for i in range(count)]
    elif every:
        slides = [bool((i + 1) % every) for i in range(count)]
    else:
        slides = [i >= (found.get("max_window_layers") or 0) for i in range(count)]
    if found.get("attention_chunk_size") is None:
        words = {False: "full_attention", True: "sliding_attention"}
        found["layer_types"] = [words[slide] for slide in slides]


def add_choices(found: dict[str, Any]) -> None:
    """Adds which layers choose tokens themselves, in types whose layers may share a choice."""
    every = facts_of(found.get("model_type")).chooses_every
    if not every or found.get("indexer_types") is not None:
        return
    if pattern := found.get("index_topk_pattern"):
        words = {"F": "full", "S": "shared"}
        found["indexer_types"] = [words.get(letter, letter) for letter in pattern]
        return
    every, offset = found.get("index_topk_freq") or every, found.get("index_skip_topk_offset", 2)
    found["indexer_types"] = [
        "shared" if max(i - offset + 1, 0) % every else "full"
        for i in range(found["num_hidden_layers"])
    ]


def rotated(found: Mapping[str, Any]) -> list[int] | None:
    """Returns for each layer whether it has positions; None for a type where all layers do."""
    told: list[int] | None = found.get("no_rope_layers") or None
    every = found.get("no_rope_layer_interval") or facts_of(found.get("model_type")).unrotated
    if told is not None or not every:
        return told
    return [int((i + 1) % every != 0) for i in range(found["num_hidden_layers"])]
