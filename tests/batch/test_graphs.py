"""Decoding through captured steps, with a recorder in the place of CUDA's graphs.

A recorded forward is run again on each replay, over the tensors that it was recorded with: what it
computes is right only if all that changes between steps lies in buffers whose addresses last.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pagedkv import BatchGenerator, CacheConfig, PagedKVCache
from pagedkv.batch.graphs import DecodeGraphs, capture, padded_size
from pagedkv.kernels.triton import shared_prefix
from tests.effort import few
from tests.hf.tiny import tiny
from tests.hf.zoo import built

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


class Recorder:
    """Counts captures and replays; a replay runs the forward that was captured."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, forward, device, pool):
        self.captures += 1
        out = forward()

        def replay():
            self.replays += 1
            out.copy_(forward())

        return replay, out


def llama(layers=1):
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).eval()


def mistral(layers=1):
    torch.manual_seed(1)
    config = MistralConfig(**SHAPE, sliding_window=12, num_hidden_layers=layers)
    return MistralForCausalLM(config).eval()


def generator(model, recorder=None, verify_width=1, after=1, **fields):
    """With a recorder through Triton's interpreter, which is slow, else through torch."""
    fields = {"max_tokens": 512, "max_sequences": 8, "page_size": 4, **fields}
    config = CacheConfig.from_model(model.config, dtype="float32", **fields)
    backend = "torch" if recorder is None else "triton"
    cache = PagedKVCache(config, device="cpu", backend=backend, debug=True)
    made = BatchGenerator(model, cache=cache, verify_width=verify_width)
    if recorder is not None:
        made._graphs = DecodeGraphs(made._packed, capture=recorder, after=after)
    return made


PROMPTS = [[1, 2, 3, 4, 5], list(range(18)), [11]]


@pytest.mark.parametrize("make", few([llama, mistral], llama))
def test_captured_steps_give_the_tokens_of_uncaptured_ones(make):
    model = make(layers=2)
    lengths = [2, 3, 5]  # rows leave one after the other
    with generator(model) as plain:
        expected = plain.generate(PROMPTS, max_new_tokens=lengths)
    recorder = Recorder()
    with generator(model, recorder) as captured:
        got = captured.generate(PROMPTS, max_new_tokens=lengths)
        again = captured.generate(PROMPTS, max_new_tokens=lengths)
        captured.cache.check()
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert [r.tokens for r in again] == [r.tokens for r in expected]
    assert recorder.captures == 3  # of 3, 2 and 1 rows
    assert recorder.replays > 2 * recorder.captures


def test_steps_with_guesses_run_beside_captured_ones():
    model, recorder = llama(), Recorder()
    with generator(model) as plain:
        expected = plain.generate(PROMPTS, max_new_tokens=16)
    with generator(model, recorder, verify_width=4) as captured:
        got = captured.generate(PROMPTS, max_new_tokens=16)
        stats = captured.stats
        captured.cache.check()
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert stats.drafted > 0
    assert 0 < recorder.replays < stats.steps - 1  # the first computes the prompts


def test_latents_that_have_to_be_expanded_are_not_captured():
    """Alone finds lengths on the host, which are upper bounds in a graph, taken for a row's own."""

    class Quantised(torch.nn.Linear):
        pass

    model = built("deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=16, head_dim=16)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Quantised
    options = {"max_new_tokens": 6, "do_sample": False}
    with generator(model) as plain:
        expected = plain.generate(PROMPTS, **options)
    with generator(model, recorder := Recorder()) as captured:
        with pytest.warns(UserWarning, match="cannot be captured"):
            got = captured.generate(PROMPTS, **options)
        assert recorder.replays == 0
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def test_jobs_of_other_sizes_capture_their_own_steps():
    model, recorder = llama(), Recorder()
    with generator(model) as plain:
        expected = plain.generate(PROMPTS, max_new_tokens=3)
    with generator(model, recorder) as captured:
        captured.generate([*PROMPTS, [3, 1], [2, 2]], max_new_tokens=2)
        got = captured.generate(PROMPTS, max_new_tokens=3)
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def in_chunks(layers=1):
    own = {"num_hidden_layers": layers, "layer_types": ["chunked_attention"] * layers}
    own |= {"no_rope_layers": [1] * layers, "interleave_moe_layer_step": layers + 1}
    return tiny("llama4", **own, moe_layers=[], head_dim=16)


@pytest.mark.parametrize("make", [llama, in_chunks])
def test_rows_that_only_fill_a_captured_step_read_and_write_nothing(make):
    model, recorder = make(), Recorder()
    prompts, lengths = [[row + 1, 7, 3] for row in range(10)], [2, *[4] * 9]  # then 9 rows of 10
    with generator(model, max_sequences=16) as plain:
        expected = plain.generate(prompts, max_new_tokens=lengths)
    with generator(model, recorder, max_sequences=16) as captured:
        got = captured.generate(prompts, max_new_tokens=lengths)
        captured.cache.check()
    assert recorder.captures == 1
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def test_rows_beyond_a_padded_step_have_no_tokens_and_no_slots():
    with generator(llama(), max_sequences=16) as made:
        cache = made.cache
        seqs = [cache.add() for _ in range(9)]
        step = cache.prepare(seqs, list(range(9)))
        cache._devices.each[0][0].kept("kv_lens").whole[9:] = 99
        padded = step.padded(10, {})
        assert padded.kv_lens(0).tolist() == [1] * 9 + [0]
        assert padded.slots(0).tolist()[9:] == [-1]
        assert padded.slots(0)[:9].min() >= 0
        cache.abort(step)


def test_a_captured_step_never_has_more_rows_than_a_step_may_have_tokens():
    model, recorder = llama(), Recorder()
    prompts = [[row + 1, 7, 3] for row in range(9)]
    sizes = {"max_sequences": 16, "max_step_tokens": 9}
    with generator(model, **sizes) as plain:
        expected = plain.generate(prompts, max_new_tokens=3)
    with generator(model, recorder, **sizes) as captured:
        got = captured.generate(prompts, max_new_tokens=3)
    assert recorder.replays
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def test_captured_steps_share_prefixes(monkeypatch):
    monkeypatch.setattr(shared_prefix, "LAUNCH_WORTH_BYTES", 1)
    model, recorder = llama(), Recorder()
    common = [token % 60 for token in range(70)]  # more than the 64 tokens of a whole tile
    prompts = [[*common, 1], [*common, 2, 3], [*common, 4], [7]]
    with generator(model) as plain:
        expected = plain.generate(prompts, max_new_tokens=3)
    with generator(model, recorder) as captured:
        got = captured.generate(prompts, max_new_tokens=3)
        again = captured.generate(prompts[::-1], max_new_tokens=3)
        graphs = captured._graphs
    assert graphs._sharing == {0}  # some rows did share
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert [r.tokens for r in again] == [r.tokens for r in expected][::-1]


def test_rows_that_share_nothing_replay_the_graph_of_those_that_do(monkeypatch):
    monkeypatch.setattr(shared_prefix, "LAUNCH_WORTH_BYTES", 1)
    model, recorder = llama(), Recorder()
    common = [token % 60 for token in range(70)]
    alike, apart = [[*common, 1], [*common, 2]], [[7], [8]]
    with generator(model) as plain:
        expected = [plain.generate(prompts, max_new_tokens=4) for prompts in (alike, apart)]
    with generator(model, recorder) as captured:
        got = [captured.generate(alike, max_new_tokens=4)]
        assert captured._graphs._sharing == {0}
        before = recorder.captures, recorder.replays
        got.append(captured.generate(apart, max_new_tokens=4))
        assert (recorder.captures, recorder.replays) == (before[0], before[1] + 4)
    assert [[r.tokens for r in job] for job in got] == [[r.tokens for r in job] for job in expected]


def test_a_size_is_captured_once_it_came_back_often_and_the_next_larger_serves_until_then():
    model, recorder = llama(), Recorder()
    with generator(model) as plain:
        expected = plain.generate(PROMPTS, max_new_tokens=[8, 12, 16])
    with generator(model, recorder, after=5) as captured:
        got = captured.generate(PROMPTS, max_new_tokens=[8, 12, 16])
        # 7 steps of 3 rows, of which 4 go without; then 4 each of 2 rows and 1 row.
        assert (recorder.captures, recorder.replays) == (1, 3 + 4 + 4)
        again = captured.generate(PROMPTS[:1], max_new_tokens=4)  # 4 more: its text is cached
        assert (recorder.captures, recorder.replays) == (2, 11 + 4)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert again[0].tokens == expected[0].tokens[:4]


def test_weights_that_moved_are_captured_anew():
    model, recorder = llama(), Recorder()
    with generator(model, recorder) as captured:
        captured.generate(PROMPTS[:1], max_new_tokens=4)
        before = recorder.captures
        captured.generate(PROMPTS[:1], max_new_tokens=4)
        assert recorder.captures == before
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
        got = captured.generate(PROMPTS[:1], max_new_tokens=4)
        assert recorder.captures > before
    with generator(model) as plain:
        assert got[0].tokens == plain.generate(PROMPTS[:1], max_new_tokens=4)[0].tokens


def test_a_model_that_cannot_be_captured_runs_without_and_says_so():
    def refuse(forward, device, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = llama()
    with generator(model) as plain:
        expected = plain.generate(PROMPTS[:2], max_new_tokens=4)
    with generator(model, refuse) as captured:
        with pytest.warns(UserWarning, match="LlamaForCausalLM cannot be captured"):
            got = captured.generate(PROMPTS[:2], max_new_tokens=4)
        captured.cache.check()
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def test_layers_of_several_head_counts_are_not_captured():
    """Alone finds a graph whose shared work is planned for the heads of another layer."""
    with BatchGenerator(built("step3p7"), page_size=4, max_tokens=64) as batched:
        assert DecodeGraphs(batched._packed).refused


def test_a_capture_that_failed_once_is_tried_again_later(recwarn):
    recorder, failures = Recorder(), []

    def fails_once(forward, device, pool):
        if not failures:
            failures.append(True)
            raise RuntimeError("operation failed due to a previous error during capture")
        return recorder(forward, device, pool)

    model = llama()
    with generator(model) as plain:
        expected = plain.generate(PROMPTS[:2], max_new_tokens=8)
    with generator(model, fails_once, after=2) as captured:
        got = captured.generate(PROMPTS[:2], max_new_tokens=8)
    # 7 steps of 2 rows: the second fails, the fourth is captured.
    assert failures
    assert (recorder.captures, recorder.replays) == (1, 4)
    assert not [warning for warning in recwarn if "captured" in str(warning.message)]
    assert [r.tokens for r in got] == [r.tokens for r in expected]


def test_other_threads_may_use_the_device_while_a_step_is_captured(monkeypatch):
    entered = []

    @contextmanager
    def graph(graph, **options):
        entered.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    capture(lambda: torch.zeros(1), torch.device("cpu"), None)
    assert [options["capture_error_mode"] for options in entered] == ["thread_local"]


def test_graphs_come_in_few_sizes_and_never_too_small():
    sizes = [padded_size(rows, 200) for rows in range(1, 201)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert all(size <= rows * 1.25 for rows, size in enumerate(sizes, start=1) if rows > 8)
    assert max(sizes) == 200
    assert len(set(sizes)) <= 30
