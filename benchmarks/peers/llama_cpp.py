"""Runs a job of ours in llama.cpp, on the same weights: an independent yardstick.

`llama-cpp-python` batches sequences only through its low-level calls, which this file makes: one
context, the prefix decoded once and its cells shared by all rows, then one token a row and step.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 512  # tokens of one llama_decode


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

    def generate(self, prompts: list[list[int]], new: int, prefix: int) -> np.ndarray:
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

    def score(
        self, contexts: list[list[int]], choices: list[list[list[int]]], prefix: int
    ) -> list[float]:
        """Log-probabilities of choices behind contexts that share their first `prefix` tokens.

        Contexts run one after another, each with its choices side by side; row 0 has the context.
        """
        self.lib.llama_memory_clear(self.memory, True)
        self._decode([(token, i, 0) for i, token in enumerate(contexts[0][:prefix])], [])
        sums = []
        for context, own in zip(contexts, choices, strict=True):
            self.lib.llama_memory_seq_rm(self.memory, 0, prefix, -1)
            asked = [(token, i, 0) for i, token in enumerate(context)][prefix:]
            (first,) = self._decode(asked, [len(asked) - 1], lambda _, logits: log_softmax(logits))
            for row in range(1, len(own) + 1):
                self.lib.llama_memory_seq_rm(self.memory, row, -1, -1)
                self.lib.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
            entries = [
                (token, len(context) + i, row)
                for row, choice in enumerate(own, 1)
                for i, token in enumerate(choice[:-1])
            ]
            due = [token for choice in own for token in choice[1:]]
            every = list(range(len(due)))
            found = iter(
                self._decode(entries, every, lambda i, at, due=due: log_softmax(at)[due[i]])
            )
            sums += [float(first[x[0]]) + sum(float(next(found)) for _ in x[1:]) for x in own]
        return sums

    def _decode(
        self,
        entries: list[tuple[int, int, int]],
        wanted: list[int],
        read: Callable[[int, np.ndarray], Any] = lambda _, logits: logits.argmax(),
    ) -> list[Any]:
        """Runs (token, position, row) entries; returns what `read` makes of the wanted logits."""
        found, asked = {}, set(wanted)
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            self.batch.n_tokens = len(part)
            for i, (token, position, row) in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = token, position
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
                self.batch.logits[i] = start + i in asked
            if code := self.lib.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode returned {code}")
            for i in range(len(part)):
                if start + i in asked:
                    logits = self.lib.llama_get_logits_ith(self.context, i)
                    each = np.ctypeslib.as_array(logits, (self.vocabulary,))
                    found[start + i] = read(start + i, each)
        return [found[i] for i in wanted]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    away = logits - logits.max()
    return away - np.log(np.exp(away).sum())


def _silent(level: int, text: bytes, data: Any) -> None:
    pass


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_silent)
