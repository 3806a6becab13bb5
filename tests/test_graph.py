"""Recorded decode steps: a fake recording replays a closure over the same static tensors, and every answer is
that of transformers; sizes and padding for all batches; and, where there is a GPU, the real thing."""
import importlib.util
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import Batch, ForwardMode
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.runtime import build
from minisgl_lit.core.engine.engine import Launched
from minisgl_lit.core.engine.cuda_graph import (
    CudaCapture, GraphEngine, CudaGraphs, bucket_sizes, padded)
from minisgl_lit.testing.flashinfer_emulator import standin
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.kernels.attention_choice import choose_attention
from minisgl_lit.core.attention.flashinfer import FlashInferAttention
from minisgl_lit.core.kv_cache.table import dummy_batch
from reference import MAX_NEW, Comparison, generate, make_checkpoint, prompts

lacks_package = importlib.util.find_spec('flashinfer') is None
missing = ['a GPU'] * (not torch.cuda.is_available()) + ['the package flashinfer'] * lacks_package
needs_gpu = pytest.mark.skipif(bool(missing), reason='needs ' + ' and '.join(missing))

@given(st.integers(0, 700))
def test_sizes(most):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and (not most or sizes[-1] == most) and all(o > 0 for o in sizes)
    assert {1, 2, 4} <= set(sizes) or most < 4
    assert all(o % 8 == 0 for o in sizes if o > 4 and o != most)
    assert all(b - a <= 8 for a, b in zip(sizes, sizes[1:]))

@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 20))
def test_padding_is_nobodys(n, more, page_size):
    table = TableManager(n, 64, page_size, dummy_page=500)
    dummy = dummy_batch(table)
    rows, lens = np.arange(n), np.random.default_rng(n).integers(1, 64, n)
    batch = Batch(list(range(n)), ForwardMode.DECODE, 3, rows, lens - 1, lens, rows, lens - 1,
                  table.slots(rows, lens - 1), rows)
    full = padded(batch, dummy, n + more)
    for o in ('rows', 'cached_lens', 'device_lens', 'token_rows', 'positions', 'out_loc'):
        assert len(getattr(full, o)) == n + more and (getattr(full, o)[:n] == getattr(batch, o)).all(), o
    assert (full.rows[n:] == table.dummy_row).all() and (full.out_loc[n:] == 500 * page_size).all()
    assert (full.extend_lens == 1).all() and full.sampled is batch.sampled and full.reqs is batch.reqs

def fake_capture(replays: list):
    "The closure again, into the same result; everything but the tensors it names must be as it was"
    def capture(work):
        out = work()
        def replay():
            replays.append(len(out[0]))
            for old, new in zip(out, work()): old.copy_(new)
        return replay, out
    return capture

def record(runtime, sizes, capture):
    "Exchange the engine of a runtime for one that replays"
    old, s = runtime.engine, runtime.scheduler
    attention = FlashInferAttention(old.attention.pool, s.table.page_table, runtime.model_config.windows,
                                    num_heads=runtime.model_config.num_heads, library=standin)
    graphs = CudaGraphs(old.model, attention, old.token_pool, dummy_batch(s.table), sizes, capture)
    s.engine = runtime.engine = GraphEngine(old.model, attention, old.token_pool, old.stream, graphs)

@pytest.fixture(scope='module', params=['Qwen3', 'Mistral'])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, **dict(sliding_window=20) if request.param == 'Mistral' else {})
    return path, [generate(path, o) for o in prompts()]

def serve(runtime, **params):
    told = {}
    for i, prompt in enumerate(prompts()):
        runtime.scheduler.add(str(i), prompt, SamplingParams(max_tokens=MAX_NEW, **params))
    while runtime.scheduler.has_work:
        for o in runtime.scheduler.step():
            assert o.error is None, o.error
            told.setdefault(int(o.rid), []).extend(o.token_ids)
    runtime.scheduler.self_check()
    return [told[i] for i in range(len(told))]

@pytest.mark.parametrize('sizes, apart', [([1, 2, 3, 4, 5, 6], False), ([2, 4], True), ([], True)])
@pytest.mark.parametrize('overlap', [False, True])
def test_replayed_tokens_are_those_of_transformers(checkpoint, sizes, apart, overlap):
    """Also where the page table lies apart from the host's, as on a GPU: then a step that forgets the pages
    it begins reads the dummy page"""
    (path, right), comparison, replays = checkpoint, Comparison(), []
    config = EngineConfig.of(path, device='cpu', dtype='float32', attention='torch', overlap=overlap,
                             page_size=4, num_pages=60, max_running_req=6,
                             max_prefill_tokens=24, admission='optimistic', schedule_conservativeness=.1)
    runtime = build(config)
    if apart:
        table = runtime.scheduler.table
        table.page_table, table._shared = table.page_table.clone(), False
    record(runtime, sizes, fake_capture(replays))
    for _ in range(2):
        for prompt, ours, reference in zip(prompts(), serve(runtime, temperature=0), right):
            comparison.check(path, prompt, ours, reference, sizes)
    assert set(replays) <= set(sizes) and (len(replays) > 10 or not sizes)
    runtime.close()
    comparison.done()

def test_seeded_answers_do_not_depend_on_recordings(checkpoint):
    path, _ = checkpoint
    def answers(sizes):
        runtime = build(EngineConfig.of(path, device='cpu', dtype='float32', attention='torch', page_size=4,
                                        num_pages=60, max_running_req=6))
        record(runtime, sizes, fake_capture([]))
        told = serve(runtime, temperature=.8, seed=5)
        runtime.close()
        return told
    assert answers([2, 4, 6]) == answers([])

def test_a_failing_recording_is_told_at_once(checkpoint):
    path, _ = checkpoint
    runtime = build(EngineConfig.of(path, device='cpu', dtype='float32', attention='torch', num_pages=60,
                                    max_running_req=6, overlap=True))
    def fail(work): raise RuntimeError('no memory for a recording')
    with pytest.raises(RuntimeError, match='no memory for a recording'): record(runtime, [2], fail)
    runtime.engine.stream.reset()
    runtime.close()

@needs_gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_replayed_steps_are_those_computed_as_they_come_on_a_gpu(tmp_path, dtype):
    """All prompts of the reference through both engines; bits may differ, so the logits of each step are
    compared"""
    # kernels that other steps have compiled
    make_checkpoint('Qwen3', tmp_path, head_dim=128, hidden_size=128)
    runtime = build(EngineConfig.of(tmp_path, device='cuda', dtype=dtype, page_size=16, num_pages=200,
                                    max_running_req=6, attention='torch'))
    old, s = runtime.engine, runtime.scheduler
    attention = choose_attention('flashinfer', old.attention.pool, s.table.page_table,
                                 runtime.model_config.windows, num_heads=runtime.model_config.num_heads)
    graphs = CudaGraphs(old.model, attention, old.token_pool, dummy_batch(s.table), [1, 2, 4, 6],
                        CudaCapture())
    s.engine = runtime.engine = GraphEngine(old.model, attention, old.token_pool, old.stream, graphs)
    apart, inner = [], graphs.run
    def run(batch, launched):
        super(GraphEngine, runtime.engine)._forward(batch, seen := Launched())
        inner(batch, launched)
        apart.append(float((launched.logits.float() - seen.logits.float()).abs().max()))
    graphs.run = run
    serve(runtime, temperature=0)
    assert len(apart) > 5 and max(apart) < .5, apart
    runtime.close()

def test_what_torch_is_told_to_record(monkeypatch):
    """Once by itself, waited for, then recorded on the same stream; the second recording in the pool of the
    first; other threads may go on"""
    did, stream = [], SimpleNamespace(synchronize=lambda: did.append('waited'))
    class Graph:
        def pool(self): return 'pool'
        def replay(self): return did.append('replayed')
    @contextmanager
    def graph(graph, pool, on, capture_error_mode):
        did.append(('begins', type(graph), pool, on is stream, capture_error_mode))
        yield
        did.append('ends')
    for name, o in dict(current_stream=lambda: stream, CUDAGraph=Graph, graph=graph).items():
        monkeypatch.setattr(torch.cuda, name, o)
    def work():
        did.append('work')
        return did.count('work')
    capture = CudaCapture()
    for pool in (None, 'pool'):
        did.clear()
        replay, out = capture(work)
        assert (did == ['work', 'waited', ('begins', Graph, pool, True, 'thread_local'), 'work', 'ends']
                and out == 2)
        replay()
        assert did[-1] == 'replayed'
