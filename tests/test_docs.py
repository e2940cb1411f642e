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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.filterwarnings("ignore:length. planned for")
def test_the_uses_of_the_streamer_run_as_they_stand_on_a_small_budget(smollm2_path):
    transformers = pytest.importorskip("transformers")
    pagedkv = pytest.importorskip("pagedkv")
    for file, least in ((ROOT / "README.md", 1), (DOCS / "streaming.md", 2)):
        blocks = [b for b in BLOCK.findall(file.read_text()) if "LayerStreamer" in b]
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
