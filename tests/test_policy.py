"""Orders of the waiting queue: nobody is lost, equals keep their places, and on the real scheduler nobody
waits for ever."""
from collections import Counter

from hypothesis import given, strategies as st
import numpy as np
import pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import PendingReq
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import NaiveCache, RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.scheduler.scheduler import Observer, Scheduler
from minisgl_lit.core.scheduler.policy import (
    CacheAware, DfsWeight, Fcfs, Lof, Lpm, PrefixMatches, Random, make_policy,
    one_per_shared_prefix, policies)
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output

def new_cache(page_size=2, num_pages=400, rows=4, prefix=RadixCache):
    table = TableManager(rows, 128, page_size, dummy_page=num_pages)
    return CacheManager(num_pages, table, prefix(page_size))

def request(rid, ids=(1,), answer=1, **wishes):
    return PendingReq(str(rid), np.asarray(ids), SamplingParams(**wishes), max_len=len(ids) + answer)

def remember(cache, pending):
    "Put the full pages of a prompt into the tree; page numbers play no part here"
    n = pending.input_len // cache.page_size
    cache.prefix.insert(pending.input_ids[:n * cache.page_size], np.arange(n),
                        extra_key=pending.params.extra_key)

# Random queues: prompts of few letters in pages of two, so that they share beginnings
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
waiting_ones = st.lists(
    st.builds(lambda ids, answer, priority: dict(ids=ids, answer=answer, priority=priority),
              prompts, st.integers(1, 3), st.integers(-1, 1)), max_size=12)
names = st.sampled_from(sorted(policies.names))

def line(wishes): return [request(i, **o) for i, o in enumerate(wishes)]

def make(name, cache, **kwargs):
    policy = make_policy(name, cache, seed=0)
    for k, v in kwargs.items(): setattr(policy.inner, k, v)
    return policy

@given(names, waiting_ones, st.lists(prompts, max_size=5))
def test_an_order_is_made_of_those_who_wait_and_by_priority(name, wishes, known):
    cache, queue = new_cache(), line(wishes)
    for ids in known: remember(cache, request('before', ids))
    tried = list(make(name, cache).order(queue))
    assert len(set(tried)) == len(tried) and set(tried) <= set(queue) and bool(tried) == bool(queue)
    assert len(tried) == len(queue)   # they share too little to wait for
    assert [o.params.priority for o in tried] == sorted((o.params.priority for o in tried), reverse=True)

@given(names, waiting_ones)
def test_equal_priorities_leave_the_order_alone(name, wishes):
    plain = [{**o, 'priority': 0} for o in wishes]
    high = [{**o, 'priority': 7} for o in wishes]
    orders = [[o.rid for o in make(name, new_cache()).order(line(ones))] for ones in (plain, high)]
    assert orders[0] == orders[1]

@given(waiting_ones, st.lists(prompts, max_size=5))
def test_equal_keys_keep_their_places(wishes, known):
    cache, queue = new_cache(), line(wishes)
    for ids in known: remember(cache, request('before', ids))
    def stable(tried, key):
        assert tried == sorted(tried, key=lambda o: (-o.params.priority, key(o), int(o.rid)))
    stable(Fcfs(cache).order(queue), lambda o: 0)
    stable(Lof(cache).order(queue), lambda o: o.input_len - o.max_len)
    stable(Lpm(cache).order(queue), lambda o: -cache.match(o).cached_len)
    stable(DfsWeight(cache).order(queue), dict(zip(queue, DfsWeight(cache).keys(queue))).get)

@given(names, st.data())
def test_everybody_starts_and_nobody_is_overtaken_more_often_than_is_allowed(name, data):
    "One priority, arrivals at any time, one or two start in a pass, some are aborted"
    bound, cache = data.draw(st.integers(0, 4)), new_cache()
    policy, waiting, overtaken = make(name, cache, max_overtaken=bound), [], Counter()
    arrivals = line(data.draw(waiting_ones))
    for o in arrivals: vars(o.params)['priority'] = 0
    while arrivals or waiting:
        n = data.draw(st.integers(0 if waiting else 1, 3))
        waiting, arrivals = waiting + arrivals[:n], arrivals[n:]
        tried = list(policy.order(waiting))
        gone = set(tried[:data.draw(st.integers(0 if arrivals else 1, 2))])
        left = [o for o in waiting if o not in gone]
        for o in left: overtaken[o] += any(int(x.rid) > int(o.rid) for x in gone)
        for o in gone:
            if data.draw(st.booleans()): remember(cache, o)
        waiting = left
    assert all(n <= bound for n in overtaken.values())

def slow_walk(waiting, cache):
    "Depth first over the tree, by recursion"
    ends = {}
    for o in waiting: ends.setdefault(cache.match(o).node, []).append(o)
    def below(node): return ends.get(node, []) + [o for child in node.children.values() for o in below(child)]
    def visit(node):
        def rank(child): return -len(below(child)), min(int(o.rid) for o in below(child))
        for child in sorted(filter(below, node.children.values()), key=rank): yield from visit(child)
        yield from ends.get(node, [])
    return list(visit(cache.prefix.root))

@given(waiting_ones, st.lists(prompts, max_size=9))
def test_sorting_ways_is_walking_the_tree(wishes, known):
    cache, queue = new_cache(), line([{**o, 'priority': 0} for o in wishes])
    for ids in known: remember(cache, request('before', ids))
    assert DfsWeight(cache).order(queue) == slow_walk(queue, cache)

@given(st.data())
def test_what_is_remembered_is_what_would_be_found(data):
    "Whatever is inserted, split and evicted between two looks"
    cache = new_cache()
    matches, queue = PrefixMatches(cache), [request(i, ids, extra_key=key) for i, (ids, key) in enumerate(
        data.draw(st.lists(st.tuples(prompts, st.sampled_from([None, 'a'])), max_size=8)))]
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            remember(cache,
                     request('new', data.draw(prompts), extra_key=data.draw(st.sampled_from([None, 'a']))))
        else: cache.prefix.evict(data.draw(st.integers(0, 3)))
        some = [o for o in queue if data.draw(st.booleans())]
        assert [o.node for o in matches.of(some)] == [cache.match(o).node for o in some]
        assert [o.cached_len for o in matches.of(some)] == [cache.match(o).cached_len for o in some]
        assert cache.prefix.protected_size == 0

@given(st.lists(prompts, max_size=9), st.lists(prompts, max_size=5), st.integers(1, 5), st.integers(1, 6))
def test_only_those_are_left_out_whose_next_pages_somebody_before_them_computes(ids, known, page_size,
        at_least):
    cache, queue = new_cache(page_size), [request(i, o) for i, o in enumerate(ids)]
    for o in known: remember(cache, request('before', o))
    goes = []
    for o in queue:
        def shared(other):
            same = next((i for i, (a, b) in enumerate(zip(o.input_ids[:-1], other.input_ids[:-1])) if a != b),
                        min(o.input_len, other.input_len) - 1)
            return same // page_size * page_size - cache.match(o).cached_len
        if not any(shared(other) >= at_least for other in goes): goes.append(o)
    assert list(one_per_shared_prefix(queue, PrefixMatches(cache).of(queue), page_size, at_least)) == goes

@given(waiting_ones, st.lists(prompts, min_size=1, max_size=5))
def test_looking_is_no_use(wishes, known):
    "The same pages are evicted, in the same order, whoever has looked"
    caches = new_cache(), new_cache()
    for cache in caches:
        for i, ids in enumerate(known):
            n = len(ids) // 2
            cache.prefix.insert(np.array(ids[:2*n]), np.arange(100*i, 100*i + n))
    for name in ('lpm', 'dfs-weight'): list(make(name, caches[0]).order(line(wishes)))
    def facts(cache):
        return Counter((node.last_used, node.hits, node.locks) for node in cache.prefix.nodes()
                       for _ in node.pages)
    assert facts(caches[0]) == facts(caches[1])
    while caches[1].prefix.evictable_size:
        assert caches[0].prefix.evict(1).tolist() == caches[1].prefix.evict(1).tolist()

def test_a_shuffle_is_fair_and_a_seed_repeats_it():
    queue = line([dict()]*3)
    policy = Random(new_cache(), seed=0)
    seen = Counter(tuple(policy.order(queue)) for _ in range(3000))
    assert len(seen) == 6 and all(400 < n < 600 for n in seen.values())
    assert [o.rid for _ in range(5) for o in make('random', new_cache()).order(queue)] \
        == [o.rid for _ in range(5) for o in make('random', new_cache()).order(queue)]

def test_only_passes_in_which_somebody_later_left_are_counted():
    policy, queue = Lof(new_cache()), line([dict()]*4)
    for ones in (queue, queue, queue[1:], queue[2:]): policy.order(ones)
    assert list(policy.overtaken.values()) == [0, 0]
    policy.order([queue[2], request('later')])
    assert policy.overtaken[queue[2]] == 1
    policy.order([queue[2]])
    assert policy.overtaken == {queue[2]: 2}

def test_priority_grows_once_for_each_so_many_times():
    policy, patient, seen = Fcfs(new_cache(), age_every=3), request('patient'), []
    for i in range(13):
        vip = request(i, priority=2)
        seen.append(policy.order([patient, vip])[0] is patient)
        policy.order([patient])   # the other has left
    assert seen.index(True) == 6 and all(seen[6:])

def test_prompt_logprobs_stand_aside():
    ids, cache = np.zeros(40, int), new_cache()
    def waiting(*reporting):
        return [request(i, ids, prompt_logprobs=1 if i in reporting else None) for i in range(3)]
    queue = waiting(1)
    assert list(one_per_shared_prefix(queue, PrefixMatches(cache).of(queue), 2, 32)) == queue[:2]
    queue = waiting(0, 1)
    assert list(one_per_shared_prefix(queue, PrefixMatches(cache).of(queue), 2, 32)) == queue

def test_without_a_cache_it_says_so_once_and_goes_by_arrival():
    cache, queue = new_cache(prefix=NaiveCache), line([dict(ids=[1]*40)]*3)
    for name, kind in ((o, policies.find(o)) for o in policies.names):
        if not issubclass(kind, CacheAware):
            assert type(make_policy(name, cache)) is kind
            continue
        with pytest.warns(UserWarning,
                          match=f"policy='{name}' looks at the prefix cache, and cache='none'") as said:
            policy = make_policy(name, cache)
        assert policy.order(queue) == queue and len(said) == 1

# On the real scheduler: a toy engine, room for one or two requests, arrivals without end

class Starts(Observer):
    "Notes who starts, and in which step"
    def __init__(self): self.steps, self.hits = {}, {}
    def launched(self, batch):
        for o in batch.reqs:
            self.steps.setdefault(o.rid, batch.step)
            self.hits.setdefault(o.rid, o.pending.cached_tokens)

def server(policy, rows=1, page_size=4, prefill_tokens=64, overlap=False, age_every=None, max_overtaken=None):
    cache = new_cache(page_size, num_pages=100, rows=rows)
    engine = ToyEngine(cache.table.page_table, cache.table.token_pool, page_size, cache.num_pages, 13)
    config = EngineConfig(max_running_req=rows, max_prefill_tokens=prefill_tokens, overlap=overlap)
    s = Scheduler(engine, cache, 13, clock=lambda: 0., config=config, observer=Starts())
    s.prefill.policy = make_policy(policy, cache, 0, age_every)
    if max_overtaken is not None: s.prefill.policy.inner.max_overtaken = max_overtaken
    return s

def finish(s):
    while s.has_work: s.step()
    s.self_check()

GOOD, BAD = [1, 2, 3, 4]*9, [5, 6, 7, 8]*9

def better_matches(s, n):
    "A stream that always finds more than `unlucky`, which came first; its place among those who start"
    s.add('before', GOOD, SamplingParams(max_tokens=1))
    while s.has_work: s.step()
    s.add('unlucky', BAD, SamplingParams(max_tokens=1))
    for i in range(n):
        s.add(str(i), GOOD + [i % 10], SamplingParams(max_tokens=1))
        while len(s.prefill.waiting) > 1: s.step()
    return sum(step < s.observer.steps.get('unlucky', 10**9) for step in s.observer.steps.values()) - 1

@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('name', ['lpm', 'dfs-weight'])
def test_better_matches_without_end_cannot_starve_anybody(name, overlap):
    for bound in (0, 3, 20):
        s = server(name, overlap=overlap, max_overtaken=bound)
        assert better_matches(s, 40) == bound
        finish(s)
    assert better_matches(server('fcfs'), 10) == 0

def test_the_bound_that_lpm_keeps_by_itself():
    s = server('lpm')
    assert better_matches(s, 100) == s.prefill.policy.inner.max_overtaken == 64
    finish(s)

def test_without_the_bound_a_stream_of_better_matches_starves():
    s = server('lpm', max_overtaken=10**9)
    assert better_matches(s, 100) == 100

def important_ones(s, n):
    "How many of a stream of high priority start before one that came first"
    s.add('first', BAD, SamplingParams(max_tokens=1))
    for i in range(n):
        s.add(str(i), [i % 13], SamplingParams(max_tokens=1, priority=3))
        while len(s.prefill.waiting) > 1: s.step()
    return sum(step < s.observer.steps.get('first', 10**9) for step in s.observer.steps.values())

@pytest.mark.parametrize('name', sorted(policies.names))
def test_important_ones_starve_others_unless_priority_grows(name):
    off, on = server(name), server(name, age_every=5)
    assert important_ones(off, 200) == 200 and 'first' not in off.observer.steps
    first = important_ones(on, 200)
    # equal priority, equal answers
    if name == 'lof': assert 15 <= first <= 15 + on.prefill.policy.inner.max_overtaken
    assert first <= 4*5 + on.prefill.policy.inner.max_overtaken
    finish(off), finish(on)

def test_equal_prompts_compute_their_beginning_once():
    "Four at once: one of them is computed, and of the others the last page"
    for name, hits in ((o, [0, 32, 32, 32]) for o in ('fcfs', 'lpm', 'dfs-weight', 'lof')):
        s = server(name, rows=4, prefill_tokens=1000)
        for i in range(4): s.add(str(i), GOOD, SamplingParams(max_tokens=3, temperature=0))
        finish(s)
        assert [s.observer.hits[str(i)] for i in range(4)] == hits

@pytest.mark.parametrize('overlap', [False, True])
def test_who_follows_goes_next_if_the_first_leaves_nothing(overlap):
    s = server('lpm', rows=4, prefill_tokens=1000, overlap=overlap)
    for i in range(3): s.add(str(i), GOOD, SamplingParams(max_tokens=3))
    assert [o.rid for o in s.prefill.policy.order([*s.prefill.waiting.values()])] == ['0']
    s.abort('0')          # aborted while it waits
    s.step()
    assert '1' in s.observer.steps and '2' not in s.observer.steps
    s.engine.nan_rids.add('1')     # fails
    s.step()
    s.step()
    assert '2' in s.observer.steps
    finish(s)

@given(names, st.booleans(), st.lists(st.tuples(prompts, st.integers(0, 2), st.integers(-2, 2)), min_size=1,
                                      max_size=8), st.sampled_from([None, 1, 3]))
def test_all_are_answered_as_if_alone(name, overlap, asked, age_every):
    s, told = server(name, rows=2, page_size=2, prefill_tokens=8, overlap=overlap, age_every=age_every), {}
    for i, (ids, n, priority) in enumerate(asked):
        s.add(str(i), ids*4, SamplingParams(max_tokens=n, temperature=0, priority=priority))
        if n == 2:
            for o in s.step(): told.setdefault(o.rid, []).extend(o.token_ids)
    while s.has_work:
        for o in s.step(): told.setdefault(o.rid, []).extend(o.token_ids)
    s.self_check()
    assert {rid: o for rid, o in told.items() if o} == {str(i): expected_output(ids*4, n, 13)
        for i, (ids, n, _) in enumerate(asked) if n}

class Patient(Fcfs):
    "The shortest first, and before them who has waited for long"
    def keys(self, waiting):
        return [float('-inf') if self.clock() - o.arrival > 30 else o.input_len for o in waiting]

def test_a_policy_asks_the_clock_of_the_scheduler(monkeypatch):
    monkeypatch.setitem(policies, 'patient', Patient)
    s, now = server('fcfs'), [1000.]
    s.clock = lambda: now[0]
    s.prefill.policy = make_policy('patient', s.cache, clock=s.clock)
    s.add('busy', [1], SamplingParams(max_tokens=3))
    s.step()
    for rid, n in (('long', 20), ('middle', 10), ('short', 5)):
        s.add(rid, [2] * n, SamplingParams(max_tokens=1))
        now[0] += 20.
    finish(s)
    assert [*s.observer.steps] == ['busy', 'long', 'middle', 'short']   # 60, 40 and 20 seconds
    config = EngineConfig(max_running_req=1, max_prefill_tokens=64, overlap=False)
    made = Scheduler(s.engine, new_cache(rows=1), 13, clock=s.clock, config=config)
    assert made.prefill.policy.inner.clock is s.clock
