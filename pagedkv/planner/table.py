"""Prints a plan as text: first the answers that people ask for, then where the bytes are."""

from __future__ import annotations

from pagedkv.models.weighing import PACKED

from .byte_sizes import readable
from .gpus import GPUS, ORDINARY
from .model_shape import ModelShape
from .outcome import Outcome

NVME = 7.0  # GB/s of a PCIe 4 drive
STREAMED = "", "bitnet", "compressed-tensors"  # methods whose weights stream as they are


def render(plan: Outcome) -> str:
    """Returns the table that `print(plan)` shows."""
    source = "exact" if plan.shape.exact else "from the config"
    weights = (plan.shape.whole or plan.shape).weights
    lines = [
        f"{plan.model}: {readable(weights)} of weights ({source}), {plan.shape.dtype}",
        *_how(plan),
        *(f"assumed: {said}" for said in plan.shape.assumed),
        "",
        *_answers(plan),
        "",
        *_rows("device", plan.device_memory, plan.device_bytes, _device_notes(plan)),
    ]
    if any(plan.host_bytes.values()):
        lines += ["", *_rows("host", plan.host_memory, plan.host_bytes, _host_notes(plan))]
    return "\n".join([*lines, *_advice(plan)])


def _how(plan: Outcome) -> list[str]:
    if plan.shape.whole is not None:
        return _shared_out(plan, plan.shape.whole)
    if not plan.streams:
        return ["it fits: all weights stay on the device, nothing streams"]
    if plan.expert_slots:
        return [_by_experts(plan)]
    streamed = f"{len(plan.streamed_layers)} of {len(plan.shape.layers)} layers"
    return [
        f"it fits by streaming {streamed}: {readable(plan.streamed_bytes)} a pass of up to "
        f"{plan.step_tokens:,} tokens",
        *_not_streamed(plan),
    ]


def _not_streamed(plan: Outcome) -> list[str]:
    """Warns of a checkpoint that is packed in a way that the streamer does not read."""
    method = plan.shape.model.method
    if method in STREAMED or (method == "mxfp4" and plan.shape.unpacked):
        return []
    return [
        f"but LayerStreamer reads no weights that {method} packed"
        f"{' on this device' * (method == 'mxfp4')}:",
        "take a checkpoint in 16 bits or of compressed-tensors",
    ]


def _by_experts(plan: Outcome) -> str:
    """Says how many bytes stream if experts are read as tokens are routed to them."""
    rest = f" beside {readable(plan.streamed_bytes)} of the rest" if plan.streamed_bytes else ""
    return (
        "it fits by reading experts as tokens are routed to them: "
        f"{readable(plan.expert_bytes(plan.batch))} for {plan.batch} row"
        f"{'s' * (plan.batch > 1)}, {readable(plan.expert_bytes(plan.step_tokens))} for a pass of "
        f"{plan.step_tokens:,} tokens{rest}"
    )


def _reads(plan: Outcome) -> list[str]:
    """Says which share of the experts passes of a few widths read."""
    experts = plan.shape.experts
    if not plan.expert_slots or experts is None:
        return []
    rows = sorted({1, 4, 16, 64, plan.batch})
    shares = [experts.read(n, plan.expert_slots, plan.alone) for n in rows]
    said = [
        f"{share:.1%} for {n} row{'s' * (n > 1)}" for n, share in zip(rows, shares) if share < 1
    ]
    if len(said) < len(rows):
        said.append(f"whole layers for {rows[len(said)]}")
    return [
        f"of the experts {', '.join(said)}",
        f"{experts.per_token} of {experts.count} a token, each as likely as another; "
        f"{plan.expert_slots / experts.count:.1%} of them there",
    ]


def _shared_out(plan: Outcome, whole: ModelShape) -> list[str]:
    """Says what each of several ranks holds."""
    every, here = ({s.num_kv_heads for s in x.settings.shapes} for x in (whole, plan.shape))
    heads = f"{max(here)} of {max(every)} KV heads"
    if whole.settings.shapes[0].v_is_k:
        heads = "all latents"
    lines = [
        f"it fits on {plan.ranks} devices under torchrun: each holds "
        f"{readable(plan.shape.weights)} of the weights and {heads}"
    ]
    if plan.shape.layers == whole.layers:
        kind = whole.settings.model_type
        lines.append(f"transformers shares out no layer of {kind}: each holds all of them")
    return lines


def _answers(plan: Outcome) -> list[str]:
    here, most = plan.max_batch(), plan.largest_batch
    more = [f"pages for {here:,} here; --batch {most} plans for more"] if most > here else []
    found = {
        "longest context": [f"{plan.max_length():,} tokens each for a batch of {plan.batch}"],
        "largest batch": [f"{most:,} x {plan.length:,} tokens", *more],
        "tokens a second": _rates(plan),
        "a pass reads": _reads(plan),
        "assumed": _assumed(plan),
    }
    return [
        f"{name if not i else '':<17}  {line}"
        for name, lines in found.items()
        for i, line in enumerate(lines)
    ]


def _rates(plan: Outcome) -> list[str]:
    fast, slow = plan.predict(), plan.predict(disk_gbps=NVME)
    lines = [f"{_number(fast)}, a batch of {plan.batch}"]
    if plan.ranks > 1:
        lines[0] += ", without the time in which ranks exchange what they computed"
    if slow < fast:
        lines[0] += ", where the files are in memory"
        lines.append(f"{_number(slow)}, where they are read from a drive at {NVME:g} GB/s")
    if plan.rate_by_slots:
        slots, rate = plan.rate_by_slots
        lines.append(f"{_number(rate)} with --expert-slots {slots}")
    if plan.rate_in_4_bits:
        lines.append(f"{_number(plan.rate_in_4_bits)} in 4 bits, {PACKED}")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _assumed(plan: Outcome) -> list[str]:
    """Describes the machine for which tokens a second were estimated."""
    speed = f"{plan.memory_gbps:g} GB/s of memory, {plan.compute_tflops:g} TFLOPS"
    experts = plan.expert_gbps if plan.expert_slots else 0.0
    if plan.device == "cpu":
        alone = f", experts at {experts:.3g}" if experts else ""
        arrive = "weights unpacked" if plan.shape.unpacked else "files read"
        return [f"a CPU: {speed}, {arrive} at {plan.link_gbps:g} GB/s{alone}"]
    card = GPUS[plan.gpu] if plan.gpu else ORDINARY
    link = card.link if plan.link_gbps == card.link_gbps else "a link"
    said = [f"{plan.gpu or 'an ordinary card'}: {speed},", f"{link} at {plan.link_gbps:g} GB/s"]
    held = plan.host_bytes.get("held experts", 0)
    if experts and plan.shape.experts is not None and held < plan.shape.experts.total:
        said.append(f"experts from files at {experts:.3g} GB/s")
    return said if plan.gpu else [*said, "--gpu NAME for another, --gpu list for all"]


def _rows(
    title: str, budget: int | None, items: dict[str, int], notes: dict[str, str]
) -> list[str]:
    """Lists the items of one budget that are not empty, and their sum or what is left."""
    total = sum(items.values())
    whole = total if budget is None else budget
    unit, power, digits = ("GiB", 30, 2) if whole >= 1 << 30 else ("MiB", 20, 1)
    rows = [(name, nbytes, notes.get(name, "")) for name, nbytes in items.items()]
    if budget is not None:
        rows.append(("unused", budget - total, ""))
    rows = [row for row in [*rows, ("budget" if budget else "total", whole, "")] if row[1]]
    width = max(15, *(len(name) for name, *_ in rows))
    lines = [f"{title:<{width + 2}}{unit:>8}{'share':>8}"]
    for name, nbytes, note in rows:
        size = f"{nbytes / 2**power:.{digits}f}"
        lines.append(f"  {name:<{width}}{size:>8}{nbytes / whole:>8.1%}  {note}".rstrip())
    return lines


def _device_notes(plan: Outcome) -> dict[str, str]:
    count, resident = len(plan.shape.layers), len(plan.resident_layers)
    glue = ["embedding", "head"] + ["tables"] * bool(plan.shape.tables)
    there = [plan.embedding_resident, plan.head_resident, plan.tables_resident]
    tower = [f"tower for images ({readable(plan.shape.tower)})"] if plan.shape.tower else []
    here = ["norms", *tower, *(name for name, is_here in zip(glue, there) if is_here)]
    resident_note = f"{resident} of {count}" + ", but for experts" * bool(plan.expert_slots)
    size = readable(plan.shape.tables)
    away = {"embedding": "on host", "head": f"by {plan.head_rows} rows"}
    away["tables"] = f"({size}) by row from their files"
    gone = [f"{name} {away[name]}" for name, is_here in zip(glue, there) if not is_here]
    config = plan.cache
    sliding = sum(len(group.layers) for group in config.groups if group.window)
    kept = [config.dtype if name == "dense" else name for name in dict.fromkeys(config.kv_format)]
    token = f"{round(plan.bytes_per_token / 1024, 2):g} KiB"
    pages = f"{plan.max_tokens:,} tokens x {token}, {' and '.join(kept)}"
    return {
        "device context": "CUDA itself",
        "glue": "; ".join([", ".join(here), *gone]),
        "resident layers": resident_note,
        **_expert_notes(plan),
        "packed weights": "blocks for the products of a CPU, beside the weights",
        "ring": f"{plan.ring_depth} slots of {readable(plan.ring_slot)}",
        "KV pages": pages + (f"; {sliding} of {count} layers slide" if sliding else ""),
        "states": f"{plan.states} x {plan.bytes_per_state / 2**20:.3g} MiB, one a sequence and one "
        "for a prefix; copies of a pass",
        "activations": f"{plan.step_tokens} tokens a pass, logits of {plan.batch} x "
        f"{plan.verify_width}",
        "workspace": "attention's parts, page tables",
    }


def _expert_notes(plan: Outcome) -> dict[str, str]:
    experts = plan.shape.experts
    if not plan.expert_slots or experts is None:
        return {}
    layers = sum(map(bool, experts.layers))
    return {
        "expert slots": f"{plan.expert_slots} of {experts.count} in {layers} layers",
        "widest layer": "of a pass that needs more experts than stay",
    }


def _host_notes(plan: Outcome) -> dict[str, str]:
    streamed, experts = set(plan.streamed_layers), plan.shape.experts
    with_experts = experts.layers if experts is not None and plan.expert_slots else ()
    of_experts = sum(bool(with_experts[i]) for i in plan.host_layers) if with_experts else 0
    return {
        "held layers": f"{len(streamed & set(plan.host_layers))} of {len(streamed)} that stream"
        + ("; others are on disk" if plan.disk_bytes else ""),
        "held embedding": "each pass takes its rows from here",
        "held experts": f"those of {of_experts} of {sum(map(bool, with_experts))} layers",
        "staging": "what is read lands here",
        "staging of experts": "those that a layer lacks, and two layers of a pass that needs more",
        "embedding rows": "of one pass",
    }


def _advice(plan: Outcome) -> list[str]:
    """Returns advice on what would serve better than this plan; empty if there is none."""
    found = []
    if plan.cache.larger_than_int8:
        sizes = plan.cache.larger_than_int8.partition(":")[0]
        found.append(f"KV pages: {sizes}, because of staging pages (--kv-format int8).")
    if plan.streams and plan.batch == 1:
        found += [
            "Streaming pays from about 8 rows on (--batch). For one user who chats,",
            "llama.cpp with a GGUF in 4 bits answers sooner.",
        ]
    return ["", *found] if found else []
