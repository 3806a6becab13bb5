"""The weekend's scheduler and the real one in lockstep, on the toy engine: the same messages between the same
steps, and the same batches, rows, slots, cached lengths, evictions, tokens and ends. `python
tests/weekend_oracle.py 200 [seed]` lives so many lives, `… mutants` says which mutants of scheduler and cache
they notice.

What the weekend leaves out is switched off in the real one: no overlap, `fcfs`, reserving admission, chunks
as long as a step may be, no prompt that lets others pass; and its queue is tried in every step, which changes
nothing but what was used last.
"""
import os, random, re, subprocess, sys, tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import Batch, FinishReason, ForwardMode
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import WorkerStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.scheduler.scheduler import Observer
from minisgl_lit.core.scheduler.policy import Fcfs
from minisgl_lit.core.scheduler.prefill import PrefillAdder
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine
from minisgl_lit.weekend import batch, decode, pages, prefill, radix

VOCAB = 50

class Toy:
    "The toy engine, called as the weekend's scheduler calls an engine; it checks every batch"
    def __init__(self, table, num_pages):
        self.toy = ToyEngine(table.page_table.numpy(), table.token_pool.numpy(), table.page_size, num_pages,
                             VOCAB)

    def forward_batch(self, small):
        reqs = [SimpleNamespace(rid=o.rid, pending=SimpleNamespace(input_ids=np.array(o.tokens)))
                for o in small.reqs]
        arrays = [np.asarray(o, dtype=np.int64) for o in shape(small)[1:]]
        rows, cached, device, out_loc, sampled = arrays
        owners = rows.repeat(device - cached)
        same = Batch(reqs, ForwardMode.PREFILL, small.number, rows, cached, device, owners,
                     small.positions.numpy(), out_loc, sampled)
        out = self.toy.sample(same, self.toy.forward(same))
        out.copy_done.synchronize()
        return torch.from_numpy(out.next_tokens)

def shape(batch):
    "What is compared of a batch, and in this order"
    return ([o.rid for o in batch.reqs], *(np.asarray(o).tolist()
        for o in (batch.rows, batch.cached_lens, batch.device_lens, batch.out_loc, batch.sampled)))

class Seen(Observer):
    def __init__(self): self.batches = []
    def launched(self, batch): self.batches.append(shape(batch))

def real(size, overlap=False):
    "The real scheduler, without what the weekend leaves out"
    table = TableManager(size.rows, size.max_len, size.page, size.pages)
    engine = ToyEngine(table.page_table, table.token_pool, size.page, size.pages, VOCAB,
                       WorkerStream() if overlap else None)
    config = EngineConfig(overlap=overlap, policy='fcfs', admission='reserve', page_size=size.page,
                          num_pages=size.pages, max_running_req=size.rows,
                          max_prefill_tokens=size.budget, max_prefill_streak=10**6, max_seq_len=size.max_len)
    s = Scheduler(engine, cache := CacheManager(size.pages, table, RadixCache(size.page)), VOCAB, float,
                  config, frozenset([size.eos]), observer=Seen())
    s.prefill.policy = Fcfs(cache)
    return s

class Watched(decode.Scheduler):
    def launch(self, batch):
        self.batches.append(shape(batch))
        return super().launch(batch)

def small(size):
    table = pages.TableManager(size.rows, size.max_len, size.page)
    s = Watched(Toy(table, size.pages), table, cache := radix.CacheManager(size.pages, table),
                prefill.PrefillManager(cache, size.budget), size.eos)
    s.batches = []
    return s

class Differs(AssertionError):
    "What the two did otherwise"

def orders(seed):
    """Sizes, and what callers do before each step: prompts (name, ids, longest answer), and names of those
    that leave"""
    rng = random.Random(seed)
    page, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([24, 40])
    least = -(-max_len // page)
    size = SimpleNamespace(page=page, max_len=max_len, pages=rng.randint(least, 4 * least),
                           rows=rng.randint(1, 5),
                           budget=rng.choice([3, 8, 16, 100]), eos=rng.randrange(VOCAB))
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, max_len - 4))] for _ in range(3)]
    steps, n = [], 0
    for _ in range(30):
        come = []
        for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
            prefix = rng.choice(prefixes)
            ids = (prefix[:rng.randint(1, len(prefix))] + [rng.randrange(VOCAB)
                for _ in range(rng.randint(0, 3))])[:max_len - 1]
            room = min(max_len, size.pages * page + 1) - len(ids)
            if room > 0: come.append((f'r{(n := n + 1)}', ids, rng.randint(1, min(room, 12))))
        steps.append((come, [f'r{rng.randint(1, n)}'] if n and rng.random() < .1 else []))
    return size, steps

def tell(real_one, weekends, come, leave):
    "Requests that come and callers that leave, to both"
    for rid, ids, most in come:
        real_one.add(rid, ids, SamplingParams(max_tokens=most, temperature=0))
        weekends.add(batch.PendingReq(rid, ids, most))
    for rid in leave:
        if rid in real_one.alive: real_one.mark_to_finish(real_one.alive[rid], FinishReason.ABORT)
        weekends.abort(rid)

def life(seed, count=None):
    "One life of both; `Differs` where they do"
    size, steps = orders(seed)
    a, b = real(size), small(size)
    with patch.object(PrefillAdder, 'max_passed_over', 0):
        for step in range(600):
            tell(a, b, *(steps[step] if step < len(steps) else ((), ())))
            a.prefill.blocked = None
            theirs = sorted((o.rid, *o.token_ids, str(o.finish_reason or ''))
                            for o in (a.step() if a.has_work else []))
            ours = sorted((o.rid, *([] if o.token is None else [o.token]), o.finish_reason or '')
                          for o in b.step())
            counts = a.cache.page_counts
            for what, one, other in (('outputs', theirs, ours), ('batches', a.observer.batches[-2:],
                    b.batches[-2:]), ('steps', len(a.observer.batches), len(b.batches)),
                                     ('pages: free, evictable, evicted so far',
                                      [counts['free'], counts['evictable'], a.cache.evicted_pages],
                                      [len(b.cache.free), b.cache.tree.evictable_size,
                                       b.cache.evicted_pages])):
                if one != other:
                    raise Differs(f'seed {seed}, step {step}, {what}:\nreal    {one}\nweekend {other}')
            if step >= len(steps) and not (a.has_work or b.has_work): break
        else: raise Differs(f'seed {seed}: it never ends')
    a.cache.check_integrity()
    if count is not None:
        for rids, _, cached, _, _, sampled in b.batches:
            count['batches'] += 1
            count['with a chunk'] += len(sampled) < len(rids)
        count['lives'] += 1
        count['with evictions'] += b.cache.evicted_pages > 0
        count['with hits'] += a.counts['cached_tokens'] > 0

def answers(seed):
    """The real one with overlap, on a device that is a thread: in the end each request has what the weekend's
    has, or a part of it if its caller left"""
    size, steps = orders(seed)
    a, b, told = real(size, overlap=True), small(size), [{}, {}]
    try:
        for step in range(600):
            tell(a, b, *(steps[step] if step < len(steps) else ((), ())))
            for said, outputs in (told[0], a.step() if a.has_work else []), (told[1], b.step()):
                for o in outputs:
                    said.setdefault(o.rid, []).extend(o.token_ids if said is told[0] else [o.token]
                        if o.token is not None else [])
                for o in outputs:
                    if o.finish_reason: said[o.rid].append(str(o.finish_reason))
            if step >= len(steps) and not (a.has_work or b.has_work): break
        else: raise Differs(f'seed {seed}: it never ends')
        a.quiesce()
        a.cache.check_integrity()
        if a.table.available_size != size.rows: raise Differs(f'seed {seed}: rows are lost')
        for rid in told[1].keys() | told[0].keys():
            theirs, ours = told[0].get(rid, []), told[1].get(rid, [])
            n = min(len(theirs), len(ours)) - 1
            if theirs[:n] != ours[:n] or 'abort' not in (theirs[-1], ours[-1]) and theirs != ours:
                raise Differs(f'seed {seed}, {rid}:\nreal    {theirs}\nweekend {ours}')
    finally: a.engine.stream.close()

OF = ([f'kv_cache/{o}' for o in ('table', 'radix', 'eviction', 'manager')]
      + [f'scheduler/{o}' for o in ('prefill', 'decode', 'lifecycle', 'batch', 'scheduler')])

def notices(mutant):
    "Whether lives differ on a copy of the package with one line changed"
    from mutants import make, root
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), *mutant[1:])
        done = subprocess.run([sys.executable, root/'tests'/'weekend_oracle.py', '60'], cwd=folder,
                              capture_output=True, text=True, timeout=300,
                              env=os.environ | dict(PYTHONPATH=folder, OMP_NUM_THREADS='1',
                                  PYTHONDONTWRITEBYTECODE='1'))
    return done.returncode != 0

# mechanisms that the weekend has not: a word of each in the names of their mutants
LACKS = (re.compile('below:|handed over|retract|recomput|anew by '
                   'itself|preempt|importan|borrow|invalid|namespace|grammar|mask|timeout|pause|streak|fail|vLLM|'
                   'told '
                   'of|hidden|stale|rank'
                   '|passed over|new token ratio|clip|most tokens made|displaced|end-of-sequence|stop '
                   'tokens|row is watched|a device never|keeps no|is kept is given away|rid is used|'
                   'can never fit|policy is asked|shares nothing|not noticed|not checked|tail alive|dummy'))

def share_noticed(at_once=2):
    """Prints each mutant of scheduler and cache, and whether the oracle alone notices it; how many, of how
    many that break what the weekend has, too"""
    from mutants import mutants
    of_both = [o for o in mutants if o[1] in OF and not LACKS.search(o[0])]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(notices, of_both))
    for (name, module, *_), seen in zip(of_both, found):
        print(f'{"noticed" if seen else "       "} {module:20} {name}')
    for name, module, *_ in mutants:
        if module in OF and LACKS.search(name): print(f'lacks   {module:20} {name}')
    return sum(found), len(found)

if __name__ == '__main__':
    if sys.argv[1:] == ['mutants']: print('%d of %d' % share_noticed())
    else:
        count, (n, first) = Counter(), (int(o) for o in (*sys.argv[1:], 0)[:2])
        for seed in range(first, first + n):
            life(seed, count)
            if seed % 4 == 0: answers(seed)
        print(dict(count))
