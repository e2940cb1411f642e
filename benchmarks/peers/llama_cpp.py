"""Runs a job of ours in llama.cpp, on the same weights: an independent yardstick.

`llama-cpp-python` batches sequences only through its low-level calls, which this file makes: one
context, the prefix decoded once and its cells shared by all rows, then one token a row and step.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.smollm2 import gguf_file

BATCH = 512  # tokens of one llama_decode


def float_gguf(folder: Path) -> Path:
    """The model's GGUF file with every tensor as float32, written once.

    The numbers are those that transformers reads from the quantised file.
    """
    return write_gguf(folder / "smollm2-f32.gguf", np.float32)


def write_gguf(target: Path, dtype: Any) -> Path:
    """The model's GGUF file with matrices in `dtype`, and vectors in float32, written once."""
    import gguf

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
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(n) for n in reversed(tensor.shape)]
        writer.add_tensor(
            tensor.name, values.astype(dtype if len(shape) > 1 else np.float32).reshape(shape)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


class LlamaJob:
    """A loaded model and a context for some rows."""

    def __init__(self, file: Path, rows: int, tokens: int, threads: int) -> None:
        import llama_cpp as lib

        self.lib, self.rows = lib, rows
        lib.llama_log_set(_SILENT, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(file).encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, BATCH, BATCH
        params.n_seq_max, params.kv_unified = rows, True  # one buffer, so that cells can be shared
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def generate(self, prompts: list[list[int]], prefix: int, new: int) -> np.ndarray:
        """Greedy tokens `[rows, new]` behind prompts whose first `prefix` tokens are the same."""
        self.lib.llama_memory_clear(self.memory, True)
        front = [(prompts[0][i], i, 0) for i in range(prefix)]
        self._decode(front, [])
        for row in range(1, self.rows):
            self.lib.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
        chosen = [
            (token, prefix + i, row)
            for row, prompt in enumerate(prompts)
            for i, token in enumerate(prompt[prefix:])
        ]
        ends = np.cumsum([len(prompt) - prefix for prompt in prompts]) - 1
        tokens = [self._decode(chosen, ends.tolist())]
        for step in range(new - 1):
            entries = [
                (int(token), len(prompt) + step, row)
                for row, (token, prompt) in enumerate(zip(tokens[-1], prompts, strict=True))
            ]
            tokens.append(self._decode(entries, list(range(self.rows))))
        return np.stack(tokens, axis=1)

    def _decode(self, entries: list[tuple[int, int, int]], wanted: list[int]) -> np.ndarray:
        """Runs (token, position, row) entries; the likeliest next token of those wanted."""
        found = {}
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            self.batch.n_tokens = len(part)
            for i, (token, position, row) in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = token, position
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
                self.batch.logits[i] = start + i in wanted
            if code := self.lib.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode returned {code}")
            for i in range(len(part)):
                if start + i in wanted:
                    logits = self.lib.llama_get_logits_ith(self.context, i)
                    found[start + i] = np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()
        return np.array([found[i] for i in wanted], dtype=np.int64)


def _silent(level: int, text: bytes, data: Any) -> None:
    pass


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_silent)
