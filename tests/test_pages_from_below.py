"""The cache manager and a real second tier: what one request has computed goes down when another takes its
pages, and comes up for a third."""
from unittest.mock import Mock

import numpy as np
from fastcore.test import test_eq

from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.request import Batch, ForwardMode, PendingReq, Req
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.distributed.page_file import PageFile
from minisgl_lit.distributed.tier import Tier
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output, segments

test_eq.__test__ = False

def admit(cache, rid, tokens, params=SamplingParams()):
    pending, table = PendingReq(rid, np.array(tokens), params, max_len=12), cache.table
    handle, row = cache.match(pending), table.allocate()
    cache.lock(handle)
    pages = handle.pages
    table.write(np.full(len(pages), row), np.arange(len(pages)), pages)
    table.write_tokens(row, 0, pending.input_ids)
    table.lengths.cached_len[row] = handle.cached_len
    return Req(pending, row, handle, table.lengths)

def run(cache, engine, step, *reqs):
    "A step: compute what each request has not yet computed; the output of the engine"
    table, lengths = cache.table, cache.table.lengths
    rows = np.array([o.table_idx for o in reqs])
    start, end = lengths.cached_len[rows], np.array([o.pending.n_tokens for o in reqs])
    for row, a, b in zip(rows, cache.pages_for(start).tolist(), cache.pages_for(end).tolist()):
        table.write(np.full(b - a, row), np.arange(a, b), cache.allocate(b - a))
    request, offset = segments(end - start)     # of each new token
    at = rows[request], start[request] + offset
    lengths.cached_len[rows] = lengths.device_len[rows] = end
    lengths.launched[rows] = step
    batch = Batch([*reqs], ForwardMode.MIXED, step, rows, start, end,
                  *at, table.slots(*at).astype(np.int64), np.arange(len(rows)))
    return engine.sample(batch, engine.forward(batch))

def text(output):
    "The tokens of a step"
    output.copy_done.synchronize()
    return output.next_tokens.tolist()

def test_pages_come_up_from_below(tmp_path):
    "A request that shares nothing finds nothing"
    table, stream = TableManager(4, max_seq_len=12, page_size=2, dummy_page=4), ManualStream()
    engine = ToyEngine(table.page_table, table.token_pool, 2, 4, vocab_size=10)
    file = PageFile(tmp_path, 32, 4096 + 9*80)
    tier = Tier(engine, 2, lambda: bytes(20), stream, file, idle=stream.run_next)
    cache = CacheManager(4, table, RadixCache(page_size=2), dict(tier=tier))
    def admit_from_below(rid, tokens):
        pending = PendingReq(rid, np.array(tokens), SamplingParams(), max_len=12)
        while cache.arriving(pending, cache.match(pending)):
            cache.check_integrity()
            stream.run_next()
            cache.collect(0)
        admitted = admit(cache, rid, tokens)
        tier._leases[admitted.pending] = tier._leases.pop(pending)   # `admit` makes its own
        cached_len = cache.load(admitted)
        cache.check_integrity([admitted])
        return admitted, cached_len
    def end(step, pending):
        cache.cache_finished(pending)
        cache.collect(step)
    run(cache, engine, 1, first := admit(cache, 'l', [1, 2, 3, 4, 5, 6, 7]))
    end(1, first)
    run(cache, engine, 2, m := admit(cache, 'm', [9]*7))     # takes the pages of the first
    end(2, m)
    test_eq((tier.stats()['stored'], cache.match(first.pending).cached_len), (3, 0))
    n, cached_len = admit_from_below('n', [1, 2, 3, 4, 5, 6, 8])
    test_eq((cached_len, n.handle.cached_len, n.handle.borrowed), (6, 6, True))
    test_eq(text(run(cache, engine, 3, n)), expected_output([1, 2, 3, 4, 5, 6, 8], 1, 10))
    cache.cache_unfinished(n)
    test_eq(n.handle.cached_len, 6)
    end(3, n)
    cache._push(cache.prefix.evict(4))
    alone = PendingReq('o', first.pending.input_ids, SamplingParams(), max_len=12)
    alone.shares_cache = False
    test_eq((cache.arriving(alone, cache.match(alone)), cache.n_leases), (False, 0))
    alone.shares_cache = True
    found = cache.arriving(alone, cache.match(alone)), cache.n_leases
    test_eq(found, (False, 1))   # all of it is in host memory still
    cache.drop(alone)
    cache.flush()
    test_eq((tier.stats()['disk'], cache.page_counts['free']), (0, 4))
    run(cache, engine, 4, o := admit(cache, 'o', [5]*7))
    end(4, o)
    away = Mock(**{'serves.return_value': False})
    both = CacheManager(4, table, RadixCache(page_size=2), dict(away=away, tier=tier))
    assert both._source(alone) is tier
    away.serves.return_value = True
    assert both._source(alone) is away
    test_eq(list(cache.source_stats), ['tier'])
    cache.close()   # what was never evicted is written, and only the file is still to be closed
    test_eq((tier.stats()['disk'], stream.n_waiting), (3, 1))
