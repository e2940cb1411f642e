"""Decoding a layer of the gated delta rule on a card: its convolution, then the rule itself.

Rows read one slot and write another; a step within one slot would move as many bytes. The yardstick
is `copy`, which reads and writes as many bytes as the states have.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.cells import Call, Case, Cell, Heads, Ready
from benchmarks.gpu import correctness  # noqa: F401  # finds the package of tests
from pagedkv.kernels.triton.delta_rule import delta_rule_step
from pagedkv.kernels.triton.short_convolution import convolution_step
from tests.kernels import delta_rules, short_convolutions

TARGET = "must <= 1.15x copy, that is of reading and writing its states once"


def cells() -> list[Cell]:
    """64 rows, and heads as Qwen3.6-35B-A3B has them: 32 value heads on 16 key heads."""
    facts = {"page_size": 1, "peers": ("copy",), "target": TARGET, "kind": "delta_rule"}
    return [Cell("delta-rule/b64", Heads(32, 16, 128), (1,) * 64, (1,) * 64, **facts)]


def prepare(case: Case, variant: str) -> Ready:
    """Both kernels of a layer's step."""
    (heads, keys, dim), rows, q = case.cell.heads, len(case.cell.new), case.q
    sizes, where = delta_rules.Sizes(rows, keys, heads, dim, dim), (q.dtype, q.device)
    token = delta_rules.make(sizes, *where, mixed=False)
    channels = (heads + 2 * keys) * dim
    convolved = short_convolutions.make(rows, channels, 4, *where, mixed=False)

    def call() -> Tensor:
        convolution_step(*convolved)
        return delta_rule_step(*token.arguments())

    def check(call: Call) -> float:
        short_convolutions.check(convolution_step, *convolved)
        delta_rules.check(delta_rule_step, token)
        return 0.0  # within a bound of its own, or it has raised

    return Ready(call, check)
