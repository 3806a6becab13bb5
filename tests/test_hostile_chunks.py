"""A long prompt holds up nobody: short ones start beside its chunks, and a second long one is not starved by
that."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.scheduler.scheduler import Observer, Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine

class Steps(Observer):
    "In which step each request started, and in which its prompt was computed to the end"
    def __init__(self): self.started, self.computed, self.tokens = {}, {}, []
    def launched(self, batch):
        self.tokens.append(len(batch.positions))
        for o, end in zip(batch.reqs, batch.device_lens):
            self.started.setdefault(o.rid, batch.step)
            if end >= o.pending.input_len: self.computed.setdefault(o.rid, batch.step)

class CountedCache(CacheManager):
    "Counts how often a prompt is looked up"
    matches = 0
    def match(self, pending):
        self.matches += 1
        return super().match(pending)

def server(num_pages=2000, rows=64, page_size=16, max_seq_len=10_100, prefix='none', **settings):
    table = TableManager(rows, max_seq_len, page_size, dummy_page=num_pages)
    cache = CountedCache(num_pages, table, make_prefix_cache(prefix, page_size))
    engine = ToyEngine(table.page_table, table.token_pool, page_size, num_pages, 13, verify=False)
    config = EngineConfig(max_running_req=rows, page_size=page_size, **dict(dict(overlap=False), **settings))
    return Scheduler(engine, cache, 13, lambda: 0., config, observer=Steps())

def add(s, rid, n, max_tokens=1, first=0):
    s.add(rid, np.arange(first, first + n) % 13,
          SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))

def finish(s):
    while s.has_work: s.step()
    s.self_check()
    return s.observer

@pytest.mark.parametrize('how', [dict(overlap=False), dict(overlap=True), dict(mixed_chunk=True)])
def test_short_prompts_do_not_wait_for_a_long_one(how):
    "One of 10,000 tokens in chunks of 512, and twenty of 100 tokens behind it; a step may compute 8,192"
    s = server(chunked_prefill_size=512, max_prefill_tokens=8192, **how)
    add(s, 'long', 10_000)
    for i in range(20): add(s, f'short {i}', 100)
    seen = finish(s)
    assert {step for rid, step in seen.computed.items() if rid != 'long'} == {1}
    assert seen.computed['long'] == 20 == -(-10_000 // 512)   # as if alone
    assert seen.tokens[:2] == [512 + 20*100, 512] and max(seen.tokens) <= 8192

def test_many_long_prompts_hold_up_no_short_one():
    s = server(num_pages=4000, chunked_prefill_size=512, max_prefill_tokens=8192)
    for i in range(9): add(s, f'long {i}', 2000)
    add(s, 'short', 100)
    seen = finish(s)
    assert seen.computed['short'] == 1
    assert [seen.started[f'long {i}'] for i in range(3)] == [1, 4, 7]   # each where the one before it ends

def crowd(s):
    """Two long prompts, and short ones without end, with long answers; when the second has started, it must
    have been at once"""
    n = 0
    add(s, 'first', 1000, first=1)
    add(s, 'second', 1000)
    while 'second' not in s.observer.started:
        for _ in range(3):
            add(s, f'short {n}', 20, max_tokens=40, first=2)
            n += 1
        s.step()
        assert len(s.observer.tokens) <= 30, 'the second long prompt is starved'
    assert s.observer.started['second'] == s.observer.computed['first'] and 'short 0' in s.observer.started

@pytest.mark.parametrize('tight', [dict(num_pages=150), dict(rows=6)])
def test_a_second_long_prompt_is_not_starved(tight):
    crowd(server(chunked_prefill_size=64, max_prefill_tokens=256, **tight))

def test_what_it_has_cached_is_kept_for_it_too():
    "Twenty pages of the second prompt are in the tree; the short ones would evict them"
    s = server(150, prefix='radix', chunked_prefill_size=64, max_prefill_tokens=256)
    add(s, 'before', 321)
    while s.has_work: s.step()
    crowd(s)
    finish(s)

def test_waiting_for_chunks_costs_little():
    """A hundred long prompts wait for 40 steps: they are looked up once when the first is in chunks, and not
    all of them"""
    s = server(num_pages=20_000, chunked_prefill_size=64, max_prefill_tokens=256, max_seq_len=3000)
    for i in range(101): add(s, f'long {i}', 64*40)
    s.step()
    before = s.cache.matches
    for _ in range(38): s.step()
    assert s.prefill.chunked.rid == 'long 0' and 0 < s.cache.matches - before <= 65

@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 24), st.integers(2, 5), st.integers(10, 30), st.booleans(),
       st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6), st.integers(1, 4)), min_size=3, max_size=14))
def test_the_first_that_must_wait_is_next(chunk, budget, rows, num_pages, overlap, arrivals):
    "First come, first served, whatever comes: who is passed over first starts as soon as a prompt may be cut"
    s = server(num_pages, rows, 2, 40, chunked_prefill_size=chunk, max_prefill_tokens=budget, overlap=overlap)
    arrivals = [o for o in arrivals if -(-(o[0] + o[1]) // 2) <= num_pages]
    n, overtaken, owner, late = 0, None, None, 0
    while arrivals or s.has_work:
        for _ in range(arrivals[0][2] if arrivals else 0):
            if not arrivals: break
            add(s, str(n), *arrivals.pop(0)[:2])
            n += 1
        waited = {*s.prefill.waiting}
        s.step()
        if overtaken in s.observer.started: overtaken = None
        elif overtaken and s.prefill.chunked is not owner:   # the step may have been full with its last chunk
            late += 1
            assert late <= 1, f'{overtaken} could have started'
        elif s.prefill.chunked and s.prefill.waiting:
            head = next(iter(s.prefill.waiting))
            if any(int(o) > int(head) for o in waited - s.prefill.waiting.keys()):
                overtaken, owner, late = head, s.prefill.chunked, 0
    s.self_check()
    assert len(s.observer.computed) == n
