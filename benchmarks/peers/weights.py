"""The small model's weights as other programs read them: matrices that float16 holds exactly.

OpenVINO's reader takes only float16. So in a job that is compared with other programs, every way
multiplies with weights rounded to float16, however wide they are in its file.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.smollm2 import gguf_file


def rounded(model: Any) -> Any:
    """A copy in float32 whose matrices are numbers of float16; vectors stay as they are."""
    copy = deepcopy(model)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.half())
    return copy


def write_gguf(folder: Path, dtype: Any) -> Path:
    """The model's GGUF file with matrices in `dtype` and vectors in float32, written once."""
    import gguf

    target = folder / f"smollm2-{np.dtype(dtype).name}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(gguf_file())
    arch = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch)
    kind = gguf.LlamaFileType.ALL_F32 if dtype == np.float32 else gguf.LlamaFileType.MOSTLY_F16
    writer.add_file_type(kind)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        sub_type = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = [int(n) for n in reversed(tensor.shape)]
        if len(shape) > 1:
            values = values.astype(np.float16).astype(dtype)
        writer.add_tensor(tensor.name, values.reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
