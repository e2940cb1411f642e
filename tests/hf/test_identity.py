"""One identity for saved files and prefix stores: what K and V depend on counts, names do not."""

import copy

import pytest
import torch
from torch import nn

from pagedkv import BatchGenerator, PagedCache, PagedKVCache
from pagedkv.errors import WrongModelError
from pagedkv.hf.fingerprint import AT_ONCE, ROW, fingerprint_of, sums_of
from pagedkv.hf.model import cache_config
from tests.batch.generating import tokens_alone
from tests.effort import few, slow
from tests.hf.adapted import adapted, add
from tests.hf.test_prefix_store import OPTIONS, SIZES, found
from tests.hf.tiny import FAMILIES, named, padded, prompts, tiny

OTHER_SETTINGS = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
    ("mistral", {"sliding_window": 5}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    *slow(
        ("llama", {"rms_norm_eps": 1e-2}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("gemma2", {"query_pre_attn_scalar": 64}),
        ("gemma2", {"attn_logit_softcapping": 1.0}),
        ("granite", {"residual_multiplier": 0.5}),
        ("deepseek_v3", {"routed_scaling_factor": 2.0}),
    ),
]


def with_settings(model, family, fields):
    """A model with the same parameters that computes otherwise."""
    other = tiny(family, **fields)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def save_text(model, path):
    cache = PagedCache(model, **SIZES)
    model(**padded(prompts(20)), **named(cache))
    cache.kv.save(cache.rows[0], path)


@pytest.mark.parametrize(
    ("family", "fields"),
    OTHER_SETTINGS,
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_the_same_parameters_under_other_settings_are_another_model(family, fields, tmp_path):
    model, (row,) = tiny(family), prompts(140)
    other = with_settings(model, family, fields)
    assert fingerprint_of(other) != fingerprint_of(model) == fingerprint_of(copy.deepcopy(model))
    save_text(model, tmp_path / "text")
    PagedCache(copy.deepcopy(model), **SIZES).kv.load(tmp_path / "text")
    with pytest.raises(WrongModelError):
        PagedCache(other, **SIZES).kv.load(tmp_path / "text")
    found(model, tmp_path / "store", [row])
    assert found(other, tmp_path / "store", [row])[0] == [0]


def saved_buffer(model):
    model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1)


def computed_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)


@torch.no_grad()
@pytest.mark.parametrize("change", [saved_buffer, computed_buffer], ids=lambda f: f.__name__)
def test_buffers_tell_models_apart_whether_they_are_saved_or_not(change, tmp_path):
    model, (row,) = tiny("deepseek_v3"), prompts(140)
    other = copy.deepcopy(model)
    change(other)
    save_text(model, tmp_path / "text")
    with pytest.raises(WrongModelError):
        PagedCache(other, **SIZES).kv.load(tmp_path / "text")
    found(model, tmp_path / "store", [row])
    assert found(other, tmp_path / "store", [row])[0] == [0]


@torch.no_grad()
def test_last_bits_of_a_computed_buffer_make_no_other_file():
    """Another machine computes other ones; a store is found by exact ones."""
    model = tiny()
    before, sums = fingerprint_of(model), sums_of(model)
    model.model.rotary_emb.inv_freq[0] = torch.nextafter(
        model.model.rotary_emb.inv_freq[0], torch.tensor(0.99)
    )
    assert fingerprint_of(model) == before
    assert sums_of(model) != sums


@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gemma2", "deepseek_v3", "gpt2"))
def test_a_model_is_the_same_once_it_was_saved_and_loaded(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert (fingerprint_of(loaded), sums_of(loaded)) == (fingerprint_of(model), sums_of(model))


def test_names_and_ways_of_calling_make_no_other_model():
    model = tiny()
    before = fingerprint_of(model)
    for field, value in {
        "name_or_path": "/elsewhere", "use_cache": False, "pad_token_id": 3, "eos_token_id": [7, 8],
        "architectures": ["Llama"], "output_hidden_states": True, "transformers_version": "4.0",
        "auto_map": {"AutoConfig": "me/model--config.Config"}, "id2label": {0: "x"},
    }.items():  # fmt: skip
        setattr(model.config, field, value)
    with PagedCache(model, **SIZES):
        assert fingerprint_of(model) == before
    assert fingerprint_of(model) == before


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, ROW // 4 + 5, (2 * AT_ONCE["cpu"] + ROW + 12) // 2], ids=str)
def test_sums_see_every_exchange(size, dtype):
    """Exchanges words in a row, in a column, far apart; rows; numbers that differ by a sign."""
    model = tiny("llama")
    model.register_buffer("x", torch.randn(size).to(dtype))
    before, found = model.x.clone(), {sums_of(model)}
    wide, places = ROW // dtype.itemsize, [(0, 1), (2, 6)]
    places += [(3, 3 + wide * k) for k in (1, 2, 192, 193)] + [(0, size - 1), (size - 2, size // 2)]
    for one, two in [p for p in places if max(p) < size]:
        model.x[[one, two]] = model.x[[two, one]]
        found.add(sums_of(model))
        model.x.copy_(before)
        model.x[two] = -model.x[one]
        found.add(sums_of(model))
        model.x[[one, two]] = model.x[[two, one]]
        found.add(sums_of(model))
        model.x.copy_(before)
    assert len(found) == 1 + 3 * len([p for p in places if max(p) < size])


def test_sums_do_not_depend_on_how_much_is_summed_at_once(monkeypatch):
    model = tiny()
    model.register_buffer("x", torch.randn(ROW))
    before = sums_of(model)
    for rows in (1, 3, 1000):
        monkeypatch.setitem(AT_ONCE, "cpu", rows * ROW)
        assert sums_of(model) == before


@torch.no_grad()
def test_exchanged_rows_of_a_small_table_are_seen(tmp_path):
    """Rows within the bytes of one sum, at places that no sample reads."""
    model, (row,) = tiny(), prompts(140)
    other = copy.deepcopy(model)
    table, before = other.get_input_embeddings().weight, fingerprint_of(model)
    pairs = [(i, j) for i in range(101) for j in range(i)]
    for one, two in pairs:
        table[[one, two]] = table[[two, one]]
        if fingerprint_of(other) == before:
            break
        table[[one, two]] = table[[two, one]]
    found(model, tmp_path, [row])
    assert found(other, tmp_path, [row])[0] == [0]


# ---- a model that changes while its pages live


def quantised(model):
    options = {"dtype": torch.qint8}
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True, **options)


@pytest.mark.filterwarnings("ignore")  # torch has another way to quantize now
def test_a_model_that_is_quantised_later_leaves_nothing_in_a_store(tmp_path):
    """Packed weights cannot be read, so all such models would look alike."""
    (row,) = prompts(140)
    for model in (tiny(), tiny()):
        config = cache_config(model, fingerprint=b"the same", **SIZES)
        cache = PagedKVCache(config, device="cpu", prefix_store=tmp_path)
        with BatchGenerator(model, cache=cache) as batched:
            quantised(model)
            batched.generate([row], **OPTIONS)
        assert cache.identity.weights() == b""
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:model. .* has the forward hook")
def test_a_model_with_a_hook_neither_finds_nor_stores(tmp_path):
    """Nobody knows what it computes, and a store outlasts the process that has it."""
    model, (row,) = tiny(), prompts(140)
    found(model, tmp_path, [row])
    left = sorted(tmp_path.iterdir())
    hook = model.model.layers[0].register_forward_hook(lambda layer, args, out: out * 1.5)
    expected = tokens_alone(model, row, **OPTIONS)
    assert found(model, tmp_path, [row]) == ([0], [expected])
    assert found(model, tmp_path, prompts(150))[0] == [0]
    assert sorted(tmp_path.iterdir()) == left
    hook.remove()
    assert found(model, tmp_path, [row])[0] == [128]


@torch.no_grad()
def test_code_of_others_neither_finds_nor_stores_and_numbers_of_modules_make_another_model(
    tmp_path,
):
    """A prefix was found that a model of the same tensors had computed otherwise."""
    model, (row,) = tiny(), prompts(140)
    found(model, tmp_path, [row])
    left, own = sorted(tmp_path.iterdir()), model.model.layers[0].mlp
    own.forward = lambda hidden: 1.5 * type(own).forward(own, hidden)
    expected = tokens_alone(model, row, **OPTIONS)
    assert found(model, tmp_path, [row]) == ([0], [expected])
    assert sorted(tmp_path.iterdir()) == left
    del own.forward
    assert found(model, tmp_path, [row])[0] == [128]
    before = fingerprint_of(model)
    model.model.layers[0].self_attn.scaling *= 2
    assert fingerprint_of(model) != before
    expected = tokens_alone(model, row, **OPTIONS)
    assert found(model, tmp_path, [row]) == ([0], [expected])
    assert found(model, tmp_path, [row]) == ([128], [expected])


def test_an_adapter_swapped_under_its_name_is_another_model(tmp_path):
    model, (row,) = adapted(tiny()), prompts(140)
    whole = model.get_base_model()
    seen = {fingerprint_of(whole)}
    with BatchGenerator(model, prefix_store=tmp_path, **SIZES) as batched:
        batched.generate([row], **OPTIONS)
        model.delete_adapter("one")
        add(model, "one")
        model.set_adapter("one")
        (result,) = batched.generate([row], **OPTIONS)
    expected = tokens_alone(whole, row, **OPTIONS)
    assert (result.cached_tokens, result.tokens) == (0, expected)
    assert found(model, tmp_path, [row]) == ([128], [expected])
    seen.add(fingerprint_of(whole))
    add(model, "two")
    assert fingerprint_of(whole) in seen
    model.set_adapter("two")
    seen.add(fingerprint_of(whole))
    assert len(seen) == 3


def test_a_module_may_change_while_its_model_is_read():
    # A step of another thread puts its forward into a module, and takes it out again.
    class Asked:
        @property
        def __class__(self):
            own["changed"] = True
            return object

    model = tiny()
    before, own = fingerprint_of(model), vars(model.model.norm)
    own["asked"] = Asked()
    assert fingerprint_of(model) == before
    assert own["changed"]
