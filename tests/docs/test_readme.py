"""README as a newcomer follows it: its install line, then its blocks in an empty folder.

pip asks the index that this machine uses. Nothing else of the machine is in the environment.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_commands import FILES
from tests.docs.test_python import LOOSE, SAME

README = [block for block in blocks(ROOT / "README.md") if not block.not_run]
SHELL = [block.body for block in README if block.language == "sh"]
INSTALL = [body for body in SHELL if "pip install" in body]
NOT_CLONED = (".*", "__pycache__", "*.egg-info", "build", "dist", "site")
# Llama's and Mistral's tokenizers have no token to pad with.
LOADED = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({0!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({0!r})
tokenizer.pad_token = None
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs a program in the environment that README's line makes, and returns what it prints."""
    clone = tmp_path_factory.mktemp("clone") / "pagedkv"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(*NOT_CLONED))
    made = tmp_path_factory.mktemp("environment")
    subprocess.run((sys.executable, "-m", "venv", made), check=True)
    path = f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*command, cwd):
        options = {"cwd": cwd, "env": env | {"PATH": path}, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        return done.stdout

    (line,) = INSTALL
    run("bash", "-ec", line, cwd=clone)
    return run


def test_every_shell_block_runs_with_what_the_install_line_brings(ran, smollm2_path, tmp_path):
    for number, body in enumerate(body for body in SHELL if body not in INSTALL):
        (folder := tmp_path / str(number)).mkdir()
        words = shlex.split(body.replace("\\\n", " "))
        for before, word in pairwise(words):
            if before in ("--file", "--prefix"):
                text = FILES.get(word, FILES.get(Path(word).suffix))
                (folder / word).write_text(text, encoding="utf-8")
        body = re.sub(r"\bMODEL\b", shlex.quote(str(smollm2_path)), body)
        ran("bash", "-ec", body, cwd=folder)
        written = [word for before, word in pairwise(words) if before == "--out"]
        assert all((folder / name).stat().st_size for name in written)


def test_the_python_blocks_print_what_stands_there(ran, smollm2_path, tmp_path):
    source = "".join(block.body for block in README if block.language == "python")
    shown = "".join(block.body for block in README if block.language == "output")
    printed = ran("python", "-c", LOADED.format(str(smollm2_path)) + source, cwd=tmp_path)
    assert SAME.check_output(shown, printed, LOOSE), printed
