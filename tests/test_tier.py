"""The second tier for keys and values under faults: other weights, other tenants, NaN, a full or damaged
disk, a killed server."""
import errno, json, os, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch

from minisgl_lit import LLM, serve
from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import CudaStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.distributed.page_file import PageFile, open_page_file
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.formats.weight_control import WeightControl
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.server.metrics import Metrics
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output, mix
from test_scheduler import SecondTier

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]

class Server:
    "A scheduler on the toy engine, in pages of two tokens, with a disk of a hundred"
    def __init__(self, num_pages=40, **settings):
        config = EngineConfig(page_size=2, overlap=False, kv_disk_path='disk', kv_disk_gib=1.2e-5, **settings)
        table = TableManager(4, 40, 2, dummy_page=num_pages)
        self.engine = ToyEngine(table.page_table, table.token_pool, 2, num_pages, 99)
        self.below = SecondTier(config, self.engine, 40, 1)
        self.cache = CacheManager(num_pages, table, make_prefix_cache('radix', 2), dict(tier=self.below.tier))
        self.s = Scheduler(self.engine, self.cache, 99, float, config)
        self.control = WeightControl(self.s)

    def add(self, rid, prompt=PROMPT, **params):
        return self.s.add(rid, prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **params))

    def run(self, *pendings):
        while self.s.has_work:
            self.s.step()
            self.cache.check_integrity({o.rid: o for o in [*(p.req for p in self.s.alive.values() if p.req),
                *self.s._deferred.to_release]}.values())
        return [(o.output_ids.tolist(), o.cached_tokens) for o in pendings]

    def ask(self, rid, **params): return self.run(self.add(rid, **params))[0]

    def go_down(self):
        self.cache._push(self.cache.prefix.evict(99, self.cache.sources['tier'].put))
        for _ in range(2):
            self.below.stream.run_all()
            self.cache.collect(self.s.completed)

RIGHT = expected_output(PROMPT, 3, 99)

@pytest.fixture
def server():
    made = Server()
    yield made
    made.control.scheduler.self_check()
    made.below.end()

def test_a_page_comes_back(server):
    assert server.ask('a') == (RIGHT, 0)
    server.go_down()
    assert server.ask('b') == (RIGHT, 8) and server.cache.sources['tier'].counts['from_disk'] == 4

def test_who_shares_nothing_asks_for_nothing(server):
    "As one that is computed again because what it had read was wrong"
    server.ask('a')
    server.go_down()
    pending = server.add('b')
    pending.shares_cache = False
    assert server.run(pending) == [(RIGHT, 0)] and server.below.tier.counts['from_disk'] == 0

def test_others_run_while_pages_travel(server):
    server.ask('a')
    server.go_down()
    b, c = server.add('b'), server.add('c', [7, 7, 7])
    with patch.object(server.cache.sources['tier'], 'idle'):   # the disk does nothing
        for _ in range(5): server.s.step()
        assert (c.finish_reason and not b.output_ids.size
                and server.cache.sources['tier'].stats()['waiting'] == 4)
    assert server.run(b) == [(RIGHT, 8)]

def test_who_is_aborted_on_the_way_lets_go(server):
    server.ask('a')
    server.go_down()
    c = [server.add(o) for o in 'bc'][1]
    with patch.object(server.cache.sources['tier'], 'idle'): server.s.step()
    server.control.scheduler.abort('b')
    assert server.cache.n_leases == 1 and server.run(c) == [(RIGHT, 8)]

def test_no_tenant_finds_the_pages_of_another(server):
    server.ask('a', extra_key='ann')
    server.go_down()
    assert server.ask('b') == server.ask('c', extra_key='bob') == (RIGHT, 0)
    server.go_down()
    assert server.ask('d', extra_key='ann') == (RIGHT, 8)

def test_other_weights_find_nothing(server):
    """Neither who comes later nor who waits for pages already; what the old ones left is found when they are
    back"""
    version = [0]
    server.cache.sources['tier']._make_fingerprint = lambda: bytes([version[0]]*20)
    server.cache.sources['tier'].renew()
    server.ask('a')
    server.go_down()
    b = server.add('b')
    with patch.object(server.cache.sources['tier'], 'idle'): server.s.step()
    assert server.cache.n_leases == 1
    old = server.engine.kv._mixed
    def load(v, mixed): version[0], server.engine.kv._mixed = v, mixed
    server.control.swap(lambda: load(1, mix(old)))
    assert server.cache.n_leases == 0
    (told, cached), = server.run(b)
    assert cached == 0 and told != RIGHT and server.ask('c') == (told, 8)   # from the tree
    server.control.swap(lambda: load(0, old))
    assert server.ask('d') == (RIGHT, 8)

def test_the_operator_empties_all_tiers(server):
    server.ask('a')
    server.go_down()
    server.control.scheduler.flush_cache()
    server.below.stream.run_all()
    # nor is anything left for a server that is started later
    server.cache.sources['tier'] = server.below.restart()
    assert server.ask('b') == (RIGHT, 0)

def test_nan_that_went_down_is_found_out(server):
    """It was aborted before anybody saw its NaN; who reads its pages is computed again, and nothing of it
    stays"""
    server.engine.nan_rids.add('a')
    server.add('a')
    with patch.object(server.s, '_process_one_token', lambda *args: None): server.s.step()
    server.control.scheduler.abort('a')
    server.run()
    server.go_down()
    assert server.cache.sources['tier'].stats()['disk'] == 4
    server.engine.nan_rids.clear()
    assert server.ask('b')[0] == RIGHT and server.cache.sources['tier'].stats()['disk'] == 0
    assert server.ask('c')[0] == RIGHT

def test_nan_that_was_seen_never_goes_down():
    "Its first chunk was in the tree before its last one showed what was wrong"
    server = Server(max_prefill_tokens=4)
    server.engine.nan_rids.add('a')
    server.ask('a')
    assert server.cache.page_counts['evictable'] >= 2
    server.go_down()
    assert server.cache.sources['tier'].counts['stored'] == 0 and server.cache.page_counts['free'] == 40
    server.below.end()

@pytest.mark.parametrize('error', [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_costs_nobody_an_answer(server, error, caplog):
    server.ask('a')
    with patch('minisgl_lit.distributed.page_file.os.pwrite', side_effect=OSError(error, 'no')):
        server.go_down()
    assert (server.cache.sources['tier'].stats()['disk'] == 0
            and caplog.text.count('could not be written') == 1)
    assert server.ask('b') == (RIGHT, 0)

def test_a_disk_that_breaks_half_way(server):
    "The third page is damaged: two are found, the rest is computed"
    server.ask('a')
    server.go_down()
    server.below.damage(3, in_page=True)   # slot 0 has the last page, which was evicted first
    assert server.ask('b') == (RIGHT, 4) and server.cache.sources['tier'].counts['lost'] == 1

def test_a_disk_that_cannot_be_read(server):
    server.ask('a')
    server.go_down()
    with patch('minisgl_lit.distributed.page_file.os.preadv', side_effect=OSError(errno.EIO, 'no')):
        assert server.ask('b') == (RIGHT, 0)

def test_a_disk_that_hangs_keeps_nobody_for_ever(server, caplog):
    """Ten seconds for who waits already, nothing for who comes later; who needs nothing from there runs on;
    and a disk that answers again is used again"""
    tier = server.cache.sources['tier']
    server.ask('a')
    server.go_down()
    b, c = server.add('b'), server.add('c', [7, 7, 7])
    with patch.object(tier, 'idle'):   # the disk does nothing
        for _ in range(5): server.s.step()
        assert c.finish_reason and not b.output_ids.size
        server.below.now = 9
        server.s.step()
        assert not b.output_ids.size
        server.below.now = 11
        assert server.run(b) == [(RIGHT, 0)] and tier.disk_hangs
        server.cache._push(server.cache.prefix.evict(99))
        assert server.ask('d') == (RIGHT, 0) and server.below.now == 11
    assert caplog.text.count('no page came in 10 seconds') == 1 and server.cache.n_leases == 0
    server.go_down()
    assert not tier.disk_hangs and tier.counts['lost'] == 4   # what came too late
    server.ask('e')
    server.go_down()
    assert server.ask('f') == (RIGHT, 8)

def test_what_is_emptied_is_not_waited_for(server):
    server.ask('a')
    server.go_down()
    b = server.add('b')
    with patch.object(server.cache.sources['tier'], 'idle'):   # the disk does nothing
        server.s.step()
        server.control.scheduler.flush_cache()
        assert server.run(b) == [(RIGHT, 0)]

def test_an_engine_ends_beside_a_disk_that_hangs(tmp_path):
    "It answers what lies there, and its file is closed by the thread that hangs, once it goes on"
    gate, prompts = (threading.Event(),
                     [np.random.default_rng(i).integers(100, 500, 400).tolist() for i in range(3)])
    with patch('minisgl_lit.second_tier.least_pages', return_value=1):   # even if the disk is busy
        llm = LLM(device='cpu', num_pages=60, max_running_req=2, kv_disk_path=str(tmp_path), kv_disk_gib=.05)
    tier, params = llm.runtime.scheduler.cache.sources['tier'], SamplingParams(max_tokens=2, temperature=0)
    def ask(): return [llm.generate([p], params)[0].token_ids for p in prompts]
    right, end = ask(), time.monotonic() + 30
    while tier.stats()['host'] and time.monotonic() < end:   # what is still in memory needs no disk
        tier.collect()
        time.sleep(.01)
    with patch.object(PageFile, 'read',
                      lambda *args: gate.wait(60)), patch('minisgl_lit.distributed.tier._PATIENCE',
                          .2), patch('minisgl_lit.distributed.tier.CLOSING_SECONDS', .1):
        assert ask() == right and tier.disk_hangs
        llm.close()
        assert tier._stream._thread.is_alive() and tier._file._fd >= 0
        gate.set()
        tier._stream._thread.join()
    assert tier._file._fd == -1

@pytest.mark.parametrize('path, why', [('/dev/null', 'Not a directory'), ('/proc/nobody', 'No such file')])
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_loaded(path, why):
    with patch('minisgl_lit.runtime.Tokenizer',
               side_effect=AssertionError('it was loaded')), pytest.raises(ValueError,
                   match=f'kv_disk_path={path!r} cannot be used: .*{why}'):
        LLM(device='cpu', kv_disk_path=path)

def test_the_file_of_another_user_is_refused(tmp_path):
    open_page_file(tmp_path, 8, 9999).close()
    with patch('minisgl_lit.distributed.page_file.os.geteuid', return_value=1
               + os.geteuid()), pytest.raises(ValueError, match='pages-0.kv: it is no file of this user'):
        open_page_file(tmp_path, 8, 9999)

def test_a_server_starts_beside_a_disk_that_is_full_or_unreadable(tmp_path):
    for call, error in ('pwrite', errno.ENOSPC), ('pread', errno.EIO):
        with patch(f'minisgl_lit.distributed.page_file.os.{call}', side_effect=OSError(error, 'no')):
            file = open_page_file(tmp_path, 8, 9999)
            assert not file.write(0, 1, bytes(20), np.zeros(8, np.uint8)) or call == 'pread'
            assert [*file.records()] == []
        file.close()

def test_a_small_pool_computes_what_it_has_no_room_to_load():
    "A request whose pages have all come up, and a pool that is full of others': nothing is promised twice"
    server = Server(num_pages=8)
    server.ask('a')
    server.go_down()
    long = server.add('long', [9]*8)
    server.s.step()
    assert server.run(long, server.add('b'))[1][0] == RIGHT
    server.below.end()

def test_an_end_in_order_writes_what_was_never_evicted(server):
    server.ask('a')
    server.cache.close()
    server.cache.sources['tier'] = server.below.restart()
    assert server.ask('b') == (RIGHT, 8)

def test_an_end_in_order_goes_on_while_there_is_room_for_a_page():
    "In a host memory of one page all five go down, one after the other"
    server = Server()
    server.cache.sources['tier'].moving_pages = 1
    server.ask('a')
    server.cache.close()
    assert (server.cache.sources['tier'].counts == dict(stored=5, from_host=0, from_disk=0, dropped=0, lost=0)
            and len(server.cache.sources['tier']._slots) == 5)
    server.below.end()

def test_metrics_tell_of_it(server):
    server.ask('a')
    server.go_down()
    server.ask('b')
    page = Metrics('toy').page(server.s.stats())[0].decode()
    for name, value in dict(kv_disk_hit_pages_total=4, kv_disk_pages=5, kv_bytes_up_total=128,
                            kv_bytes_down_total=160, kv_waiting_pages=0).items():
        assert f'minisgl:{name}{{model_name="toy"}} {value:.1f}' in page, (name, page)
    assert 'kv_disk' not in Metrics('toy').page({k: o
        for k, o in server.s.stats().items() if k != 'tier'})[0].decode()

CHILD = ("""
import json, sys
import numpy as np
from minisgl_lit import LLM, SamplingParams
from minisgl_lit import second_tier
second_tier.least_pages = lambda *measured: 1   # even if the disk is busy
llm = LLM(device='cpu', num_pages=60, max_running_req=2, kv_disk_path=sys.argv[1], kv_disk_gib=.05)
prompts = [np.random.default_rng(i).integers(100, 500, 400).tolist() for i in range(8)]
outs = [llm.generate([p], SamplingParams(max_tokens=8, temperature=0))[0] for _ in range(int(sys.argv[2])) for p in prompts]
print(json.dumps([sum(o.cached_tokens for o in outs[-8:]), [list(o.token_ids) for o in outs[-8:]]]), flush=True)
sys.stdin.read()
""")   # noqa: E501

def child(folder, rounds):
    process = subprocess.Popen([sys.executable, '-c', CHILD, str(folder), str(rounds)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    return process, json.loads(process.stdout.readline())

@pytest.mark.long
def test_a_killed_server_finds_its_pages_again(tmp_path):
    """kill -9, a start: at least 80 % of the hits at once, and the same tokens; then the file is damaged
    everywhere, and the tokens are the same again"""
    first, (hits, tokens) = child(tmp_path, 2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second, (again, same) = child(tmp_path, 1)
    second.kill()
    second.wait()
    assert same == tokens and hits > 2000 and again >= .8*hits, (hits, again)
    data = np.fromfile(tmp_path/'pages-0.kv', dtype=np.uint8)
    data[4096::777] ^= 1
    data.tofile(tmp_path/'pages-0.kv')
    third, (none, same) = child(tmp_path, 1)
    third.kill()
    third.wait()
    assert same == tokens and none < hits

def test_two_engines_do_not_share_a_file(tmp_path):
    one, two = (open_page_file(tmp_path, 8, 9999) for _ in range(2))
    assert [one.path.name, two.path.name] == ['pages-0.kv', 'pages-1.kv']
    one.close()
    assert open_page_file(tmp_path, 8, 9999).path == one.path

@pytest.mark.long
def test_a_server_that_ends_in_order_finds_all_of_it_again(tmp_path):
    """Over HTTP: pages go down and come up while others run, the end writes the pool, and the next start has
    at least 80 % of the hits at once"""
    prompts = [np.random.default_rng(i).integers(100, 500, 400).tolist() for i in range(6)]
    settings = dict(device='cpu', port=0, num_pages=80, max_running_req=2, kv_disk_path=str(tmp_path),
                    kv_disk_gib=.05)
    def ask(url, prompt):
        body = {'input_ids': prompt, 'sampling_params': {'max_new_tokens': 4, 'temperature': 0}}
        answer = httpx.post(url + '/generate', json=body, timeout=60).json()
        return answer['text'], answer['meta_info']['cached_tokens']
    def ask_all(url):
        with ThreadPoolExecutor(3) as threads: return [*threads.map(ask, [url]*6, prompts)]
    with serve(**settings) as s:
        first, second = ask_all(s.url), ask_all(s.url)
        told = httpx.get(s.url + '/metrics').text
    with serve(**settings) as s: third = ask_all(s.url)
    texts, hits = zip(*(zip(*o) for o in (first, second, third)))
    assert texts[0] == texts[1] == texts[2] and 'minisgl:kv_disk_hit_pages_total{' in told
    assert sum(hits[1]) > 1000 and sum(hits[2]) >= .8*max(sum(hits[1]), 2304), hits

def test_a_copy_to_the_host_waits_for_what_it_copies(monkeypatch):
    """On a GPU pages are cloned on the stream of the steps and copied on another, which must wait for the
    clones; seen in the order of the calls"""
    calls, stream = [], CudaStream.__new__(CudaStream)
    stream.stream, stream._copy_stream, stream._error = ('steps',
        SimpleNamespace(wait_stream=lambda other: calls.append(f'wait for {other}')), None)
    monkeypatch.setattr(stream, 'submit', lambda work: work(), raising=False)
    monkeypatch.setattr('minisgl_lit.core.device.CudaEvent', lambda *args: 'event')
    monkeypatch.setattr(torch.cuda, 'stream', lambda other: nullcontext())
    monkeypatch.setattr(torch.Tensor, 'record_stream', lambda x, other: calls.append('kept'))
    out = [np.zeros(2, dtype=np.float32) for _ in range(2)]
    def pairs():
        for i, there in enumerate(out):
            calls.append('clone')
            yield there, torch.full((2,), float(i + 1))
    assert stream.fetch(pairs) == 'event'
    assert (calls == ['clone', 'clone', 'wait for steps', 'kept', 'kept']
            and [o.tolist() for o in out] == [[1, 1], [2, 2]])
