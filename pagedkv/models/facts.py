"""Facts about types of models that their configurations do not say: one row a type.

A row has only what cannot be read from a configuration. `tests/hf/test_planner.py` compares rows
with transformers' classes, as far as these tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

States = Literal[
    "delta rule",
    "kimi delta",
    "mamba1",
    "mamba2",
    "short convolution",
    "four convolutions",
    "convolved attention",
]
Indexer = Literal["tokens", "blocks", "blocks by head", "pools"]
Rule = Literal[
    "every nth",
    "indices",
    "periods",
    "none",
    "convolutions",
    "all",
    "kimi",
    "listed",
    "chunks",
    "no window",
    "second of four",
    "first of each",
    "from behind",
    "last of each, the first",
    "last of each, the last",
    "local",
]


@dataclass(frozen=True)
class Facts:
    """The facts of one type of model.

    Attributes:
        refused: why pages cannot serve it, if no configuration tells that.
        encoder: it is not causal unless its configuration says `is_decoder`.
        both_ways: it reads its prompt both ways unless its configuration says otherwise.
        states: the form of its recurrent states; None if it has none, or an unknown form.
        stepwise: it loses a state if several tokens are computed behind it at once.
        shares_block: its layers share a block, whose heads are twice as wide.
        latent: it gives its cache latents (MLA), and expands them after the cache. Other types
            give their cache expanded K and V.
        indexer: each of its layers with K and V keeps index keys beside them, by which it chooses
            the tokens that a query reads: one by one; in blocks, whose keys are averaged before
            they are rotated; in blocks that each KV head chooses for itself; or in pools, whose
            keys are averaged by a gate that is kept beside each key.
        written: its layers write attention out, instead of calling a function for it.
        unplaced: it knows no positions but the distances of the bias that it adds.
        masks: each of its layers keeps a mask of all pairs of positions, a byte a pair.
        sinks: `s_aux` is one more score per head, without a value, in otherwise plain attention.
            Other types that pass one select or compress their keys after the cache, extend the
            mask, or are not causal. The torch backend computes such scores explicitly.
        twice_in_windows: layers with a window have twice the KV heads that its configuration says.
        layers: the rule for the kinds of layers, if a file does not list them; `listed` if there
            is no rule, so that a file has to list them.
        attends_twice: each of its layers attends twice, as two layers of a cache.
        head_dim, window: their values if a file does not say them.
        full_head_dim: the head dim of layers without a window, if a file does not say it.
        full_every: one layer of so many has no window, if a file does not list them; which one, the
            rule says: the last or the first, perhaps counted from the end, and perhaps the model's
            first or last layer as well.
        chooses_every: after the second, one layer of so many chooses tokens, and the layers between
            share its choice, if a file does not say otherwise; 0 if none share.
        unrotated: one layer of so many has no positions, if a file does not list them.
        at_once: channels a token has at once behind attention, in multiples of the inner width, if
            these are more than gate, up and product: because one matrix makes gate and up, whose
            output stays, or because of clamps and biases.
        experts_with_layer: experts are read with their layer, because its class is not called with
            the routing, or checkpoints have experts transposed or under other names.
        text_alone: transformers opens its checkpoints without their tower unless images are asked
            for.
    """

    refused: str = ""
    encoder: bool = False
    both_ways: bool = False
    states: States | None = None
    stepwise: bool = False
    shares_block: bool = False
    latent: bool = False
    indexer: Indexer | None = None
    written: bool = False
    unplaced: bool = False
    masks: bool = False
    sinks: bool = False
    twice_in_windows: bool = False
    layers: Rule | None = None
    attends_twice: bool = False
    head_dim: int = 0
    full_head_dim: int = 0
    window: int = 0
    full_every: int = 0
    chooses_every: int = 0
    unrotated: int = 0
    at_once: int = 0
    experts_with_layer: bool = False
    text_alone: bool = False


_REFUSED = {
    "its attention does not go through transformers' attention interface": (
        "blip cpmant reformer xlm"
    ),
    "encoder-decoder models keep a second cache for cross-attention": (
        "bart bigbird_pegasus blenderbot blenderbot-small florence2 longt5 m2m_100 marian mbart "
        "mt5 mvp pegasus pegasus_x pix2struct plbart pp_formulanet prophetnet switch_transformers "
        "t5 t5gemma t5gemma2 udop umt5 vision-encoder-decoder whisper"
    ),
    "its forward takes no cache": "openai-gpt xlnet",
    "its attention is not causal": "git kosmos-2 kosmos-2.5",
    "it changes K and V after the cache": "diffllama jetmoe",
    "it changes the attention mask layer by layer": "doge",
    "its configuration names a window that its attention does not keep to": "moshi",
    "it has no layers of its own to plan": "blt",
    "it keeps a recurrent state beside K and V": ("mamba2 minimax recurrent_gemma rwkv xlstm"),
}
_ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm "
    "roc_bert xlm-roberta xlm-roberta-xl xmod"
)
_WRITTEN_ENCODERS = "megatron-bert rembert roformer big_bird"
_GEMMA4 = Facts(
    head_dim=256, full_head_dim=512, window=512, full_every=6, layers="last of each, the last"
)
_LATENT = Facts(latent=True)
_CHOSEN = Facts(latent=True, indexer="tokens")
_SHARES_CHOICE = replace(_CHOSEN, chooses_every=1)
_FIRST_OF_FOUR = Facts(full_every=4, layers="first of each")
_DELTA = Facts(states="delta rule", layers="every nth")
_TWO_PARTS = Facts(text_alone=True, layers="every nth")
_CONVOLUTIONS = Facts(states="short convolution", layers="convolutions")
_FOUR_CONVOLUTIONS = Facts(states="four convolutions", full_every=6, layers="local")
_SHARED_BLOCK = Facts(states="mamba2", shares_block=True)

FACTS: dict[str, Facts] = {
    **{kind: Facts(refused=why) for why, kinds in _REFUSED.items() for kind in kinds.split()},
    **{kind: Facts(encoder=True) for kind in _ENCODERS.split()},
    **{kind: Facts(encoder=True, written=True) for kind in _WRITTEN_ENCODERS.split()},
    "aria_text": Facts(experts_with_layer=True),
    "axk1": _LATENT,
    "axk2": _CHOSEN,
    "bailing_hybrid": Facts(states="kimi delta", latent=True, layers="every nth"),
    "bamba": Facts(states="mamba2", layers="indices"),
    "beam": Facts(full_every=6, layers="last of each, the last"),
    "bloom": Facts(written=True, unplaced=True),
    "cohere2": Facts(window=4096, full_every=4),
    "cohere_compass_text": Facts(layers="no window"),
    "cwm": _FIRST_OF_FOUR,
    "dbrx": Facts(experts_with_layer=True),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _CHOSEN,
    "dots3_note_text": replace(_CHOSEN, window=512, layers="second of four"),
    "ernie4_5_vl_moe_text": Facts(experts_with_layer=True),
    "falcon": Facts(written=True),
    "falcon_h1": Facts(states="mamba2", layers="all"),
    "flint": Facts(sinks=True, layers="listed"),
    "gemma": Facts(head_dim=256),
    "gemma2": Facts(head_dim=256, window=4096, full_every=2),
    "gemma3_text": Facts(head_dim=256, window=4096, full_every=6),
    "gemma3n_text": Facts(head_dim=256, window=512, full_every=5),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": Facts(at_once=4),
    "glm4": Facts(at_once=4),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _SHARES_CHOICE,
    "glm5_next_text": Facts(
        states="kimi delta", latent=True, indexer="pools", layers="every nth", chooses_every=1
    ),
    "gpt_neo": Facts(written=True, masks=True, full_every=2, layers="first of each"),
    "gpt_oss": Facts(sinks=True, window=128, full_every=2, at_once=9),
    "gpt_neox_japanese": Facts(written=True),
    "granite_swa": replace(_FIRST_OF_FOUR, sinks=True),
    "granitemoe_swa": replace(_FIRST_OF_FOUR, sinks=True),
    "granitemoehybrid": Facts(states="mamba2", layers="none"),
    "hy_v4": replace(_CHOSEN, sinks=True, chooses_every=4),
    "hy_v4_vl_text": replace(_CHOSEN, sinks=True, chooses_every=4),
    "inkling2_text": _FOUR_CONVOLUTIONS,
    "inkling_text": _FOUR_CONVOLUTIONS,
    "jamba": Facts(states="mamba1", stepwise=True, layers="periods"),
    "kimi_linear": Facts(states="kimi delta", latent=True, layers="kimi"),
    "kolibri1": Facts(full_every=5),
    "laguna": Facts(layers="no window"),
    "lara_mini": replace(_DELTA, layers=None),
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm3": replace(_CONVOLUTIONS, layers=None),
    "llama4": Facts(experts_with_layer=True),
    "llama4_text": Facts(experts_with_layer=True, layers="chunks", unrotated=4),
    "longcat_flash": Facts(latent=True, attends_twice=True, experts_with_layer=True),
    "mellum": Facts(layers="no window"),
    "mimo_v2_flash": Facts(
        head_dim=192,
        sinks=True,
        twice_in_windows=True,
        full_every=6,
        layers="last of each, the first",
    ),
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": Facts(indexer="blocks by head"),
    "mistral4": _LATENT,
    "mistral_large4_text": replace(_SHARES_CHOICE, unrotated=4),
    "modernbert-decoder": Facts(full_every=3, layers="first of each"),
    "mpt": Facts(written=True, unplaced=True),
    "muse_glimmer_text": Facts(full_every=4, layers="from behind"),
    "nemotron_h": Facts(states="mamba2"),
    "olmo_hybrid": _DELTA,
    "olmo3": Facts(full_every=4),
    "paligemma": Facts(both_ways=True),
    "phi3": Facts(at_once=4),
    "qwen3_5": _TWO_PARTS,
    "qwen3_5_moe": _TWO_PARTS,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen3_vl_moe_text": Facts(experts_with_layer=True),
    "qwen4_exp": _TWO_PARTS,
    "qwen4_exp_text": replace(_DELTA, indexer="blocks"),
    "sarvam_mla": _LATENT,
    "step3p5": Facts(layers="no window"),
    "trocr": Facts(written=True),
    "vaultgemma": Facts(full_every=2),
    "xglm": Facts(written=True),
    "youtu": _LATENT,
    "zamba": replace(_SHARED_BLOCK, states="mamba1", stepwise=True),
    "zamba2": _SHARED_BLOCK,
    "zaya": Facts(states="convolved attention", layers="all"),
}
_NONE = Facts()


def facts_of(kind: object) -> Facts:
    """Returns the facts of a type, by the name in its configuration; empty ones if it has none."""
    return FACTS.get(str(kind), _NONE)


def types_with(name: str) -> list[str]:
    """Returns the types for which the fact of this name is set, sorted."""
    return sorted(kind for kind, facts in FACTS.items() if getattr(facts, name))
