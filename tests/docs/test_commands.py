"""Commands of the documentation: `pagedkv` is run; what others are told to work on exists."""

import json
import re
import shlex
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, name, with_blocks
from tests.effort import examples

FILES = {
    ".txt": "Why is the sea salty?\nWhy is the sky blue?\n",
    "mine.txt": "The sea is salty because rivers bring salt into it. " * 20,
    "mails.txt": "The sea is salty because rivers bring salt into it. " * 64,
    ".jsonl": '{"prompt": "Why is the sea salty?"}\n{"prompt": "Why is the sky blue?"}\n',
    ".json": json.dumps([{"role": "system", "content": "You are a guide."}]),
    "tickets.csv": "subject,text\nInvoice,I was charged twice.\nPassword,I cannot log in.\n",
    ".csv": "prompt,question\nsea,Why is the sea salty?\nsky,Why is the sky blue?\n",
}
WRITTEN = ("--out", "--html", "--trace")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(page):
    """(line, words) of each command, those of one block in one list."""
    for block in blocks(page):
        if block.language == "sh" and not block.not_run:
            body = block.body.replace("\\\n", "  ")
            lines = [shlex.split(line, comments=True) for line in body.splitlines()]
            yield f"{name(page)}:{block.line}", [words for words in lines if words]


@pytest.fixture
def pagedkv(tiny_path, tmp_path, monkeypatch):
    """Runs `pagedkv` in an empty folder in which the files that it reads are made before."""
    from typer.testing import CliRunner

    from pagedkv.cli.app import app

    def run(words):
        words = [str(tiny_path) if word == "MODEL" else word for word in words]
        if words[0] == "quality":  # token by token
            length = 128 if "--at-most" in words else examples(1024, 128)  # of 24 windows
            words += ["--length", str(length)] if "--length" not in words else []
        for before, word in zip(["", *words], words):
            text = FILES.get(word, FILES.get(Path(word).suffix))
            if text is not None and before not in WRITTEN:
                Path(word).write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"

    monkeypatch.chdir(tmp_path)
    return run


def look_at(words):
    """Assert that targets, extras, files and options of another program exist."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        variables = [word.split("=")[0] for word in words[1:] if "=" in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)
        assert all(re.search(rf"^{v}\s*\?=", makefile, re.MULTILINE) for v in variables)
    elif words[0] == "pip":
        extras = re.findall(r"(?:pagedkv|\.)\[([\w,]+)\]", " ".join(words))
        missing = set(",".join(extras).split(",")) - {"", *PROJECT["optional-dependencies"]}
        assert not missing, f"no such extra: {missing}"
        for option, file in pairwise(words):
            assert option not in ("-c", "-r") or (ROOT / file).is_file()
    elif words[:2] == ["python", "-m"]:
        place = ROOT / words[2].replace(".", "/")
        files = list(place.glob("*.py")) or [place.with_suffix(".py")]
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        options = [word.split("=")[0] for word in words[3:] if word.startswith("--")]
        assert all(f'"{option}"' in source for option in options), options
    elif words[0] == "pytest":
        files = [word for word in words[1:] if "/" in word and not word.startswith("-")]
        assert files
        assert all((ROOT / file).exists() for file in files)
    elif words[0] in ("git", "cd", "python", "python3"):
        files = [word for word in words[1:] if word.startswith("docs/")]
        assert all((ROOT / file).exists() for file in files)
    else:
        pytest.fail("no test knows how to look at this command")


@pytest.mark.parametrize("page", with_blocks("sh"), ids=name)
def test_the_commands_of_a_page_work(page, pagedkv, tmp_path, monkeypatch):
    for number, (where, lines) in enumerate(commands(page)):
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(folder)
        for words in lines:
            print(where, *words)  # shown where one fails
            if words[0] == "torchrun" and "pagedkv" in words:  # one process runs it as several do
                words = words[words.index("pagedkv") :]
            if words[0] == "pagedkv":
                pagedkv(words[1:])
            elif words[0] == "cat":  # of what the commands before it wrote
                subprocess.run(" ".join(words), shell=True, check=True)
            else:
                look_at(words)
