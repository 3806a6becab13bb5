"""The radix cache and the ledger of pages against models that make the same promises in the plainest way."""
import gc, os, sys, tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                 run_state_machine_as_test)

from minisgl_lit.core.request import PendingReq, Req
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.kv_cache import radix as chapter
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.eviction import evictions
from minisgl_lit.core.kv_cache.radix import NaiveCache, RadixCache, make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager

SIZES = [1, 2, 7, 16]
keys = st.sampled_from([None, None, 'bank', ''])
# whole pages, then so many tokens of another
texts = st.tuples(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), max_size=5), st.integers(0, 15))

def toks(text, size):
    "Pages of four kinds that differ in their first token, their last, or both; so the kinds need care"
    kinds, rest = text
    page = lambda kind: ([kind] if size == 1 else [kind % 2] + [9]*(size - 2) + [kind // 2])
    return np.array([t for kind in kinds for t in page(kind)] + page(0)[:rest % size], dtype=np.int32)

def lives(machine, examples, steps=30):
    "So many random lives of a state machine"
    run_state_machine_as_test(machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
                          database=None, suppress_health_check=list(HealthCheck)))

class Page:
    "A page of the model, which comes after the page `up`"
    def __init__(self, number, up, step, priority):
        self.number, self.up, self.created, self.used, self.priority = number, up, step, step, priority
        self.locks = self.hits = self.removed = 0

# which of two pages goes first, said once more and in another way
better = dict(
    lru=lambda a, b: a.used < b.used, mru=lambda a, b: a.used > b.used,
    fifo=lambda a, b: a.created < b.created, filo=lambda a, b: a.created > b.created,
    lfu=lambda a, b: a.hits < b.hits or a.hits == b.hits and a.used < b.used,
    slru=lambda a, b: (not a.hits) > (not b.hits) or (not a.hits) == (not b.hits) and a.used < b.used,
    priority=lambda a, b: a.priority < b.priority or a.priority == b.priority and a.used < b.used)

def test_every_eviction_is_said_twice(): assert better.keys() == evictions.keys()

class Model:
    "A dictionary from each prefix of whole pages to its page; nothing is fast, nothing is clever"
    def __init__(self, size, eviction):
        self.size, self.better, self.found, self.step = size, better[eviction], {}, 0

    def prefixes(self, ids, key):
        ids = tuple(ids.tolist())
        return [(key, ids[:n]) for n in range(self.size, len(ids) + 1, self.size)]

    def match(self, ids, key):
        "The way along `ids` as far as it is known"
        way = []
        for p in self.prefixes(ids, key):
            if p not in self.found: break
            way.append(self.found[p])
        return way

    def use(self, way, locks, priority):
        self.step += 1
        for o in way: o.used, o.locks, o.priority = self.step, o.locks + locks, max(o.priority, priority)

    def extend(self, way, ids, numbers, first, key, priority):
        "The way along `ids`, which goes on from the locked `way`; its lock is on all of it"
        new = [self.found.get(p) for p in self.prefixes(ids, key)][len(way):]
        for o in [*way*first, *new]:
            if o: o.hits += 1
        for i, number in enumerate(numbers):
            if new[i] is None:
                new[i] = Page(number, ([*way, *new[:i]] or [None])[-1], self.step, priority)
                self.found[self.prefixes(ids, key)[len(way) + i]] = new[i]
        self.use(new, 1, priority)
        return way + new

    def free(self): return [o for o in self.found.values() if not o.locks]

    def hide(self, top):
        "A page and all that come after it are not found any more, but they are still there"
        for p, o in list(self.found.items()):
            way = [o]
            while way[-1].up: way.append(way[-1].up)
            if top in way: o.removed, self.found[id(o), p] = 1, self.found.pop(p)

    def drop(self, gone): self.found = {p: o for p, o in self.found.items() if o not in gone}

    def check_evicted(self, n, numbers):
        """These were given up: first what is bad, in any order; then, page by page, the best among those that
        nothing comes after"""
        bad = [o for o in self.free() if o.removed]
        gone = [o for o in bad if o.number in numbers]
        assert len(gone) == min(n, len(bad))
        self.drop(gone)
        while len(gone) < n and (free := self.free()):
            inner = {id(o.up) for o in self.found.values()}
            victim, *others = [o for o in free if id(o) not in inner]
            for o in others:
                if self.better(o, victim): victim = o
            self.drop([victim])
            gone.append(victim)
        assert sorted(o.number for o in gone) == sorted(numbers)

class Radix(RuleBasedStateMachine):
    "One tree and one model; rules are what a cache can be asked"
    @initialize(size=st.sampled_from(SIZES), eviction=st.sampled_from(sorted(better)))
    def start(self, size, eviction):
        self.cache, self.model, self.held, self.made = (RadixCache(size, eviction), Model(size, eviction), [],
            0)

    def numbers(self, ids):
        "New pages for these tokens"
        n = len(ids) // self.cache.page_size
        self.made += n
        return np.arange(self.made - n, self.made)

    @rule(text=texts, key=keys, priority=st.integers(-1, 1), locks=st.integers(0, 2))
    def match(self, text, key, priority, locks):
        ids = toks(text, self.cache.page_size)
        handle, way = self.cache.match_prefix(ids, key, priority), self.model.match(ids, key)
        assert (handle.cached_len, handle.pages.tolist()) == (len(way)*self.model.size,
            [o.number for o in way])
        for _ in range(locks):
            self.cache.lock(handle)
            self.model.use(way, 1, priority)
            self.held.append((handle, way, ids[:handle.cached_len]))

    @rule(text=texts, key=keys, priority=st.integers(-1, 1))
    def insert(self, text, key, priority):
        ids = toks((text[0], 0), self.cache.page_size)
        numbers = self.numbers(ids)
        self.model.use([], 1, priority)
        way = self.model.extend([], ids, numbers, True, key, priority)
        self.model.use(way, -1, priority)
        found = self.cache.insert(ids, numbers, key, priority)
        assert found.pages.tolist() == [o.number for o in way] and found.handle.cached_len == len(ids)

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0), text=texts)
    def extend(self, i, text):
        i %= len(self.held)
        handle, way, before = self.held[i]
        if handle.locks > 1: return
        ids = toks((text[0], 0), self.cache.page_size)
        numbers, whole = self.numbers(ids), np.concatenate([before, ids])
        if handle.invalid:
            assert len(self.cache.extend(handle, ids, numbers)) == 0
            return
        longer = self.model.extend(way, whole, numbers, handle.matched_len is None, handle.extra_key,
                                   handle.priority)
        assert self.cache.extend(handle, ids, numbers).tolist() == [o.number for o in longer[len(way):]]
        self.held[i] = handle, longer, whole

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0))
    def unlock(self, i):
        handle, way, _ = self.held.pop(i % len(self.held))
        self.cache.unlock(handle)
        self.model.use(way, -1, handle.priority)

    @rule(n=st.integers(0, 7))
    def evict(self, n): self.model.check_evicted(n, self.cache.evict(n).tolist())

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0))
    def remove(self, i):
        handle, way, _ = self.held[i % len(self.held)]
        own = way[(handle.cached_len if handle.matched_len is None else handle.matched_len)//self.model.size:]
        self.cache.invalidate(handle)
        if own: self.model.hide(own[0])

    @rule()
    def reset(self):
        if self.held:
            with pytest.raises(RuntimeError, match=f'{len(self.held)} of them'): self.cache.reset()
        else: self.model.check_evicted(10**6, self.cache.reset().tolist())

    @invariant()
    def all_is_as_the_model_says(self):
        if not hasattr(self, 'cache'): return
        self.cache.check_integrity()
        pages, free = self.model.found.values(), self.model.free()
        assert sorted(self.cache.all_pages().tolist()) == sorted(o.number for o in pages)
        assert (self.cache.evictable_size, self.cache.protected_size) == (len(free), len(pages) - len(free))
        for handle, way, ids in self.held:
            assert (handle.cached_len, handle.pages.tolist()) == (len(ids), [o.number for o in way])
            assert handle.invalid == any(o.removed for o in way)

def test_tree_keeps_the_promises_of_a_dictionary(): lives(Radix, int(os.environ.get('TST_EXAMPLES', 150)))

@pytest.mark.long
def test_tree_keeps_them_in_thousands_of_lives(): lives(Radix, 5000, steps=60)

class Ledger(RuleBasedStateMachine):
    """One pool and a few requests that are computed by hand, in batches that complete later.

    `content` is what the engine has written into each page: the tokens of a prefix up to the end of that
    page.
    """
    @initialize(size=st.sampled_from(SIZES), num_pages=st.integers(5, 14), rows=st.integers(1, 4),
                kind=st.sampled_from(['radix', 'radix', 'none']))
    def start(self, size, num_pages, rows, kind):
        table = TableManager(rows, num_pages*size, size, dummy_page=num_pages)
        self.cache, self.size = CacheManager(num_pages, table, make_prefix_cache(kind, size)), size
        self.table, self.lengths = table, table.lengths
        self.running, self.flying, self.rows, self.content, self.bad = [], {}, [], {}, set()
        self.launched = self.completed = self.n = 0

    def compute(self, p, end):
        "Launch a batch for one request: it gets pages, and its tokens up to `end` are computed"
        row, start = p.table_idx, int(self.lengths.cached_len[p.table_idx])
        first, last = self.cache.pages_for(start), self.cache.pages_for(end)
        pages = self.cache.allocate(last - first)
        in_use = set().union(*self.flying.values())
        assert not in_use & set(pages.tolist()), 'lent while a launched batch uses it'
        self.bad -= set(pages.tolist())
        self.table.write(np.full(len(pages), row), np.arange(first, last), pages)
        self.launched += 1
        self.lengths.cached_len[row], self.lengths.launched[row] = end, self.launched
        mine = self.table.pages[row, :last].tolist()
        for i in range(start // self.size, last):
            self.content[mine[i]] = p.pending.tokens[:min(end, (i + 1)*self.size)].tolist()
        self.reads(p)
        self.flying[self.launched] = set(mine)

    def reads(self, p):
        "What a request reads is of its own prefix"
        end = int(self.lengths.cached_len[p.table_idx])
        for i, page in enumerate(self.table.pages[p.table_idx, :self.cache.pages_for(end)].tolist()):
            want = p.pending.tokens[:min(end, (i + 1)*self.size)].tolist()
            assert self.content[page][:len(want)] == want, f'{p.rid} reads another text in page {page}'

    @precondition(lambda self: self.table.available_size)
    @rule(text=texts, chunk=st.integers(1, 40), more=st.integers(0, 9))
    def admit(self, text, chunk, more):
        ids, room = toks(text, self.size), self.cache.num_pages*self.size
        if not 0 < len(ids) <= room: return
        p = PendingReq(str(self.n), ids, SamplingParams(), max_len=min(len(ids) + more, room))
        handle = self.cache.match(p)
        assert handle.cached_len < len(ids), 'a token must be left to compute'
        assert not self.bad & set(handle.pages.tolist()), 'bad pages are found'
        self.cache.lock(handle)
        end = min(handle.cached_len + chunk, len(ids))
        if self.cache.pages_for(end) - handle.cached_len // self.size > self.cache.ready_size:
            return self.cache.unlock(handle)
        self.n += 1
        p, pages = Req(p, self.table.allocate(), handle, self.lengths), handle.pages
        self.table.write(np.full(len(pages), p.table_idx), np.arange(len(pages)), pages)
        self.lengths.cached_len[p.table_idx] = handle.cached_len
        self.running.append(p)
        self.compute(p, end)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0), chunk=st.integers(1, 40))
    def go_on(self, i, chunk):
        "The next piece of a prompt, or the next token of an answer"
        p = self.running[i % len(self.running)]
        start = int(self.lengths.cached_len[p.table_idx])
        if start == p.pending.n_tokens:
            if p.pending.n_tokens == p.pending.max_len: return
            p.pending.append(i % 4)
        end = min(start + chunk, p.pending.n_tokens)
        if self.cache.pages_for(end) - self.cache.pages_for(start) <= self.cache.ready_size:
            self.compute(p, end)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0))
    def share(self, i): self.cache.cache_unfinished(self.running[i % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0), keep=st.booleans())
    def end(self, i, keep):
        p = self.running.pop(i % len(self.running))
        available = self.cache.available_size + self.cache.freed_by([p])
        self.rows.append((int(self.lengths.launched[p.table_idx]), p.table_idx))
        self.cache.cache_finished(p, keep)
        if self.completed == self.launched:
            self.cache.collect(self.completed)
            assert self.cache.available_size == available

    @precondition(lambda self: self.completed < self.launched)
    @rule()
    def complete(self):
        self.completed += 1
        del self.flying[self.completed]
        self.cache.collect(self.completed)
        for step, row in self.rows:
            if step <= self.completed: self.table.free(row)
        self.rows = [o for o in self.rows if o[0] > self.completed]

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0), shared=st.booleans())
    def lose_numbers(self, i, shared):
        """A request is bad: it goes, those who read what it has shared begin anew, and what it has shared is
        not found again"""
        p = self.running[i % len(self.running)]
        if shared: self.cache.cache_unfinished(p)
        own = set(p.handle.pages[(p.handle.cached_len if p.handle.matched_len is None
                                  else p.handle.matched_len)//self.size:].tolist())
        others = [o for o in self.running if o is not p]
        readers = [o for o in others if own & set(o.handle.pages.tolist())]
        assert self.cache.invalidate(p, self.running) == readers
        for o in [p, *readers]:
            pages = o.handle.pages.tolist()
            self.bad |= set(pages[min((pages.index(b) for b in own if b in pages), default=len(pages)):])
            self.end(self.running.index(o), False)

    @rule()
    def flush(self): self.cache.flush()

    @rule()
    def reset(self):
        if self.cache.prefix.root.locks:
            with pytest.raises(RequestError, match='only while nothing runs'): self.cache.reset()
        else: self.cache.reset()

    @invariant()
    def every_page_has_one_owner(self):
        if not hasattr(self, 'cache'): return
        self.cache.check_integrity(self.running)
        assert sum(self.cache.page_counts.values()) == self.cache.num_pages
        assert self.cache.ready_size <= self.cache.available_size <= self.cache.num_pages
        for p in self.running: self.reads(p)

    def teardown(self):
        if not hasattr(self, 'cache'): return
        while self.running: self.end(0, True)
        while self.completed < self.launched: self.complete()
        self.cache.collect(self.completed)
        self.cache.check_integrity()
        assert self.cache.prefix.root.locks == 0
        self.cache.flush()
        assert self.cache.page_counts == dict(free=self.cache.num_pages, evictable=0, protected=0, held=0)

def test_every_page_has_one_owner(): lives(Ledger, int(os.environ.get('TST_EXAMPLES', 150)))

@pytest.mark.long
def test_every_page_has_one_owner_in_thousands_of_lives(): lives(Ledger, 5000, steps=60)

def count_calls(work):
    "Calls of Python and C functions: what an operation costs, whatever else the machine is doing"
    n = Counter()
    def see(frame, event, arg): n[event in ('call', 'c_call')] += 1
    gc.disable()   # what it calls is not the operation's
    sys.setprofile(see)
    try: work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n[True]

def peak_bytes(work):
    "Memory that an operation needs at once"
    tracemalloc.start()
    try: work(); return tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()

def bush(n, size=4, eviction='lru'):
    "A tree of `n` leaves of one page below one shared page, and prompts for it and beyond"
    ids = np.zeros((n + 50, 2*size), dtype=np.int32)
    ids[:, size:] = np.arange(n + 50)[:, None]
    cache = RadixCache(size, eviction)
    for i in range(n): cache.insert(ids[i], [0, i + 1])
    cache._heap.sweep_at = 10**9    # paid for by many operations, so it is no part of one
    return cache, ids

def test_no_operation_walks_the_tree():
    costs = []
    for n in (100, 10_000):
        cache, ids = bush(n)
        held = cache.insert(ids[n + 1], [0, n + 2]).handle
        cache.lock(held)
        ops = dict(match=lambda: cache.match_prefix(ids[7]),
                   lock=lambda: cache.lock(cache.match_prefix(ids[8])),
                   unlock=lambda: cache.unlock(held), insert=lambda: cache.insert(ids[n], [0, n + 1]),
                   evict=lambda: cache.evict(20))
        costs.append({name: count_calls(op) for name, op in ops.items()})
    assert costs[0] == costs[1] and min(costs[0].values()) > 3, costs

def chain(size=4, prefix=None, n_tokens=4000, piece=200):
    "A prompt that is handed over in pieces; calls and bytes of its last piece, and calls of all"
    num_pages = -(-n_tokens // size)
    table = TableManager(1, n_tokens, size, dummy_page=num_pages)
    cache = CacheManager(num_pages, table, prefix or RadixCache(size))
    p = PendingReq('a', np.arange(n_tokens), SamplingParams(), max_len=n_tokens)
    p = Req(p, table.allocate(), cache.match(p), table.lengths)
    cache.lock(p.handle)
    pages, calls = cache.allocate(num_pages), 0
    table.write(np.zeros(num_pages, dtype=int), np.arange(num_pages), pages)
    for end in range(piece, n_tokens, piece):
        table.lengths.cached_len[p.table_idx] = end
        calls += count_calls(lambda: cache.cache_unfinished(p))
    table.lengths.cached_len[p.table_idx] = n_tokens
    last = peak_bytes(lambda: cache.cache_unfinished(p))
    cache.check_integrity([p])
    return calls, last

def test_a_long_prompt_in_pieces_is_not_copied_again_and_again():
    (few, small), (many, large) = chain(n_tokens=4_000), chain(n_tokens=40_000)
    assert many < 11*few and large < 1.2*small + 500, (few, many, small, large)

@pytest.mark.parametrize('eviction', ['lru', 'mru', 'lfu'])
def test_the_heap_does_not_outgrow_the_tree(eviction):
    cache, ids = bush(600, eviction=eviction)
    cache._heap.sweep_at, used, rng = 1000, {i: (0, i - 600) for i in range(600)}, np.random.default_rng(0)
    for step, i in enumerate(rng.integers(0, 600, 5_000).tolist()):
        cache.insert(ids[i], [0, i + 1])
        used[i] = used[i][0] + 1, step
        assert len(cache._heap.entries) <= 2200 + 1
    cache.check_integrity()
    assert 2000 < cache._heap.sweep_at <= 2200
    rank = dict(lru=lambda i: used[i][1], mru=lambda i: -used[i][1], lfu=lambda i: used[i])[eviction]
    assert cache.evict(600).tolist() == [i + 1 for i in sorted(used, key=rank)]

def test_a_rank_that_fell_while_it_was_locked_counts():
    """Most recently used first, and one is used again and again: it has many old entries, and goes first all
    the same"""
    other, ids = bush(5, eviction='mru')
    for _ in range(3):
        handle = other.match_prefix(ids[2])
        other.lock(handle)
        other.unlock(handle)
    assert other.evict(2).tolist() == [3, 5]

def test_a_page_is_as_important_as_the_most_important_who_uses_it():
    cache = RadixCache(1, 'priority')
    def use(ids, **priority):
        handle = cache.match_prefix(np.array(ids), **priority)
        cache.lock(handle)
        cache.unlock(handle)
    for token, priority in ((1, dict(priority=3)), (2, {}), (3, dict(priority=1)), (4, dict(priority=-1)),
                            (5, {})):
        cache.insert([token], [token], **priority)
    use([5], priority=2)
    use([1], priority=-7)
    use([2])
    use([4])
    assert cache.evict(5).tolist() == [2, 4, 3, 5, 1]

def test_the_largest_first(monkeypatch):
    "A rank that rises by itself, when a match splits a node"
    monkeypatch.setitem(evictions, 'largest', lambda node: (-len(node.pages),))
    cache = RadixCache(1, 'largest')
    cache.insert(np.array([1, 1, 1, 1, 1]), np.arange(5))
    cache.insert(np.array([2, 2, 2]), np.arange(5, 8))
    cache.insert(np.array([1, 1, 1, 9]), np.array([0, 1, 2, 8]))   # the first has two pages of its own now
    cache.check_integrity()
    assert cache.evict(1).tolist() == [7]
    cache.check_integrity()
    assert cache.evict(3).tolist() == [3, 4, 6]

def broken(how):
    """A small tree: pages 0 and 1, below them page 2 (locked, with 1 and 0) and page 3; one thing in it is
    changed"""
    cache = RadixCache(2)
    cache.lock(cache.insert(np.array([1, 1, 2, 2, 3, 3]), np.array([0, 1, 2])).handle)
    cache.insert(np.array([1, 1, 2, 2, 4, 4]), np.array([0, 1, 3]))
    cache.check_integrity()
    top, = cache.root.children.values()
    locked, free = sorted(top.children.values(), key=lambda o: o.pages[0])
    how(cache, top, locked, free)
    return cache

def drop_entry(cache, top, locked, free): free.entry_no = 0
def late_entry(cache, top, locked, free): cache._heap.entries = [(99, *o[-2:]) for o in cache._heap.entries]
def extra_entry(cache, top, locked, free): locked.entry_no = free.entry_no
def short_key(cache, top, locked, free): free.key = free.key[:1]
def no_pages(cache, top, locked, free): free.key, free.pages = free.key[:0], free.pages[:0]
def wrong_name(cache, top, locked, free): free.key = free.key + 1
def wrong_place(cache, top, locked, free): top.children[None, b'?'] = top.children.pop(free.name)
def wrong_parent(cache, top, locked, free): free.parent = locked
def wrong_key(cache, top, locked, free):
    del top.children[free.name]
    free.name = 'bank', free.name[1]
    top.children[free.name] = free
def hidden(cache, top, locked, free):
    del top.children[free.name]
    free.name = 7, b''
    top.children[free.name] = free
def removed_above(cache, top, locked, free): top.invalid = True
def lost_lock(cache, top, locked, free): top.locks = 0
def wrong_time(cache, top, locked, free):
    cache.unlock(chapter.PrefixHandle(locked, 6, locks=1))
    free.last_used = 99
    late_entry(cache, top, locked, free)
def wrong_evictable(cache, top, locked, free): cache.evictable_size += 1
def wrong_protected(cache, top, locked, free): cache.protected_size -= 1
def twice(cache, top, locked, free): free.pages = locked.pages

@pytest.mark.parametrize('how,claim', [
    (drop_entry, r'node of pages \[3\] has an entry if it can be evicted'),
    (extra_entry, r'node of pages \[2\] has an entry if it can be evicted'),
    (late_entry, r'node of pages \[3\] is not evicted too late'),
    (short_key, r'node of pages \[3\] has their tokens'),
    (no_pages, r'node of pages \[\] has pages, or is the root'),
    (wrong_name, r'node of pages \[3\] is named by its first page'),
    (wrong_key, r'node of pages \[0, 1\] is in one namespace with its children'),
    (hidden, r'node of pages \[3\] is invalid if it is hidden'),
    (removed_above, r'node of pages \[0, 1\] is invalid with all below'),
    (wrong_place, r'node of pages \[0, 1\] has its children by name'),
    (wrong_parent, r'node of pages \[0, 1\] is the parent of its children'),
    (lost_lock, r'node of pages \[0, 1\] has the locks of its children'),
    (wrong_time, r'node of pages \[0, 1\] was used when they were'),
    (wrong_evictable, 'evictable_size 2 is 1'), (wrong_protected, 'protected_size 2 is 3'),
    (twice, 'page 2 is in one place')], ids=lambda o: getattr(o, '__name__', ''))
def test_check_names_the_claim_that_is_false(how, claim):
    with pytest.raises(RuntimeError, match=f'not true that {claim}'): broken(how).check_integrity()

def ledger():
    "Page 0 in the tree, 1 and 2 of request a, 3 of request b, 4 waiting, 5 free"
    table = TableManager(2, 6, 2, dummy_page=6)
    cache, ps = CacheManager(6, table, RadixCache(2)), []
    cache.prefix.insert(np.array([8, 8]), cache.allocate(1))
    cache._allocated[0], cache.held_size = False, 0
    for rid, n in (('a', 2), ('b', 1)):
        p = PendingReq(rid, np.arange(2*n), SamplingParams(), max_len=6)
        p = Req(p, table.allocate(), cache.prefix.match_prefix(p.input_ids[:0]), table.lengths)
        cache.lock(p.handle)
        table.write(np.full(n, p.table_idx), np.arange(n), cache.allocate(n))
        table.lengths.cached_len[p.table_idx] = 2*n
        ps.append(p)
    cache._release(cache.allocate(1), step=1)
    cache.check_integrity(ps)
    return cache, ps

def say(cache, who, page):
    "Let somebody say that a page is his"
    if who == 'b': cache.table.pages[1, 0] = page
    if who == 'waiting': cache.releasing._waiting[0][1][0] = page
    if who == 'free': cache._stack[0] = page
    if who == 'tree': next(iter(cache.prefix.root.children.values())).pages[0] = page

@pytest.mark.parametrize('who,page,owners', [
    ('b', 1, 'a and to b'), ('b', 0, 'tree and to b'), ('b', 4, 'waiting and to b'),
    ('b', 5, 'free and to b'), ('waiting', 5, 'free and to waiting'), ('waiting', 0, 'tree and to waiting'),
    ('waiting', 1, 'waiting and to a'), ('free', 0, 'free and to tree'), ('free', 1, 'free and to a'),
    ('free', 4, 'free and to waiting'), ('tree', 5, 'free and to tree'), ('tree', 1, 'tree and to a'),
    ('tree', 4, 'tree and to waiting')])
def test_integrity_names_the_page_and_both_owners(who, page, owners):
    cache, ps = ledger()
    say(cache, who, page)
    with pytest.raises(RuntimeError, match=f'page {page} belongs to {owners}$'): cache.check_integrity(ps)

def forget(cache): cache.table.lengths.cached_len[1] = 0
def count(cache): cache.held_size += 1
def tree_count(cache): cache.prefix.evictable_size -= 1; cache.held_size += 1

def unmarked(cache): cache._allocated[1:3] = False
def in_tree(cache): cache.prefix.root.last_used = -1; cache.prefix.root.locks = 0

@pytest.mark.parametrize('how,text',
                         [(forget, r'pages \[3\] have no owner'), (count, 'of 6 pages, 1 in the tree'),
                          (tree_count, 'of 6 pages, 1 in the tree'), (unmarked, 'and 2 allocated or waiting'),
                          (in_tree, 'prefix tree: it is not true')])
def test_integrity_says_what_is_wrong(how, text):
    cache, ps = ledger()
    how(cache)
    with pytest.raises(RuntimeError, match=text): cache.check_integrity(ps)

def test_what_was_handed_over_is_not_taken_back():
    """A request that has shared a page may end with less known than it had shared (its last token is not
    trusted)"""
    cache, (a, b) = ledger()
    cache.cache_unfinished(a)
    assert (a.handle.cached_len, cache.prefix.protected_size) == (4, 2)
    a.pending.input_len = a.pending.n_tokens = 3    # as if the rest had been its answer
    cache.cache_finished(a)
    cache.check_integrity([b])
    cache.collect(9)
    assert cache.page_counts == dict(free=2, evictable=3, protected=0, held=1)

def alone_in(cache, n_tokens, rid='a'):
    "A request with so many tokens, all computed in pages of its own"
    p, table = PendingReq(rid, np.arange(n_tokens), SamplingParams(), max_len=6), cache.table
    p, n = (Req(p, table.allocate(), cache.prefix.match_prefix(p.input_ids[:0]), table.lengths),
            cache.pages_for(n_tokens))
    cache.lock(p.handle)
    table.write(np.full(n, p.table_idx), np.arange(n), cache.allocate(n))
    table.lengths.cached_len[p.table_idx] = n_tokens
    return p

def test_the_last_token_of_an_answer_is_not_trusted():
    cache = CacheManager(6, TableManager(2, 6, 2, dummy_page=6), RadixCache(2))
    p = alone_in(cache, 4)
    p.pending.input_len = 1
    cache.cache_finished(p)
    assert (len(cache.prefix.all_pages()), cache.releasing.size) == (1, 1)
    cache.cache_finished(alone_in(cache, 4), keep=False)
    assert (len(cache.prefix.all_pages()), cache.releasing.size) == (1, 3)

def test_a_row_is_repointed_page_by_page():
    cache = CacheManager(6, TableManager(2, 6, 2, dummy_page=6), RadixCache(2))
    a, b = alone_in(cache, 6), alone_in(cache, 6, 'b')
    cache.table.lengths.cached_len[1] = 2
    cache.cache_unfinished(a)
    cache.cache_unfinished(b)
    cache.table.lengths.cached_len[1] = 6
    cache.cache_unfinished(b)
    assert cache.table.pages[:2].tolist() == [[0, 1, 2]]*2 and cache.releasing.items().tolist() == [3, 4, 5]
    cache.check_integrity([a, b])

def test_a_copy_waits_for_the_batch_that_reads_it():
    cache = CacheManager(6, TableManager(2, 6, 2, dummy_page=6), RadixCache(2))
    a, b = alone_in(cache, 4), alone_in(cache, 4, 'b')
    cache.table.lengths.launched[1] = 3
    cache.cache_unfinished(a)
    cache.cache_unfinished(b)
    cache.collect(2)
    assert (cache.ready_size, cache.releasing.items().tolist()) == (2, [2, 3])
    cache.collect(3)
    assert (cache.ready_size, cache.releasing.size) == (4, 0)

def test_what_sending_somebody_away_would_bring():
    "His own pages, and those of the tree that nobody else has locked"
    cache = CacheManager(6, TableManager(2, 6, 2, dummy_page=6), RadixCache(2))
    a, b = alone_in(cache, 5), alone_in(cache, 3, 'b')
    cache.cache_unfinished(a)
    cache.cache_unfinished(b)    # page 0 is locked by both
    assert [cache.freed_by(o) for o in ([], [a], [b], [a, b])] == [0, 2, 1, 4]

def test_pages_stay_what_they_were_when_lent():
    cache = CacheManager(6, TableManager(2, 6, 2, dummy_page=6), NaiveCache(2))
    first, second = cache.allocate(2), cache.allocate(3)
    cache._release(second, 1)
    cache._release(first[:1], 1)
    cache.collect(1)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])

def test_tokens_may_come_as_any_whole_numbers():
    cache, ids = RadixCache(2), [5, 6, 7, 8]
    cache.insert(ids, [0, 1])
    for same in (ids, np.array(ids), np.array(ids, dtype=np.int32)):
        assert cache.match_prefix(same).cached_len == 4
    cache.lock(handle := cache.match_prefix(ids))
    assert cache.extend(handle, np.array([9, 9]), np.array([2])).tolist() == [2]
    assert cache.match_prefix(ids + [9, 9]).pages.tolist() == [0, 1, 2]

def test_a_hit_is_counted_once_and_on_all_that_was_found():
    cache = RadixCache(2)
    for ids, pages in (([1, 1], [0]), ([1, 1, 2, 2], [0, 1])): cache.insert(ids, pages)
    cache.lock(handle := cache.match_prefix([1, 1, 2, 2, 3, 3]))
    assert [node.hits for node in handle.path[1:]] == [1, 0]    # the second insertion has found page 0
    for token, page in ((3, 2), (4, 3)): cache.extend(handle, [token]*2, [page])
    assert [node.hits for node in handle.path[1:]] == [2, 1, 0, 0]

def test_the_tree_has_arrays_of_its_own():
    cache, ids, pages = (RadixCache(2), np.array([1, 1, 2, 2], dtype=np.int32),
                         np.array([0, 1], dtype=np.int32))
    cache.insert(ids, pages)
    ids[:], pages[:] = 9, 9
    head = cache.match_prefix([1, 1, 3, 3]).node
    assert cache.match_prefix([1, 1, 2, 2]).pages.tolist() == [0, 1]
    # as views they would keep the memory of the tail alive
    assert (head.key.base, head.pages.base) == (None, None)

def test_only_a_locked_prefix_can_be_removed():
    cache = RadixCache(2)
    cache.lock(handle := cache.match_prefix([1, 1]))
    cache.extend(handle, [1, 1], [0])
    cache.unlock(handle)
    with pytest.raises(RuntimeError, match='2 tokens must be locked to be invalidated'):
        cache.invalidate(handle)
    assert cache.match_prefix([1, 1]).cached_len == 2

def test_all_that_was_added_is_removed():
    "In however many pieces, and once more: it does not matter if that was done before"
    cache = RadixCache(2)
    cache.insert([1, 1], [0])
    cache.lock(handle := cache.match_prefix([1, 1, 2, 2]))
    for token, page in ((2, 1), (3, 2), (4, 3)): cache.extend(handle, [token]*2, [page])
    for _ in range(2):
        cache.invalidate(handle)
        cache.check_integrity()
        assert cache.match_prefix([1, 1, 2, 2, 3, 3, 4, 4]).pages.tolist() == [0]
    cache.lock(found := cache.match_prefix([1, 1]))
    cache.invalidate(found)    # it has added nothing
    assert (found.invalid, cache.match_prefix([1, 1]).cached_len) == (False, 2)
    cache.unlock(handle)
    assert sorted(cache.evict(9).tolist()) == [1, 2, 3]
    cache.check_integrity()

def test_a_bad_page_that_nobody_uses_goes_first():
    cache = RadixCache(2)
    cache.insert([1, 1], [0])
    cache.lock(bad := cache.match_prefix([2, 2]))
    cache.extend(bad, [2, 2], [1])
    cache.insert([2, 2, 3, 3], [1, 2])    # somebody has added to it, and is gone
    cache.invalidate(bad)
    cache.check_integrity()
    assert cache.evict(1).tolist() == [2]
