"""Small caches that evict."""

from dataclasses import dataclass

from pagedkv import LayerGroup
from pagedkv.retention import Fifo, Policy, Sinks
from tests.cases import Case, in_few_bits, one_group


@dataclass(frozen=True)
class Scattered(Policy):
    """Any page may go, another one in each layer."""

    recent: int = 3

    def keep_scores(self, pages):
        return (pages.position * 2654435761 + pages.owner * 40503 + pages.length) % 1009


LONG = 10_000
EACH_LAYER = (LayerGroup((0,)), LayerGroup((1,)))
WITH_WINDOW = (LayerGroup((0,)), LayerGroup((1,), 6), LayerGroup((2,)))


def case(name, debug=True, **fields):
    base = {"max_tokens": 48, "max_sequences": 6, "max_sequence_length": LONG}
    return Case(name, one_group(**{**base, **fields}), debug)


def coded(name, kv_format, **fields):
    base = {"max_tokens": 144, "max_sequences": 5, "max_sequence_length": LONG}
    return Case(name, in_few_bits(kv_format, **{**base, **fields}), True)


CASES = [
    case("fifo-P1", page_size=1, max_tokens=24, retention="fifo", budget=5),
    case("fifo-P4", retention=Fifo(), budget=8),
    case("sinks-P3", page_size=3, retention=Sinks(Fifo(2), 2), budget=9),
    case("scattered-P4", retention=Scattered(), budget=8, groups=EACH_LAYER),
    case("scattered-P1", page_size=1, max_tokens=30, retention=Scattered(), budget=6),
    case("share-P1", page_size=1, max_tokens=36, retention=Scattered(), keep=0.3),
    case("share-P4", retention=Scattered(), keep=0.5, budget=24, groups=EACH_LAYER),
    case("pressed-P4", retention=Scattered(), high_water=0.9, low_water=0.7),
    case("pressed-P3", page_size=3, retention=Fifo(), groups=EACH_LAYER, debug=False),
    case(
        "pressed-window",
        num_layers=3,
        max_tokens=60,
        groups=WITH_WINDOW,
        retention=Scattered(),
        budget=16,
        rollback=4,
    ),
    coded("int8", "int8", page_size=4, max_tokens=48, retention=Scattered(), budget=8),
    coded("int4", "int4", retention=Scattered(), budget=32, groups=EACH_LAYER),
    coded("int4-fifo", "int4", retention=Fifo(), budget=32),
    coded("int4-share", "int4", retention=Scattered(), keep=0.4),
    coded("int4-pressed", ("int8", "int4"), retention=Scattered(), max_tokens=80),
]
