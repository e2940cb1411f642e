"""Refuses uses of a streamed model that need all weights at once, or weights of other files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pagedkv.errors import StreamError, UnsupportedModelError

from .forwards import models_in
from .lazy_tensor import Absent

# Arguments that make transformers load other files than it does by default.
OTHER_WEIGHTS = "variant", "subfolder", "gguf_file", "use_safetensors"


def refuse_whole(model: PreTrainedModel) -> list[Callable[[], None]]:
    """Makes operations that need all weights at once raise before they begin.

    Absent weights would raise by themselves, but only after the glue was changed.

    Returns:
        Functions that undo this.
    """
    undo: list[Callable[[], None]] = []

    def forbid(module: nn.Module, name: str, what: str) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise StreamError(
                f"{type(module).__name__}: a streamed model cannot be {what}; open a streamer "
                "on the folder, or load it in memory"
            )

        module.__dict__[name] = refuse
        undo.append(lambda: module.__dict__.pop(name, None))

    for module in models_in(model):
        for name in ("__deepcopy__", "__reduce_ex__"):
            forbid(module, name, "copied or pickled")
    for module in model.modules():
        if not any(isinstance(t, Absent) for t in chain(module.parameters(), module.buffers())):
            continue
        forbid(module, "_apply", "moved or cast, whole or in parts")
        undo.append(module.register_load_state_dict_pre_hook(_refuse_weights).remove)
        if isinstance(module, PreTrainedModel):
            forbid(module, "save_pretrained", "saved")
    return undo


def _refuse_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuses to load streamed weights; weights of adapters and the glue may be loaded."""
    tensors = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        if isinstance(tensor, Absent) and prefix + name in state:
            raise StreamError(
                f"{tensor.path} is streamed: other weights than its file's cannot be loaded; "
                "save them as a checkpoint and open that"
            )


def refuse_closed(module: nn.Module, args: Any) -> None:
    """Raises in a hook before the forwards of a model whose streamer was closed."""
    raise StreamError(f"{type(module).__name__}: the streamer of this model was closed")


def require_own_weights(folder: Path, arguments: dict[str, Any]) -> None:
    """Refuses arguments and adapters with which transformers would load other weights."""
    for name in OTHER_WEIGHTS:
        if arguments.get(name) not in (None, "", True):
            raise ValueError(
                f"{name}: expected none, the streamer reads the safetensors that transformers "
                f"reads without it; load the model with {name}= once, and save_pretrained() it"
            )
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{folder}: the adapter beside the weights (adapter_config.json) is not streamed; "
            "merge it, or open a folder without it and load it on the streamed model"
        )
