"""Random arrivals, aborts, failures and interleavings on the toy engine: no page, token or request is lost, in either loop."""
import os

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
import pytest

from minisgl_lit.core import SamplingParams
from minisgl_lit.device import ManualStream
from minisgl_lit.kv.cache import CacheManager
from minisgl_lit.kv.prefix import make_prefix_cache
from minisgl_lit.kv.table import TableManager
from minisgl_lit.scheduler.control import Control
from minisgl_lit.scheduler.loop import Scheduler
from minisgl_lit.toy import ToyEngine, alone

VOCAB, MAX_SEQ_LEN = 13, 40
EOS = {5, 6}
SYSTEM = [1, 2, 3, 4, 1, 2, 3, 4, 1, 1, 2, 2]    # prompts begin with a piece of it, so that they share pages

class Serving(RuleBasedStateMachine):
    "One server; rules are what callers and the engine may do at any moment"

    @initialize(page_size=st.integers(1, 8), pages=st.integers(0, 30), rows=st.integers(1, 5), budget=st.integers(1, 30), chunk=st.integers(1, 30),
                cache=st.sampled_from(['radix', 'none']), overlap=st.booleans(), faulty=st.integers(0, 3).map(lambda n: n == 3))
    def start(self, page_size, pages, rows, budget, chunk, cache, overlap, faulty):
        num_pages = -(-MAX_SEQ_LEN // page_size) + pages // page_size
        table = TableManager(rows, MAX_SEQ_LEN, page_size, dummy_page=num_pages)
        self.stream = ManualStream()
        engine = ToyEngine(table.page_table, table.token_pool, page_size, num_pages, VOCAB, stream=self.stream)
        ledger = CacheManager(num_pages, table, make_prefix_cache(cache, page_size))
        self.s = Scheduler(engine, ledger, VOCAB, clock=lambda: 0., eos_token_ids=EOS, max_prefill_tokens=budget,
                           chunked_prefill_size=min(chunk, budget), overlap=overlap)
        self.right, self.told, self.ends, self.aborted, self.n = {}, {}, {}, set(), 0
        self.faulty = faulty    # whether this engine may break down

    @rule(head=st.integers(0, len(SYSTEM)), tail=st.lists(st.integers(1, 4), max_size=6), max_tokens=st.integers(0, 12), ignore_eos=st.booleans())
    def arrive(self, head, tail, max_tokens, ignore_eos):
        prompt, rid = (SYSTEM[:head] + tail) or [7], str(self.n)
        self.s.add(rid, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=0))
        self.right[rid], self.told[rid] = alone(prompt, max_tokens, VOCAB, () if ignore_eos else EOS), []
        self.n += 1

    @precondition(lambda self: self.s.alive)
    @rule(data=st.data())
    def abort(self, data):
        rid = data.draw(st.sampled_from(list(self.s.alive)))
        Control(self.s).abort(rid)
        self.aborted.add(rid)

    @precondition(lambda self: self.faulty)
    @rule()
    def the_engine_fails(self): self.s.engine.fail_at = self.s.launched + 1

    @precondition(lambda self: self.faulty and self.s.alive)
    @rule(data=st.data())
    def numbers_get_lost(self, data): self.s.engine.nan_rids.add(data.draw(st.sampled_from(list(self.s.alive))))

    @rule(n=st.integers(1, 3))
    def the_engine_works(self, n):
        for _ in range(n): self.stream.run_next()

    @rule(n=st.integers(1, 4))
    def steps(self, n):
        for _ in range(n): self.step()

    def step(self):
        for o in self.s.step():
            assert o.rid not in self.ends, 'news after the end'
            self.told[o.rid] += o.token_ids
            if o.finish_reason: self.ends[o.rid] = o
        self.check()

    def check(self):
        s, lengths = self.s, self.s.table.lengths
        s.cache.check_integrity([o for o in [*s.alive.values(), *s._ended] if o.table_idx is not None])
        for o in s.decode.schedule(): assert 0 <= o.cached_len < o.device_len <= o.max_device_len
        for o in s.alive.values():
            if o.table_idx is not None: assert 0 <= lengths.cached_len[o.table_idx] <= lengths.device_len[o.table_idx] <= o.max_len

    @invariant()
    def everyone_is_told_the_right_tokens(self):
        for rid, told in getattr(self, 'told', {}).items(): assert told == self.right[rid][:len(told)], (rid, told, self.right[rid])

    def teardown(self):
        if not hasattr(self, 's'): return
        while self.s.has_work: self.step()
        assert self.ends.keys() == self.right.keys()
        for rid, o in self.ends.items():
            if o.finish_reason == 'abort': assert rid in self.aborted
            elif o.finish_reason == 'error' and self.faulty: assert 'engine failed' in o.error or 'no finite logits' in o.error
            else: assert (o.finish_reason in ('stop', 'length'), self.told[rid]) == (True, self.right[rid]), (rid, o)
        Control(self.s).self_check()

def run(examples: int, steps: int = 40) -> None:
    "So many random lives of a server"
    run_state_machine_as_test(Serving, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
                                                         database=None, suppress_health_check=list(HealthCheck)))

def test_nothing_is_lost(): run(int(os.environ.get('TST_EXAMPLES', 300)))

@pytest.mark.long
def test_nothing_is_lost_in_thousands_of_lives(): run(5000)
