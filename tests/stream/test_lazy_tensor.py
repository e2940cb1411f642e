"""A weight that streams is there while its layer computes; what stands there else only raises."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pagedkv.errors import StreamError, UnsupportedModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.stream import WeightStore
from pagedkv.stream.layers import make_absent
from pagedkv.stream.lazy_tensor import Absent
from pagedkv.stream.skeleton import build
from tests.effort import each_value
from tests.hf.tiny import prompts
from tests.stream.models import CPU, assert_bits, in_memory, make, placed, stream


@pytest.fixture
def streamer(folder):
    with stream(folder, resident_layers=[1]) as opened:
        yield opened


def absent(*shape, parameter=True, device=CPU):
    def read(places):
        raise AssertionError("nobody asked for elements")

    return Absent.of(torch.empty(shape, device="meta"), "layer.weight", parameter, device, read)


UP = "model.layers.0.mlp.up_proj.weight"
STREAMED = rf"^{UP} is streamed"


@pytest.mark.parametrize(
    "use",
    [
        lambda w: F.linear(torch.ones(2, 3), w),
        lambda w: F.linear(torch.ones(2, 4), torch.ones(5, 4), w),
        lambda w: torch.ones(2, 4) @ w,
        lambda w: torch.ones(2, 3) @ w.data.T,
        lambda w: torch.ones(2, 3) @ w.detach().t(),
        lambda w: F.embedding(torch.tensor([1]), w),
        lambda w: F.conv1d(torch.ones(1, 3, 5), w.view(4, 3, 1)),
        lambda w: torch.cat([torch.ones(4, 3), w]),
        lambda w: torch.einsum("bi,oi->bo", torch.ones(2, 3), w),
        lambda w: w + 1,
        lambda w: w.to("cpu"),
        lambda w: w.numpy(),
        lambda w: w.tolist(),
        lambda w: w.data_ptr(),
        lambda w: w.zero_(),
        lambda w: w[0],
    ],
)
def test_a_weight_that_is_not_there_raises_whatever_needs_it(use):
    with torch.no_grad(), pytest.raises(StreamError, match=r"^layer.weight is streamed"):
        use(absent(4, 3))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # which is tried here
@pytest.mark.parametrize("use", [torch.tensor, lambda w: torch.nested.nested_tensor([w])])
def test_what_asks_no_class_of_tensors_is_told_as_well(use):
    message = r"^layer.weight is streamed: .* and aten::\w+ needs them"
    with torch.no_grad(), pytest.raises(StreamError, match=message):
        use(absent(4, 3))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(StreamError, match=message):
        F.linear(torch.ones(2, 3), absent(4, 3))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_weight_that_is_not_there_names_one_device(name):
    weight = absent(4, 3, device=torch.device(name))
    assert (weight.device.type, weight.is_cpu, weight.is_cuda) == (
        name,
        name == "cpu",
        name == "cuda",
    )


def test_weights_that_are_frozen_between_passes_are_frozen_when_they_compute(streamer):
    ids, mlp, seen = torch.stack(prompts(5)), streamer.model.model.layers[0].mlp, []
    mlp.register_forward_hook(lambda *_: seen.append(mlp.up_proj.weight.requires_grad))
    wanted = [False, True, False, True]
    for needed, mode in zip(wanted, [torch.inference_mode, torch.no_grad] * 2):
        streamer.model.requires_grad_(needed)
        with mode():
            streamer.model(ids)
    assert seen == wanted


def test_a_weight_that_is_not_there_says_what_it_is_like():
    weight, buffer = absent(4, 3), absent(4, 3, parameter=False)
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(buffer, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device) == ((4, 3), torch.float32, CPU)
    assert weight.is_meta
    assert (weight.numel(), weight.element_size(), weight.dim(), weight.nbytes) == (12, 4, 2, 48)
    assert weight.is_floating_point()
    assert "layer.weight" in repr(weight)
    assert not weight.requires_grad
    assert weight.requires_grad_().requires_grad


def test_a_model_counts_what_streams(streamer, folder):
    known = in_memory(folder)
    assert streamer.model.num_parameters() == known.num_parameters()
    assert streamer.model.get_memory_footprint() == known.get_memory_footprint()
    assert streamer.model.dtype == known.dtype


@pytest.mark.parametrize(
    "part",
    [
        lambda m: m.model.layers[0].mlp(torch.ones(2, 9, 32)),
        lambda m: m.model.layers[2].self_attn.q_proj(torch.ones(2, 9, 32)),
        lambda m: m.model.layers[0].input_layernorm(torch.ones(2, 9, 32)),
    ],
)
def test_a_part_called_by_itself_raises_open_or_closed(part, folder):
    with torch.no_grad(), stream(folder) as streamer:
        for _ in range(2):
            with pytest.raises(StreamError, match=r"^model.layers.\d.* is streamed"):
                part(streamer.model)
            streamer.close()


def test_a_layer_called_by_itself_has_its_weights(folder):
    known, hidden = in_memory(folder), torch.ones(1, 2, 32)
    positions = torch.arange(2)[None]
    with torch.no_grad(), stream(folder) as streamer:
        for index in (2, 0):
            both = []
            for model in (streamer.model.model, known.model):
                rotary = model.rotary_emb(hidden, positions)
                both.append(model.layers[index](hidden, position_embeddings=rotary))
            assert torch.equal(*both)


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.data.zero_(),
        lambda w: w.add_(1),
        lambda w: w.copy_(torch.zeros(48, 32)),
        lambda w: nn.init.zeros_(w),
        lambda w: setattr(w, "data", torch.zeros(48, 32)),
    ],
)
def test_an_edit_of_a_streamed_weight_raises_at_the_call(edit, streamer, folder):
    with torch.no_grad(), pytest.raises(StreamError, match=STREAMED):
        edit(streamer.model.get_parameter(UP))
    assert_bits(streamer.model, in_memory(folder))


def test_a_replaced_weight_of_a_streamed_layer_raises_at_the_next_pass(streamer, folder):
    ids, expected = torch.stack(prompts(5)), in_memory(folder)
    linear = streamer.model.model.layers[0].mlp.up_proj
    before = linear.weight
    linear.weight = nn.Parameter(torch.zeros(48, 32))
    for _ in range(2):
        with pytest.raises(StreamError, match=rf"^{UP} is streamed and was replaced"):
            streamer.model(ids)
    linear.weight = before
    assert_bits(streamer.model, expected)


def test_a_weight_replaced_while_its_layer_computes_raises_at_the_next_pass(streamer):
    ids, mlp = torch.stack(prompts(5)), streamer.model.model.layers[0].mlp
    zeros = nn.Parameter(torch.zeros(48, 32))
    hook = mlp.register_forward_hook(lambda *_: setattr(mlp.up_proj, "weight", zeros))
    streamer.model(ids)
    hook.remove()
    with pytest.raises(StreamError, match="was replaced"):
        streamer.model(ids)


def test_another_module_in_the_place_of_a_streamed_one_is_used(streamer, folder):
    known, ids = in_memory(folder), torch.stack(prompts(5))
    other = nn.Linear(32, 48, bias=False)
    for model in (streamer.model, known):
        model.model.layers[0].mlp.up_proj = other
    with torch.no_grad():
        assert torch.equal(streamer.model(ids).logits, known(ids).logits)


def test_edits_of_what_is_resident_work(streamer, folder):
    known, ids = in_memory(folder), torch.stack(prompts(5))
    with torch.no_grad():
        for model in (streamer.model, known):
            model.model.norm.weight.mul_(2)
            model.model.layers[1].mlp.up_proj.weight.data.zero_()
            model.lm_head.load_state_dict({"weight": torch.ones(101, 32)})
        assert torch.equal(streamer.model(ids).logits, known(ids).logits)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_weights_for_streamed_layers_are_refused_before_any_is_loaded(
    assign, strict, streamer, folder
):
    other = make("llama").state_dict()
    layer = {n.removeprefix("model.layers.0."): t for n, t in other.items() if ".0." in n}
    options = {"assign": assign, "strict": strict}
    with pytest.raises(StreamError, match=r"^model.layers.0.* is streamed: other weights"):
        streamer.model.load_state_dict(other, **options)
    with pytest.raises(StreamError, match=r"^model.layers.0.* is streamed: other weights"):
        streamer.model.model.layers[0].load_state_dict(layer, **options)
    assert_bits(streamer.model, in_memory(folder))


def test_weights_for_the_glue_alone_are_loaded(streamer, folder):
    known, ids = in_memory(folder), torch.stack(prompts(5))
    glue = {"model.norm.weight": torch.full((32,), 2.0)}
    for model in (streamer.model, known):
        assert not model.load_state_dict(glue, strict=False).unexpected_keys
    assert torch.equal(streamer.model(ids).logits, known(ids).logits)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: torch.save(m.state_dict(), io.BytesIO()),
        lambda m: copy.deepcopy(m.state_dict()),
        lambda m: {name: tensor.clone() for name, tensor in m.state_dict().items()},
        lambda m: make("llama").load_state_dict(m.state_dict()),
    ],
)
def test_a_state_dict_of_what_streams_cannot_be_written(write, streamer):
    with pytest.raises((StreamError, RuntimeError), match="is streamed"):
        write(streamer.model)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m: m.half(), "moved or cast"),
        (lambda m: m.to(torch.bfloat16), "moved or cast"),
        (lambda m: m.to("cpu"), "moved or cast"),
        (lambda m: m.model.float(), "moved or cast"),
        (lambda m: m.model.layers.double(), "moved or cast"),
        (lambda m: m.model.layers[0].half(), "moved or cast"),
        (copy.deepcopy, "copied or pickled"),
        (lambda m: copy.deepcopy(m.model), "copied or pickled"),
        (lambda m: copy.deepcopy(m.model.layers[0]), "is streamed"),
        (pickle.dumps, "copied or pickled"),
        (lambda m: torch.save(m, io.BytesIO()), "copied or pickled"),
    ],
)
def test_what_needs_all_weights_at_once_is_a_sentence(call, named, streamer, folder):
    with pytest.raises(StreamError, match=named):
        call(streamer.model)
    assert_bits(streamer.model, in_memory(folder))


def test_saving_a_streamed_model_writes_nothing(streamer, tmp_path):
    with pytest.raises(StreamError, match="a streamed model cannot be saved"):
        streamer.model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_model_that_is_whole_is_only_not_copied(folder, tmp_path):
    with stream(folder, resident_layers=3) as streamer:
        with pytest.raises(StreamError, match="copied or pickled"):
            copy.deepcopy(streamer.model)
        streamer.model.save_pretrained(tmp_path)
        assert_bits(in_memory(tmp_path), in_memory(folder))
        streamer.model.load_state_dict(in_memory(folder).state_dict())
        assert streamer.model.to(torch.bfloat16).dtype == torch.bfloat16


def test_a_replaced_embedding_or_head_raises_where_its_file_would_win(folder):
    ids = torch.stack(prompts(5))
    for path in ("model.embed_tokens", "lm_head"):
        with placed(folder, embedding=False, head=False, head_rows=7) as streamer:
            streamer.model.get_submodule(path).weight = nn.Parameter(torch.zeros(101, 32))
            with pytest.raises(StreamError, match=rf"^{path}.weight is streamed and was replaced"):
                streamer.model(ids)


@pytest.mark.parametrize(("whole", "resident"), each_value([True, False], [0, 3]))
def test_a_compiler_leaves_alone_what_streams(whole, resident, folder):
    ids, expected = torch.stack(prompts(5)), in_memory(folder)
    with stream(folder, resident_layers=resident) as streamer, torch.no_grad():
        for part in [streamer.model] if whole else streamer.model.model.layers:
            part.compile(backend="eager")
        for _ in range(2):
            assert torch.equal(streamer.model(ids).logits, expected(ids).logits)


class Adapter(nn.Module):
    """A low-rank addition to a linear map, on the device its weight names."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        rows, columns = linear.weight.shape
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.down = nn.Linear(columns, 2, bias=False, **like)
        self.up = nn.Linear(2, rows, bias=False, **like)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def test_an_adapter_is_added_and_loaded_as_in_memory(streamer, folder):
    known, ids = in_memory(folder), torch.stack(prompts(5))
    for model in (known, streamer.model):
        layer = model.model.layers[0]
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
    added = (".down.weight", ".up.weight")
    own = {name: t for name, t in known.state_dict().items() if name.endswith(added)}
    assert len(own) == 2
    streamer.model.load_state_dict(own, strict=False)
    with torch.no_grad():
        assert torch.equal(streamer.model(ids).logits, known(ids).logits)
    assert fingerprint_of(streamer.model) == fingerprint_of(known)


def test_weights_are_packed_in_no_other_class_of_tensor(folder):
    class Packed(torch.Tensor):
        pass

    checkpoint = Checkpoint.open(folder)
    built = build(checkpoint, "auto")
    model = built.model
    store = WeightStore.open(checkpoint, built)
    like = Packed._make_subclass(Packed, torch.empty(48, 32, device="meta"))
    model.model.layers[0].mlp.up_proj._parameters["weight"] = like
    with pytest.raises(UnsupportedModelError, match=rf"^{UP}: Packed is no plain tensor"):
        make_absent(model, CPU, store.elements)
    store.close()
