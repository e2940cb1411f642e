"""`pagedkv generate --device-memory`: pages of a plan, and layers that stream if they have to."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pagedkv import BudgetExceeded, plan_memory
from pagedkv.cli import job
from pagedkv.cli.job import refusal
from pagedkv.cli.prompts import Prompt
from pagedkv.hf.blocked_weights import PackedWeights
from tests.cli.conftest import answers
from tests.hf.tiny import tiny
from tests.hf.zoo import built
from tests.stream.models import make
from tests.stream.packed import save_packed

PROMPTS = ("abc", "bcdbcdbcd", "c")


@pytest.fixture
def generate(pagedkv, model):
    def generate(*arguments, code: int = 0):
        result = pagedkv(
            "generate", model, *PROMPTS, "-n", 6, "--page-size", 4, "--device", "cpu", *arguments
        )
        assert result.exit_code == code, result.output
        return result

    return generate


def budgets(model):
    """One that only a streamed model keeps to, and one that holds all of it."""
    options = {"device": "cpu", "page_size": 4, "length": 15, "batch": 3}
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(model, device_memory="4KiB", **options)
    tight = refused.value.needed
    assert plan_memory(model, device_memory=tight, **options).streams
    assert not plan_memory(model, device_memory="64MiB", **options).streams
    return tight, "64MiB"


def assert_streams_the_same_texts(pagedkv, folder):
    tight, _ = budgets(folder)
    command = ("generate", folder, *PROMPTS, "-n", 6, "--page-size", 4, "--device", "cpu")
    plain, streamed = pagedkv(*command), pagedkv(*command, "--device-memory", tight)
    assert plain.exit_code == streamed.exit_code == 0, plain.output + streamed.output
    assert plain.stdout == streamed.stdout
    assert "streaming" in streamed.stderr
    return tight


def test_a_model_that_does_not_fit_streams_and_gives_the_same_texts(generate, model):
    tight, ample = budgets(model)
    plain = generate()
    streamed = generate("--device-memory", tight)
    assert streamed.stdout == plain.stdout
    assert "streaming" in streamed.stderr
    assert "a pass" in streamed.stderr
    held = generate("--device-memory", ample)
    assert held.stdout == plain.stdout
    assert "streaming" not in held.stderr


def test_a_configuration_that_makes_no_model_is_told_in_one_sentence(pagedkv, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "unheard"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "unheard of"}))
    tight, ample = budgets(model)
    for memory in (tight, ample):
        command = ("generate", folder, *PROMPTS, "-n", 6, "--page-size", 4, "--device", "cpu")
        refused = pagedkv(*command, "--device-memory", memory)
        assert refused.exit_code == 2
        assert re.search(r"MODEL: .*unheard.*KeyError: 'unheard of'", refused.stderr)


SIZED = {"as needed": ["--no-pack-weights"], "planned": ["--device-memory", "64MiB"]}


@pytest.mark.parametrize("sized", SIZED.values(), ids=SIZED)
def test_weights_are_packed_where_that_is_asked_for(generate, monkeypatch, sized):
    made = []
    packs = PackedWeights.refresh
    monkeypatch.setattr(PackedWeights, "refresh", lambda self: (packs(self), made.append(self)))
    plain = generate(*sized)
    assert not made
    assert generate(*sized, "--pack-weights").stdout == plain.stdout
    assert made
    assert made[0].nbytes > 0


def test_a_budget_that_packed_weights_do_not_fit_says_so(generate, model):
    options = {"device": "cpu", "page_size": 4, "length": 15}
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(model, device_memory="4KiB", pack_weights=True, **options)
    tight = refused.value.needed - 1000
    result = generate("--pack-weights", "--device-memory", tight, code=2)
    assert re.search(
        "no --pack-weights or --device-memory .* would fit", " ".join(result.stderr.split())
    )
    generate("--device-memory", tight)


@pytest.fixture(scope="module")
def packed(checkpoints):
    model = tiny(vocab_size=64, hidden_size=64, intermediate_size=128)
    folder = checkpoints("packed", None, model)
    (folder / "model.safetensors").unlink()
    return save_packed(model, folder, "W4A16")


def test_a_packed_model_in_memory_is_unpacked_only_where_there_is_room(
    pagedkv, packed, monkeypatch
):
    loaded, load = [], job.model_of
    monkeypatch.setattr(job, "model_of", lambda *args: loaded.append(load(*args)) or loaded[-1])
    sizes = {"device": "cpu", "page_size": 4, "length": 15, "batch": 3}
    plan = plan_memory(packed, device_memory="64MiB", **sizes)
    command = ("generate", packed, *PROMPTS, "-n", 6, "--page-size", 4, "--device", "cpu")
    texts = []
    for memory in (sum(plan.device_bytes.values()) + 1000, "64MiB"):
        result = pagedkv(*command, "--device-memory", memory)
        assert (result.exit_code, "streaming" in result.stderr) == (0, False)
        texts.append(result.stdout)
    tight, ample = (sum(x.nbytes for x in model.parameters()) for model in loaded)
    assert texts[0] == texts[1]
    assert tight <= plan.shape.weights < ample


def test_a_packed_model_streams_and_gives_the_texts_of_the_one_in_memory(pagedkv, packed):
    assert_streams_the_same_texts(pagedkv, packed)
    refused = pagedkv("generate", packed, *PROMPTS, "--dtype", "int4")
    assert refused.exit_code == 2
    assert "weights in int4 come from a checkpoint such as" in " ".join(refused.stderr.split())


def test_a_model_that_takes_images_gives_texts_whether_it_streams_or_not(pagedkv, checkpoints):
    small = {"text_config": {"vocab_size": 101}, "image_token_index": 100}
    folder = checkpoints("sees", None, built("llava", **small))
    tight = assert_streams_the_same_texts(pagedkv, folder)
    planned = pagedkv("plan", folder, "--device-memory", tight, "--device", "cpu", "-l", 15)
    assert "tower for images" in planned.stdout


def test_experts_stay_in_the_count_that_is_asked_for(pagedkv, checkpoints):
    folder = checkpoints("experts", None, make("qwen3_moe", vocab_size=64))
    command = ("generate", folder, *PROMPTS, "-n", 6, "--page-size", 4, "--device", "cpu")
    sized = ("--device-memory", "64MiB", "--expert-slots")
    plain, streamed, beyond = (
        pagedkv(*command),
        pagedkv(*command, *sized, 2),
        pagedkv(*command, *sized, 5),
    )
    assert plain.exit_code == streamed.exit_code == 0, streamed.output
    assert streamed.stdout == plain.stdout
    assert "experts as they are asked for, 2 of 4 stay" in " ".join(streamed.stderr.split())
    assert beyond.exit_code == 2
    assert "--expert-slots: expected 2, " in beyond.stderr


def test_a_prompt_or_limit_that_the_model_does_not_take_is_that_rows_alone(generate):
    result = generate("d" * 300, "-n", 10_000, "--device-memory", "9MiB", code=3)
    assert "1 of 4 prompts is longer than the model takes: prompt 3" in result.stderr
    assert [len(text) for text in answers(result.stdout)[:3]] == [253, 247, 255]


@pytest.mark.parametrize(
    ("asked", "advised"),
    [({}, "--max-new-tokens 988 or "), ({"max_new_tokens": 5}, ""), (None, "")],
    ids=["alike", "a limit of its own", "a prompt too long"],
)
def test_a_refusal_names_a_length_as_new_tokens_where_that_would_help(asked, advised):
    error = BudgetExceeded(
        "device_memory: ... length=1000 or device_memory='9MiB' would fit",
        needed=9,
        available=8,
        largest="KV pages",
        advice={"length": 1000},
    )
    longest = Prompt("abc", asked or {}, ids=[1] * (1200 if asked is None else 12))
    said = refusal(error, [Prompt("a", ids=[1]), longest])
    assert said == f"--device-memory: ... {advised}--device-memory 9MiB would fit"


def test_the_advice_of_a_refusal_is_followed_as_it_is_printed(generate):
    asked = ("--device-memory", "4KiB")
    refused = " ".join(generate(*asked, code=2).stderr.split())
    generate(*asked, *re.search(r"\. (--.*) would fit", refused)[1].split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device-memory", "much"), "--device-memory: expected"),
        (("--host-memory", "1GiB"), "--host-memory: expected with --device-memory"),
        (("--device-memory", "1GiB", "--max-tokens", 64), "--max-tokens: expected none"),
        (("--expert-slots", 2), "--expert-slots: expected with --device-memory"),
        (("--device-memory", "1GiB", "--expert-slots", 2), "--expert-slots: .* has no experts"),
    ],
    ids=str,
)
def test_budgets_that_cannot_be_kept_or_read_end_the_command(generate, options, words):
    result = generate(*options, code=2)
    assert result.stdout == ""
    assert re.search(words, " ".join(result.stderr.split())), result.stderr
