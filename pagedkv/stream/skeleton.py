"""A model without weights, made by transformers' own loader from tensors that have no storage.

So the loader itself reports which parameter has no tensor and which tensor no parameter, which
tensors are tied and which are packed; it never gets a byte of them.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from pagedkv.errors import CheckpointError, CheckpointMismatch, UnsupportedModelError
from pagedkv.models.checkpoint import Checkpoint, TensorRange
from pagedkv.models.packing import method_of
from pagedkv.models.skeleton import model_class, own_config
from pagedkv.planner import plan_memory

from .coverage import require_covered, spelled_out
from .mxfp4 import Packed, packed_in, unpacked_dtype

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
META = {"": "meta"}
SHARED_OUT = "distributed_config", "tp_plan", "tp_size", "device_mesh"
# Methods whose packed weights are no plain tensors.
NOT_STREAMED = {"bitsandbytes", "torchao"}
# Arguments of our and transformers' `from_pretrained`, without the sizes of a plan.
ARGUMENTS = {
    "attn_implementation", "dtype", "key_mapping", "layers_path", "plan", "progress",
    "resident_layers", "revision", "trust_remote_code",
}  # fmt: skip
OF_HUB = "revision", "token", "cache_dir", "local_files_only", "force_download"
# Messages of transformers about weights that are loaded, or divided among ranks.
UNSAID = "LOAD REPORT", "were not sharded", "rules were not applied"


class Built(NamedTuple):
    """A model without weights.

    Attributes:
        model: its weights are on the meta device.
        dtypes: dtypes that its parameters and buffers have without the checkpoint, by name.
        packed: the parameters that the checkpoint has in mxfp4, by name.
    """

    model: PreTrainedModel
    dtypes: dict[str, torch.dtype]
    packed: dict[str, Packed]


def build(
    checkpoint: Checkpoint, dtype: str | torch.dtype, images: bool = False, **kwargs: Any
) -> Built:
    """Makes the model of a checkpoint: weights on the meta device, real other buffers on the host.

    Args:
        dtype: dtype of the weights; transformers resolves `auto`.
        images: use the class that takes images, even if another one takes text alone.
        kwargs: as for `from_pretrained`.

    Raises:
        CheckpointError: transformers makes no model of the checkpoint's configuration.
        CheckpointMismatch: a parameter has no tensor, a tensor no parameter, or a shape is wrong.
        UnsupportedModelError: the model is no causal language model of transformers.
    """
    for name in SHARED_OUT:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: expected none, a streamed model is not shared out among processes; "
                "each would stream all of it"
            )
    if "device_map" in kwargs:
        raise ValueError("device_map: expected none, the streamer places weights by its plan")
    try:
        config, kwargs = AutoConfig.from_pretrained(
            checkpoint.folder, return_unused_kwargs=True, **kwargs
        )
    except (OSError, ImportError):
        raise
    except Exception as error:  # each class checks its fields in its own way
        raise _no_model(checkpoint, error) from error
    cls = model_class(config, images)
    packed = packed_in(checkpoint)
    if packed:  # unpacked while they are read, so the model is like any other
        del config.quantization_config
    method = method_of(config)
    if method in NOT_STREAMED:
        raise _refused(checkpoint, method)
    if (checkpoint.folder / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(checkpoint.folder)
        kwargs.setdefault("generation_config", found)
    own = own_config(cls, config)
    if dtype == "auto" and own.dtype is None:  # the loader sees no index, only tensors
        dtype = checkpoint.indexed_dtype or dtype
    kwargs |= {"dtype": dtype, "device_map": META, "ignore_mismatched_sizes": True}
    kwargs |= {"output_loading_info": True, "config": own}
    tensors: dict[str, Tensor] = {
        t.name: without_storage(t).as_subclass(_Unmoved) for t in checkpoint.as_loaded
    }
    for name, each in packed.items():
        for half in (each.blocks, each.scales):
            del tensors[half.name]
        tensors[name] = torch.empty(each.shape, dtype=torch.bfloat16, device="meta")
    with _kept_report() as report:
        try:
            model, info = cls.from_pretrained(None, state_dict=tensors, **kwargs)
        except RuntimeError as error:  # an operation of the conversion refused these tensors
            names = tuple(sorted(set(re.findall(r"destined for (\S+)\. Ckpt", "".join(report)))))
            raise CheckpointMismatch(
                f"{checkpoint.folder}: the tensors for {spelled_out([*names]) or 'a parameter'} do "
                f"not fit together ({error})",
                mismatched=names,
            ) from error
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in kwargs:
                raise _no_model(checkpoint, error) from error
            raise TypeError(
                f"{unknown[1]}: expected an argument of LayerStreamer.from_pretrained, of "
                "transformers' from_pretrained or a field of the configuration, it is none"
                + _near(unknown[1])
            ) from None
        except (ArithmeticError, AssertionError, AttributeError, LookupError) as error:
            raise _no_model(checkpoint, error) from error
        if method and getattr(model, "hf_quantizer", None) is None:
            raise _refused(checkpoint, method)  # the loader would unpack all of them at once
        pristine = None
        if getattr(model, "hf_quantizer", None) is not None:
            # With a quantizer the loader takes any shape and dtype, so an empty model checks them.
            # It draws no random weights, because integers cannot be drawn.
            kept = {"_initialize_missing_keys": lambda *_: None, "__module__": cls.__module__}
            empty: Any = type(cls.__name__, (cls,), kept)
            pristine = empty.from_pretrained(None, state_dict={}, **kwargs)[0].state_dict()
    wrong = [
        f"{name} has shape {list(came)}, expected {list(expected)}"
        for name, came, expected in sorted(info["mismatched_keys"], key=str)
    ]
    state = model.state_dict()
    for name, expected in (pristine or {}).items():
        if name in state and state[name].shape != expected.shape:
            wrong.append(
                f"{name} has shape {list(state[name].shape)}, expected {list(expected.shape)}"
            )
    lists = info["missing_keys"], info["unexpected_keys"], wrong
    require_covered(checkpoint, model, *lists, _other_class(config, cls))
    _make_buffers(model)
    for name, each in packed.items():
        owner, _, key = name.rpartition(".")
        like = torch.empty(each.shape, dtype=unpacked_dtype(model.dtype), device="meta")
        setattr(model.get_submodule(owner), key, nn.Parameter(like))
    model.config.name_or_path = str(checkpoint.folder)
    dtypes = {name: tensor.dtype for name, tensor in (pristine or model.state_dict()).items()}
    return Built(model.eval(), dtypes, packed)


def _no_model(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    said = " ".join(str(error).split())
    return CheckpointError(
        f"{checkpoint.folder / 'config.json'}: transformers makes no model of it "
        f"({type(error).__name__}: {said})"
    )


def _refused(checkpoint: Checkpoint, method: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{checkpoint.folder}: weights packed by {method} do not stream here; those of "
        "compressed-tensors do, see docs/streaming.md"
    )


def _near(name: str) -> str:
    """Suggests the argument that was probably meant."""
    known = set(signature(plan_memory).parameters) - {"model", "weight_dtype", "gpu"} | ARGUMENTS
    near = ["dtype"] if name == "weight_dtype" else get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def without_storage(tensor: TensorRange) -> Tensor:
    """Makes a meta tensor like one of the checkpoint."""
    if tensor.dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{tensor.file}: tensor {tensor.name}: {tensor.dtype} has no dtype of torch to stream"
        )
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


class _Unmoved(Tensor):
    """A meta tensor for the loader, which sends large tables to the host to join them there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, places: Any) -> Tensor:
        return super().__getitem__(places).as_subclass(_Unmoved)

    def to(self, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
        """Returns a plain meta tensor for every device."""
        return self.as_subclass(Tensor).to(dtype=dtype or self.dtype)


def _other_class(config: Any, cls: Any) -> str:
    """Returns advice if tensors belong to a tower that the text-only class does not take."""
    other = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), cls)
    return "" if other is cls else f"; images=True opens it as {other.__name__}"


@contextmanager
def _kept_report() -> Iterator[list[str]]:
    """Keeps the loader's table of mismatches out of the log: it becomes an error with the names.

    It also silences messages on weights that are loaded or divided, because none are.
    """
    report: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            report.append(text)
        return not any(said in text for said in UNSAID)

    loader, divider = map(
        logging.getLogger,
        ("transformers.modeling_utils", "transformers.distributed.tensor_parallel"),
    )
    level, bars = loader.level, transformers_logging.is_progress_bar_enabled()
    loader.setLevel(logging.WARNING)  # it may have been told to be silent
    for logger in (loader, divider):
        logger.addFilter(keep)
    if bars:
        transformers_logging.disable_progress_bar()
    try:
        yield report
    finally:
        for logger in (loader, divider):
            logger.removeFilter(keep)
        loader.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _make_buffers(model: PreTrainedModel) -> None:
    """Computes tensors that the checkpoint lacks, as the loader would on a real device.

    These are buffers that are not saved, and tensors that the model allows to be missing.
    """
    left = [*model.named_non_persistent_buffers()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not getattr(tensor, "_is_hf_initialized", False):
            left.append((name, tensor))
    made: list[tuple[str, dict[str, Any], str, Tensor]] = []
    for name, tensor in left:
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        real = torch.full_like(tensor, _poison(tensor.dtype), device="cpu", requires_grad=False)
        where: dict[str, Any] = owner._buffers if own in owner._buffers else owner._parameters
        if where is owner._parameters:
            real = nn.Parameter(real, tensor.requires_grad)
        where[own] = real
        made.append((name, where, own, real))
    for module in model.modules():  # some buffers are computed by a module further up
        module._is_hf_initialized = False
    with torch.no_grad():
        model.initialize_weights()
    left_out = [name for name, where, own, real in made if _untouched(where[own], real)]
    if left_out:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {spelled_out(left_out)} is in no checkpoint, and the model "
            "does not compute it"
        )


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else 0


def _untouched(tensor: Tensor, poisoned: Tensor) -> bool:
    """Whether a poisoned tensor was never computed."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor is poisoned and not tensor._version


def find_folder(model: str | Path, **hub: Any) -> Path:
    """Returns the folder of a checkpoint; looks an id up on the hub.

    Args:
        hub: arguments of `from_pretrained` for the hub, for example `revision`.
    """
    if not isinstance(model, (str, PathLike)):
        raise TypeError(
            f"path: expected a folder, or an id on the hub, got {type(model).__name__}; a model "
            "that is in memory is loaded already"
        )
    if Path(model).exists() or str(model).endswith(".gguf"):
        return Path(model)
    from huggingface_hub import snapshot_download

    hub = {name: value for name, value in hub.items() if name in OF_HUB}
    patterns = ["*.json", "*.safetensors"]
    return Path(snapshot_download(str(model), allow_patterns=patterns, **hub))
