"""Counts of bytes that streaming moved, and of the time it took."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class StreamStats:
    """Totals since the streamer was opened. `print` it.

    Attributes:
        passes: forwards of the model.
        tokens: tokens that these forwards computed.
        bytes_read: bytes read from files.
        bytes_copied: bytes copied over the link to a device.
        cold_bytes: bytes read that were not in the file cache.
        read_seconds: time spent reading, in any thread.
        copy_seconds: time that copies to the device took.
        stall_seconds: time that passes waited for weights.
        pass_seconds: time of all passes.
        expert_hits, expert_misses: experts that a layer was routed to, and found in memory or not.
        expert_bytes: bytes of experts that came for these calls, from files or from host memory.
        expert_layer_bytes: bytes of all experts of these layers, which streaming by whole layers
            would have read.
        wide_passes: calls of a layer's experts that needed more of them than stay in memory, or
            that read all of a layer. The latter count as neither hits nor misses, unless slots of a
            card are tried at the same time.
        link_gbps: speed of the slowest link in the plan; 0 without a plan.
    """

    passes: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_copied: int = 0
    cold_bytes: int = 0
    read_seconds: float = 0.0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    pass_seconds: float = 0.0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    expert_layer_bytes: int = 0
    wide_passes: int = 0
    link_gbps: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """Time of all passes without the time they waited for weights."""
        return self.pass_seconds - self.stall_seconds

    @property
    def tokens_per_pass(self) -> float:
        """Tokens computed in a pass, on average."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def link_share(self) -> float:
        """Share of the planned link's speed that passes used; 0 without a plan."""
        possible = 1e9 * self.link_gbps * self.pass_seconds
        return max(self.bytes_copied, self.bytes_read) / possible if possible else 0.0

    def snapshot(self) -> StreamStats:
        """Returns a copy, which later passes do not change."""
        return replace(self)

    def __str__(self) -> str:
        passes = max(1, self.passes)
        rows = [("passes", f"{self.passes:,}", f"{self.tokens_per_pass:.1f} tokens each")]
        unit = "GB" if max(self.bytes_read, self.bytes_copied) >= 1e9 else "MB"
        for name, count, seconds in (
            ("read", self.bytes_read, self.read_seconds),
            ("  from disk", self.cold_bytes, 0.0),
            ("copied", self.bytes_copied, self.copy_seconds),
        ):
            each = f"{_size(count / passes, unit)} a pass"
            more = f"{each}, at {count / seconds / 1e9:.3g} GB/s" if seconds else each
            rows += [(name, _size(count, unit), more)] if count else []
        if self.expert_layer_bytes:
            share = self.expert_bytes / self.expert_layer_bytes
            of = f"{share:.1%} of {_size(self.expert_layer_bytes, unit)} in whole layers"
            rows.append(("  experts", _size(self.expert_bytes, unit), of))
        if calls := self.expert_hits + self.expert_misses:
            rows.append(("  found", f"{self.expert_hits / calls:.1%}", f"of {calls:,} experts"))
        if self.wide_passes:
            rows.append(("  wide calls", f"{self.wide_passes:,}", "of a layer's experts"))
        for name, seconds in (
            ("time", self.pass_seconds),
            ("  computing", self.compute_seconds),
            ("  waiting", self.stall_seconds),
        ):
            each = f"{1e3 * seconds / passes:.1f} ms a pass"
            rows += [(name, f"{seconds:.2f} s", each)] if seconds else []
        if self.link_gbps:
            rows.append(("of the link", f"{self.link_share:.0%}", f"of {self.link_gbps:.3g} GB/s"))
        return "\n".join(f"{name:<13}{value:>12}  {more}" for name, value, more in rows)


def _size(count: float, unit: str) -> str:
    return f"{count / 1e9:,.3f} GB" if unit == "GB" else f"{count / 1e6:,.3f} MB"
