"""`MemoryPlan`: what `plan_memory` returns."""

from __future__ import annotations

import json
from typing import Any

from .outcome import Outcome
from .table import NVME, render


class MemoryPlan(Outcome):
    """Where a model's bytes are, and what fits beside them. `print` it.

    Attributes:
        shape: what the model weighs.
        cache: the pool: the `CacheConfig` of a `PagedKVCache` that keeps to the plan.
        placement: what stays on the device, and how wide a pass is.
        batch: sequences that it was made for.
        length: tokens of each sequence.
        host_layers: layers whose streamed parts host memory holds for good, on a card also their
            experts that come alone; other layers are read from disk in every pass.
        head_in_host: whether host memory holds the head as well.
        embedding_in_host: whether it holds an embedding that is not on the device; else each pass
            reads the rows of its tokens from the file.
        ring_slot: bytes of a slot of the ring; 0 without one.
        device_bytes: bytes on the device, by item.
        host_bytes: bytes on the host, by item.
        device_memory: the budget of the device.
        host_memory: the budget of the host.
        link_gbps: the speed of the link for which widths were chosen.
        compute_tflops: the speed of the device for which they were chosen.
        memory_gbps: the speed of the device's own memory.
        gpu: the card that has these speeds, if one was named.
        ranks: processes that share out the model, each with such a device; all sizes are of one.
        expert_gbps: the speed at which experts are read alone.
        largest_batch: the most sequences of `length` tokens for which the same call finds room;
            this plan's own pages hold `max_batch()`.
        rate_in_4_bits: `predict()` of the same call for the model in 4 bits, if that is more.
        rate_by_slots: on a card, slots of experts with which the same call would decode faster, and
            its `predict()`.
    """

    def to_json(self) -> str:
        """Returns the plan as JSON text, sizes in bytes."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in plain values, sizes in bytes."""
        names = (
            "model streams device device_memory host_memory device_bytes unused host_bytes batch "
            "length max_tokens bytes_per_token states bytes_per_state step_tokens verify_width "
            "ring_depth ring_slot head_rows embedding_resident tables_resident head_resident "
            "resident_layers host_layers head_in_host embedding_in_host streamed_bytes disk_bytes "
            "gpu link_gbps memory_gbps compute_tflops ranks largest_batch expert_slots"
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            "tower": self.shape.tower,
            "weights": "exact" if self.shape.exact else "from the config",
            "expert_bytes": self.expert_bytes(self.batch),
            "page_size": self.cache.page_size,
            "kv_dtype": self.cache.dtype,
            "max_length": self.max_length(),
            "max_batch": self.max_batch(),
            "tokens_per_second": {"link": self.predict(), "nvme": self.predict(disk_gbps=NVME)},
        }

    def __str__(self) -> str:
        return render(self)
