"""The Python blocks of the documentation do what the text around them says, and its paths exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# compat.md names files of transformers. Decisions tell of the past.
OURS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
OURS.remove(DOCS / "compat.md")
PLACES = ("pagedkv", "kernels", "tests", "benchmarks", "docs")


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_every_file_and_folder_that_a_document_names_exists(file):
    there = {f"/{name}/" for name in PLACES}
    for place in PLACES:
        for path in (ROOT / place).rglob("*"):
            ending = "/" if path.is_dir() else ""
            there.add(f"/{path.relative_to(ROOT).as_posix()}{ending}")
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", file.read_text(encoding="utf-8")))
    made = {".gpu/"}  # by a command that the document tells of
    missing = [name for name in named - made if not any(x.endswith(f"/{name}") for x in there)]
    assert not missing, f"{file.name} names {', '.join(sorted(missing))}"


@pytest.mark.slow
@pytest.mark.model
def test_the_uses_of_the_batch_generator_run_as_they_stand(smollm2_path):
    transformers = pytest.importorskip("transformers")
    namespace = {
        "model": transformers.AutoModelForCausalLM.from_pretrained(smollm2_path).eval(),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(smollm2_path),
    }
    blocks = BLOCK.findall((DOCS / "generate.md").read_text())
    assert len(blocks) >= 9
    for block in blocks:
        exec(compile(block, "docs/generate.md", "exec"), namespace)
    namespace["generator"].cache.check()


def test_the_loops_over_states_run_as_they_stand():
    torch = pytest.importorskip("torch")
    pagedkv = pytest.importorskip("pagedkv")
    loop, layer = BLOCK.findall((DOCS / "hybrid.md").read_text())
    namespace = {}
    for block in (loop, layer):
        exec(compile(block, "docs/hybrid.md", "exec"), namespace)

    def heads(x):
        return [part.unflatten(1, (2, -1)) for part in x.split([8, 8, 16], 1)]

    namespace["split_into_heads"] = heads
    tensors = (((32, 4), "float32"), ((2, 4, 8), "float32"))
    states = (namespace["StateLayer"](tensors),)
    sizes = {"num_kv_heads": 1, "head_dim": 4, "dtype": "float32", "max_tokens": 64}
    cache = pagedkv.PagedKVCache(pagedkv.CacheConfig(1, states=states, **sizes), device="cpu")
    seq, weight = cache.add(), torch.randn(32, 4)
    plain = [torch.zeros(1, *shape) for shape, _ in tensors]
    zero = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        x, gate, beta = torch.randn(1, 32), -torch.rand(1, 2), torch.rand(1, 2)
        dropped = cache.prepare([seq], num_new=1)
        namespace["decode_layer"](dropped, 0, x, weight, gate, beta)
        cache.abort(dropped)
        with cache.step([seq], num_new=1) as step:
            pagedkv.write_kv(*torch.randn(2, 1, 1, 4), step, 0)
            out = namespace["decode_layer"](step, 0, x, weight, gate, beta)
        mixed = namespace["convolution_step"](x, plain[0], weight, None, zero, zero)
        wanted = namespace["delta_rule_step"](*heads(mixed), gate, beta, plain[1], zero, zero)
        assert torch.equal(out, wanted)
    for kept, expected in zip(cache.read_state(seq, 0), plain):
        assert torch.equal(kept, expected)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.filterwarnings("ignore:length. planned for")
def test_the_uses_of_the_streamer_run_as_they_stand_on_a_small_budget(smollm2_path):
    transformers = pytest.importorskip("transformers")
    pagedkv = pytest.importorskip("pagedkv")
    for file, least in ((ROOT / "README.md", 1), (DOCS / "streaming.md", 2)):
        blocks = [b for b in BLOCK.findall(file.read_text()) if "LayerStreamer" in b]
        blocks = [b for b in blocks if "processor" not in b]  # this model takes no images
        assert len(blocks) >= least
        for block in blocks:
            namespace = {name: getattr(pagedkv, name) for name in pagedkv.__all__}
            namespace |= {"path": smollm2_path, "prompts": [[5, 6, 7], [8, 9]]}
            namespace["tokenizer"] = transformers.AutoTokenizer.from_pretrained(smollm2_path)
            # A plan for a card has room for the context of one.
            memory = "700MB" if "plan_memory" in block else "150MB"
            block = block.replace('"path/to/model"', "path").replace("8GiB", memory)
            block = block.replace("length=1024", "length=128")
            exec(compile(block, str(file), "exec"), namespace)
            namespace["streamer"].close()
