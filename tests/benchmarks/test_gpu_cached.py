"""Faults that are planted in the binaries of Triton's cache are found; none is passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

PLANTED = """
import json
import re
import struct
import subprocess
from pathlib import Path

from triton import knobs

from benchmarks.compiled import shipped
from benchmarks.gpu import cached
from pagedkv.kernels.triton.card import absent_card

NOTHING = struct.pack("<QQ", 0x7918, 0xFC0 << 32)  # NOP
WAIT = r"WARPGROUP[.]DEPBAR[^\\n]*/[*] (0x\\w+) [*]/\\s+/[*] (0x\\w+) [*]/"
folder = Path(knobs.cache.dir)
told = {"empty": cached.main(folder, 1)}
with absent_card(90):
    for one in shipped.shipped(90):
        if one.name in ("prefill D64 p16", "Gluon decode D64 p16", "write D128 bf16"):
            one.compile()
every = cached.kernels(folder)
told["looked at"] = sorted(cubin.stem for cubin in every)
told["clean"] = cached.main(folder, 1)
for cubin in every:
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code = cubin.read_bytes()
    for words in re.findall(WAIT, text):
        code = code.replace(struct.pack("<QQ", *(int(word, 16) for word in words)), NOTHING)
    cubin.write_bytes(code)
told["planted"] = cached.main(folder, 1)
every[0].write_bytes(code[:1000])
told["cut off"] = cached.main(folder, 1)
facts = json.loads(every[0].with_suffix(".json").read_text())
every[0].with_suffix(".json").write_text(json.dumps(facts | {"triton_version": "3.0.0"}))
told["another Triton's"] = cached.main(folder, 1)
type(knobs.nvidia).__dict__["cuobjdump"].default_path = "/not there"
told["no disassembler"] = cached.main(folder, 1)
print(json.dumps(told))
"""


@pytest.mark.slow
def test_planted_faults_are_found_in_the_binaries_that_ran(tmp_path: Path, forked) -> None:
    said = forked(PLANTED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    told = json.loads(said.splitlines()[-1])
    assert told["looked at"] == ["_decode_hopper", "_prefill"]
    assert told["clean"] == []
    assert len(told["planted"]) == 2
    assert all(": operands may change while products run (0x" in each for each in told["planted"])
    assert len([each for each in told["cut off"] if ": not looked at: " in each]) == 1
    assert len(told["cut off"]) == 2
    assert len(told["another Triton's"]) == 1
    for missing, what in (
        ("empty", "no kernel with"),
        ("no disassembler", "Cannot find cuobjdump"),
    ):
        (sentence,) = told[missing]
        assert sentence.startswith(f"binaries were not looked at: {what}")
