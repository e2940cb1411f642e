"""Compares the outputs of a model's layers over pages with those over its own cache.

Random texts are answered with forced tokens, so that every way computes the same. The outputs of
modules that have a layer's index are recorded, the decoder's, and the logits. How far apart two
right ways may be is measured by changing the layers' outputs by about a rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.ranks import ranks_of

from .model import device_of, named_model, text_config
from .release import CACHE

LENGTHS = 19, 19, 11  # of texts; the two equally long ones need no padding
COMMON = 5  # tokens with which all texts begin
NEW = 3  # tokens of an answer, the last of which is not computed
ROUNDINGS = 4  # another right way may differ by so many times the effect of a rounding a layer
LEAST = 1e-4  # of a layer's output: sums in another order may always differ by so much
VAGUE = 0.2  # a larger effect of rounding hides whether a model is wrong
HUGE = 1e4  # at minus this and below a logit hides a token: the least of float16 is -65504
DRAWS = 3  # tries with other texts
LAST, LOGITS = "its last hidden state", "its logits"
OPTIONS: dict[str, Any] = {
    "do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0,
    "max_new_tokens": NEW, "use_cache": True,
}  # fmt: skip

# By layer, in the order of computation: `[n, C]` for each row, the outputs for its last n tokens.
Rows = dict[str, list[Tensor]]
Refusal = Callable[[PreTrainedModel, str], UnsupportedModelError]


@contextmanager
def recorded(model: PreTrainedModel, shaken: bool = False) -> Iterator[list[dict[str, Tensor]]]:
    """Records the outputs of layers within it, `[B, n, C]` by layer, in a dictionary a forward.

    Args:
        shaken: change a layer's output by about a rounding before the model goes on with it.
    """
    found: list[dict[str, Tensor]] = []
    text = text_config(model)
    draw = torch.Generator().manual_seed(0)

    def note(name: str, given: Any) -> None:
        if isinstance(given, Tensor) and given.dim() == 3:
            found[-1][name] = given.detach().float().cpu()

    def note_layer(name: str, module: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if shaken and isinstance(first, Tensor):
            by = torch.rand(first.shape, generator=draw, device="cpu").sub(0.5)
            first = first + first * by.mul(torch.finfo(first.dtype).eps).to(first)
            output = (first, *output[1:]) if isinstance(output, tuple) else first
        note(f"layer {module.layer_idx} ({name})", first)
        return output

    def here(hook: Callable[..., Any]) -> Callable[..., Any]:
        """Leaves out the forwards of other threads."""
        return lambda *given: hook(*given) if get_ident() == thread else None

    thread = get_ident()
    hooks = [
        model.register_forward_pre_hook(here(lambda *_: found.append({}))),
        model.register_forward_hook(here(lambda _, args, output: note(LOGITS, output.logits))),
    ]
    if (decoder := model.get_decoder()) is not model:  # of all tokens, where logits are of the last
        last = here(lambda _, args, output: note(LAST, output[0]))
        hooks.append(decoder.register_forward_hook(last))
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "config", text) is text:
            layer = here(lambda m, _, out, n=name: note_layer(n, m, out))
            hooks.append(module.register_forward_hook(layer))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _plain_defaults(own: GenerationConfig) -> GenerationConfig:
    """Returns transformers' defaults of `generate`, without several samples, guidance and so on.

    What the class of a model's own defaults adds to transformers' options stays.
    """
    plain = copy.copy(own)
    vars(plain).update(vars(GenerationConfig()))
    return plain


class _Forced(LogitsProcessor):
    """Chooses given tokens `[B, NEW]`, whatever the scores are."""

    def __init__(self, tokens: Tensor) -> None:
        self._left = [*tokens.unbind(1)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._left.pop(0).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0)


class Truth:
    """The outputs of a model's layers over transformers' own cache, for some random texts.

    Args:
        refusal: makes the error for a model that gives something else, from what was found.

    Attributes:
        texts: `[n]` each, with all tokens that are computed.
        far: the largest distance that was found, in parts of a layer's output.
        last: the latest recording.
    """

    def __init__(
        self, model: PreTrainedModel, seed: int = 0, refusal: Refusal | None = None
    ) -> None:
        self.model, self.far, self._ranks = model, 0.0, ranks_of(model)
        self._refusal = partial(refusal or not_alike, model)
        self.last: list[dict[str, Tensor]] = []
        draw = torch.Generator().manual_seed(seed)
        most = text_config(model).vocab_size * 3 // 4  # special tokens are the last, as a rule
        shape = 3, max(LENGTHS) + NEW
        every = torch.randint(min(3, most - 1), most, shape, generator=draw, device="cpu")
        every[:, :COMMON] = every[0, :COMMON]
        self._whole = [row[: n + NEW] for row, n in zip(every, LENGTHS)]
        self.texts = [row[:-1] for row in self._whole]

    def given(self, rows: Sequence[int], cache: Any = None, shaken: bool = False) -> Rows:
        """Returns the outputs of layers while `generate` answers the rows at these places.

        Args:
            cache: the cache that it is given; None for the model's own.
            shaken: as for `recorded`.
        """
        texts = [self._whole[i] for i in rows]
        width = max(map(len, texts)) - NEW
        batch = [nn.functional.pad(text[:-NEW], (width + NEW - len(text), 0)) for text in texts]
        mask = [torch.arange(width, device="cpu") >= width + NEW - len(text) for text in texts]
        seen = recorded(self.model, shaken)
        with seen as self.last, self._by_itself(cache):
            found = self.model.generate(
                input_ids=torch.stack(batch).to(device_of(self.model)),
                attention_mask=torch.stack(mask).long().to(device_of(self.model)),
                logits_processor=[_Forced(torch.stack([text[-NEW:] for text in texts]))],
                **OPTIONS,
                **({} if cache is None else {CACHE: cache}),
            )
        if not found[:, -NEW:].cpu().equal(torch.stack([text[-NEW:] for text in texts])):
            raise self._refusal("its generate() takes no logits_processor to force tokens by")
        names = dict.fromkeys(name for forward in self.last for name in forward)
        whole = {n: torch.cat([f[n] for f in self.last if n in f], 1) for n in names}
        return {
            n: [x[i, 1 - len(text) :] for i, text in enumerate(texts)] for n, x in whole.items()
        }

    @contextmanager
    def _by_itself(self, cache: Any) -> Iterator[None]:
        """Refuses a model that fails over its own cache; over ours the caller makes the error."""
        try:
            yield
        except Exception as error:  # of any kind: the model is unknown
            if cache is not None:
                raise
            why = f"it fails by itself ({type(error).__name__}: {error})"
            raise self._refusal(why) from error

    @cached_property
    def alone(self) -> Rows:
        """Outputs for each row by itself."""
        return self._each(shaken=False)

    @cached_property
    def padded(self) -> Rows:
        """Outputs for all rows together."""
        return self.given(range(len(LENGTHS)))

    def _each(self, shaken: bool) -> Rows:
        each = [self.given([i], shaken=shaken) for i in range(len(LENGTHS))]
        return {name: [rows[name][0] for rows in each] for name in each[0]}

    @cached_property
    def _allowed(self) -> dict[str, float]:
        """How far another right way may be from this one, by layer.

        Raises:
            UnsupportedModelError: it is too far to judge by.
        """
        shaken, found = self._each(shaken=True), {}
        for name, far in self._distances(shaken, self.alone).items():
            if not far < VAGUE:
                raise self._refusal(
                    f"{name} changes by {far:.1e} of it with a rounding in {self.model.dtype}, "
                    "which hides what pages change; float32 may tell, unless the model keeps "
                    "something beside its cache"
                )
            found[name] = max(ROUNDINGS * far, LEAST)
        return found

    def require_finite(self) -> None:
        """Raises if outputs are no finite numbers, from which nothing has a distance."""
        for name, far in self._distances(self.alone, self.alone).items():
            if far != 0:
                raise self._refusal(f"not all of {name} is finite in {self.model.dtype}")

    def require_again(self) -> None:
        """Raises if a text gives another output once other texts were computed."""
        most = max(LEAST, ROUNDINGS * torch.finfo(self.model.dtype).eps)
        first = {name: rows[:1] for name, rows in self.alone.items()}
        for name, far in self._distances(self.given([0]), first).items():
            if not far <= most:
                raise self._refusal(
                    f"{name} gives another by {far:.1e} of it for the same text again: it draws at "
                    "random, or keeps something beside its cache"
                )

    def _distances(self, found: Rows, truth: Rows) -> dict[str, float]:
        """How far rows are from the truth, by layer; ranks decide by those of the first one."""
        far = {name: max(map(distance, found[name], rows)) for name, rows in truth.items()}
        shared: dict[str, float] = self._ranks.share(far)
        return shared

    def require_like(self, way: str, give: Callable[[], Rows], truth: Rows) -> None:
        """Raises UnsupportedModelError with the first layer that gives something else, and how far.

        Args:
            way: the name of the way that is compared.
            give: computes rows in this way, or raises.
            truth: the right outputs for these rows, perhaps with more rows behind them.
        """
        try:
            found = give()
        except Exception as error:  # of any kind: the model is unknown
            reached = self.last[-1] if self.last else {}
            where = next((name for name in self.alone if name not in reached), "its end")
            raise self._refusal(f"{way} fail in {where}: {error}") from error
        if missing := next((name for name in truth if name not in found), None):
            raise self._refusal(f"{missing} is not called for {way}")
        for name, far in self._distances(found, truth).items():
            self.far = max(self.far, far)
            if far <= LEAST:
                continue
            if not far <= (most := self._allowed[name]):  # a look at roundings costs forwards
                raise self._refusal(
                    f"{name} is another by {far:.1e} of it for {way}, where rounding explains "
                    f"{most:.1e}"
                )


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns how far two outputs differ at their common tokens, in parts of the second's size.

    Where both hide the same, as logits of tokens that nobody may choose, this counts as no size.
    """
    n = min(len(ours), len(theirs))
    ours, theirs = ours[-n:], theirs[-n:]
    hidden = (theirs <= -HUGE) & (ours == theirs)
    ours, theirs = ours.masked_fill(hidden, 0), theirs.masked_fill(hidden, 0)
    size, apart = float(theirs.norm()), float((ours - theirs).norm())
    return apart / size if size else apart


def compared(
    model: PreTrainedModel, compare: Callable[[Truth], None], refusal: Refusal | None = None
) -> Truth:
    """Compares a model with its truth, which is returned; `unmarked` around it takes all back.

    Args:
        compare: compares; raises UnsupportedModelError. A rounding may choose another expert, or
            another number of 16 bits within a model of 32, so it is called again with other texts:
            a wrong model is wrong with any.
        refusal: as for `Truth`.
    """
    model.generation_config = _plain_defaults(model.generation_config)
    left = DRAWS
    while True:
        truth = Truth(model, left, refusal)
        try:
            truth.require_finite()
            truth.require_again()
            compare(truth)
            return truth
        except UnsupportedModelError:
            left -= 1
            if not left:
                raise


def not_alike(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    """Makes the error for a model that no list knows, and that failed the comparison."""
    return UnsupportedModelError(
        f"{named_model(model)} cannot use paged attention: no list knows its type, and held "
        f"against transformers' own cache {why}. Use transformers' own cache for it."
    )
