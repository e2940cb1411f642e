"""The parts of a model by the headers of its checkpoint: layers, embedding, head and the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.config import DTYPE_BYTES
from pagedkv.errors import CheckpointError

from .checkpoint import BITS, Checkpoint, TensorRange

ALIGNMENT = 256  # bytes; where a tensor may begin in a buffer of the device
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

EMBEDDING = re.compile(
    r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|backbone\.embeddings)\."
)
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
INDEXED = re.compile(r"(.*?)\.?\b(\d+)\.(.*)")
# Words in the names of what sees or hears, and of what joins that to the decoder.
TOWER = re.compile(
    r"(^|[._])(vision|visual|image|vit|vq|vqmodel|siglip|audio|sam|aligner|connector|projectors?|"
    r"projection|merger|resampler|adapter|qformer|query|multi_modal|multimodal|mm)([._]|$)"
)
# Not what every token takes.
EXPERTS = re.compile(r"(^|\.)experts\.(?!e_score|post_expert_norm)")
BLOCKS, SCALES = "_blocks", "_scales"  # how names of tensors in mxfp4 end
UNUSED = re.compile(r"^mtp\.")  # predicts several tokens; transformers leaves it out


@dataclass(frozen=True)
class Parts:
    """Bytes of each layer and of its experts, of embedding, head and the rest, tower included."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    head: int
    rest: int
    tower: int


def parts_of(
    checkpoint: Checkpoint, count: int, experts: int | None, dtype: str | None, sees: bool
) -> Parts:
    """The parts of a checkpoint.

    Args:
        count: layers of the decoder.
        experts: those of a layer, if it has some.
        dtype: what weights are cast or unpacked to, if they are.
        sees: whether a tower for images is loaded.
    """
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    routed: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    parts = {"embedding": 0, "head": 0, "rest": 0, "tower": 0}
    for tensor in checkpoint.tensors.values():
        nbytes = aligned(_loaded(tensor, dtype))
        indexed = INDEXED.match(tensor.name)
        if UNUSED.match(tensor.name):
            continue
        if TOWER.search(indexed[1] if indexed else tensor.name.rpartition(".")[0]):
            parts["tower"] += nbytes if sees else 0
        elif indexed:
            lists[indexed[1]][int(indexed[2])] += nbytes
            if _is_of_experts(tensor, indexed[3], experts):
                routed[indexed[1]][int(indexed[2])] += nbytes
        elif EMBEDDING.search(tensor.name):
            parts["embedding"] += nbytes
        else:
            parts["head" if HEAD.search(tensor.name) else "rest"] += nbytes
    wanted = range(count)
    whole = [name for name, found in lists.items() if found.keys() >= set(wanted)]
    if not whole:
        raise CheckpointError(
            f"{checkpoint.folder}: expected tensors of layers 0..{wanted[-1]}, as config.json "
            "says; no list of layers is complete"
        )
    decoder = max(whole, key=lambda name: sum(lists[name].values()))
    # Layers past the last are for predicting several tokens; transformers leaves them out.
    layers = tuple(lists[decoder][i] for i in wanted)
    alone = tuple(routed[decoder][i] for i in wanted)
    others = sum(sum(found.values()) for name, found in lists.items() if name != decoder)
    parts["rest"] += others + parts["tower"]
    # The head counts also beside an embedding that it should be tied to.
    return Parts(layers, alone, **parts)


def _is_of_experts(tensor: TensorRange, name: str, experts: int | None) -> bool:
    """Whether a tensor of a layer has experts, one or all, of those that tokens are routed to."""
    stacked = len(tensor.shape) == 3 and tensor.shape[0] == experts and min(tensor.shape) > 1
    return bool(experts) and (stacked or bool(EXPERTS.search(name)))


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's experts are in mxfp4, by its configuration."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    return str(getattr(method, "quant_method", method)) == "mxfp4"


def _loaded(tensor: TensorRange, dtype: str | None) -> int:
    """Bytes of a tensor in memory."""
    if dtype is not None and tensor.dtype == "U8" and tensor.name.endswith((BLOCKS, SCALES)):
        # Some versions of transformers unpack to bfloat16, whatever the dtype: then it is less.
        return 2 * tensor.nbytes * DTYPE_BYTES[dtype] if tensor.name.endswith(BLOCKS) else 0
    if dtype is None or tensor.dtype not in STORED:
        return tensor.nbytes
    return tensor.nbytes * 8 // BITS[tensor.dtype] * DTYPE_BYTES[dtype]


def aligned(nbytes: int) -> int:
    """Bytes of a tensor with what is left free behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
