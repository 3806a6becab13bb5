"""Packed weights and the matmul in C: against torch in float64 over random shapes, the same bits in any
company, and sources that compile."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.kernels.attention_c import attention_c
from minisgl_lit.kernels.cpu_operations import layers_c
from minisgl_lit.kernels.compiler import compile_c, library_folder, load, vectors
from minisgl_lit.kernels.quantized import grouped_c
from minisgl_lit.kernels.linear import PanelWeight, linear_c, pack_weight
from minisgl_lit.kernels.plan import load_kernels
from minisgl_lit.core.models.operations import linear

try:
    with library_folder() as folder: compile_c('void nothing(void *to) {}', folder)
except RuntimeError as e: no_compiler = str(e)
else: no_compiler = None
needs_compiler = pytest.mark.skipif(no_compiler is not None, reason='needs a C compiler')
BF16 = torch.bfloat16

@needs_compiler
@pytest.mark.parametrize('name', ['vectors', 'linear_c', 'layers_c', 'attention_c', 'grouped_c'])
def test_where_a_compiler_is_every_source_compiles(name):
    "Otherwise torch would serve in its place, and no test would notice"
    source = dict(vectors=vectors + 'void nothing(void *to) {}', linear_c=linear_c, layers_c=layers_c,
                  attention_c=attention_c, grouped_c=grouped_c)[name]
    assert load(source) is not None

@settings(max_examples=60)
@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 700), st.sampled_from([torch.float32, BF16]),
       st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_matmul_agrees_with_torch(rows, n_out, n_in, dtype, constant, threads, seed):
    g = torch.Generator().manual_seed(seed)
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    x, weight, bias = some(rows, n_in), some(n_out, n_in), some(n_out) if constant else None
    expected = F.linear(x.double(), weight.double(), bias.double() if constant else None)
    packed, was = pack_weight(weight.clone()), torch.get_num_threads()
    torch.set_num_threads(threads)
    try: got = linear(x, packed, bias)
    finally: torch.set_num_threads(was)
    eps = 1e-5 if dtype == torch.float32 else .01
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=eps, atol=eps * n_in ** .5)
    if isinstance(packed, PanelWeight): assert torch.equal(packed.unpack(), weight)

@needs_compiler
@settings(max_examples=30)
@given(st.integers(2, 300), st.integers(1, 150), st.integers(1, 1300), st.sampled_from([torch.float32, BF16]),
       st.data())
def test_a_row_has_the_same_bits_in_any_company(rows, n_out, n_in, dtype, data):
    "A sample never depends on its neighbours; neither do the numbers that it is drawn from"
    if dtype == BF16: n_in += n_in % 2
    x, weight = torch.randn(rows, n_in).to(dtype), pack_weight(torch.randn(n_out, n_in).to(dtype))
    a = data.draw(st.integers(0, rows - 1))
    # a single row has a kernel of its own on AMX
    b = data.draw(st.sampled_from([a + 1, rows]) | st.integers(a + 1, rows))
    assert torch.equal(linear(x[a:b], weight), linear(x, weight)[a:b])

@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("of_x, of_weights", [(1e-38, 1), (1e-20, 1e-18), (1e-30, 1e-9)],
                         ids=["inputs", "products", "sums"])
def test_the_smallest_numbers_have_no_company_either(of_x, of_weights, dtype):
    "Where a kernel counts denormals as zero, it does so for one row and for many"
    x, weight = ((torch.randn(40, 320) * of_x).to(dtype),
                 pack_weight((torch.randn(70, 320) * of_weights).to(dtype)))
    assert torch.equal(torch.cat([linear(row[None], weight) for row in x]), linear(x, weight))

@needs_compiler
def test_where_the_system_refuses_tiles_vectors_compute():
    "As on a processor that has none"
    asked = "PERMIT = 0x1023"
    assert asked in linear_c
    refused, without = (load_kernels(linear_c.replace(*o))
                        for o in ((asked, "PERMIT = -1"), ("defined(__AMX_BF16__)", "0")))
    x, weight = torch.randn(300, 1100).to(BF16), pack_weight(torch.randn(140, 1100).to(BF16))
    def product(lib):
        y = x.new_empty(300, 140)
        lib.linear(y, x, weight.data, None, *x.shape[:1], *weight.shape, True)
        return y
    assert torch.equal(product(refused), product(without))
