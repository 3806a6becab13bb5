"""Random crowds on random simulated servers; what is left of those who have ended; traces that merge."""
import gc
import math
import subprocess
import sys
from collections import Counter
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit.config import EngineConfig
from minisgl_lit.tools.roofline import ModelCosts
from minisgl_lit.tools.simulator import (
    CostModel, bin_of, bins, goodput, quantile, replay, sim_scheduler, simulate)
from minisgl_lit.tools.traces import SessionShape, Turn, trace
from script import load

StepTimer, error, fit = itemgetter('StepTimer', 'error', 'fit')(load('tools/calibrate'))

small = ModelCosts(layer_weights=1000, head_weights=500, token_kv=8, pair_flops=100, itemsize=2)
cost = CostModel(costs=small, byte=1e-8, flop=1e-8, step=1e-3, token=1e-5, host_step=2e-4, host_req=1e-6,
                 host_new=1e-4)
configs = st.builds(
    EngineConfig, page_size=st.sampled_from([1, 4, 16]), num_pages=st.integers(400, 800),
    max_seq_len=st.just(300), max_running_req=st.integers(1, 20), max_prefill_tokens=st.integers(10, 400),
    overlap=st.booleans(), cache=st.sampled_from(['radix', 'none']),
    admission=st.sampled_from(['reserve', 'optimistic']), mixed_chunk=st.booleans(),
    policy=st.sampled_from(['fcfs', 'lof', 'random']), eviction=st.sampled_from(['lru', 'lfu', 'slru']))
crowds = st.builds(SessionShape, input_len=st.integers(1, 40), output_len=st.integers(1, 30),
                   turns=st.integers(1, 4),
                   pause=st.sampled_from([.001, 1., 100.]), prefixes=st.integers(1, 4),
                   prefix_len=st.integers(0, 60), max_len=st.just(300))


class Listener:
    "Passes sessions on and notes what was asked and answered"
    def __init__(self, sessions): self.sessions, self.asked, self.answered = sessions, [], []

    def listen(self, session):
        answer = None
        try:
            while True:
                turn = session.send(answer)
                self.asked.append(turn)
                answer = yield turn
                self.answered.append(answer.copy())
        except StopIteration: return

    def __iter__(self): return (self.listen(o) for o in self.sessions)


@settings(max_examples=15)
@given(configs, crowds, st.integers(0, 99), st.sampled_from([.5, 20., 1000.]))
def test_everybody_is_served_in_full(config, kind, seed, rate):
    clients = Listener(trace(kind, 12, rate, seed=seed))
    s, clock = sim_scheduler(config, cost)
    stats = replay(s, clock, clients)
    s.self_check()
    asked, n = clients.asked, len(clients.asked)
    assert Counter(map(len, clients.answered)) == Counter(o.max_tokens for o in asked)
    assert (stats.served.sum() == n == sum(stats.reasons.values()) and stats.refused == 0
            and not stats._last_token)
    tokens = sum(o.max_tokens for o in asked)
    assert s.counts['generated_tokens'] == tokens and stats.gaps.sum() == tokens - n
    assert s.counts['prompt_tokens'] == sum(len(o.prompt) for o in asked)
    if config.cache == 'none': assert s.counts['cached_tokens'] == 0
    assert goodput(stats, math.inf, math.inf) * clock() == pytest.approx(n)


@settings(max_examples=6)
@given(configs, crowds, st.integers(0, 99))
def test_the_same_day_twice_is_the_same(config, kind, seed):
    a, b = (simulate(config, cost, trace(kind, 8, 20., seed=seed)) for _ in range(2))
    assert a.clock() == b.clock() and a.scheduler.stats() == b.scheduler.stats()
    assert (a.served == b.served).all() and (a.gaps == b.gaps).all() and a.samples == b.samples


@settings(max_examples=6)
@given(configs, crowds, st.integers(0, 99))
def test_a_fit_to_a_simulation_says_what_it_did(config, kind, seed):
    s, clock = sim_scheduler(config, cost)
    s.engine = StepTimer(s.engine, small, clock)
    replay(s, clock, trace(kind, 8, 20., seed=seed))
    if len(s.engine.steps) < 2: return
    _, total = error(fit(small, s.engine.steps), s.engine.steps)
    assert abs(total) < .05
    taken = sum(o.engine for o in s.engine.steps)   # of host and engine, which the simulated one has in one
    assert sum(cost.engine(o.work) + cost.host(o.work) for o in s.engine.steps) == pytest.approx(taken)
    assert sum(o.host for o in s.engine.steps) == pytest.approx(0, abs=1e-6)


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e5), min_size=1), st.floats(0, 1))
def test_quantiles_are_those_of_the_list(times, q):
    counts = np.bincount(bin_of(np.array(times)), minlength=bins)
    want = sorted(times)[max(math.ceil(q * len(times) - 1e-9), 1) - 1]
    assert quantile(counts, q) == pytest.approx(want, rel=.03)


def test_nobody_who_has_ended_is_kept():
    def left(n):
        stats = simulate(EngineConfig(num_pages=200, max_seq_len=300, max_running_req=8), cost,
                         trace(SessionShape(input_len=20, output_len=5, prefix_len=16, max_len=300), n, 100.))
        gc.collect()
        kinds = Counter(type(o).__name__ for o in gc.get_objects())
        return stats.served.sum(), kinds['PendingReq'], kinds['Turn'], kinds['generator'], kinds['Node']
    few, many = left(100), left(1000)
    assert few[0] == 100 and many[0] == 1000
    assert all(b <= a + 10 for a, b in zip(few[1:4], many[1:4])) and many[4] <= 201, (few, many)


def test_only_conversations_under_way_exist():
    started = []
    def sessions():
        for i in range(5):
            started.append(i)
            yield (o for o in [Turn(i * 10., np.array([1]), 1)])
    s, clock = sim_scheduler(EngineConfig(num_pages=20, max_seq_len=50), cost)
    seen = []
    real = s.add
    s.add = lambda *args: (seen.append(len(started)), real(*args))[1]
    replay(s, clock, sessions())
    assert seen == [2, 3, 4, 5, 5] and clock() == pytest.approx(40, abs=.1)


def test_overlap_hides_the_host_and_nothing_else():
    heavy = CostModel(costs=small, step=2e-3, host_step=1e-3)
    def seconds(**how):
        config = EngineConfig(num_pages=500, max_seq_len=300, **how)
        one = (o for o in [Turn(0., np.array([1, 2]), 100)])
        return simulate(config, heavy, [one]).clock()
    assert seconds(overlap=False) == pytest.approx(.3) and seconds(overlap=True) == pytest.approx(.201)


def test_a_simulation_needs_no_server():
    "A day of requests without sockets, tokenizers, or a model"
    code = ("import sys; import minisgl_lit.tools.simulator; "
            "sys.exit([o for o in ('zmq', 'transformers', 'minisgl_lit.llm', 'minisgl_lit.tools.bench') if o "
            "in sys.modules] or 0)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
