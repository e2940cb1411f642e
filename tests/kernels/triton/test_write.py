"""New K and V go to their slots, bit for bit, and nowhere else."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels import reference
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import geometry, launch, write
from tests.kernels.steps import DEVICE, LAYOUTS, pages_of
from tests.kernels.triton_cases import HALF, assert_same_bits, misaligned, random_bits

N = 7


def pools(layout, groups, page, dim, dtype):
    """Pages full of random bits, and the same once more for the twin."""
    found = []
    for _ in range(2):
        pages = pages_of(layout, (N, groups, page, dim), dtype)
        for seed, x in enumerate(pages):
            x.copy_(random_bits(*x.shape, dtype=dtype, seed=seed))
        found.append(pages)
    return found


SIZES = {
    "one head, D=16": (1, 16, 16, 20),
    "3 heads, D=80, pages of 3": (3, 3, 80, 15),
    "2 heads, D=256, pages of 1": (2, 1, 256, 5),
    "5 heads, D=96, pages of 32": (5, 32, 96, 40),
    "one token": (2, 16, 64, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_token_comes_to_its_slot_and_no_other_slot_changes(size, layout, dtype):
    groups, page, dim, tokens = SIZES[size]
    mine, twins = pools(layout, groups, page, dim, dtype)
    k, v = (random_bits(tokens, groups, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    slots = torch.randperm(N * page)[:tokens].to(DEVICE)
    slots[::4] = -1
    slots[:2] = torch.tensor([N * page - 1, 0])[:tokens]  # the last slot, and the first
    paged.write_kv(k, v, *mine, slots)
    reference.write_kv(k, v, *twins, slots)
    for found, expected in zip(mine, twins, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("number", [torch.int32, torch.int64], ids=str)
def test_slots_may_be_numbers_of_either_size(number):
    mine, twins = pools(LAYOUTS[0], 2, 16, 16, torch.float32)
    k, v = torch.randn(2, 6, 2, 16, device=DEVICE)
    slots = torch.tensor([5, 100, -1, 7, 90, 3], device=DEVICE)
    paged.write_kv(k, v, *mine, slots.to(number))
    reference.write_kv(k, v, *twins, slots)
    for found, expected in zip(mine, twins, strict=True):
        assert_same_bits(found, expected)


def test_k_and_v_may_be_slices_of_one_projection():
    mine, twins = pools(LAYOUTS[0], 2, 16, 32, torch.bfloat16)
    slots = torch.randperm(N * 16)[:21].to(DEVICE)
    fused = random_bits(21, 4 + 2 + 2, 32, dtype=torch.bfloat16)
    transposed = random_bits(2, 21, 32, dtype=torch.bfloat16).transpose(0, 1)
    for k, v in ((fused[:, 4:6], fused[:, 6:]), (transposed, fused[:, 2:4])):
        paged.write_kv(k, v, *mine, slots)
        reference.write_kv(k, v, *twins, slots)
        for found, expected in zip(mine, twins, strict=True):
            assert_same_bits(found, expected)


def test_tokens_may_lie_more_than_2_to_the_31_elements_apart():
    mine, twins = pools(LAYOUTS[0], 2, 16, 16, torch.bfloat16)
    new = random_bits(2, 5, 2, 16, dtype=torch.bfloat16)
    memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)  # hardly touched
    k, v = (memory[at:].as_strided((5, 2, 16), (2**29, 16, 1)).copy_(new[i])
            for i, at in enumerate((0, 1024)))  # fmt: skip
    slots = torch.tensor([5, 100, -1, 7, 90], device=DEVICE)
    paged.write_kv(k, v, *mine, slots)
    reference.write_kv(*new, *twins, slots)
    for found, expected in zip(mine, twins, strict=True):
        assert_same_bits(found, expected)


def test_slots_of_another_size_are_another_kernel():
    half, target = geometry.Half(*geometry.NOT_THERE, 16), geometry.Target(-1, 0, 1, 1)
    kinds = [(torch.float32, number) for number in (torch.int32, torch.int64)]
    one, other = (write._launcher(2, 16, half, half, kind, target) for kind in kinds)
    assert one is not other


@pytest.mark.usefixtures("_no_launch")
def test_k_v_and_pages_of_several_dtypes_are_refused():
    mine, _ = pools(LAYOUTS[0], 2, 16, 16, torch.float32)
    k = torch.zeros(2, 2, 16, device=DEVICE)
    slots = torch.tensor([3, 4], device=DEVICE)
    for tensors in ((k.half(), k), (k, k.half()), (k.half(), k.half())):
        with pytest.raises(TypeError, match=r"^k, v: expected the dtype of the pages"):
            paged.write_kv(*tensors, *mine, slots)


def test_a_step_without_tokens_writes_nothing():
    mine, twins = pools(LAYOUTS[0], 2, 16, 16, torch.float32)
    nothing = torch.empty(0, 2, 16, device=DEVICE)
    paged.write_kv(nothing, nothing, *mine, torch.empty(0, dtype=torch.int64, device=DEVICE))
    paged.write_kv(*torch.randn(2, 3, 2, 16, device=DEVICE), *mine,
                   torch.full((3,), -1, device=DEVICE))  # fmt: skip
    for found, expected in zip(mine, twins, strict=True):
        assert_same_bits(found, expected)


def test_a_pool_of_more_than_2_to_the_31_elements_is_written_at_its_end():
    pages = 2**31 // (2 * 16 * 16) + 9
    both = torch.empty(pages, 2, 1, 16, 16, dtype=torch.bfloat16, device=DEVICE)  # never touched
    k, v = random_bits(2, 3, 1, 16, dtype=torch.bfloat16)
    last, middle = (pages - 1) * 16 + 15, (pages // 2 + 1) * 16
    paged.write_kv(k, v, both[:, 0], both[:, 1], torch.tensor([last, 3, middle], device=DEVICE))
    for token, slot in enumerate((last, 3, middle)):
        assert_same_bits(both[slot // 16, 0, :, slot % 16], k[token])
        assert_same_bits(both[slot // 16, 1, :, slot % 16], v[token])


@pytest.fixture
def _no_launch(monkeypatch):
    def launched(*_):
        pytest.fail("a kernel was launched")

    monkeypatch.setattr(launch.Launcher, "__call__", launched)


def widened(tensor):
    """Copies a tensor so that its strides are no multiples of 16."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, device=DEVICE)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


REFUSED = {
    "a view of the pages": (lambda x, pages: pages[0, :, :2].transpose(0, 1), "view of the pages"),
    "misaligned": (lambda x, _: misaligned(x), "multiple of 16 bytes"),
    "odd strides": (lambda x, _: widened(x), "multiples of 16 elements"),
    "a last axis with gaps": (lambda x, _: torch.cat([x, x], -1)[..., ::2], "contiguous last"),
}


@pytest.mark.usefixtures("_no_launch")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_cannot_be_read_are_refused_and_nothing_is_written(case, which):
    change, message = REFUSED[case]
    mine, twins = pools(LAYOUTS[0], 2, 16, 16, torch.float32)
    tensors = [torch.randn(2, 2, 16, device=DEVICE) for _ in "kv"]
    for pages in mine:
        tensors[which] = change(tensors[which], pages)
        with pytest.raises(ValueError, match=f"^{'kv'[which]}: .*{message}"):
            paged.write_kv(*tensors, *mine, torch.tensor([3, 4], device=DEVICE))
    for found, expected in zip(mine, twins, strict=True):
        assert_same_bits(found, expected)
