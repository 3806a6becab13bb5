"""The simulated rule is the router's; whatever the rule, every request is served once and is charged to one
replica."""
import asyncio
from operator import itemgetter

import numpy as np
import pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.outputs import EngineCoreOutput
from minisgl_lit.core.request import FinishReason
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.distributed.kv_events import KVEvents
from minisgl_lit.loop.messages import UserMsg
from minisgl_lit.server.router import Prompt, Router
from minisgl_lit.tools.roofline import ModelCosts
from minisgl_lit.tools.simulator import CostModel
from minisgl_lit.tools.traces import SessionShape, Turn, trace
from script import load

LeastCost, SimReplica, SimRouter, routing_rules, simulate_replicas = itemgetter(
    'LeastCost', 'SimReplica', 'SimRouter', 'routing_rules', 'simulate_replicas')(load('tools/routing'))

small = ModelCosts(layer_weights=1000, head_weights=500, token_kv=8, pair_flops=100, itemsize=2)
cost = CostModel(costs=small, byte=1e-8, flop=1e-8, step=1e-3, token=1e-5, host_step=2e-4)
config = EngineConfig(num_pages=150, page_size=4, max_seq_len=300, max_running_req=6, seed=0)
chats = SessionShape(input_len=20, output_len=6, turns=3, pause=.05, prefixes=5, prefix_len=40, max_len=250)


class Told:
    "An engine of which the router only knows what it is told, and that answers when the test says so"
    model, alive, why = 'toy', True, ''

    def __init__(self): self.asked, self.answers = [], {}

    async def control(self, command, argument=''):
        return {'page_size': config.page_size, 'num_pages': config.num_pages, 'adapters': {}}

    async def stream(self, requests):
        for r in requests: self.asked.append(r.rid)
        queue = self.answers[requests[0].rid] = asyncio.Queue()
        while True:
            output = await queue.get()
            yield output
            if output.finish_reason: return


class Beside(LeastCost):
    "Chooses as it would, and keeps what was asked and known"
    def __init__(self): super().__init__(); self.chosen, self.average = [], []

    def choose(self, prompt, loads):
        self.chosen.append(super().choose(prompt, loads))
        self.average.append(self._answer)
        return self.chosen[-1]


@pytest.mark.parametrize('seed', range(3))
def test_the_router_chooses_as_the_simulated_rule(seed):
    "Random prompts, ends and events: told the same, both send each prompt to the same replica"
    rng, rule = np.random.default_rng(seed), LeastCost()

    async def life():
        router, engines = Router('toy'), [Told() for _ in range(3)]
        for i, engine in enumerate(engines): await router.join(str(i), engine)
        loads, reading = [o.load for o in router.replicas.values()], {}
        starts = [rng.integers(0, 99, 40) for _ in range(4)]
        async def read(request):
            async for _ in router.stream([request]): pass
        for step in range(60):
            ids = np.concatenate([starts[rng.integers(4)], rng.integers(0, 99, int(rng.integers(1, 60)))])
            request = UserMsg(str(step), ids, SamplingParams(max_tokens=9, temperature=0))
            expected = rule.choose(Prompt(len(ids), router._prompt(request).hashes), loads)
            reading[str(step)] = asyncio.ensure_future(read(request))
            while not any(o.answers.get(str(step)) for o in engines): await asyncio.sleep(0)
            assert [i for i, o in enumerate(engines) if str(step) in o.asked] == [expected]
            for rid in [o for o in reading if rng.random() < .2]:
                [engine] = [o for o in engines if rid in o.answers]
                n = int(rng.integers(1, 200))
                engine.answers[rid].put_nowait(EngineCoreOutput(rid, [0]*n, FinishReason.LENGTH))
                await reading.pop(rid)
                rule.answered(n)
            k = int(rng.integers(3))
            blocks = np.array([o for o in loads[k].open.values() for o in o.hashes], dtype=np.int64)
            engines[k].on_kv_events(KVEvents(1, blocks, blocks[:0], True))
        for task in reading.values(): task.cancel()
    asyncio.run(asyncio.wait_for(life(), 15))


@pytest.mark.parametrize('name', routing_rules)
def test_whatever_the_rule_everybody_is_served_once(name):
    asked = []
    def noted(session):
        answer = None
        try:
            while True:
                turn = session.send(answer)
                asked.append(turn)
                answer = yield turn
                assert len(answer) == turn.max_tokens
        except StopIteration: return
    replicas = [SimReplica(config, cost) for _ in range(3)]
    SimRouter(replicas, routing_rules[name]()).replay(map(noted, trace(chats, 40, 60., seed=1)))
    assert sum(o.stats.served.sum() for o in replicas) == len(asked) == sum(o.load.n_sent for o in replicas)
    for o in replicas:
        assert (o.load.open, o.load.waiting_tokens, o.next_at) == ({}, 0, float('inf'))
        assert (len(o.load.index.blocks) == o.scheduler.cache.page_counts['evictable']
                and o.load.index.complete)


def test_the_same_day_twice_is_the_same():
    a, b = (simulate_replicas(config, cost, trace(chats, 30, 60., seed=2), 3, LeastCost()) for _ in range(2))
    assert a.to_json() == b.to_json()


def test_what_a_step_brings_is_known_at_its_end():
    """Two replicas of one second a step; a request at .5 does not know what the first step of the other will
    have brought at 1"""
    slow, rule = CostModel(costs=small, step=1.), Beside()
    def one(at, ids): yield Turn(at, np.array(ids), 1)
    simulate_replicas(config, slow, [one(0., range(40)), one(.5, range(50, 60)), one(1.5, range(30))], 2,
                      rule)
    assert rule.chosen == [0, 1, 0]
    assert rule.average == [100., 100., pytest.approx(100. - .05*99)]
