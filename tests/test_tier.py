"""The second tier for keys and values under faults: other weights, other tenants, NaN, a full or damaged disk, a killed server."""
import errno, json, signal, subprocess, sys
from unittest.mock import patch

import numpy as np
import pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.sampling_params import SamplingParams
from minisgl_lit.kv_cache.manager import CacheManager
from minisgl_lit.kv_cache.page_file import open_page_file
from minisgl_lit.kv_cache.radix import make_prefix_cache
from minisgl_lit.kv_cache.table import TableManager
from minisgl_lit.scheduler.control import Control
from minisgl_lit.scheduler.scheduler import Scheduler
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
        self.cache = CacheManager(num_pages, table, make_prefix_cache('radix', 2), self.below.tier)
        self.s = Scheduler(self.engine, self.cache, 99, float, config)
        self.control = Control(self.s)

    def add(self, rid, prompt=PROMPT, **params):
        return self.s.add(rid, prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **params))

    def run(self, *pendings):
        while self.s.has_work:
            self.s.step()
            self.cache.check_integrity([o for o in [*self.s.alive.values(), *self.s._to_release] if o.table_idx is not None])
        return [(o.output_ids.tolist(), o.cached_tokens) for o in pendings]

    def ask(self, rid, **params): return self.run(self.add(rid, **params))[0]

    def go_down(self):
        self.cache._push(self.cache.prefix.evict(99, self.cache.tier.put))
        for _ in range(2):
            self.below.stream.run_all()
            self.cache.collect(self.s.completed)

RIGHT = expected_output(PROMPT, 3, 99)

@pytest.fixture
def server():
    made = Server()
    yield made
    made.control.self_check()
    made.below.end()

def test_a_page_comes_back(server):
    assert server.ask('a') == (RIGHT, 0)
    server.go_down()
    assert server.ask('b') == (RIGHT, 8) and server.cache.tier.counts['from_disk'] == 4

def test_others_run_while_pages_travel(server):
    server.ask('a')
    server.go_down()
    b, c = server.add('b'), server.add('c', [7, 7, 7])
    with patch.object(server.cache.tier, 'idle'):   # the disk does nothing
        for _ in range(5): server.s.step()
        assert c.finish_reason and not b.output_ids.size and server.cache.tier.stats()['waiting'] == 4
    assert server.run(b) == [(RIGHT, 8)]

def test_who_is_aborted_on_the_way_lets_go(server):
    server.ask('a')
    server.go_down()
    c = [server.add(o) for o in 'bc'][1]
    with patch.object(server.cache.tier, 'idle'): server.s.step()
    server.control.abort('b')
    assert server.cache.n_leases == 1 and server.run(c) == [(RIGHT, 8)]

def test_no_tenant_finds_the_pages_of_another(server):
    server.ask('a', extra_key='ann')
    server.go_down()
    assert server.ask('b') == server.ask('c', extra_key='bob') == (RIGHT, 0)
    server.go_down()
    assert server.ask('d', extra_key='ann') == (RIGHT, 8)

def test_other_weights_find_nothing(server):
    "Neither who comes later nor who waits for pages already; what the old ones left is found when they are back"
    version = [0]
    server.cache.tier._make_fingerprint = lambda: bytes([version[0]]*20)
    server.cache.tier.renew()
    server.ask('a')
    server.go_down()
    b = server.add('b')
    with patch.object(server.cache.tier, 'idle'): server.s.step()
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
    server.control.flush_cache()
    server.below.stream.run_all()
    server.cache.tier = server.below.restart()   # nor is anything left for a server that is started later
    assert server.ask('b') == (RIGHT, 0)

def test_nan_that_went_down_is_found_out(server):
    "It was aborted before anybody saw its NaN; who reads its pages is computed again, and nothing of it stays"
    server.engine.nan_rids.add('a')
    server.add('a')
    with patch.object(server.s, '_process_one_token', lambda *args: None): server.s.step()
    server.control.abort('a')
    server.run()
    server.go_down()
    assert server.cache.tier.stats()['disk'] == 4
    server.engine.nan_rids.clear()
    assert server.ask('b')[0] == RIGHT and server.cache.tier.stats()['disk'] == 0
    assert server.ask('c')[0] == RIGHT

def test_nan_that_was_seen_never_goes_down():
    "Its first chunk was in the tree before its last one showed what was wrong"
    server = Server(max_prefill_tokens=4)
    server.engine.nan_rids.add('a')
    server.ask('a')
    assert server.cache.page_counts['evictable'] >= 2
    server.go_down()
    assert server.cache.tier.counts['stored'] == 0 and server.cache.page_counts['free'] == 40
    server.below.end()

@pytest.mark.parametrize('error', [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_costs_nobody_an_answer(server, error, caplog):
    server.ask('a')
    with patch('minisgl_lit.kv_cache.page_file.os.pwrite', side_effect=OSError(error, 'no')): server.go_down()
    assert server.cache.tier.stats()['disk'] == 0 and caplog.text.count('could not be written') == 1
    assert server.ask('b') == (RIGHT, 0)

def test_a_disk_that_breaks_half_way(server):
    "The third page is damaged: two are found, the rest is computed"
    server.ask('a')
    server.go_down()
    server.below.damage(3, in_page=True)   # slot 0 has the last page, which was evicted first
    assert server.ask('b') == (RIGHT, 4) and server.cache.tier.counts['lost'] == 1

def test_a_disk_that_cannot_be_read(server):
    server.ask('a')
    server.go_down()
    with patch('minisgl_lit.kv_cache.page_file.os.preadv', side_effect=OSError(errno.EIO, 'no')): assert server.ask('b') == (RIGHT, 0)

def test_a_small_pool_computes_what_it_has_no_room_to_load():
    "A request whose pages have all come up, and a pool that is full of others': nothing is promised twice"
    server = Server(num_pages=8)
    server.ask('a')
    server.go_down()
    long = server.add('long', [9]*8)
    server.s.step()
    assert server.run(long, server.add('b'))[1][0] == RIGHT
    server.below.end()

def test_metrics_tell_of_it(server):
    server.ask('a')
    server.go_down()
    server.ask('b')
    page = Metrics('toy').page(server.s.stats())[0].decode()
    for name, value in dict(kv_disk_hit_pages_total=4, kv_disk_pages=5, kv_bytes_up_total=128, kv_bytes_down_total=160, kv_waiting_pages=0).items():
        assert f'minisgl:{name}{{model_name="toy"}} {value:.1f}' in page, (name, page)
    assert 'kv_disk' not in Metrics('toy').page({k: o for k, o in server.s.stats().items() if k != 'tier'})[0].decode()

CHILD = """
import json, sys
import numpy as np
from minisgl_lit import LLM, SamplingParams
llm = LLM(device='cpu', num_pages=60, max_running_req=2, kv_disk_path=sys.argv[1], kv_disk_gib=.05)
prompts = [np.random.default_rng(i).integers(100, 500, 400).tolist() for i in range(8)]
outs = [llm.generate([p], SamplingParams(max_tokens=8, temperature=0))[0] for _ in range(int(sys.argv[2])) for p in prompts]
print(json.dumps([sum(o.cached_tokens for o in outs[-8:]), [list(o.token_ids) for o in outs[-8:]]]), flush=True)
sys.stdin.read()
"""

def child(folder, rounds):
    process = subprocess.Popen([sys.executable, '-c', CHILD, str(folder), str(rounds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, json.loads(process.stdout.readline())

@pytest.mark.long
def test_a_killed_server_finds_its_pages_again(tmp_path):
    "kill -9, a start: at least 80 % of the hits at once, and the same tokens; then the file is damaged everywhere, and the tokens are the same again"
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
