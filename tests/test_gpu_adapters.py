"""The way of adapters on a GPU, on a machine without one: kernels run in the emulator of Triton, attention in
that of FlashInfer, decode steps are recorded and replayed, and every token is that of a merged model."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minisgl_lit.adapters import pool as pools
from minisgl_lit.adapters.low_rank_triton import RowTiles, TiledWeight
from minisgl_lit.adapters.pool import AdapterEngine
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.engine.cuda_graph import CudaGraphs, GraphEngine
from minisgl_lit.core.kv_cache.table import dummy_batch
from minisgl_lit.core.models.operations import Operations
from minisgl_lit.runtime import build
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.text.sampling_params import SamplingParams
from random_adapters import write_adapter
from reference import make_checkpoint, prompts
from test_adapters import Merged
from test_graph import fake_capture, record

SOME = 6   # tokens of an answer

@pytest.fixture(scope='module')
def served(tmp_path_factory):
    "A checkpoint, adapters by name, and what merged models answer to some prompts"
    path, right = tmp_path_factory.mktemp('model'), {}
    make_checkpoint('Qwen3', path)
    asked = [prompts()[i] for i in (0, 2, 6)]
    for name, how in dict(a={}, b=dict(only='mlp|k_proj', rank=17), none=None).items():
        deltas = {} if how is None else write_adapter(path/name, path, len(right), **how)
        with Merged(path, deltas) as merged: right[name] = [merged.answer(o)[:SOME] for o in asked]
    return path, asked, right

@pytest.fixture
def on_gpu(served, monkeypatch):
    "Makes a runtime that goes the way of a GPU, and says how often it replays, by engine"
    path, made = served[0], []
    def tiles(most): return RowTiles(most, 2, 'cpu')
    monkeypatch.setattr(pools, 'RowAdapters', tiles)
    monkeypatch.setattr(pools, 'AdaptedWeight', TiledWeight)
    monkeypatch.setattr(pools, 'adapted_operations', lambda operations: Operations())
    def make(sizes, names='ab', **settings):
        given = dict(device='cpu', dtype='float32', attention='torch', page_size=4, num_pages=90,
                     max_running_req=6, max_prefill_tokens=24, max_loras=2, cache='none')
        runtime, replays = build(EngineConfig.of(path, **given | settings)), dict(base=[], adapted=[])
        made.append(runtime)
        record(runtime, sizes, fake_capture(replays['base']))
        pool, engine = runtime.scheduler.adapters, runtime.engine
        def join(decoder):
            graphs = CudaGraphs(decoder, engine.attention, engine.token_pool,
                                dummy_batch(runtime.scheduler.table), sizes,
                                fake_capture(replays['adapted']))
            return GraphEngine(decoder, engine.attention, engine.token_pool, engine.stream, graphs)
        pool.engine, pool.join = engine, join
        for name in names: pool.load(name, str(path/name))
        return runtime, replays
    yield make
    for o in made: o.close()

def answers(runtime, asked, names):
    "Tokens of these prompts, in one batch as far as it may be"
    s, told = runtime.scheduler, {}
    for i, (prompt, name) in enumerate(zip(asked, names)):
        s.add(str(i), prompt, SamplingParams(max_tokens=SOME, temperature=0, lora=name))
    while s.has_work:
        for o in s.step():
            assert o.error is None, o.error
            told.setdefault(int(o.rid), []).extend(o.token_ids)
    s.self_check()
    return [told[i] for i in range(len(asked))]

@pytest.mark.parametrize('sizes, overlap', [([2, 4, 6], True),
                                            pytest.param([], False, marks=pytest.mark.long)], ids=str)
def test_tokens_are_those_of_a_merged_model(served, on_gpu, sizes, overlap):
    """Alone and with others, recorded and kernel by kernel; a recording reads its tiles where they were when
    it was made, and batches without adapters are the first engine's"""
    _, asked, right = served
    runtime, replays = on_gpu(sizes, overlap=overlap, mixed_chunk=overlap)
    kept = runtime.scheduler.engine.at.ids
    names = ['a', None, 'b', 'b', 'a', None]
    want = [right[name or 'none'][i % 3] for i, name in enumerate(names)]
    assert len({str(o) for o in want}) == 6
    assert answers(runtime, asked * 2, names) == want
    assert runtime.scheduler.engine.at.ids is kept
    seen = [len(replays['adapted'])]
    for i in (4, 1):
        assert answers(runtime, [asked[i % 3]], [names[i]]) == [want[i]]
        seen.append(len(replays['adapted']))
    together, one, none = seen
    assert together < one == none and replays['base'] if sizes else none == 0

def test_an_adapter_comes_and_goes_beside_a_recording(served, on_gpu):
    "A number is given anew: the recorded step has the new one's matrices, of another rank"
    path, asked, right = served
    runtime, _ = on_gpu([1, 2])
    pool = runtime.scheduler.adapters
    assert answers(runtime, asked[1:2], ['a']) == right['a'][1:2]
    pool.unload('a')
    assert pool.drop_unused() == ['a'] and 1 not in pool.numbers.values()
    assert all(not o.table[1].any() and 1 not in o.changes for o in pool.both.weights.values())
    pool.load('again', str(path/'b'))
    assert pool.numbers['again'] == 1
    assert answers(runtime, asked[1:2], ['again']) == right['b'][1:2]

def test_tiles_change_between_steps(monkeypatch):
    "Behind the step before, which may not have begun when the next one is launched"
    stream, seen = ManualStream(), []
    at = RowTiles(8, 2, 'cpu')
    def forward(batch): stream.submit(lambda: seen.append(at.ids.view(-1, 17)[:2, :3].tolist()))
    model = SimpleNamespace(weights={}, operations=Operations(), config=None, group=None)
    both = SimpleNamespace(stream=stream, forward=forward, model=model)
    monkeypatch.setattr(pools, 'Decoder', lambda *ignored: None)
    engine = AdapterEngine(both, lambda decoder: both, at)
    for ids in ([1, 0, 1], [0, 2]):
        engine.forward(SimpleNamespace(adapters=np.array(ids), extend_lens=np.ones(len(ids), dtype=int)))
    stream.synchronize()
    assert seen == [[[1, 0, 2], [0, -1, -1]], [[2, 1, -1], [0, -1, -1]]]

def test_where_kernels_cannot_be_used_a_sentence_says_why(served, monkeypatch):
    path = served[0]
    runtime = build(EngineConfig.of(path, device='cpu', dtype='float32', num_pages=30))
    pool = runtime.scheduler.adapters
    engine = pool.engine
    pool.engine = SimpleNamespace(model=engine.model, device=torch.device('cuda'))
    with pytest.raises(ValueError, match="lora='a': adapters on a GPU need kernels in Triton, and here the "
                                         'package is not installed'):
        monkeypatch.setattr('minisgl_lit.kernels.library.find_spec', lambda name: None)
        pool.load('a', str(path/'a'))
    assert not pool.numbers and runtime.scheduler.engine is engine
    runtime.close()

def test_without_room_nothing_has_changed(served, on_gpu, monkeypatch):
    "Neither while steps are recorded, nor while matrices are sent; and then there is room"
    path, asked, right = served
    runtime, _ = on_gpu([1], names='')
    pool, engine, put = runtime.scheduler.adapters, runtime.engine, TiledWeight.put
    join = pool.join
    def full(*ignored): raise torch.OutOfMemoryError('CUDA out of memory')
    def all_but_one(weight, number, changes):
        if changes and weight.table.shape[1] == 2: full()
        put(weight, number, changes)
    def refused():
        with pytest.raises(ValueError, match="'a': beside pages and weights this GPU has no room for it"):
            pool.load('a', str(path/'a'))
        assert not pool.numbers
        assert not (pool.both and any(o.changes or o.table.any() for o in pool.both.weights.values()))
    def no_room(decoder):
        engine.stream.submit(full)
        engine.stream.synchronize()
    pool.join = no_room
    refused()
    assert runtime.scheduler.engine is engine and not pool.both
    pool.join = join
    with monkeypatch.context() as m:
        m.setattr(TiledWeight, 'put', all_but_one)
        refused()
    pool.load('a', str(path/'a'))
    assert answers(runtime, asked[1:2], ['a']) == right['a'][1:2]
