"""FlashInfer's backend over its stand-in: plan arrays against the page table, random worlds against the
reference, whole answers through `build`; and, where the package is installed, its signatures against those
that the stand-in has."""
import importlib.util, inspect, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.core.request import Batch, ForwardMode
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import HostEvent
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.testing.flashinfer_emulator import PagedDecode, standin
from minisgl_lit.core.kv_cache.pool import KVPool
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.llm import LLM
from minisgl_lit.kernels import gpu_operations as gpu_operations_
from minisgl_lit.kernels.fused_heads import norm_rope_store
from minisgl_lit.kernels.library import SMALL_KERNELS
from minisgl_lit.kernels.gpu_operations import FlashInferOperations, gpu_operations
from minisgl_lit.speculation.drafts import Speculation, StepCosts
from minisgl_lit.speculation.ngram import NgramGuesser
from minisgl_lit.core.models.operations import Operations
from minisgl_lit.core.attention.torch import TorchAttention
from minisgl_lit.kernels import attention_choice as choice
from minisgl_lit.kernels.attention_choice import choose_attention, unsupported_reason
from minisgl_lit.core.attention.flashinfer import (
    KERNELS, FlashInferAttention, kind_of, page_indices, plan_arrays)
from minisgl_lit.kernels.pair_attention import PairAttention
from reference import MAX_NEW, Comparison, generate, make_checkpoint, prompts

lacks_package = importlib.util.find_spec('flashinfer') is None
missing = ['a GPU'] * (not torch.cuda.is_available()) + ['the package flashinfer'] * lacks_package
needs_gpu = pytest.mark.skipif(bool(missing), reason='needs ' + ' and '.join(missing))

@st.composite
def worlds(draw, most=6):
    "What a batch may look like"
    n, decode = draw(st.integers(1, most)), draw(st.booleans())
    fresh = not decode and draw(st.booleans())
    extend = [1 if decode or draw(st.booleans()) else draw(st.integers(1, 40)) for _ in range(n)]
    return dict(cached=[0 if fresh else draw(st.integers(0, 70)) for _ in range(n)], extend=extend,
                padding=draw(st.integers(0, 3)) * decode,
                page_size=draw(st.sampled_from([1, 3, 16, 32, 64])), num_kv_heads=draw(st.integers(1, 3)),
                family=draw(st.integers(1, 8)), dim=draw(st.sampled_from([8, 64])),
                window=draw(st.one_of(st.none(), st.integers(1, 100))), seed=draw(st.integers(0, 99)),
                dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])))

def make(cached, extend, padding, page_size, num_kv_heads, family, dim, window, seed, dtype):
    "Pages shuffled, NaN in every slot that is nobody's cached token; batch and queries"
    g = torch.Generator().manual_seed(seed)
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    n, lens = len(cached), np.add(cached, extend)
    max_pages = 1 - (-lens.max() // page_size)
    pool = KVPool(2, n * max_pages, page_size, num_kv_heads, dim, dtype)
    pool.buffer.fill_(torch.nan)
    table = TableManager(n + padding, max_pages * page_size, page_size, pool.dummy_page)
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
                  table.slots(token_rows, positions), np.arange(n))
    heads = num_kv_heads * family
    qkv = some(len(positions), heads + 2 * num_kv_heads,
               dim).split([heads, num_kv_heads, num_kv_heads], dim=1)
    return pool, table, batch, qkv, [None, window]

@settings(max_examples=60)
@given(worlds())
def test_plan_arrays_say_what_the_page_table_says(world):
    """Whoever follows the arrays finds, for each token of each request, the slot that the host's table names,
    and the positions of the batch"""
    pool, table, batch, *_ = make(**world)
    size, told = pool.page_size, plan_arrays(batch, pool.page_size)
    pages = page_indices(table.page_table, batch.rows, told.kv_indptr).numpy()
    assert (told.qo_indptr[0] == told.kv_indptr[0] == 0 and told.qo_indptr[-1] == len(batch.positions)
            and told.kv_indptr[-1] == len(pages))
    assert (1 <= told.last_page_len).all() and (told.last_page_len <= size).all() and pages.dtype == np.int32
    for i, row in enumerate(batch.rows):
        mine = pages[told.kv_indptr[i]:told.kv_indptr[i + 1]]
        n = (len(mine) - 1) * size + told.last_page_len[i]
        slots = (mine[:, None] * size + np.arange(size)).ravel()[:n]
        assert n == batch.device_lens[i] and (slots == table.slots(np.full(n, row), np.arange(n))).all()
        tokens = slice(told.qo_indptr[i], told.qo_indptr[i + 1])
        assert (batch.positions[tokens] == np.arange(n)[n - len(batch.positions[tokens]):]).all()
        assert (batch.out_loc[tokens] == slots[n - len(batch.positions[tokens]):]).all()

@settings(max_examples=40)
@given(worlds())
def test_it_says_what_the_reference_says(world):
    pool, table, batch, qkv, windows = make(**world)
    n, heads = len(batch.sampled), qkv[0].shape[1]
    if kind_of(batch) == 'decode' and heads // qkv[1].shape[1] in (5, 6, 7): assert FlashInferAttention(
        pool, table.page_table, windows, num_heads=heads, library=standin).tensor_cores
    ours = FlashInferAttention(pool, table.page_table, windows, num_heads=heads, library=standin)
    got = ours.forward(*qkv, 1, ours.prepare(batch))
    exact = KVPool(2, pool.num_pages, pool.page_size, qkv[1].shape[1], qkv[0].shape[2], torch.float32)
    exact.buffer.copy_(pool.buffer)
    reference = TorchAttention(exact, table.page_table, windows)
    tokens = int(batch.extend_lens[:n].sum())
    expected = reference.forward(*(o.float() for o in qkv), 1, reference.prepare(batch))[:tokens]
    eps = 2e-5 if pool.buffer.dtype == torch.float32 else .02
    assert got.dtype == qkv[0].dtype and got.shape == qkv[0].shape and got.isfinite().all()
    torch.testing.assert_close(got[:tokens].float(), expected, rtol=eps, atol=eps)

@settings(max_examples=30)
@given(worlds(), st.integers(0, 9))
def test_static_tensors_tell_of_the_last_batch(world, seed):
    """Planned for one batch, updated for another of the same size: as if planned for that one, in the tensors
    of the first"""
    world |= dict(extend=[1] * len(world['cached']))
    pool, table, batch, qkv, windows = make(**world)
    pool.buffer.nan_to_num_(0.5)
    rng = np.random.default_rng(seed)
    lens = np.minimum(rng.integers(1, 60, len(batch.rows)), table.page_table.shape[1] * pool.page_size)
    lens[batch.rows == table.dummy_row] = 1
    other = replace(batch, cached_lens=lens - 1, device_lens=lens, positions=lens - 1,
                    out_loc=table.slots(batch.rows, lens - 1))
    ours = FlashInferAttention(pool, table.page_table, windows, num_heads=qkv[0].shape[1], library=standin)
    static = ours.static(batch)
    before = [o.data_ptr() for o in (static.block.indptr, static.memory.pages, static.block.last_page_len,
                                     static.out_loc)]
    ours.update(static, other)
    ours.list_pages(static)
    wrapper = static.graph_wrappers[windows[1]]
    assert [o.data_ptr() for o in (wrapper.indptr, wrapper.indices, wrapper.last, static.out_loc)] == before
    told = plan_arrays(other, pool.page_size)
    assert torch.equal(static.memory.pages[:told.kv_indptr[-1]],
                       page_indices(table.page_table, other.rows, told.kv_indptr))
    n = len(batch.sampled)
    got = ours.forward(*qkv, 1, static)[:n].clone()
    assert torch.equal(got, ours.forward(*qkv, 1, ours.prepare(other))[:n])

class CopiesLate(PagedDecode):
    """A stand-in with the pinned buffer that FlashInfer's wrappers have: a plan writes there, a copy on the
    device's line reads it later"""
    line = ManualStream()
    def _keep(self, *arrays):
        self.pinned = [o.clone() for o in arrays] if not hasattr(self, 'pinned') else self.pinned
        for here, o in zip(self.pinned, arrays): here.resize_(o.shape).copy_(o)
        there = self.indptr, self.indices, self.last = [torch.full_like(o, -1) for o in arrays]
        def copy():
            for here, o in zip(there, self.pinned): here.copy_(o)
        self.line.submit(copy)

def late_answers(waits: bool, n: int = 6) -> list[bool]:
    """Plan `n` steps ahead of a device that does nothing until told or waited for; whether each step then
    reads its own plan"""
    CopiesLate.line = line = ManualStream()
    library = type(standin)(**vars(standin) | dict(BatchDecodeWithPagedKVCacheWrapper=CopiesLate))
    pool, table, batch, qkv, windows = make([9, 3, 5], [1, 1, 1], 0, 4, 2, 2, 8, None, 0, torch.float32)
    ours = FlashInferAttention(pool, table.page_table, windows, num_heads=4, library=library)
    ours.record_event = line.record if waits else lambda: HostEvent(lambda event: None)
    right = []
    for step in range(n):
        lens = batch.device_lens - step % 3
        now = replace(batch, cached_lens=lens - 1, device_lens=lens)
        planned, told = ours.prepare(now).paged[None], plan_arrays(now, 4)
        line.submit(partial(lambda w, t: right.append(w[0].tolist() == t.kv_indptr.tolist()
            and w[1].tolist() == t.last_page_len.tolist()),
                            (planned.indptr, planned.last), told))
    line.run_all()
    return right

def test_no_plan_is_overwritten_before_it_is_copied():
    assert late_answers(waits=True) == [True] * 6

def test_the_race_would_be_seen():
    assert not all(late_answers(waits=False))

@pytest.fixture(scope='module', params=['Llama', 'Qwen3', 'Mistral'])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, **dict(sliding_window=20) if request.param == 'Mistral' else {})
    return path, [generate(path, o) for o in prompts()]

def standing_in(pool, page_table, windows, halves=False, num_heads=4):
    make = partial(FlashInferAttention, pool, page_table, windows, num_heads=num_heads, library=standin)
    return PairAttention(TorchAttention(pool, page_table, windows), make()) if halves else make()

@pytest.mark.parametrize('halves', [False, True])
@pytest.mark.parametrize('page_size', [1, 16])
def test_answers_are_those_of_transformers(checkpoint, page_size, halves, monkeypatch, long, request):
    """Through `LLM` and `build`, with the stand-in as its attention, and for half of them in its layers;
    twice, the second time from the cache"""
    family = request.node.callspec.params["checkpoint"]
    if not long and (page_size, halves) not in [(16, False)] + [(1, True)] * (family == "Qwen3"):
        pytest.skip("long: --long or TST_LONG=1")
    (path, right), comparison = checkpoint, Comparison()
    if page_size == 1:
        steps = FlashInferOperations(torch.device('cpu'), torch.float32, standin)
        monkeypatch.setattr('minisgl_lit.core.engine.assembly.find_operations', lambda *_: steps)
        monkeypatch.setattr(gpu_operations_, 'store_kernel', lambda *_: norm_rope_store)
    with LLM(path, device='cpu', attention='torch', page_size=page_size, num_pages=400 * 16 // page_size,
             max_prefill_tokens=24) as llm:
        runtime = llm._driver.runtime
        given = runtime.engine.attention
        runtime.engine.attention = standing_in(given.pool, given.page_table, list(given.windows.values()),
                                               halves)
        for _ in range(2):
            outs = llm.generate(prompts(), SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, reference in zip(prompts(), outs, right):
                comparison.check(path, prompt, out.token_ids, reference)
        assert sum(o.cached_tokens for o in outs) > 0
        runtime.scheduler.drafter = Speculation(NgramGuesser(), StepCosts((1, 2), (1., 1.)))
        outs = llm.generate(prompts(), SamplingParams(max_tokens=MAX_NEW, temperature=0))
        for prompt, out, reference in zip(prompts(), outs, right):
            comparison.check(path, prompt, out.token_ids, reference)
        assert runtime.scheduler.counts['drafted_tokens'] > 0
    comparison.done()

def test_what_may_be_captured():
    pool, table, *_ = make([3], [1], 0, 4, 1, 1, 8, None, 0, torch.float32)
    ours, torch_ = standing_in(pool, table.page_table, (), False), TorchAttention(pool, table.page_table)
    assert [o.recorder for o in (ours, torch_)] == ['graphs', ''] and ours.decoding is ours
    assert PairAttention(torch_, ours).decoding is ours and PairAttention(ours, torch_).decoding is torch_
    assert 'runs on cpu' in unsupported_reason('decode', pool, (), 1)
    with pytest.raises(ValueError, match="attention cannot be 'flashinfer' here"):
        choose_attention('flashinfer', pool, table.page_table, num_heads=1)

def parameters(function): return list(inspect.signature(function).parameters.values())

@pytest.fixture
def flashinfer(monkeypatch):
    "The package, installed or fetched; only its Python is looked at"
    monkeypatch.setattr(sys, 'path', [*sys.path, str(Path(__file__).parents[1]/'.flashinfer')])
    monkeypatch.setenv('FLASHINFER_CUDA_ARCH_LIST', '9.0a')
    return pytest.importorskip('flashinfer', reason='needs the package flashinfer: make flashinfer')

@pytest.mark.parametrize('name', list(vars(standin)))
def test_flashinfer_takes_what_the_stand_in_takes(name, flashinfer):
    "Every word of ours is theirs; what we pass by place stands in the same place"
    ours, theirs = getattr(standin, name), getattr(flashinfer, name)
    methods = ([o for o in ('__init__', 'plan', 'run', 'reset_workspace_buffer') if hasattr(ours, o)]
               if inspect.isclass(ours) else [None])
    for method in methods:
        mine, real = (parameters(getattr(o, method) if method else o) for o in (ours, theirs))
        # 0.6.18 hands all on
        if method == 'plan' and any(o.kind is o.VAR_KEYWORD for o in real):
            real = parameters(theirs._plan_impl)
        needed = [o.name for o in mine if o.default is o.empty]
        assert [o.name for o in real][1:len(needed)] == needed[1:], (name, method)
        assert {o.name for o in mine[1:]} <= {o.name for o in real}, (name, method)
        assert all(o.default is not o.empty for o in real[len(needed):]
                   if o.name not in ('args', 'kwargs')), (name, method)

@needs_gpu
@pytest.mark.parametrize('page_size', [1, 16, 32, 64])
@pytest.mark.parametrize('heads,kv_heads,dim,window',
                         [(16, 8, 128, None), (8, 1, 64, 100), (10, 2, 128, None), (4, 4, 256, 33)])
def test_kernels_say_what_the_reference_says_on_a_gpu(page_size, heads, kv_heads, dim, window):
    device, dtype = torch.device('cuda'), torch.bfloat16
    torch.manual_seed(0)
    pool = KVPool(2, 8 * -(-600 // page_size), page_size, kv_heads, dim, dtype, device)
    pool.buffer.normal_()
    table = TableManager(8, 600, page_size, pool.dummy_page, device)
    every = np.indices(table.pages[:8].shape).reshape(2, -1)
    table.write(*every, np.random.default_rng(0).permutation(pool.num_pages).astype(np.int32))
    table.flush()
    ours = choose_attention('flashinfer', pool, table.page_table, (None, window), num_heads=heads)
    reference = TorchAttention(pool, table.page_table, (None, window))
    for cached, lens in [([0, 0, 0], [300, 7, 1]), ([599, 5, 64], [600, 6, 65]),
                         ([100, 0, 31], [350, 20, 32])]:
        cached, lens, rows = np.array(cached), np.array(lens), np.arange(3)
        owner, at = rows.repeat(lens - cached), np.concatenate([np.arange(*o) for o in zip(cached, lens)])
        batch = Batch([], ForwardMode.MIXED, 1, rows, cached, lens, owner, at, table.slots(owner, at), rows)
        for layer in (0, 1):
            qkv = torch.randn(len(at), heads + 2*kv_heads, dim,
                              device=device).to(dtype).split([heads, kv_heads, kv_heads], 1)
            got = ours.forward(*qkv, layer, ours.prepare(batch))
            torch.testing.assert_close(got, reference.forward(*qkv, layer, reference.prepare(batch)),
                                       rtol=.02, atol=.02)

def small_steps(ops, device, dtype=torch.bfloat16, n_q=4, n_kv=2, dim=128, n=37):
    "Results of the functions of a layer that have kernels, from the same numbers each time"
    g = torch.Generator().manual_seed(0)
    def some(*shape): return torch.randn(*shape, generator=g).to(device, dtype)
    x, more, weight, at, speed = (some(n, 256), some(n, 256), some(256), torch.arange(n, device=device) * 7,
                                  torch.rand(dim // 2, generator=g).to(device))
    qkv, all_rows = some(n, n_q + 2 * n_kv, dim), (n_q + 2 * n_kv) * dim
    told = [ops.rms_norm(x, weight, 1e-6), ops.rms_norm(qkv[:, :n_q], some(dim), 1e-6),
            ops.silu_mul(some(n, 96)), ops.silu_mul(some(n, 34))]
    told += ops.apply_rope(qkv[:, :n_q], qkv[:, n_q:-n_kv], ops.rope_angles(at, speed, dtype))
    told += ops.qkv_heads(some(n, 256), some(all_rows, 256) / 16, None, (some(dim), some(dim)), 1e-6,
                          ops.rope_angles(at, speed, dtype), n_kv)
    told += [ops.gated_mlp(some(n, 256), some(192, 256) / 16, some(256, 96) / 10),
             *ops.add_norm(x, more, weight, 1e-6)]
    return told + [ops.rms_norm(x[:0], weight, 1e-6)]    # nobody is sampled

@pytest.mark.parametrize('shape', [dict(), dict(n=1), dict(dim=64, n_kv=1), dict(dim=32)])
def test_small_steps_by_the_stand_in_say_what_torch_says(shape):
    calls, counted = ([], {name: lambda *args, f=getattr(standin, name), name=name: calls.append(name)
                           or f(*args) for name in SMALL_KERNELS})
    ours = small_steps(FlashInferOperations(torch.device('cpu'), torch.bfloat16, replace(standin, **counted)),
                       'cpu', **shape)
    for a, b in zip(ours, small_steps(Operations(), 'cpu', **shape), strict=True):
        torch.testing.assert_close(a, b, rtol=.03, atol=.06)
    assert len(calls) > 5 and set(calls) >= {*SMALL_KERNELS} - {'apply_rope_with_cos_sin_cache_inplace'}

@needs_gpu
def test_small_kernels_say_what_torch_says_on_a_gpu():
    for dtype in (torch.bfloat16, torch.float16):
        ops = gpu_operations(torch.device('cuda'), dtype)
        assert ops.library.rmsnorm is importlib.import_module('flashinfer').rmsnorm
        for a, b in zip(small_steps(ops, 'cuda', dtype), small_steps(Operations(), 'cuda', dtype),
                        strict=True):
            torch.testing.assert_close(a, b, rtol=.03, atol=.06)

@pytest.mark.parametrize('kind', ['prefill', 'decode'])
def test_what_is_measured_runs_by_its_own_plan(kind):
    """Three shapes of as many new tokens each: every work attends to its own pages, and the first is refused
    once others have taken its plan's place"""
    lens = [[np.array(o) for o in ([9, 8, 30], [4, 17, 12], [21, 2, 6])][i] for i in range(3)]
    loads = [(o - 1, o) for o in lens] if kind == 'decode' else [(o, o + [3, 1, 4]) for o in lens]
    served = choice.Served(torch.device('cpu'), torch.float32, (4, 2, 8), (None,), 4, 3, 64, 64)
    with patch.object(choice.Served, 'loads', lambda self: dict(decode=loads, prefill=loads)), \
         patch.object(choice, 'unsupported_reason',
                      lambda *_: None), patch.object(choice, 'load_library', lambda *_: standin):
        bench = choice.Bench(served)
        works, held = choice.works(bench, kind, KERNELS[kind][0]), []
        reference = TorchAttention(bench.pool, bench.table.page_table)
        for i, batch in enumerate(bench.batches[kind]):
            torch.manual_seed(i)
            held.append(next(works))
            got = held[-1]()
            torch.manual_seed(i)
            q, k, v = torch.randn(len(batch.positions), 8, 8).split([4, 2, 2], 1)
            torch.testing.assert_close(got, reference.forward(q, k, v, 0, reference.prepare(batch)))
        assert next(works, None) is None and len(held) == 3
        with pytest.raises(RuntimeError, match='a later batch was planned'): held[0]()
