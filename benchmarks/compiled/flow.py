"""Where a kernel's addresses come from, read from triton's own intermediate code.

Both levels are parsed by triton: TTIR, as close to the source as it gets, and TTGIR, where the
pipeline has been laid out in shared memory.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.compiler import make_backend

from benchmarks.compiled.sass import Access


class Op(NamedTuple):
    name: str
    operands: tuple[int, ...]
    types: tuple[str, ...]  # of operands
    results: tuple[int, ...]
    result_types: tuple[str, ...]
    regions: tuple[int, ...]
    inside: tuple[int, ...]  # regions around it
    where: str


class Flow:
    """Traces which values of a module are made of which, through loops and branches."""

    def __init__(self, path: str, target: Any) -> None:
        context = ir.context()
        ir.load_dialects(context)
        make_backend(target).load_dialects(context)
        module = ir.parse_mlir_module(path, context)
        self.ops: list[Op] = []
        self.maker: dict[int, Op] = {}
        self.made_of: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, tuple[list[int], tuple[int, ...]]] = {}  # a region's arguments and yield

        def visit(op: Any) -> None:
            block = op.get_block()
            inside, region = [], block.get_parent() if block else None
            while region:
                inside.append(region.id())
                region = region.get_parent_region()
            operands = [op.get_operand(i) for i in range(op.get_num_operands())]
            results = [op.get_result(i) for i in range(op.get_num_results())]
            one = Op(
                op.get_name(),
                tuple(value.id() for value in operands),
                tuple(str(value.get_type()) for value in operands),
                tuple(value.id() for value in results),
                tuple(str(value.get_type()) for value in results),
                tuple(op.get_region(i).id() for i in range(op.get_num_regions())),
                tuple(inside),
                str(results[0].get_loc()) if results else "",
            )
            self.ops.append(one)
            self.maker |= dict.fromkeys(one.results, one)
            if one.name in ("scf.yield", "scf.condition"):
                arguments = [block.get_argument(i).id() for i in range(block.get_num_arguments())]
                ends[inside[0]] = arguments, one.operands[one.name == "scf.condition" :]

        module.walk(visit)
        main = module.get_function(module.get_entry_func_name())
        names = [str(main.args(i).get_loc()) for i in range(main.get_num_args())]
        self.arguments = {
            main.args(i).id(): match[1] if (match := re.match(r'loc\("(\w+)"', name)) else name
            for i, name in enumerate(names)
        }
        for one in self.ops:
            self._connect(one, ends)
        self.loops = {
            r for op in self.ops if op.name in ("scf.for", "scf.while") for r in op.regions
        }

    def _connect(self, op: Op, ends: dict[int, tuple[list[int], tuple[int, ...]]]) -> None:
        def feed(values: Iterable[int], *sources: Iterable[int]) -> None:
            for value, *found in zip(values, *sources):
                self.made_of[value] += found

        if op.name == "scf.for":
            (index, *carried), last = ends[op.regions[0]]
            self.made_of[index] += op.operands[:3]
            feed(carried, op.operands[3:], last)
            feed(op.results, carried)
        elif op.name == "scf.if":
            for region in op.regions:
                feed(op.results, ends.get(region, ([], ()))[1])
        elif op.name == "scf.while":
            (carried, going), (body, last) = (ends[region] for region in op.regions)
            feed(carried, op.operands, last)
            feed(body, going)
            feed(op.results, going)
        else:
            for result in op.results:
                self.made_of[result] += op.operands

    def back(self, value: int, stop: Callable[[Op], bool]) -> Iterator[int]:
        """Yields `value` and all that it is made of, up to operations where the search stops."""
        todo, seen = [value], set[int]()
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                yield one
                if not ((op := self.maker.get(one)) and stop(op)):
                    todo += self.made_of[one]

    def roots(self, pointer: int) -> set[str]:
        """Arguments that a pointer or a descriptor points into."""
        found, todo = set[str](), [pointer]
        while todo:
            for one in self.back(todo.pop(), lambda op: op.name == "tt.addptr" or _reads(op)):
                found |= {self.arguments[one]} if one in self.arguments else set()
                if (op := self.maker.get(one)) and op.name == "tt.addptr" and one in op.results:
                    todo.append(op.operands[0])
        return found


def _reads(op: Op) -> bool:
    return op.name in ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")


def _sizes(kind: str) -> tuple[list[int], int]:
    """Shape and bits of an element of a tensor of values, of pointers, or of a buffer."""
    inner = kind[kind.find("<") + 1 :] if re.match(r"(tensor|!ttg\.memdesc)<", kind) else kind
    shape = re.match(r"(?:\d+x)*", inner)
    assert shape
    element = re.search(r"(?:^|[x<])[a-z]+(\d+)", inner[shape.end() :])
    return [int(side) for side in shape[0].split("x")[:-1]], int(element[1]) if element else 64


def int32_products(flow: Flow, pools: tuple[str, ...]) -> tuple[str, ...]:
    """Finds products in 32 bits of loaded numbers, such as page ids, that reach a pool's address.

    Remainders and masked bits, such as a row within its page, are bounded; so are their products.
    """

    def bounded(op: Op) -> bool:
        return _reads(op) or op.name in ("arith.remsi", "arith.remui", "arith.andi", "arith.cmpi")

    def loaded(value: int) -> bool:
        return any((op := flow.maker.get(one)) and _reads(op) for one in flow.back(value, bounded))

    found: dict[str, None] = {}  # in order
    for address in flow.ops:
        if address.name == "tt.addptr" and flow.roots(address.operands[0]) & set(pools):
            for one in flow.back(address.operands[1], bounded):
                op = flow.maker.get(one)
                if not op or op.name not in ("arith.muli", "arith.shli"):
                    continue
                if _sizes(op.result_types[0])[1] == 32 and any(map(loaded, op.operands)):
                    place = re.search(r'([^/"]+)":(\d+)', op.where)
                    found[place.expand(r"\1:\2") if place else op.where] = None
    return tuple(found)


def narrow_copies(
    flow: Flow, accesses: list[Access], pools: tuple[str, ...], threads: int
) -> tuple[tuple[str, ...], set[str]]:
    """Finds accesses to tiles of a pool below 16 bytes, and the arguments that have tiles.

    Scales are pools too, but have a number for each token or head; so only accesses with the most
    dimensions are tiles. A tile with less than 16 bytes a thread may be accessed more narrowly.
    """
    tiles: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op in flow.ops:
        if op.name in ("tt.load", "tt.store"):
            shape, bits = _sizes(op.types[0])
            size = math.prod(shape) * bits // 8
            for name in flow.roots(op.operands[0]) & set(pools):
                tiles[name].append((sum(side > 1 for side in shape), size))
    rank = max((rank for found in tiles.values() for rank, _ in found), default=0)
    least = {
        name: min(16, max(1, min(size for dims, size in found if dims == rank) // threads))
        for name, found in tiles.items()
        if any(dims == rank for dims, _ in found)
    }
    arguments = list(flow.arguments.values())
    found: dict[str, None] = {}  # in order
    for one in accesses:
        for name in {arguments[i] for i in one.parameters if i < len(arguments)} & set(least):
            if one.width < least[name]:
                found[f"{name}: {one.width} bytes"] = None
    return tuple(found), set(least)


def pipeline(flow: Flow, tiles: set[str]) -> int:
    """Counts buffers of the tiles' pipeline, the least over all tiles; 0 without a pipeline.

    The number of stages that was asked for does not tell it: with page ids in the same iteration,
    two buffers take five stages.
    """
    depths = []
    for op in flow.ops:
        if op.name == "tt.load" and flow.loops & set(op.inside):
            if flow.roots(op.operands[0]) & tiles:
                return 0  # waits for its data where it stands
        elif op.name in ("ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local"):
            roots = flow.roots(op.operands[0])
            if roots and not roots & tiles and not op.name.startswith("ttng"):
                continue
            for operand, kind in zip(op.operands, op.types):
                if kind.startswith("!ttg.memdesc") and _sizes(kind)[1] < 64:  # no barrier
                    made = (flow.maker.get(one) for one in flow.back(operand, lambda op: False))
                    depths += [
                        _sizes(one.result_types[0])[0][0]
                        for one in made
                        if one and one.name == "ttg.local_alloc" and not one.operands
                    ]
    return min(depths, default=0)


def times_made(flow: Flow) -> int:
    """Counts how often warps make the same product: more than once if they cover more than a tile.

    Products of at most half the size of the largest do not count: staging pages are few.
    """
    sizes: dict[int, int] = defaultdict(int)  # by how often
    for op in flow.ops:
        if op.name in ("tt.dot", "ttng.warp_group_dot"):
            shape, _ = _sizes(op.result_types[0])
            times = math.prod(
                max(1, have // want) for have, want in zip(_covered(op.result_types[0]), shape)
            )
            depth = _sizes(op.types[0])[0][1]
            sizes[times] = max(sizes[times], math.prod(shape) * depth)
    most = max(sizes.values(), default=0)
    return max((times for times, size in sizes.items() if 2 * size > most), default=1)


def _covered(kind: str) -> list[int]:
    """Rows and columns of a result that all warps make at once."""
    found = {
        name: [int(side) for side in sides.split(",")]
        for name, sides in re.findall(r"(\w+) = \[([\d, ]+)\]", kind)
    }
    if "instrShape" in found:
        return [a * b for a, b in zip(found["instrShape"], found["warpsPerCTA"])]
    names = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    return [math.prod(sides) for sides in zip(*(found[name] for name in names))]


def operands_by(flow: Flow) -> set[str]:
    """Finds how tiles come to where asynchronous products read them: by copies or by stores.

    Stores outside of the products' loop do not count: they are of queries.
    """

    def made(value: int) -> set[int]:
        return {*flow.back(value, lambda op: op.name == "ttg.local_alloc")}

    products = [op for op in flow.ops if op.name == "ttng.warp_group_dot"]
    read = [
        (made(value), op.inside[:1])
        for op in products
        for value, kind in zip(op.operands, op.types)
        if kind.startswith("!ttg.memdesc")
    ]
    found = set()
    for op in flow.ops:
        if op.name in ("ttg.async_copy_global_to_local", "ttg.local_store"):
            buffers = (v for v, kind in zip(op.operands, op.types) if kind.startswith("!ttg.mem"))
            here = {one for value in buffers for one in made(value) if _is_buffer(flow, one)}
        elif op.name == "ttg.local_alloc" and op.operands:
            here = set(op.results)
        else:
            continue
        copies = op.name.startswith("ttg.async")
        if any(here & one and (copies or inside == op.inside[:1]) for one, inside in read):
            found.add("LDGSTS" if copies else "STS")
    return found


def _is_buffer(flow: Flow, value: int) -> bool:
    return (op := flow.maker.get(value)) is not None and op.name == "ttg.local_alloc"
