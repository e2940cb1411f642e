"""Chooses what stays on the device.

The order is the policy. A ring and the pages that are asked for come first. Spare memory then goes
to the head or whole layers, whichever spares more bytes a pass, and then to the embedding. If
experts can be read alone, this is done for several counts of experts that stay, and the placement
that decodes fastest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from .advice import Short
from .costs import Costs, spread
from .experts import can_read_alone
from .placement import Placement
from .speed import Machine, seconds_of_pass

# Tokens of a pass: least, most, and most on a CPU that has all weights in memory.
NARROW, WIDE, RESIDENT = 128, 8192, 1024
VERIFIED = 16  # tokens of a sequence in one pass; a decode kernel takes no more
ACTIVATION_SHARE = 10  # a wider pass may cost one tenth of the memory

# For each width: whether it is the last, tokens of the pass, tokens of one sequence.
Widths = Iterable[tuple[bool, int, int]]


def place(costs: Costs) -> Placement:
    """Keeps everything resident if that fits; else chooses what decodes fastest beside a ring.

    Raises:
        Short: nothing fits.
    """
    asked, found, shorts = costs.asked, [], []
    choices: list[tuple[tuple[int, ...], int]] = []
    if not asked.expert_slots:
        choices.append((tuple(range(len(costs.shape.layers))), 0))
    if asked.ranks == 1 and not asked.pack_weights:
        choices += [((), slots) for slots in _slots(costs)]
    for resident, slots in choices:
        try:
            placement = _widest(costs, resident, slots)
        except Short as short:
            shorts.append(short)
            continue
        if resident:
            return placement
        found.append(placement)
    by_experts = [placement for placement in found if placement.expert_slots]
    if not by_experts:  # passes of few tokens need less room, but prompts take many of them
        by_experts = _of_few_tokens(costs, shorts)
        found += by_experts
    if by_experts and asked.expert_slots is None:
        found.append(_nearby(costs, _soonest(costs, by_experts)))
    if not found:
        raise min(shorts, key=lambda short: short.needed)
    return _soonest(costs, found)


def _slots(costs: Costs) -> list[int]:
    """Lists how many experts of a layer may stay: as asked, or several counts from 0 on.

    A card keeps experts only if asked to, because its speed with them was not measured yet.
    """
    asked, experts = costs.asked, costs.shape.experts
    whole = experts is None or asked.cuda or not can_read_alone(on_cpu=True)
    if asked.expert_slots is not None or whole:
        return [asked.expert_slots or 0]
    assert experts is not None
    most, slots = experts.count, experts.per_token
    return [0, *(slots << i for i in range(most.bit_length()) if slots << i <= most)]


def _nearby(costs: Costs, best: Placement) -> Placement:
    """Finds the count of experts near this placement's that decodes fastest."""
    experts = costs.shape.experts
    assert experts is not None
    narrow = best.step_tokens < NARROW
    widths = [(True, best.step_tokens, best.verify_width)] if narrow else None
    step = best.expert_slots // 2
    while step:
        for slots in (best.expert_slots + step, best.expert_slots - step):
            if not experts.per_token <= slots <= experts.count:
                continue
            with suppress(Short):
                other = _widest(costs, (), slots, widths)
                best = _soonest(costs, [best, other])
        step //= 2
    return best


def _soonest(costs: Costs, placements: list[Placement]) -> Placement:
    """Returns the placement with the fastest decoding pass, the first of equals."""
    asked = costs.asked
    machine = Machine(asked.link_gbps, asked.memory_gbps, asked.compute_tflops, asked.alone)
    return min(
        placements, key=lambda each: seconds_of_pass(costs.shape, each, asked.batch, machine)
    )


def _widest(
    costs: Costs, resident: tuple[int, ...], slots: int, widths: Widths | None = None
) -> Placement:
    """Finds the widest pass that fits, with everything resident or beside a ring.

    Args:
        widths: the widths to try; default all.

    Raises:
        Short: none fits.
    """
    asked, whole = costs.asked, bool(resident)
    smallest: dict[str, int] | None = None
    for last, step, verify in _widths(costs, not whole) if widths is None else widths:
        placement = Placement(resident, whole, whole, whole, step, verify, slots)
        items = costs.device(placement, asked.wanted)
        wasteful = ACTIVATION_SHARE * items["activations"] > asked.device_memory
        if sum(items.values()) <= asked.device_memory and (last or not wasteful):
            return placement if whole else _fill(costs, placement)
        if smallest is None or sum(items.values()) < sum(smallest.values()):
            smallest = items
    assert smallest is not None
    raise Short("device_memory", smallest)


def _widths(costs: Costs, streams: bool) -> Iterator[tuple[bool, int, int]]:
    """Yields `Widths` of a pass, the widest first."""
    asked = costs.asked
    least = max(NARROW, asked.batch)
    resident = WIDE if asked.cuda else RESIDENT
    crossover = _crossover(costs) if streams else resident
    step = asked.step_tokens or least
    # A state behind a rejected draft cannot be taken back.
    verified = VERIFIED if streams and not costs.has_states else 1
    if not asked.step_tokens:
        enough = min(crossover, WIDE, max(least, asked.batch * asked.length))
        while 2 * step <= enough:
            step *= 2
        # Wide enough for each sequence to verify as many tokens as there is time for.
        step = max(step, asked.batch * min(verified, crossover // asked.batch) if streams else 0)
    while True:
        verify = max(1, min(verified, crossover // asked.batch, step // asked.batch))
        last = bool(asked.step_tokens) or step == least
        yield last, step, verify
        if last:
            break
        step = max(least, step // 2)
    if verify > 1:
        yield True, step, 1


def _of_few_tokens(costs: Costs, shorts: list[Short]) -> list[Placement]:
    """Finds placements for passes that never need most experts of a layer, nor room for all.

    Args:
        shorts: gets a `Short` for each count of experts that does not fit.
    """
    asked, experts = costs.asked, costs.shape.experts
    found: list[Placement] = []
    if experts is None or asked.step_tokens or asked.ranks > 1 or asked.pack_weights:
        return []
    step = min(NARROW - 1, int(asked.alone * experts.count) // experts.per_token)
    while step >= asked.batch and not found:  # the widest that fits, since prompts take many passes
        for slots in filter(None, _slots(costs)):
            try:
                found.append(_widest(costs, (), slots, [(True, step, 1)]))
            except Short as short:
                shorts.append(short)
        step //= 2
    return found


def _crossover(costs: Costs) -> int:
    """Returns the tokens of a pass that computes as long as the layers take to arrive."""
    seconds = sum(costs.shape.layers) / (1e9 * costs.asked.link_gbps)
    return int(seconds * 1e12 * costs.asked.compute_tflops / (2 * costs.shape.active))


def _fill(costs: Costs, least: Placement) -> Placement:
    """Gives the remaining memory to the head and whole layers, then to the embedding."""
    asked, shape = costs.asked, costs.shape
    fixed = sum(costs.device(least, asked.wanted).values()) - sum(costs.weights(least).values())
    room = asked.device_memory - fixed
    count = len(shape.layers)
    best, spared = least, -1
    for head in (True, False):
        # With tied weights the head is the embedding.
        base = replace(least, head=head, embedding=head and not shape.head)
        for chosen in range(count, -1, -1):
            placement = replace(base, resident=tuple(spread(chosen, count)))
            if sum(costs.weights(placement).values()) > room:
                continue
            kept = sum(costs.layer(i, placement) for i in placement.resident)
            kept += head * shape.head_bytes
            if kept > spared:
                best, spared = placement, kept
            break
    full = replace(best, embedding=True)
    fits = shape.head and sum(costs.weights(full).values()) <= room
    return full if fits else best
