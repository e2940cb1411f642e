"""lm-evaluation-harness on tasks made of Python's own docstrings: its `hf` model, and ours.

    python -m benchmarks.peers.standard_tasks tasks TASKS --documents 100
    python -m benchmarks.peers.standard_tasks hf TASKS MODEL letters --batch 8 --out hf.json
    python -m benchmarks.peers.standard_tasks pagedkv TASKS MODEL letters --args kv_format=int4
    python -m benchmarks.peers.standard_tasks compare hf.json ours.json

`letters` asks for one of four letters behind the same five examples (as MMLU does), `choices` for
one of four sentences behind examples drawn for each document (as ARC does), `qa` for a text. A run
is a process of its own on one thread, and prints scores, processor seconds of the requests alone,
MiB by which the process's memory rose above its start, and tokens that the model was fed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import random
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.measuring import held

MODULES = """
    argparse ast asyncio base64 bisect calendar cmath codecs collections configparser contextlib
    copy csv datetime decimal difflib dis email.utils fileinput fnmatch fractions functools gc
    getpass gettext glob gzip hashlib heapq hmac html imaplib inspect io ipaddress itertools json
    linecache locale logging mailbox math mimetypes multiprocessing netrc ntpath operator optparse
    os pathlib pickle pkgutil platform plistlib posixpath pprint profile quopri random re sched
    secrets select shelve shlex shutil signal socket sqlite3 ssl stat statistics string struct
    subprocess symtable sys sysconfig tarfile tempfile textwrap threading time timeit token
    tokenize trace traceback tracemalloc types unicodedata unittest urllib.parse urllib.request
    uuid warnings wave weakref webbrowser xml.dom.minidom zipfile zlib
"""
EXAMPLES, WORDS = 40, 60
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
SHORT = "{{name}}: {{text}}\nIn short:"
FIRST = {"fewshot_config": {"sampler": "first_n"}}
ASK = "Which function does this?\n{{summary}}\n"
TASKS: dict[str, dict[str, Any]] = {
    "letters": {
        "doc_to_text": ASK
        + "".join(f"{letter}. {{{{names[{i}]}}}}\n" for i, letter in enumerate("ABCD"))
        + "Answer:",
        "doc_to_choice": [*"ABCD"],
        **(CHOICE | FIRST),
    },
    "choices": {"doc_to_text": SHORT, "doc_to_choice": "{{summaries}}", **CHOICE},
    "qa": {
        "output_type": "generate_until",
        "doc_to_text": SHORT,
        "doc_to_target": "{{summary}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        **FIRST,
    },
}


def described() -> list[dict[str, Any]]:
    """Public functions and classes: name, first line, and the first WORDS words of the rest."""
    found: dict[str, dict[str, Any]] = {}
    for module in MODULES.split():
        for name, item in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not callable(item):
                continue
            first, _, rest = (inspect.getdoc(item) or "").partition("\n")
            text = " ".join(rest.split()[:WORDS])
            if 5 <= len(first.split()) <= 16 and len(text.split()) >= WORDS // 2:
                one = {"name": f"{module}.{name}", "summary": first, "text": text}
                found.setdefault(first, one)
    return list(found.values())


def write_tasks(folder: Path, documents: int) -> None:
    """The tasks' files, the same on every machine with this Python."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, every = random.Random(0), described()
    chosen = draw.sample(every, EXAMPLES + documents)
    for document in chosen:
        others = draw.sample([each for each in every if each is not document], 3)
        four = draw.sample([document, *others], 4)
        named = {"names": [e["name"] for e in four], "summaries": [e["summary"] for e in four]}
        document |= {"answer": four.index(document), **named}
    files = {split: folder.resolve() / f"{split}.jsonl" for split in ("examples", "test")}
    for file, rows in zip(files.values(), (chosen[:EXAMPLES], chosen[EXAMPLES:])):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {split: str(file) for split, file in files.items()}}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    common |= {"num_fewshot": 5, "fewshot_split": "examples"}
    for name, task in TASKS.items():
        full = {"task": f"docstrings_{name}", **common, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(full, indent=1))


def watch(lm: Any) -> dict[str, Any]:
    """Measures the calls that answer requests; the dict returned is filled as they run."""
    found: dict[str, Any] = {"fed": 0}

    def count(_: Any, args: Any, kwargs: Any) -> None:
        found["fed"] += (args[0] if args else kwargs["input_ids"]).numel()

    def watched(call: Any) -> Any:
        def run(requests: list[Any], **options: Any) -> Any:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before, begin = held("VmRSS"), process_time()
            found["answers"] = call(requests, **options)
            found["cpu_s"] = process_time() - begin
            found["grown_mib"] = held("VmHWM") - before
            return found["answers"]

        return run

    for name in ("loglikelihood", "generate_until"):
        setattr(lm, name, watched(getattr(lm, name)))
    lm.model.register_forward_pre_hook(count, with_kwargs=True)
    return found


def evaluate(asked: argparse.Namespace) -> dict[str, Any]:
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import pagedkv.integrations.lm_eval  # noqa: F401 - its name

    more: dict[str, Any] = dict(pair.split("=") for pair in asked.args)
    more = {name: int(value) if value.isdigit() else value for name, value in more.items()}
    given = {"pretrained": asked.model, "device": "cpu", "dtype": "float32", **more}
    lm = get_model(asked.way)(**given, batch_size=asked.batch)
    watched = watch(lm)
    run = lm_eval.simple_evaluate(
        model=lm,
        tasks=[f"docstrings_{asked.task}"],
        limit=asked.documents,
        task_manager=TaskManager(include_path=str(asked.place), include_defaults=False),
    )
    (scores,) = run["results"].values()
    scores = {name.split(",")[0]: value for name, value in scores.items() if ",none" in name}
    return {"way": asked.way, **more, **scores, **watched}


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the second run's costs over the first's, and how many of their answers differ."""
    pairs = list(zip(first["answers"], second["answers"]))
    found = {"answers": len(pairs), "cpu": second["cpu_s"] / first["cpu_s"]}
    found["peak"] = second["grown_mib"] / first["grown_mib"]
    if isinstance(pairs[0][0], str):
        return found | {"other_texts": sum(a != b for a, b in pairs)}
    found["other_flags"] = sum(bool(a[1]) != bool(b[1]) for a, b in pairs)
    found["relative"] = max(abs(a[0] - b[0]) / abs(a[0]) for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["tasks", "hf", "pagedkv", "compare"])
    parser.add_argument("place", type=Path, help="the tasks' folder; of compare a file")
    parser.add_argument("model", nargs="?", help="of compare the other file")
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--args", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if asked.way == "tasks":
        return write_tasks(asked.place, asked.documents)
    if asked.way == "compare":
        files = (asked.place, Path(asked.model))
        found = compare(*(json.loads(file.read_text()) for file in files))
    else:
        found = evaluate(asked)
    if asked.out:
        asked.out.write_text(json.dumps(found))
    found.pop("answers" if asked.way != "compare" else "", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
