"""A plan as text: one line an item, in GiB, with its share and a note."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import MemoryPlan

PCIE, NVME = 25.0, 7.0  # GB/s: PCIe 4 x16 from pinned memory, a PCIe 4 drive


def render(plan: MemoryPlan) -> str:
    """What `print(plan)` shows."""
    source = "exact" if plan.shape.exact else "from the config"
    lines = [
        f"{plan.model}: {gib(plan.shape.weights)} GiB of weights ({source}), {plan.shape.dtype}",
        _how(plan),
        "",
        *_rows("device", plan.device_memory, plan.device_bytes, _device_notes(plan)),
    ]
    if plan.streams:
        lines += ["", *_rows("host", plan.host_memory, plan.host_bytes, _host_notes(plan))]
    return "\n".join([*lines, "", *_answers(plan)])


def gib(nbytes: int) -> str:
    """Bytes in GiB, with two digits."""
    return f"{nbytes / 2**30:.2f}"


def _how(plan: MemoryPlan) -> str:
    if not plan.streams:
        return "nothing streams: all weights stay on the device"
    return f"streams {gib(plan.streamed_bytes)} GiB a pass of up to {plan.step_tokens:,} tokens"


def _rows(
    title: str, budget: int | None, items: dict[str, int], notes: dict[str, str]
) -> list[str]:
    """The items of one budget, their sum or what is left."""
    total = sum(items.values())
    whole = total if budget is None else budget
    lines = [f"{title:<17}{'GiB':>8}{'share':>8}"]
    rows = [(name, nbytes, notes.get(name, "")) for name, nbytes in items.items()]
    if budget is not None:
        rows.append(("unused", budget - total, ""))
    for name, nbytes, note in [*rows, ("budget" if budget else "total", whole, "")]:
        share = f"{nbytes / whole:.1%}" if whole else "-"
        lines.append(f"  {name:<15}{gib(nbytes):>8}{share:>8}  {note}".rstrip())
    return lines


def _device_notes(plan: MemoryPlan) -> dict[str, str]:
    count, resident = len(plan.shape.layers), len(plan.resident_layers)
    glue = ["embedding", "head"]
    there = [plan.embedding_resident, plan.head_resident]
    here = ["norms", *(name for name, is_here in zip(glue, there) if is_here)]
    away = {"embedding": "gathered on the host", "head": f"{plan.head_rows} rows at a time"}
    gone = [f"{name} {away[name]}" for name, is_here in zip(glue, there) if not is_here]
    config = plan.cache
    sliding = sum(len(group.layers) for group in config.groups if group.window)
    kept = [config.dtype if name == "dense" else name for name in dict.fromkeys(config.kv_format)]
    token = f"{round(plan.bytes_per_token / 1024, 2):g} KiB"
    pages = f"{plan.max_tokens:,} tokens x {token}, {' and '.join(kept)}"
    return {
        "device context": "CUDA itself" if plan.device == "cuda" else "none on a CPU",
        "glue": "; ".join([", ".join(here), *gone]),
        "resident layers": f"{resident} of {count}",
        "ring": f"{plan.ring_depth} slots of {gib(plan.ring_slot)} GiB" if plan.ring_slot else "",
        "KV pages": pages + (f"; {sliding} of {count} layers slide" if sliding else ""),
        "activations": f"{plan.step_tokens} tokens a pass, logits of {plan.batch} x "
        f"{plan.verify_width}",
        "workspace": "attention's parts, page tables",
    }


def _host_notes(plan: MemoryPlan) -> dict[str, str]:
    streamed = len(plan.streamed_layers)
    return {
        "held layers": f"{len(plan.host_layers)} of {streamed} that stream"
        + ("; the rest is read from disk" if plan.disk_bytes else ""),
        "held head": "" if plan.head_in_host or plan.head_resident else "read from disk",
        "staging": "what is read lands here" if plan.host_bytes["staging"] else "",
        "embedding rows": "of one pass" if not plan.embedding_resident else "on the device",
    }


def _answers(plan: MemoryPlan) -> list[str]:
    fast, slow = plan.predict(PCIE), plan.predict(PCIE, NVME)
    lines = [
        f"longest context     {plan.max_length():,} tokens each for a batch of {plan.batch}",
        f"largest batch       {plan.max_batch():,} x {plan.length:,} tokens",
    ]
    if plan.streams:
        rows = f"a batch of {plan.batch}"
        lines.append(f"tokens a second     {fast:.3g} over PCIe 4 x16 ({PCIE:g} GB/s), {rows}")
        lines.append(f"                    {slow:.3g} from NVMe ({NVME:g} GB/s)")
    else:
        lines.append(f"tokens a second     {fast:.3g}, a batch of {plan.batch}")
    return lines
