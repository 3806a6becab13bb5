"""Quantized weights: the kernel against the definition over random shapes, the same bits in any company, and
what the definition promises."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.kernels.cpu_operations import cpu_operations
from minisgl_lit.kernels.linear import pack_weight
from minisgl_lit.kernels.codes import QuantizedWeight, quantize
from minisgl_lit.kernels.quantized import PackedGroups, join_rows, pack_groups
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.decoder import Decoder
from minisgl_lit.core.models.operations import Operations, inverse_frequencies, linear
import minisgl_lit.families.mlps   # noqa: F401 (its activations)
from minisgl_lit.formats.quantization import Quantization
from minisgl_lit.core.models.weights import load_weights
from reference import make_checkpoint
from test_products import needs_compiler

BF16 = torch.bfloat16
shapes = st.tuples(st.integers(0, 300), st.integers(1, 150), st.sampled_from([8, 24, 32, 64, 96, 128]),
                   st.integers(1, 9))
# bits, minima, and what the scales and minima are: numbers of this dtype, or multiples of the steps of blocks
forms = st.tuples(st.sampled_from([4, 5, 6, 8]), st.booleans(),
                  st.sampled_from([BF16, torch.float16, torch.float32, "steps"]))


def some(shape, form, seed):
    "Rows, and any quantized weight: also ones that no rounding would make"
    (rows, n_out, group, groups), (bits, minima, kind), g = shape, form, torch.Generator().manual_seed(seed)
    if group % {5: 32, 6: 16}.get(bits, 8): bits = 4
    n_blocks = groups // 2 if groups % 2 == 0 else groups
    steps = (torch.rand(n_out, n_blocks, 1 + minima, generator=g) * .01).half() if kind == "steps" else None
    def numbers(which):
        if steps is None: return (torch.rand(n_out, groups, generator=g) + .01).to(kind).float()
        multiples = torch.randint(-128, 128, (n_out, n_blocks, groups // n_blocks), generator=g)
        return (multiples * steps[..., which, None].float()).flatten(1)
    codes = torch.randint(0, 2**bits, (n_out, group * groups), generator=g, dtype=torch.uint8)
    return (torch.randn(rows, group * groups, generator=g),
            QuantizedWeight(bits, codes, numbers(0), numbers(1) if minima else None, steps))


@needs_compiler
@settings(max_examples=60)
@given(shapes, forms, st.sampled_from([torch.float32, BF16]), st.booleans(), st.integers(1, 3),
       st.integers(0, 99))
def test_the_exact_product_is_that_of_the_weights_that_are_meant(shape, form, dtype, constant, threads, seed):
    "To the last bit"
    x, weight = some(shape, form, seed)
    x, bias, was = x.to(dtype), torch.randn(shape[1]).to(dtype) if constant else None, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, want = (pack_groups(weight, dtype).multiply(x, bias),
                     linear(x, pack_weight(weight.dequantize().to(dtype)), bias))
    finally: torch.set_num_threads(was)
    assert got.dtype == dtype and torch.equal(got, want)


@needs_compiler
@settings(max_examples=60)
@given(shapes, forms, st.sampled_from([torch.float32, BF16]), st.integers(0, 99), st.data())
def test_whole_numbers_are_within_their_bound_and_the_same_in_any_company(shape, form, dtype, seed, data):
    "Rounded to 8 bits, a number of x is off by at most half of a 127th of the largest of its group"
    x, weight = some(shape, form, seed)
    x, packed, group = x.to(dtype), pack_groups(weight, dtype, rounds_input=True), weight.group
    got, meant = packed.multiply(x), weight.dequantize().double()
    off = (x.double().abs().unflatten(1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
           / 254)
    want, bound = x.double() @ meant.T, off * 1.001 @ meant.abs().T
    last = (want.abs() + bound) * (2**-8 if dtype == BF16 else 1e-5) + 1e-4   # the rounding of the result
    assert ((got.double() - want).abs() <= bound + last).all()
    if len(x):
        a = data.draw(st.integers(0, len(x) - 1))
        b = data.draw(st.integers(a + 1, len(x)))
        assert torch.equal(packed.multiply(x[a:b]), got[a:b])


# outputs, group
parts = st.lists(st.tuples(st.integers(1, 150), st.sampled_from([8, 16, 24, 48]), forms), min_size=2,
                 max_size=4)

@needs_compiler
@settings(max_examples=60)
@given(parts, st.integers(0, 99), st.integers(1, 3), st.sampled_from([torch.float32, BF16]), st.booleans(),
       st.integers(1, 3), st.integers(0, 99))
def test_parts_of_a_weight_are_as_if_they_were_alone(parts, rows, half_groups, dtype, rounds_input, threads,
        seed):
    "Of any forms; and single rows are found in them"
    n_in, was = 48 * half_groups, torch.get_num_threads()
    alone = [pack_groups(some((0, n, group, n_in // group), form, seed + i)[1], dtype, rounds_input)
             for i, (n, group, form) in enumerate(parts)]
    whole, x = join_rows(alone), torch.randn(rows, n_in).to(dtype)
    bias = torch.randn(whole.shape[0]).to(dtype)
    torch.set_num_threads(threads)
    try:
        got, want = (whole.multiply(x, bias),
            torch.cat([o.multiply(x, b) for o, b in zip(alone, bias.split([o.shape[0] for o in alone]))], 1))
    finally: torch.set_num_threads(was)
    assert torch.equal(got, want) and torch.equal(whole.unpack(), torch.cat([o.unpack() for o in alone]))
    ids = torch.randint(0, whole.shape[0], (20,))
    assert torch.equal(whole.rows(ids), whole.unpack()[ids])


@given(st.integers(1, 30), st.sampled_from([(8, 6), (32, 2)]), st.booleans(),
       st.sampled_from([BF16, "steps"]), st.data())
def test_a_part_of_a_weight_is_that_of_the_weights_that_are_meant(n_out, groups, minima, kind, data):
    (group, n), weight = groups, some((0, n_out, *groups), (4, minima, kind), 0)[1]
    rows, columns = (slice(*data.draw(st.lists(st.integers(0, o), min_size=2, max_size=2,
                                               unique=True).map(sorted))) for o in (n_out, group * n))
    got = weight.part(rows, columns)
    if got is None: assert columns.start % group or columns.stop % group
    else:
        assert torch.equal(got.dequantize(), weight.dequantize()[rows, columns])
        packed = pack_groups(got, torch.float32)
        whole = packed.unpack() if isinstance(packed, PackedGroups) else packed
        assert torch.equal(whole, got.dequantize())


@given(st.sampled_from([(4, 32), (4, 64), (6, 64), (8, 64), (8, 128)]), st.booleans(), st.floats(1e-3, 1e3),
       st.integers(0, 99))
def test_each_weight_is_the_nearest(how, minima, size, seed):
    "That its group could have; and together they are nearer than steps by the largest weight alone"
    (bits, group), g = how, torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 256, generator=g) * size
    q = quantize(weight, bits, group, minima)
    zero = q.minima[..., None] / q.scales[..., None] if minima else 2**(bits - 1)
    possible = ((torch.arange(2**bits) - zero) * q.scales[..., None]).unsqueeze(-2)
    groups, scales = weight.unflatten(1, (-1, group)), q.scales[..., None]
    gap = (q.dequantize() - weight).abs().unflatten(1, (-1, group))
    assert (gap <= (groups[..., None] - possible).abs().amin(-1) + scales.abs() * 1e-3).all()
    if not minima:
        plain = groups.abs().amax(-1, keepdim=True) / (2**(bits - 1) - 1)
        by_largest = (groups / plain).round() * plain - groups
        assert gap.square().sum() < by_largest.square().sum() * (.95 if bits == 4 else 1.1)
    assert torch.equal(q.scales.bfloat16().float(), q.scales)
    assert q.group == group and int(q.codes.max()) < 2**bits


@needs_compiler
def test_what_is_not_finite_stays_so():
    "An input with NaN gives NaN, for its row alone"
    packed = pack_groups(quantize(torch.randn(70, 128)), torch.float32, rounds_input=True)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 128)
        x[1, 77] = wrong
        got = packed.multiply(x)
        assert not got[1].isfinite().any() and got[[0, 2]].isfinite().all()


@needs_compiler
@settings(max_examples=30)
@given(st.integers(1, 300), st.sampled_from([4, 8]), st.booleans(), st.sampled_from([torch.float32, BF16]),
       st.integers(0, 99))
def test_fused_layers_compute_what_single_steps_compute(rows, bits, whole, dtype, seed):
    "The kernels of several steps, with quantized weights, beside one call for each step"
    g = torch.Generator().manual_seed(seed)
    def weight(n_out, n_in):
        return pack_groups(quantize(torch.randn(n_out, n_in, generator=g) * .1, bits, 32), dtype, whole)
    def vector(n): return torch.randn(n, generator=g).to(dtype)
    x, gate_up, down = torch.randn(rows, 64, generator=g).to(dtype), weight(192, 64), weight(64, 96)
    biases, ops = (vector(192), vector(64)), cpu_operations(torch.device('cpu'), dtype)
    got, want = (ops.gated_mlp(x, gate_up, down, *biases),
                 linear(ops.silu_mul(linear(x, gate_up, biases[0])), down, biases[1]))
    torch.testing.assert_close(got, want, rtol=.02, atol=.02)   # of silu: ours is of the kernel's own exp
    other = ops.gated_mlp(x, gate_up, down, *biases, act='gelu_pytorch_tanh')
    want = Operations.gated_mlp(ops, x, gate_up, down, *biases, 'gelu_pytorch_tanh')
    torch.testing.assert_close(other, want, rtol=.02, atol=.02)
    assert not torch.equal(other, got)
    angles = ops.rope_angles(torch.arange(rows), inverse_frequencies(16, 1e4), dtype)
    norms, w = (vector(16), vector(16)), weight(8 * 16, 64)
    q, k, v = ops.qkv_heads(x, w, None, norms, 1e-6, angles, 2)
    alone = linear(x, w).view(rows, 8, 16)
    assert torch.equal(v, alone[:, 6:])
    a, b = ops.apply_rope(ops.rms_norm(alone[:, :4], norms[0], 1e-6),
                          ops.rms_norm(alone[:, 4:6], norms[1], 1e-6), angles)
    torch.testing.assert_close(torch.cat([q, k], 1), torch.cat([a, b], 1))


@needs_compiler
def test_an_embedding_is_found_among_panels():
    "Rows of the weights that are meant, also through `embed`"
    weight = quantize(torch.randn(150, 96), 8, 32, minima=True)
    table, ids = pack_groups(weight, torch.float32), torch.tensor([149, 0, 64, 63, 149])
    assert (torch.equal(cpu_operations(table.data.device, torch.float32).embed(ids, table),
                        weight.dequantize()[ids]) and torch.equal(table.unpack(), weight.dequantize()))


def test_dtypes_without_a_kernel_get_plain_weights():
    weight = quantize(torch.randn(8, 64))
    assert torch.equal(pack_groups(weight, torch.float16), weight.dequantize().half())


@needs_compiler
@pytest.mark.parametrize('name', ['Qwen3', 'Qwen2', 'Qwen3Moe'])
def test_a_quantized_model_is_the_one_that_is_meant(name, tmp_path):
    "Exact products: the logits of every family have the bits of the same model with the dequantized weights"
    make_checkpoint(name, tmp_path)
    config, how = read_config(tmp_path), Quantization(4, 64, rounds_input=False)
    def meant(name, weight):
        bits = how.of(name, tuple(weight.shape))
        return pack_weight(quantize(weight, *bits).dequantize() if bits else weight)
    def attend(q, k, v, layer): return v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    ids = torch.arange(9)
    ops = cpu_operations(torch.device('cpu'), torch.float32)
    def logits(finish):
        model = Decoder(config, load_weights(tmp_path, config, torch.float32, finish=finish), operations=ops)
        return model.forward(ids, ids, attend, ids)
    with torch.inference_mode(): got, want = logits(how.pack), logits(meant)
    assert torch.equal(got, want)
