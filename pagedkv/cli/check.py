"""`pagedkv check`: compares a model over pages with the model over its own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from pagedkv.config import field_of
from pagedkv.errors import PagedKVError

from .errors import UsageError, refusing
from .option import MODEL, Given, Panel, takes
from .options import DTYPES_SAID, dtype_of

if TYPE_CHECKING:  # it brings torch along, for which --help does not wait
    from torch import Tensor

COMPUTE, ASKED = Panel("Computation"), Panel("Prompts")
EXIT_CODES = "Exit codes: 0 the same answers, 1 others, 2 it cannot use pages, or cannot be judged."
ROUNDINGS = 4  # two ways to compute a logit may differ by so many times the model's own rounding
VAGUE = 0.2  # share of the spread of logits; larger rounding hides whether a model is wrong


class Answer(NamedTuple):
    """A model's answer to one prompt.

    Attributes:
        tokens: `[T]` ids.
        logits: `[T, vocab]` float32; each token was chosen by its row.
    """

    tokens: Tensor
    logits: Tensor


@takes(
    MODEL,
    COMPUTE("--device DEVICE", str, "auto, or for example cpu, cuda, cuda:1.", "auto"),
    COMPUTE(
        "--dtype DTYPE", str, f"{DTYPES_SAID}. In 16 bits it finds only large errors.", "float32"
    ),
    ASKED("--length TOKENS", int, "Tokens of the longest prompt.", 24, min=4),
    ASKED("--tokens -n N", int, "New tokens for each prompt.", 32, min=1),
    epilog=EXIT_CODES,
)
def check(given: Given) -> None:
    """Compare a model's answers over pages with those over transformers' own cache.

    Random prompts are answered one at a time with transformers' cache,
    then together with `PagedCache`, in a second turn, and with
    `BatchGenerator`. Tokens may differ where the two likeliest ones are
    closer than the model's own rounding. If no list knows the model, the
    command first compares each layer, and says what the layer keeps.

    For example:

    pagedkv check MODEL
    """
    with refusing(PagedKVError):
        raise typer.Exit(_check(**vars(given)))


def _check(model: Any, device: str, dtype: str, length: int, tokens: int) -> int:
    """Runs the check of a model, given by its name; returns the command's exit code."""
    import torch
    import transformers

    from pagedkv import PagedCache
    from pagedkv.hf.look import look_at
    from pagedkv.hf.model import require_supported

    from .loading import model_of, pick

    transformers.logging.disable_progress_bar()
    model = model_of(model, dtype_of(dtype), pick(device))
    found = look_at(model, PagedCache)
    require_supported(model)
    if found:
        typer.echo(found)
    typer.echo("answering in four ways; on a CPU this may take minutes", err=True)
    model.generation_config = transformers.GenerationConfig()  # rules would hide what is computed
    text = model.config.get_text_config(decoder=True)
    _require_fits(text, length + tokens // 2 + 1 + tokens)
    draw = torch.Generator().manual_seed(0)
    least = min(3, text.vocab_size - 1)
    lengths = length, length * 3 // 8, length * 2 // 3
    prompts = [
        torch.randint(least, text.vocab_size, (n,), generator=draw, device="cpu") for n in lengths
    ]
    own = [_alone(model, prompt, tokens) for prompt in prompts]
    rounding = max(_rounding(model, prompt, answer) for prompt, answer in zip(prompts, own))
    typer.echo(
        f"{type(model).__name__} in {model.dtype} on {model.device}, transformers "
        f"{transformers.__version__}\nown cache       rounds its logits by {rounding:.1e}"
    )
    spread = max(float(answer.logits.std()) for answer in own)
    if not rounding < VAGUE * spread:
        raise UsageError(
            f"MODEL: its logits, which spread by {spread:.1e}, are rounded too much to judge "
            "others by; --dtype float32 may help"
        )
    window = getattr(text, "sliding_window", None)
    if window and window >= length + tokens:
        typer.echo(f"its window of {window} tokens is not reached; --length {window} would")
    later = [torch.cat([p[:-1], a.tokens[: tokens // 2], p[:2]]) for p, a in zip(prompts, own)]
    ways = {
        "PagedCache": lambda: _paged(model, [prompts], tokens),
        "a second turn": lambda: _paged(model, [prompts, later], tokens),
        "BatchGenerator": lambda: _batched(model, prompts, tokens),
    }
    right = []
    for way, answers in ways.items():
        expected = [_alone(model, p, tokens) for p in later] if "turn" in way else own
        try:
            right.append(_says(way, expected, answers(), rounding))
        except PagedKVError as error:
            typer.echo(f"{way:<15} refused: {error}")
    return 0 if all(right) else 1


def _require_fits(text: Any, longest: int) -> None:
    """Raises if a second turn is longer than the texts that a model takes."""
    most = field_of(text, "max_position_embeddings") or longest
    if longest > most:
        raise UsageError(
            f"--length, --tokens: a second turn has {longest} tokens with its answer, and the "
            f"model takes {most}"
        )


def _says(way: str, own: list[Answer], answers: list[Answer], rounding: float) -> bool:
    """Prints how a way's answers compare, and returns whether they are right."""
    apart = max(_apart(one, other) for one, other in zip(own, answers))
    same = sum(one.tokens.equal(other.tokens) for one, other in zip(own, answers))
    right = apart <= ROUNDINGS * rounding
    said = f"{same} of {len(own)} answers equal, logits differ by {apart:.1e}"
    typer.echo(f"{way:<15} {said}: {'right' if right else 'WRONG'}")
    return right


def _apart(own: Answer, other: Answer) -> float:
    """Measures how far logits lie apart, as long as both have chosen the same tokens."""
    common = min(len(own.tokens), len(other.tokens))
    differ = (own.tokens[:common] != other.tokens[:common]).nonzero().flatten().tolist()
    steps = min([*differ, common - 1]) + 1
    return float((own.logits[:steps] - other.logits[:steps]).abs().max())


def _options(tokens: int) -> dict[str, Any]:
    more = {"do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}
    return {**more, "max_new_tokens": tokens, "pad_token_id": 0}


def _answers(found: Any, rows: int, prompt: int) -> list[Answer]:
    import torch

    logits = torch.stack(found.logits, 1).float().cpu()
    return [Answer(found.sequences[i, prompt:].cpu(), logits[i]) for i in range(rows)]


def _alone(model: Any, prompt: Tensor, tokens: int) -> Answer:
    asked = {"return_dict_in_generate": True, "output_logits": True, **_options(tokens)}
    ids = prompt[None].to(model.device)  # a second turn may hold the pad token, hence a mask
    found = model.generate(ids, attention_mask=ids.new_ones(ids.shape), **asked)
    return _answers(found, 1, len(prompt))[0]


def _rounding(model: Any, prompt: Tensor, answer: Answer) -> float:
    """Measures how far the logits of a forward without a cache lie from the answer's."""
    import torch

    ids = torch.cat([prompt, answer.tokens[:-1]])[None].to(model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()
    least = torch.finfo(model.dtype).eps * float(answer.logits.abs().max())
    return max(least, float((logits - answer.logits).abs().max()))


def _paged(model: Any, turns: list[list[Tensor]], tokens: int) -> list[Answer]:
    """Answers several turns on one cache, and returns the answers of the last."""
    import torch

    from pagedkv import PagedCache
    from pagedkv.hf.release import CACHE

    asked = {"return_dict_in_generate": True, "output_logits": True, **_options(tokens)}
    most = max(len(prompt) for prompts in turns for prompt in prompts) + tokens + 16
    with PagedCache(model, max_tokens=2 * len(turns[0]) * most) as cache:
        for prompts in turns:
            width = max(map(len, prompts))
            ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
            mask = torch.stack(
                [torch.arange(width, device="cpu") >= width - len(p) for p in prompts]
            ).long()
            batch = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
            found = model.generate(**batch, **{CACHE: cache}, **asked)
        return _answers(found, len(prompts), width)


def _batched(model: Any, prompts: list[Tensor], tokens: int) -> list[Answer]:
    import torch

    from pagedkv import BatchGenerator

    logits: list[list[Tensor]] = [[] for _ in prompts]

    def keeping(index: int, _: int) -> list[Any]:
        def keep(ids: Tensor, scores: Tensor) -> Tensor:
            logits[index].append(scores[0].float().cpu())
            return scores

        return [keep]

    width = max(map(len, prompts)) + tokens + 16
    with BatchGenerator(model, max_tokens=len(prompts) * width, unknown="check") as generator:
        results = generator.generate(prompts, processors=keeping, **_options(tokens))
    if errors := [result.error for result in results if result.error]:
        raise UsageError(f"MODEL: {errors[0]}")
    return [
        Answer(torch.tensor(result.tokens, device="cpu"), torch.stack(rows))
        for result, rows in zip(results, logits)
    ]
