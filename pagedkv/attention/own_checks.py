"""Checks the tensors of calls on a caller's own pages, and views them as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_grad, require_tensor
from .own_plan import AttentionPlan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def as_packed(name: str, tensor: Tensor, plan: AttentionPlan) -> Tensor:
    """Returns a tensor as `[T, heads, D]`, which a caller may also give by row."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name}: expected to be called outside of compiled code")
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"plan: expected an AttentionPlan, got {type(plan).__name__}")
    require_tensor(name, tensor)
    each = plan.seqlen_q
    if tensor.ndim == 4 and tensor.shape[:2] == (plan.num_rows, each):
        tensor = tensor.flatten(0, 1)
    if tensor.ndim != 3 or tensor.shape[0] != plan.num_tokens:
        by_row = "" if each is None else f" or [{plan.num_rows}, {each}, heads, D]"
        raise ValueError(
            f"{name}: expected shape [{plan.num_tokens}, heads, D]{by_row}, got "
            f"{list(tensor.shape)}"
        )
    if tensor.device != plan.device:
        raise ValueError(f"{name}: expected device {plan.device}, got {tensor.device}")
    check_grad(name, tensor)
    return tensor


def as_paged(name: str, pages: Tensor, like: Tensor, plan: AttentionPlan) -> Tensor:
    """Views pages in the form that kernels take, `[N, G, P, D]`."""
    require_tensor(name, pages)
    heads, slots = (2, 1) if plan.kv_layout == "NHD" else (1, 2)
    if pages.ndim != 4 or pages.shape[slots] != plan.page_size or 0 in pages.shape[1:]:
        axes = ("G", "page_size") if slots == 2 else ("page_size", "G")
        raise ValueError(
            f"{name}: expected [N, {', '.join(axes)}, D] of page_size {plan.page_size}, as "
            f"kv_layout {plan.kv_layout} has it, got {list(pages.shape)}"
        )
    if pages.dtype not in DTYPES or pages.dtype != like.dtype:
        raise TypeError(
            f"{name}: expected float32, float16 or bfloat16, as all tensors of the call, got "
            f"{pages.dtype} beside {like.dtype}"
        )
    _require_plain(name, pages)
    if pages.stride(3) != 1:
        raise ValueError(f"{name}: expected a contiguous last axis, got strides {pages.stride()}")
    if pages.device != plan.device:
        raise ValueError(f"{name}: expected device {plan.device}, got {pages.device}")
    check_grad(name, pages)
    return pages.permute(0, heads, slots, 3)


def _require_plain(name: str, tensor: Tensor) -> None:
    """Raises for a lazy minus: kernels would read the negated numbers that are in memory."""
    if tensor.is_neg():
        raise ValueError(f"{name}: expected values as they are in memory, got a lazy minus")


def check_pair(k: Tensor, v: Tensor) -> None:
    """Raises unless V's pages fit K's."""
    if v.shape[:3] != k.shape[:3] or v.shape[3] > k.shape[3]:
        raise ValueError(
            f"v_pages: expected {k.shape[0]} pages of {k.shape[1]} heads, as k_pages, of at most "
            f"{k.shape[3]} columns, got {v.shape[0]} of {v.shape[1]}, of {v.shape[3]}"
        )


def check_apart(k: Tensor, v: Tensor, plan: AttentionPlan, latent: bool) -> None:
    """Raises if slots of pages `[N, G, P, D]` share memory, so that a token overwrites another."""

    def reach(name: str, pages: Tensor) -> int:
        def build() -> int:
            if end := _end_of(pages):
                return end
            raise ValueError(
                f"{name}: expected slots with memory of their own, got strides {pages.stride()} "
                f"of {list(pages.shape)}"
            )

        found: int = plan.once(("apart", pages.shape, pages.stride()), build)
        return found * pages.itemsize

    k_end = reach("k_pages", k)
    between = v.data_ptr() - k.data_ptr()
    if latent or not -reach("v_pages", v) < between < k_end:
        return
    first, second = (k, v) if between > 0 else (v, k)
    if not _lie_apart(first, second, abs(between) // k.itemsize):
        raise ValueError("v_pages: expected memory of their own, got some of that of k_pages")


def _end_of(pages: Tensor) -> int:
    """Returns how many elements pages reach over; 0 if some may be the same."""
    axes = [(step, n - 1) for step, n in zip(pages.stride()[:3], pages.shape) if n > 1]
    return _nested(axes, pages.shape[3])


def _nested(axes: list[tuple[int, int]], end: int) -> int:
    """Returns how far blocks of `end` elements reach along axes `(step, n - 1)`; 0 if they meet."""
    for step, more in sorted(axes):  # from the innermost axis on
        if step < end:
            return 0
        end += step * more
    return end


def _lie_apart(first: Tensor, second: Tensor, gap: int) -> bool:
    """Whether blocks of two pools lie in turn, those of the second one `gap` behind the first's.

    Blocks may be columns, heads, slots or pages; along the axes around them both have equal steps.
    """
    steps = zip(first.stride()[:3], second.stride()[:3], first.shape)
    axes = sorted((a, b, n - 1) for a, b, n in steps if n > 1)
    for inner in range(len(axes)):
        within, around = axes[:inner], axes[inner:]
        end = first.shape[3] + sum(a * more for a, _, more in within)
        behind = gap + second.shape[3] + sum(b * more for _, b, more in within)
        is_alike = all(a == b for a, b, _ in around)
        if is_alike and end <= gap and _nested([(a, more) for a, _, more in around], behind):
            return True
    return False


def check_buffer(
    name: str,
    buffer: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    plan: AttentionPlan,
) -> Tensor | None:
    """Checks a result's buffer and returns it packed; float32 if no dtype is named."""
    if buffer is None:
        return None
    require_tensor(name, buffer)
    kind = dtype or torch.float32
    if buffer.shape != shape or not buffer.is_contiguous():
        raise ValueError(
            f"{name}: expected shape {list(shape)}, contiguous, got {list(buffer.shape)} with "
            f"strides {buffer.stride()}"
        )
    _require_plain(name, buffer)
    if buffer.dtype != kind:
        raise TypeError(f"{name}: expected {kind}, got {buffer.dtype}")
    if buffer.device != plan.device:
        raise ValueError(f"{name}: expected device {plan.device}, got {buffer.device}")
    check_grad(name, buffer)
    return buffer.flatten(0, 1) if buffer.ndim == len(shape) > (3 if dtype else 2) else buffer
