"""The C kernel against the reference backend, over random worlds full of NaN; and the same with the compiler
hidden."""
import os, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.core.request import Batch, ForwardMode
from minisgl_lit.core.kv_cache.pool import KVPool
from minisgl_lit.kernels.kv_formats import round_rows, widen_rows
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.attention.torch import TorchAttention
from minisgl_lit.kernels.cpu_attention import CpuAttention, cpu_attention
from minisgl_lit.kernels.attention_c import attention_c
from minisgl_lit.kernels.compiler import load

hidden = load(attention_c) is None
BF16 = torch.bfloat16

@st.composite
def worlds(draw, longest=300, most=6):
    "What a batch may look like; few requests are long"
    def length(low): return draw(st.one_of(st.integers(low, 70), st.integers(low, longest)))
    n, decode = draw(st.integers(1, most)), st.booleans()
    return dict(
        cached=[length(0) for _ in range(n)], extend=[1 if draw(decode) else length(1) for _ in range(n)],
        page_size=draw(st.integers(1, 64)), num_kv_heads=draw(st.integers(1, 3)),
        family=draw(st.integers(1, 8)), dim=draw(st.sampled_from([1, 4, 8, 16, 20, 64, 80, 128])),
        dtype=draw(st.sampled_from([torch.float32, BF16])), rounded=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.integers(1, 400))), padding=draw(st.integers(0, 3)),
        threads=draw(st.integers(1, 3)), seed=draw(st.integers(0, 99)))

def make(cached, extend, page_size, num_kv_heads, family, dim, dtype, window, padding, seed, rounded=False,
         **_):
    """Pages shuffled, NaN in every slot that is nobody's cached token; batch, queries and what the reference
    says in float32"""
    g = torch.Generator().manual_seed(seed)
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    n, lens = len(cached), np.add(cached, extend)
    max_pages = 1 - (-lens.max() // page_size)   # one more than anybody needs, with a stranger's page in it
    rounded &= dim % 4 == 0
    pool = KVPool(2, n * max_pages, page_size, num_kv_heads, dim, torch.int8 if rounded else dtype)
    pool.buffer.fill_(-1 if rounded else torch.nan)   # four bytes of -1 are NaN
    table = TableManager(n, max_pages * page_size, page_size, pool.dummy_page)
    table.write(*np.indices((n, max_pages)).reshape(2, -1),
                torch.randperm(n * max_pages, generator=g).numpy())
    for i, c in enumerate(cached):
        pool.store_kv(1, some(c, num_kv_heads, dim), some(c, num_kv_heads, dim),
                      torch.from_numpy(table.slots(np.full(c, i), np.arange(c))))
    rows = np.r_[np.arange(n), [table.dummy_row]*padding].astype(np.int64)
    before, new = (np.r_[o, [i]*padding].astype(np.int64) for i, o in enumerate((cached, extend)))
    token_rows, positions = (rows.repeat(new),
                             np.concatenate([np.arange(c, c + e) for c, e in zip(before, new)]))
    batch = Batch([], ForwardMode.MIXED, 1, rows, before, before + new, token_rows, positions,
                  table.slots(token_rows, positions), np.arange(0))
    heads = num_kv_heads * family
    qkv = some(len(positions), heads + 2 * num_kv_heads,
               dim).split([heads, num_kv_heads, num_kv_heads], dim=1)
    exact = KVPool(2, pool.num_pages, page_size, num_kv_heads, dim, torch.float32)
    exact.buffer.copy_(widen_rows(pool.buffer) if rounded else pool.buffer)
    reference = TorchAttention(exact, table.page_table, [None, window])
    q, *new = (o.float() for o in qkv)
    if rounded: new = [widen_rows(round_rows(o)) for o in new]
    expected = reference.forward(q, *new, 1, reference.prepare(batch))
    return pool, table, batch, qkv, expected[:int(sum(extend))]

def check(**world):
    pool, table, batch, qkv, expected = make(**world)
    was = torch.get_num_threads()
    torch.set_num_threads(world['threads'])
    try:
        backend = cpu_attention(pool, table.page_table, [None, world['window']])
        got = backend.forward(*qkv, 1, backend.prepare(batch))
    finally: torch.set_num_threads(was)
    assert got.dtype == world['dtype'] and got.shape == qkv[0].shape and got.isfinite().all()
    eps = 2e-5 if world['dtype'] == torch.float32 else .02
    torch.testing.assert_close(got[:len(expected)].float(), expected, rtol=eps, atol=eps)
    # the dummy slot may hold any of those written there
    for stored, new in ((pool.k(1), qkv[1]), (pool.v(1), qkv[2])):
        n = len(expected)
        if stored.dtype == torch.int8: new = round_rows(new)   # to the last bit
        assert torch.equal(stored[torch.from_numpy(batch.out_loc[:n])], new[:n])

@settings(max_examples=10 if hidden else 40)
@given(worlds())
def test_kernel_says_what_the_reference_says(world): check(**world)

@settings(max_examples=6)
@given(worlds(longest=5000, most=2))
def test_long_texts(world): check(**world)

def test_scores_far_from_zero():
    "Powers that overflow or vanish unless taken from the largest score"
    for dtype in (torch.float32, BF16):
        for sign in (-1, 1):
            pool, table, batch, (q, k, v), _ = make([60, 0], [1, 9], 16, 2, 2, 16, dtype, None, 0, 0)
            pool.k(1)[:] = 40 * sign
            q, k = torch.full_like(q, 40), torch.full_like(k, 40 * sign)
            backend = cpu_attention(pool, table.page_table)
            got = backend.forward(q, k, v, 1, backend.prepare(batch))
            mean = v[1:].float().cumsum(0) / torch.arange(1, 10)[:, None, None]   # all scores are one
            torch.testing.assert_close(got[1:, ::2].float(), mean, rtol=.02, atol=.02)

@pytest.mark.skipif(hidden, reason='no compiler')
def test_it_is_the_kernel_that_is_tested():
    pool, table, *_ = make([3], [1], 4, 1, 1, 8, BF16, None, 0, 0)
    assert type(cpu_attention(pool, table.page_table)) is CpuAttention

@pytest.mark.skipif(hidden, reason='no compiler')
def test_threads_do_not_change_a_bit():
    "Tasks are the same, whoever does them; only how a text is cut may differ"
    pool, table, batch, qkv, _ = make([900, 0, 30], [1, 40, 1], 16, 2, 2, 64, torch.float32, None, 0, 0)
    backend = CpuAttention(pool, table.page_table)
    metadata, results = backend.prepare(batch), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(backend.forward(*qkv, 1, metadata))
    torch.set_num_threads(1)
    assert all(torch.equal(results[0], o) for o in results[1:])

@pytest.mark.skipif(os.environ.get('CC') == '/bin/false', reason='hidden already')
def test_without_a_compiler(tmp_path):
    "The same random worlds, and one line that says that torch serves"
    env = os.environ | dict(CC='/bin/false', XDG_CACHE_HOME=str(tmp_path))
    code = ('import pytest, sys, torch, minisgl_lit.kernels.cpu_attention as a\n'
            'print(a.load_kernels(a.attention_c), a.load_kernels(a.attention_c + " "), flush=True)\n'
            f'sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {__file__!r}, "-k", "reference_says"]))')
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith('None None\n')
    assert done.stderr.count('\n') == 1 and '/bin/false' in done.stderr

@pytest.mark.skipif(hidden, reason='no compiler')
def test_many_processes_compile_at_once(tmp_path):
    "They start with an empty cache together; all succeed, and one library is left"
    code = """
import os, torch
from minisgl_lit.kernels.compiler import load
for child in range(4):
    if os.fork(): continue
    f, x = load("#include <stdint.h>\\nvoid twice(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] *= 2; }"), torch.ones(3)
    f.twice(x, 3)
    os.write(1, f"{x.tolist()}\\n".encode())
    os._exit(0)
for child in range(4): os.wait()
"""   # noqa: E501
    env = os.environ | dict(XDG_CACHE_HOME=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, text=True,
                          timeout=120)
    assert done.stdout == '[2.0, 2.0, 2.0]\n' * 4
    assert len(list((tmp_path/'minisgl_lit').iterdir())) == 1
