"""A checkpoint folder to run the command on, and two ways to run it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LETTERS = [chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(101)]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m['role'][0] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}q{% endif %}"
)
# A random model repeats itself until it is made to stop.
SHORT = ("-n", 6, "--page-size", 4)


def answers(printed: str) -> list[str]:
    """The texts that the command printed, without the questions above and the marks behind them."""
    found = []
    for block in re.split("\n\n+", printed.rstrip("\n")):
        text = block.partition("\n")[2] if block.startswith("> ") else block
        found.append(re.sub(r" ?\[(cut at [\d,]+ tokens|error)\]$", "", text))
    return found


def by_place(rows: list[dict]) -> dict[tuple[int, int], dict]:
    """Rows by their place, without what depends on the rows beside them."""
    found = {(row["index"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    told = ("cached_tokens", "made_with")
    return {
        place: {name: value for name, value in row.items() if name not in told}
        for place, row in found.items()
    }


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Saves a tiny llama with a tokenizer of one letter for each id; returns its folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.hf.tiny import tiny

    def save(name: str, chat: str | None = None, model: Any = None) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tokenizer = Tokenizer(
            models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat).save_pretrained(
            folder
        )
        torch.manual_seed(0)
        (model or tiny(vocab_size=len(LETTERS))).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model(checkpoints):
    """Folder of a model without a chat template."""
    return checkpoints("plain")


@pytest.fixture(scope="session")
def chat_model(checkpoints):
    return checkpoints("chat", CHAT)


@pytest.fixture(scope="session")
def pagedkv():
    """Runs the command in this process: `.exit_code`, `.stdout`, `.stderr`."""
    from typer.testing import CliRunner

    from pagedkv.cli.app import app

    def run(*arguments: object, stdin: str | bytes = ""):
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def start(tmp_path):
    """Starts the command as a process of its own."""
    started = []
    # A shell that runs the tests in the background has them ignore Ctrl-C, which is inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*arguments: object, **options) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
        # One thread: processes that spin for each other on few cores take many times as long.
        env |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": tmp_path,
            **options,
            "env": env | options.get("env", {}),
        }
        launcher = options.pop("launcher", [sys.executable, "-m", "pagedkv"])
        command = [*launcher, *map(str, arguments)]
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield start
    signal.signal(signal.SIGINT, before)
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


@pytest.fixture
def rows():
    """The rows of an output file."""

    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture
def generate(pagedkv, model):
    """`pagedkv generate` with the model without a template."""

    def generate(*arguments, code: int | None = 0, **options):
        result = pagedkv("generate", model, *SHORT, *arguments, **options)
        assert code is None or result.exit_code == code, result.output
        return result

    return generate


@pytest.fixture
def written(tmp_path):
    """Writes a file and returns its path."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write
