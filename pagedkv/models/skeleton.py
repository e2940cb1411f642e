"""A model without weights, made by transformers' own class on the meta device.

A plan and a streamer both find layers, embedding, head and experts by this module, so that a plan
cannot disagree with what is streamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from pagedkv.errors import LayersNotFound, UnsupportedModelError

from .weights import Part, Weight

MARKS = ("has_gate", "has_bias", "is_transposed")  # transformers sets these on experts
# Projections that make K, alone or beside Q and V, or K and V from latents.
KEYS = {"k_proj", "qkv_proj", "query_key_value", "kv_b_proj"}


def configuration(fields: Mapping[str, Any], made: Any = None) -> Any:
    """Makes transformers' configuration from a file's fields; None for a type it does not know.

    Args:
        made: the object that the fields come from, returned if it is of transformers' class.

    Raises:
        ValueError: the class refuses the fields.
    """
    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return None
    cls, fields = CONFIG_MAPPING[kind], _with_floats(dict(fields))
    if type(made) is cls:
        return made
    try:
        return cls.from_dict(fields)
    except Exception:  # a file may say null where the class has a default
        said = {name: value for name, value in fields.items() if value is not None}
    try:
        return cls.from_dict(said)
    except Exception as error:  # each class checks its fields in its own way
        raise ValueError(
            f"model: transformers {transformers.__version__} does not take its configuration of "
            f"{kind} ({error})"
        ) from error


def _with_floats(value: Any) -> Any:
    """Converts a file's value: floats that JSON lacks, such as infinity, are spelt out in it."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def model_class(config: Any, images: bool = False) -> Any:
    """Returns the class that generates with a configuration.

    Args:
        images: return the class for images even if there is another for text alone.

    Raises:
        UnsupportedModelError: there is none.
    """
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    found = [mapping[type(config)] for mapping in mappings[images:] if type(config) in mapping]
    if not (found or images):
        found = _of_a_part(type(config))
    if not found:
        what = "model that takes images" if images else "causal language model"
        raise UnsupportedModelError(f"model: {config.model_type} is no {what} of transformers")
    cls = found[0]
    if isinstance(cls, tuple):  # several classes for one configuration, which says the right one
        names = getattr(config, "architectures", None) or []
        cls = next((c for c in cls if c.__name__ in names), cls[0])
    return cls


def _of_a_part(config: type) -> list[Any]:
    """Returns classes that generate with a configuration known only as a part of another one."""
    beside = vars(import_module(config.__module__)).values()
    wholes = [one for one in beside if getattr(one, "sub_configs", {}).get("text_config") is config]
    found = [MODEL_FOR_CAUSAL_LM_MAPPING.get(whole, None) for whole in wholes]
    return [cls for cls in found if getattr(cls, "config_class", None) is config]


def own_config(cls: Any, config: Any) -> Any:
    """Returns the configuration that a class takes: the given one, or its decoder's."""
    if cls.config_class is not config.sub_configs.get("text_config"):
        return config
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def empty_model(config: Any, images: bool = False) -> PreTrainedModel:
    """Makes the model that generates with a configuration, without memory for its weights.

    Raises:
        UnsupportedModelError: transformers has none, or cannot build it here.
    """
    heard = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)  # the class that also hears
    try:
        cls = model_class(config, images)
    except UnsupportedModelError:
        if heard is None or images:
            raise
        cls = heard
    config = own_config(cls, config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = cls(config)
    except Exception as error:  # a package is missing, sizes do not fit, and the like
        why = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"model: transformers {transformers.__version__} cannot build its "
            f"{cls.__name__} ({why:.200})"
        ) from error
    return model


def find_layers(
    model: PreTrainedModel, layers_path: str | None = None
) -> tuple[str, nn.ModuleList]:
    """Returns the name of a model's list of decoder layers, and the list.

    It is the only list of checkpointing layers that is as long as the configuration says; else the
    list that the model's pipeline plan names; else the only list of that length. Lists outside of
    the decoder, such as a tower's for images, are left out if the decoder has one of that length.

    Args:
        layers_path: the list's name, for a model in which these rules do not find it.

    Raises:
        LayersNotFound: there is no such list, or there are several.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if layers_path is not None:
        if layers_path not in lists:
            raise LayersNotFound(
                f"layers_path: expected a list of modules in {type(model).__name__}, got "
                f"{layers_path!r}; lists are {', '.join(lists) or 'none'}"
            )
        return layers_path, lists[layers_path]
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    parts = set(model.get_decoder().modules())
    lists = {n: m for n, m in lists.items() if m in parts and len(m) == count} or lists
    found = [
        name
        for name, modules in lists.items()
        if len(modules) == count and all(isinstance(m, GradientCheckpointingLayer) for m in modules)
    ]
    if len(found) != 1:
        found = [name for name in found or lists if name in _planned(model)] or found
    if not found:  # in older code layers are plain modules
        found = [name for name, modules in lists.items() if len(modules) == count]
    if len(found) != 1:
        what = f"several: {', '.join(found)}" if found else f"none of {', '.join(lists) or 'no'}"
        raise LayersNotFound(
            f"{type(model).__name__}: expected one list of {count} layers, got {what}; name it "
            "with layers_path="
        )
    return found[0], lists[found[0]]


def _planned(model: PreTrainedModel) -> set[str]:
    """Returns the lists that pipeline plans inside the model name."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            plan = getattr(module.config, "base_model_pp_plan", None) or {}
            names |= {f"{prefix}.{part}".removeprefix(".") for part in plan}
    return names


def experts_in(layer: nn.Module) -> list[nn.Module]:
    """Returns modules of a layer that compute experts by token indices and rows of tensors."""
    return [m for m in layer.modules() if all(hasattr(m, mark) for mark in MARKS)]


def weights_of(model: PreTrainedModel) -> list[Weight]:
    """Returns the weights of a model, each once; a head tied to the embedding does not count.

    A weight that several layers use belongs to none of them, as it stays while layers stream. If
    layers are not in one list, all of them stay. Buffers that checkpoints hold count, too.
    """
    try:
        layers: Any = find_layers(model)[1]
    except LayersNotFound:
        layers = ()
    users: dict[int, list[int]] = defaultdict(list)
    of_experts, alone = set(), set()
    for index, layer in enumerate(layers):
        for key in {id(tensor) for tensor in layer.state_dict(keep_vars=True).values()}:
            users[key].append(index)
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                of_experts |= {id(p) for p in module.parameters()}
        for module in experts_in(layer):
            alone |= {id(p) for p in module.parameters()}
    packable = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} | alone
    first, last = ends_of(model)
    ends: list[tuple[Part, Any]] = [("head", last), ("embedding", first)]  # one if they are tied
    parts = {id(getattr(end, "weight", None)): part for part, end in ends}
    parts |= {id(table.weight): "tables" for table in tables_of(model)}
    cut = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = _style(model, name)  # cut by rows or by columns; a bias only by columns
        if "wise" in style and (parameter.dim() > 1 or "colwise" in style):
            cut.add(id(parameter))
    inside = {id(tensor) for tensor in model.get_decoder().state_dict(keep_vars=True).values()}
    named = {id(tensor): name for name, tensor in reversed(_kept(model).items())}
    seen: list[Weight] = []
    for name, tensor in _kept(model).items():
        if named[key := id(tensor)] != name:
            continue
        used = () if parts.get(key) == "tables" else tuple(users[key])
        part = parts.get(key) or (
            "layer" if len(used) == 1 else "rest" if key in inside else "tower"
        )
        seen.append(
            Weight(
                name,
                part,
                used,
                tuple(tensor.shape),
                is_expert=key in of_experts | alone,
                alone=key in alone,
                packable=key in packable,
                cut=key in cut,
            )
        )
    return seen


def _kept(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns by name the tensors that checkpoints hold: parameters, then buffers; some twice."""
    kept: dict[str, Any] = model.state_dict(keep_vars=True)
    return dict(sorted(kept.items(), key=lambda item: not isinstance(item[1], nn.Parameter)))


def tables_of(model: PreTrainedModel) -> list[nn.Embedding]:
    """Returns a decoder's tables that are larger than its embedding: of n-grams, or for each layer.

    A token looks up a few of their rows, and only these are read while weights stream. Positions
    that are learned, as OPT's, are none: from masks and lengths they make indices of their own.
    """
    first, decoder = getattr(ends_of(model)[0], "weight", None), model.get_decoder()
    if first is None or decoder is None:
        return []
    tables = (
        module
        for module in decoder.modules()
        if isinstance(module, nn.Embedding) and len(signature(type(module).forward).parameters) == 2
    )
    return [table for table in tables if table.weight.numel() > first.numel()]


def ends_of(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns a model's embedding and its head; None for one that the model does not name."""
    found: list[Any] = [None, None]
    for i, end in enumerate((model.get_input_embeddings, model.get_output_embeddings)):
        with suppress(AttributeError, NotImplementedError):  # it has several, or another one's
            found[i] = end()
    return found[0], found[1]


def _style(model: PreTrainedModel, name: str) -> str:
    """Returns how the plan of a model's class shares out a parameter; empty if it does not."""
    plan: dict[str, str] = model.tp_plan or {}
    generic = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0]) or ""


def shares_heads(model: PreTrainedModel) -> bool:
    """Whether a process computes a part of the heads, and keeps only their K and V."""
    plan: dict[str, str] = model.tp_plan or {}
    return any(
        name.rpartition(".")[2] in KEYS and style in ("colwise", "packed_colwise")
        for name, style in plan.items()
    )
