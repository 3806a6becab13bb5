"""Quantized weights: the kernel against the definition over random shapes, the same bits in any company, and what the definition promises."""
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.kernels.linear import linear, pack_weight
from minisgl_lit.kernels.quantized import QuantizedWeight, pack_groups, quantize
from test_products import needs_compiler

BF16 = torch.bfloat16
shapes = st.tuples(st.integers(0, 300), st.integers(1, 150), st.sampled_from([8, 24, 32, 64, 96, 128]), st.integers(1, 9))
forms = st.tuples(st.sampled_from([4, 8]), st.booleans(), st.booleans())   # bits, minima, scales of float32


def some(shape, form, seed):
    "Rows, and any quantized weight: also ones that no rounding would make"
    (rows, n_out, group, groups), (bits, minima, wide), g = shape, form, torch.Generator().manual_seed(seed)
    def numbers(): return torch.rand(n_out, groups, generator=g) + .01
    codes = torch.randint(0, 2**bits, (n_out, group * groups), generator=g, dtype=torch.uint8)
    scales = numbers() if wide else numbers().bfloat16().float()
    return torch.randn(rows, group * groups, generator=g), QuantizedWeight(bits, codes, scales, numbers() if minima else None)


@needs_compiler
@settings(max_examples=60)
@given(shapes, forms, st.sampled_from([torch.float32, BF16]), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_the_exact_product_is_that_of_the_weights_that_are_meant(shape, form, dtype, constant, threads, seed):
    "To the last bit"
    x, weight = some(shape, form, seed)
    x, bias, was = x.to(dtype), torch.randn(shape[1]).to(dtype) if constant else None, torch.get_num_threads()
    torch.set_num_threads(threads)
    try: got, want = pack_groups(weight).multiply(x, bias), linear(x, pack_weight(weight.dequantize().to(dtype)), bias)
    finally: torch.set_num_threads(was)
    assert got.dtype == dtype and torch.equal(got, want)


@needs_compiler
@settings(max_examples=60)
@given(shapes, forms, st.sampled_from([torch.float32, BF16]), st.integers(0, 99), st.data())
def test_whole_numbers_are_within_their_bound_and_the_same_in_any_company(shape, form, dtype, seed, data):
    "Rounded to 8 bits, a number of x is off by at most half of a 127th of the largest of its group"
    x, weight = some(shape, form, seed)
    x, packed, group = x.to(dtype), pack_groups(weight, rounds_input=True), weight.group
    got, meant = packed.multiply(x), weight.dequantize().double()
    off = x.double().abs().unflatten(1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).flatten(1) / 254
    want, bound = x.double() @ meant.T, off * 1.001 @ meant.abs().T
    last = (want.abs() + bound) * (2**-8 if dtype == BF16 else 1e-5) + 1e-4   # the rounding of the result
    assert ((got.double() - want).abs() <= bound + last).all()
    if len(x):
        a = data.draw(st.integers(0, len(x) - 1))
        b = data.draw(st.integers(a + 1, len(x)))
        assert torch.equal(packed.multiply(x[a:b]), got[a:b])


@given(st.sampled_from([(4, 32), (4, 64), (8, 64), (8, 128)]), st.booleans(), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_each_weight_is_the_nearest(how, minima, size, seed):
    "By half a step at most, and the share of a step by which the scale was rounded"
    (bits, group), g = how, torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 256, generator=g) * size
    q = quantize(weight, bits, group, minima)
    gap = (q.dequantize() - weight).abs().unflatten(1, (-1, group))
    assert (gap <= q.scales[..., None] * (.5 + 2**bits / 2**8)).all()
    assert q.wide is False and q.group == group and int(q.codes.max()) < 2**bits


@needs_compiler
def test_what_is_not_finite_stays_so():
    "An input with NaN gives NaN, for its row alone"
    packed = pack_groups(quantize(torch.randn(70, 128)), rounds_input=True)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 128)
        x[1, 77] = wrong
        got = packed.multiply(x)
        assert not got[1].isfinite().any() and got[[0, 2]].isfinite().all()
