"""How a model sees the images of a prompt, or hears its audio: what its decoder is given for them.

Every image-text model puts the features of its images into the embeddings of the text and gives
these to its decoder, some with further tensors beside them. So a model of any family is run up to
its decoder, once for a prompt, and the decoder's arguments for image tokens are kept as *features*.
Steps that feed these tokens put the features back in the same place. Giving the model
`inputs_embeds` would lose the tensors beside them. Audio-text models do the same with audio, so all
that these modules say of images holds for audio.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError

from .model import device_of, text_config
from .release import cache_argument
from .signature import arguments_of

IMAGE_TOKEN = ("image_token_id", "image_token_index", "media_placeholder_token_id")
AUDIO_TOKEN = ("audio_token_id", "audio_token_index")
PIXELS, GRID, KINDS = "pixel_values", "image_grid_thw", "mm_token_type_ids"
SOUNDS = "input_features"
EMBEDDINGS, DEEPSTACK, DEEPSTACK_AT = "inputs_embeds", "deepstack_visual_embeds", "visual_pos_masks"
# Arguments of decoders that hold something for each token, as `[B, T, ...]`.
BY_TOKEN = (EMBEDDINGS, "per_layer_inputs")
# Arguments that say nothing of images, or that a step makes itself.
OTHERS = ("attention_mask", "input_ids", "position_ids", "cache_position")


class Features(NamedTuple):
    """The arguments of a decoder for the image tokens of a prompt, in their order.

    Attributes:
        by_token: `[n, ...]` for each argument that holds something for each token.
        deepstack: `[n, hidden]` for each of the first layers, added behind it.
    """

    by_token: dict[str, Tensor]
    deepstack: list[Tensor]

    def part(self, begin: int, end: int) -> Features:
        """Returns the features of some of the image tokens."""
        return Features(
            {name: values[begin:end] for name, values in self.by_token.items()},
            [values[begin:end] for values in self.deepstack],
        )

    @staticmethod
    def joined(parts: list[Features]) -> Features:
        """Joins the features of several prompts, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        return Features(
            {
                name: torch.cat([part.by_token[name] for part in parts])
                for name in parts[0].by_token
            },
            [torch.cat(layers) for layers in zip(*(part.deepstack for part in parts))],
        )


class Sense(NamedTuple):
    """The inputs that a model takes beside text.

    Attributes:
        word: its name in messages, `images` or `audio`.
        argument: the argument of the model's forward that holds it.
        token: the id that stands in a text for each of its tokens.
    """

    word: str
    argument: str
    token: int


class Vision:
    """The part of a model that sees, or hears.

    Raises:
        UnsupportedModelError: the model takes neither images nor audio.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, config = model, model.config
        sense, decoder = sense_of(model), model.get_decoder()
        if sense is None or decoder.config is config:
            raise UnsupportedModelError(
                f"{PIXELS}: {type(model).__name__} ({config.model_type}) takes no images"
            )
        if decoder.config is not text_config(model):
            raise UnsupportedModelError(
                f"{sense.argument}: {type(model).__name__} has its decoder where it is not looked "
                "for"
            )
        self.sense = sense
        self._decoder: nn.Module = decoder
        places = (part for part in model.modules() if hasattr(part, "get_rope_index"))
        self._places: Any = next(places, None)

    def positions(self, ids: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, int] | None:
        """Returns a prompt's positions, `[axes, n]`, and how far ahead the next positions are.

        None for a model that counts the tokens of an image like those of a text.

        Args:
            ids: `[n]`, on the host.
            inputs: what a processor made of the prompt beside its ids.

        Raises:
            ValueError: the grids of its images are missing, or do not fit pixels or text.
        """
        if self._places is None:
            return None
        compute = self._places.get_rope_index
        accepted = inspect.signature(compute).parameters
        if GRID in accepted:
            _require_grid(inputs)
        here = {name: value for name, value in inputs.items() if name in accepted}
        given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in here.items()}
        row, kinds = ids[None], (ids[None] == self.sense.token).int()
        own = {"input_ids": row, KINDS: kinds, "attention_mask": torch.ones_like(row)}
        given |= {name: value for name, value in own.items() if name in accepted}
        try:
            positions, deltas = compute(**given)
        except Exception as error:  # anything that does not fit raises somewhere in there
            tokens = int(kinds.sum())
            raise ValueError(
                f"{GRID}: expected grids that fit the {tokens} image tokens of the text, the model "
                f"raised {type(error).__name__}: {error}"
            ) from error
        return positions[:, 0].to(device_of(self.model)), int(deltas.reshape(-1)[0])

    def features(
        self,
        ids: Tensor,
        inputs: Mapping[str, Any],
        places: Tensor,
        positions: Tensor | None,
        cache: Cache,
    ) -> Features:
        """Runs the model up to its decoder; returns the features of a prompt's image tokens.

        Args:
            ids, inputs, positions: as for `positions`.
            places: `[n]`, where in the prompt its image tokens are.
            cache: a cache of ours; it tells the mask function that the forward is ours, and this
                forward from those of other threads.

        Raises:
            UnsupportedModelError: packed rows cannot give the decoder the same arguments.
            ValueError: the model makes several tokens of one token of the text.
        """
        # Qwen2-Audio needs a mask when it makes several tokens of one, which is refused below.
        given = {"attention_mask": torch.ones_like(ids[None]), **inputs}
        if positions is not None:
            given["position_ids"] = positions[:, None]

        given |= {cache_argument(self.model): cache}
        run = partial(self.model, input_ids=ids[None], use_cache=True, **given)
        # A call without this cache is a forward of another thread.
        arguments = arguments_of(self._decoder, run, partial(_are_given, cache))
        if arguments is None:
            raise UnsupportedModelError(
                f"{self.sense.argument}: {type(self.model).__name__} does not call its decoder as "
                "a module"
            )
        self._require_known(arguments)
        if (count := arguments[EMBEDDINGS].shape[1]) != len(ids):
            raise ValueError(
                f"{self.sense.argument}: expected a token of the text for each that the model "
                f"makes of {self.sense.word}, got {len(ids)} tokens, of which it makes {count}"
            )
        found = {name: arguments[name] for name in BY_TOKEN if arguments.get(name) is not None}
        by_token = {name: x[0, places.to(x.device)].clone() for name, x in found.items()}
        return Features(by_token, list(arguments.get(DEEPSTACK) or ()))

    def _require_known(self, arguments: dict[str, Any]) -> None:
        known = {*BY_TOKEN, *OTHERS, DEEPSTACK, DEEPSTACK_AT}
        strange = [
            name
            for name, value in arguments.items()
            if name not in known and isinstance(value, (Tensor, list, tuple, dict))
        ]
        if strange or EMBEDDINGS not in arguments:
            what, (word, argument, _) = ", ".join(strange) or f"no {EMBEDDINGS}", self.sense
            raise UnsupportedModelError(
                f"{argument}: the decoder of {type(self.model).__name__} is given {what} with "
                f"{word}, which packed rows do not serve; `PagedCache` with `generate` may"
            )

    @contextmanager
    def fed(self, places: Tensor, features: Features, cache: Cache) -> Iterator[None]:
        """Gives the decoder these features in forwards with this cache, within the context.

        Args:
            places: `[n]`, the packed tokens they belong to.
            cache: the step's cache; forwards of other threads have another one.
        """

        def put(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not _are_given(cache, kwargs):
                return None
            kwargs = dict(kwargs)
            for name, values in features.by_token.items():
                given = kwargs[name] = kwargs[name].clone()
                given[0, places.to(given.device)] = values.to(given.device)
            if features.deepstack:
                at = torch.zeros_like(kwargs[EMBEDDINGS][..., 0], dtype=torch.bool)
                at[0, places.to(at.device)] = True
                kwargs |= {DEEPSTACK_AT: at, DEEPSTACK: features.deepstack}
            return args, kwargs

        hook = self._decoder.register_forward_pre_hook(put, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            hook.remove()


def on_device(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Moves a processor's inputs to the model's device and dtype."""
    device, dtype = device_of(model), model.dtype
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def sense_of(model: PreTrainedModel) -> Sense | None:
    """Returns the `Sense` of images that a model takes, or of audio; None for text alone."""
    accepted = inspect.signature(model.forward).parameters
    senses = (("images", PIXELS, IMAGE_TOKEN), ("audio", SOUNDS, AUDIO_TOKEN))
    for word, argument, names in senses:
        token = _first_of(model.config, names)
        if token is not None and argument in accepted:
            return Sense(word, argument, token)
    return None


def image_token_of(config: Any) -> int | None:
    """Returns the id that stands for each token of an image; None for a model without images."""
    return _first_of(config, IMAGE_TOKEN)


def _first_of(config: Any, names: tuple[str, ...]) -> int | None:
    ids = (field_of(config, name) for name in names)
    return next((one for one in ids if one is not None), None)


def _are_given(cache: Cache, arguments: Mapping[str, Any]) -> bool:
    """Whether a cache is among the arguments of a call, under any name."""
    return any(value is cache for value in arguments.values())


def _require_grid(inputs: Mapping[str, Any]) -> None:
    grid, pixels = inputs.get(GRID), inputs[PIXELS]
    if not isinstance(grid, Tensor):
        raise ValueError(f"{GRID}: expected it beside {PIXELS}, as the processor returns it")
    if len(pixels) != (patches := int(grid.prod(-1).sum())):
        raise ValueError(
            f"{PIXELS}: expected the {patches} patches that {GRID} tells of, got {len(pixels)}"
        )
