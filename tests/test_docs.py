"""The Python blocks of the documentation do what the text around them says."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


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
