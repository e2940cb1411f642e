"""Finds the weights of a model from the headers of its checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from math import prod

from pagedkv.errors import CheckpointError

from .checkpoint import BITS, Checkpoint, TensorRange
from .groups import DTYPE_BYTES
from .weights import Part, Weight

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NARROW = {"F8_E4M3", "F8_E5M2"}  # dtypes of packed weights that have an element for each

EMBEDDING = re.compile(
    r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|backbone\.embeddings)\."
)
# Tables of n-grams, whole or in pieces, and of embeddings for each layer; see `skeleton.tables_of`.
TABLE = re.compile(r".*(embed_tokens_per_layer|ngram_embedding)(?=\.)")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
INDEXED = re.compile(r"(.*?)\.?\b(\d+)\.(.*)")
# Words in the names of parts that see or hear, and of parts that join these to the decoder.
TOWER = re.compile(
    r"(^|[._])(vision|visual|image|vit|vq|vqmodel|siglip|audio|sam|aligner|connector|projectors?|"
    r"projection|merger|resampler|adapter|qformer|query|multi_modal|multimodal|mm)([._]|$)"
)
# Experts that tokens are routed to, without parts that every token takes.
EXPERTS = re.compile(r"(^|\.)experts\.(?!e_score|post_expert_norm)")
SHARED = re.compile(r"\d\.shared_transf")  # blocks of zamba, in the layer that has one first
# Queries of Inkling 2's layers, in lists of their own; the first layer has none for attention.
QUERIES = re.compile(r"\battn_res\.(attn|mlp)_queries\.(\d+)$")
# Ends of the names of tensors that lie beside packed weights.
BESIDE = re.compile(r"(scales?|zeros|zero_point|absmax|g_idx|scale_inv)$")
UNUSED = re.compile(r"^mtp\.")  # this part predicts several tokens; transformers leaves it out


def weights_in(
    checkpoint: Checkpoint,
    count: int,
    experts: int | None,
    bits: float,
    sharing: Sequence[Sequence[int]] = (),
) -> list[tuple[Weight, TensorRange]]:
    """Returns the weights of a checkpoint, and where they lie.

    Args:
        count: the number of layers of the decoder.
        experts: the number of experts of a layer, if it has some.
        bits: bits of a packed weight.
        sharing: for each block that layers share, these layers.
    """
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    found: list[tuple[str, int, Part, bool, TensorRange]] = []
    tables, embeddings = _tables(checkpoint), _embeddings(checkpoint)
    rows = {tensor.shape[0] for tensor in embeddings.values()}
    for tensor in checkpoint.tensors.values():
        indexed = INDEXED.match(tensor.name)
        if UNUSED.match(tensor.name):
            continue
        if (table := TABLE.match(tensor.name)) and table[0] in tables:
            found.append(("", 0, "tables", False, tensor))
        elif TOWER.search(indexed[1] if indexed else tensor.name.rpartition(".")[0]):
            found.append(("", 0, "tower", False, tensor))
        elif query := QUERIES.search(tensor.name):
            found.append((query[1], int(query[2]) + (query[1] == "attn"), "layer", False, tensor))
        elif indexed:
            lists[indexed[1]][int(indexed[2])] += tensor.nbytes
            routed = _is_of_experts(tensor, indexed[3], experts)
            found.append((indexed[1], int(indexed[2]), "layer", routed, tensor))
        else:
            of_head = HEAD.search(tensor.name) and len(tensor.shape) > 1
            is_head = of_head and (tensor.dtype not in STORED or tensor.shape[0] in rows)
            part: Part = "embedding" if tensor.name in embeddings else "head" if is_head else "rest"
            found.append(("", 0, part, False, tensor))
    wanted = set(range(count))
    whole = [name for name, layers in lists.items() if layers.keys() >= wanted]
    if not whole:
        raise CheckpointError(
            f"{checkpoint.folder}: expected tensors of layers 0..{count - 1}, as config.json "
            "says; no list of layers is complete"
        )
    decoder = max(whole, key=lambda name: sum(lists[name].values()))
    weights = []
    for name, index, part, routed, tensor in found:
        if part == "layer" and name != decoder and not QUERIES.search(tensor.name):
            part = "rest"
        if part == "layer" and index not in wanted:
            continue  # layers past the last predict several tokens; transformers leaves them out
        used: tuple[int, ...] = (index,) if part == "layer" else ()
        if used and SHARED.search(tensor.name) and sharing:
            users = next((each for each in sharing if index in each), ())
            if index != next(iter(users), index):
                continue  # a second copy of the block, which all of them compute by
            used, part = tuple(users), "rest" if len(users) > 1 else part
        shape = _unpacked(tensor, bits)
        weights.append((Weight(tensor.name, part, used, shape, routed, alone=routed), tensor))
    return weights


def _embeddings(checkpoint: Checkpoint) -> dict[str, TensorRange]:
    """The embeddings of ids, by name; where none is called so, the largest matrix in no list."""
    alone = [
        tensor
        for tensor in checkpoint.tensors.values()
        if len(tensor.shape) == 2
        and not any(x.match(tensor.name) for x in (INDEXED, TABLE, UNUSED))
        and not TOWER.search(tensor.name.rpartition(".")[0])
    ]
    found = [tensor for tensor in alone if EMBEDDING.search(tensor.name)]
    if not found:
        others = (tensor for tensor in alone if not HEAD.search(tensor.name))
        found = sorted(others, key=lambda tensor: prod(tensor.shape))[-1:]
    return {tensor.name: tensor for tensor in found}


def _tables(checkpoint: Checkpoint) -> set[str]:
    """Returns the names of tables that are larger than the embedding of ids."""
    sizes: dict[str, int] = defaultdict(int)
    embedding = 0
    for tensor in checkpoint.tensors.values():
        if table := TABLE.match(tensor.name):
            sizes[table[0]] += prod(tensor.shape)
        elif EMBEDDING.search(tensor.name):
            embedding = max(embedding, prod(tensor.shape))
    return {name for name, size in sizes.items() if size > embedding}


def _unpacked(tensor: TensorRange, bits: float) -> tuple[int, ...]:
    """Returns the shape of the weight that a tensor holds; for a packed one, of equal size."""
    if BESIDE.search(tensor.name):
        return (prod(tensor.shape),)
    if tensor.dtype in STORED or tensor.dtype in NARROW or len(tensor.shape) < 2:
        return tensor.shape
    return tensor.shape[0], int(8 * tensor.nbytes / bits / max(1, tensor.shape[0]))


def _is_of_experts(tensor: TensorRange, name: str, experts: int | None) -> bool:
    """Whether a tensor of a layer belongs to experts, one or all, that tokens are routed to."""
    stacked = len(tensor.shape) == 3 and tensor.shape[0] == experts and min(tensor.shape) > 1
    return bool(experts) and (stacked or bool(EXPERTS.search(name)))


def loaded(tensor: TensorRange, dtype: str | None, unpacked: bool = False) -> int:
    """Returns the bytes of a tensor in memory.

    Args:
        dtype: the dtype that weights are cast or unpacked to; None if they stay as they are.
        unpacked: whether packed weights are unpacked; nothing is left of their scales.
    """
    if dtype is None:
        return tensor.nbytes
    # Some versions of transformers unpack to bfloat16, whatever the dtype; that takes no more.
    wide = DTYPE_BYTES[dtype]
    if unpacked and BESIDE.search(tensor.name) and len(tensor.shape) != 1:  # no scale of a norm
        return 0
    if unpacked and tensor.dtype in ("U8", "I8"):  # a byte has two elements of four bits
        return 2 * tensor.nbytes * wide
    if tensor.dtype in STORED or (unpacked and tensor.dtype in NARROW):
        return tensor.nbytes * 8 // BITS[tensor.dtype] * wide
    return tensor.nbytes
