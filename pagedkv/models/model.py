"""`Model`: a model by its configuration and files, and by what its class makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pagedkv.errors import UnsupportedModelError

from .checkpoint import Checkpoint, found_in, require_sizes, short_name
from .defaults import models_folder, named_with
from .facts import facts_of
from .kinds import LayerKind, layer_kinds, shared_layers, window_of
from .names import attributes, inner_of, leaves_out_sizes, settings_of, with_dtype
from .packing import method_of
from .shapes import kv_shapes
from .weights import Weight

# A decoder of unknown type has to say these of itself; other sizes are guessed.
SAID = "num_key_value_heads", "intermediate_size", "num_attention_heads", "hidden_size"
LIKE_A_LLAMA = (*SAID, "num_hidden_layers", "head_dim", "vocab_size", "max_position_embeddings")
MOST_MADE = 8  # most skeletons that are kept


class Skeleton(NamedTuple):
    """A model without weights, and what was assumed to build it.

    Attributes:
        weights: the model's weights, each once.
        is_planned: whether its class has a plan by which processes share out the model.
        shares_heads: whether each process then computes a part of the heads.
        assumed: sentences for people on what was assumed.
    """

    weights: list[Weight]
    is_planned: bool
    shares_heads: bool
    assumed: tuple[str, ...]


_MADE: dict[str, Skeleton] = {}


class Model:
    """A model by its configuration, and by its files if there are some.

    Attributes:
        name: a name for people.
        fields: the fields of its configuration.
        images: whether to take its class for images even if it has another for text alone.
        checkpoint: its files; None for a configuration alone.
    """

    def __init__(
        self,
        name: str,
        fields: Mapping[str, Any],
        images: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        if not isinstance(kind := fields.get("model_type") or "", str):
            raise ValueError(f"model: expected model_type in its config to be a str, got {kind!r}")
        self.name, self.fields, self.images = name, fields, images
        self.checkpoint = checkpoint

    @classmethod
    def of(cls, model: Any, images: bool = False) -> Model:
        """Makes a `Model` from any object that stands for a model.

        Args:
            model: a configuration (dict or object), a folder, an id on the hub, an open checkpoint,
                or a model in memory. Its class fills in what a configuration alone leaves out.

        Raises:
            UnsupportedModelError: pages cannot serve it.
            CheckpointError: the folder is no valid checkpoint.
            ValueError: the configuration lacks a size that is needed, or transformers refuses it.
            ImportError: there is a configuration alone, and transformers is not installed.
        """
        name = ""
        if isinstance(model, str | Path):
            name, model = found_in(model)
        if isinstance(model, Checkpoint):
            return cls(name or short_name(model.folder), model.config, images, model)
        dtype = None
        if hasattr(model, "config") and not isinstance(model, type):  # in memory, so it may be cast
            dtype, model = getattr(model, "dtype", None), model.config
        fields = model if isinstance(model, Mapping) else attributes(model)
        require_sizes(fields)
        name = name or str(fields.get("_name_or_path") or fields.get("model_type") or "model")
        if find_spec("transformers") is None:
            raise ImportError(
                "model: a configuration alone is weighed by transformers: pip install 'pagedkv[hf]'"
            )
        whole = None
        if is_known(str(fields.get("model_type"))):
            from .skeleton import configuration

            try:
                whole = configuration(fields, model)
            except ValueError:
                settings_of(dict(fields))  # raises the same in our words
                raise
            if leaves_out_sizes(fields):  # its class would fill in its own sizes
                settings_of(dict(fields))
            fields = whole.to_dict()
        made = cls(name, fields if dtype is None else with_dtype(fields, str(dtype)), images)
        if whole is not None:
            made.__dict__["config"] = whole
        return made

    @cached_property
    def settings(self) -> SimpleNamespace:
        """Its decoder's configuration by one set of names.

        It includes the `kinds` of its layers and the `shapes` of their K and V.

        Raises:
            UnsupportedModelError: pages cannot serve it.
            ValueError: the configuration lacks a size that is needed.
        """
        c = settings_of(dict(self.fields))
        if self.images and not self.takes_images:
            raise UnsupportedModelError(f"model: {c.model_type} is no model that takes images")
        kinds = layer_kinds(c)
        c.shapes = kv_shapes(c, kinds)
        if not c.shapes:
            raise UnsupportedModelError(
                f"model: {c.model_type} cannot use pages: none of its layers has K and V of its own"
            )
        # Layers that attend to the K and V of others keep nothing.
        shared = c.layer_types[len(kinds) :] if shared_layers(c) else ()
        c.kinds = kinds + [LayerKind("attention", window_of(c, name)) for name in shared]
        return c

    @property
    def kind(self) -> str:
        """Its type, by the name in its configuration."""
        return str(self.fields.get("model_type") or "")

    @property
    def method(self) -> str:
        """The method by which its checkpoint is quantised; empty if by none."""
        return method_of(self.fields)

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has its type, or its decoder's type."""
        return is_known(self.settings.model_type) or is_known(self.kind)

    @property
    def takes_images(self) -> bool:
        """Whether its configuration says something about images."""
        return any(word in name for name in self.fields for word in ("vision", "visual", "image"))

    @property
    def sees(self) -> bool:
        """Whether its tower for images is loaded."""
        return self.images or not facts_of(self.kind).text_alone

    @cached_property
    def config(self) -> Any:
        """Its configuration as transformers' class; None for a type that transformers lacks."""
        from .skeleton import configuration

        return configuration(self.fields)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The model without weights.

        Raises:
            UnsupportedModelError: neither it nor its decoder alone can be built.
        """
        key = repr((self.fields, self.images))
        if (found := _MADE.get(key)) is not None:  # a search plans one model often
            return found
        from .skeleton import shares_heads, weights_of

        empty, *assumed = self._empty()
        planned = bool(empty.tp_plan)
        made = Skeleton(weights_of(empty), planned, shares_heads(empty), tuple(assumed))
        if len(_MADE) >= MOST_MADE:
            _MADE.clear()
        _MADE[key] = made
        return made

    def _empty(self) -> tuple[Any, ...]:
        """Makes the model by transformers' class, or the nearest one, with a sentence on this."""
        from .skeleton import configuration, empty_model

        if self.config is not None:
            try:
                return (empty_model(self.config, self.images),)
            except UnsupportedModelError as error:
                decoder = self.config.get_text_config(decoder=True)
                if decoder is self.config:
                    raise
                why = str(error).removeprefix("model: ")
                return empty_model(decoder), f"{why}: planned is its decoder alone"
        unknown = f"{self.kind or 'the type'} is none of transformers"
        if (inner := configuration(inner_of(self.fields))) is not None:
            alone = f"planned is its decoder alone, {inner.model_type}"
            return empty_model(inner), f"{unknown}: {alone}"
        if missing := [name for name in SAID if not self.fields.get(name)]:
            raise UnsupportedModelError(
                f"model: {unknown}, and its configuration does not say {', '.join(missing)}"
            )
        told = {name: getattr(self.settings, name) for name in LIKE_A_LLAMA}
        told |= {"tie_word_embeddings": bool(self.fields.get("tie_word_embeddings"))}
        llama = configuration({"model_type": "llama", **told})
        return empty_model(llama), f"{unknown}: it is planned as a llama of the same sizes"


def is_known(kind: object) -> bool:
    """Whether the installed transformers has a type, without importing it.

    It is true without transformers, because then nobody can tell.
    """
    return models_folder() is None or bool(named_with(str(kind)))
