"""A copy of a prefix tree kept by events, and a router over three engines, through whatever may happen to
them."""
import asyncio, json, os, random

import numpy as np
import pytest
from hypothesis.stateful import invariant, rule

from minisgl_lit.core.request import FinishReason
from minisgl_lit.core.sampling_params import QueueFull, RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.distributed.kv_events import BlockIndex, KVEventLog, block_hashes, root_hash
from minisgl_lit.server.engine_client import AsyncEngineClient
from minisgl_lit.loop.adapter_orders import AdapterLoad, AdapterOrders
from minisgl_lit.loop.messages import ControlMsg, UserMsg, decode
from minisgl_lit.server.adapter_set import AdapterSet
from minisgl_lit.server.router import Router
from minisgl_lit.testing.toy_core import ToyEngineCore
from minisgl_lit.testing.toy_engine import expected_output
from test_radix import Radix, lives


# ---- events

class Told(Radix):
    "A tree, and what somebody knows of it who only hears its events and now and then misses some"
    log = index = None
    losing = False

    @rule()
    def a_batch_will_be_lost(self): self.losing = True

    def begin(self):
        self.cache.observer = self.log = KVEventLog(self.cache)

    @invariant()
    def the_copy_is_the_tree(self):
        if not hasattr(self, 'cache'): return
        if self.log is None:
            self.index = BlockIndex()
            self.begin()
        complete, events = self.index.complete, self.log.take()
        assert self.log.take() is None
        if events:
            assert not {*events.stored.tolist()} & {*events.removed.tolist()}
            assert len(events.stored) + len(events.removed) <= len(self.model.found) or not events.snapshot
            if self.losing: self.losing = False
            else:
                follows = events.number == self.index._number + 1
                self.index.apply(events)
                assert self.index.complete == (events.snapshot or complete and follows)
        if events and not self.index.complete:
            self.begin()
            self.index.apply(self.log.take())
        if self.index._number < self.log._number: return   # the last one was lost, which nobody can know yet
        if not self.index.complete: return
        there = {block_hashes(ids, self.model.size, root_hash(key))[-1]
                 for key, ids in self.model.found if not isinstance(key, int)}
        assert self.index.blocks == there

def test_a_copy_is_the_tree(): lives(Told, int(os.environ.get('TST_EXAMPLES', 40)), steps=25)

@pytest.mark.long
def test_a_copy_is_the_tree_in_thousands_of_lives(): lives(Told, 3000, steps=60)


# ---- the router

def client(**settings):
    "A client of a toy engine that listens until it dies"
    it = AsyncEngineClient(ToyEngineCore(**settings), 'toy')
    async def listen():
        try: await it.listen()
        except RuntimeError as e: it.fail(str(e))
    it.listening = asyncio.ensure_future(listen())
    return it

async def cluster(n=3, **settings):
    router = Router('toy')
    for i in range(n): await router.join(str(i), client(**settings))
    return router

def request(rid, ids, n=6, **more):
    return UserMsg(rid, np.array(ids), SamplingParams(max_tokens=n, temperature=0, **more))

async def read(router, *requests):
    "Tokens and end of each"
    ids, ends = {r.rid: [] for r in requests}, {}
    async for o in router.stream([*requests]):
        assert o.rid not in ends, 'something after the end'
        ids[o.rid] += o.token_ids
        if o.finish_reason: ends[o.rid] = o
    return [(ids[r.rid], ends[r.rid]) for r in requests]

def right(r): return expected_output(r.input_ids.tolist(), r.params.max_tokens, 1000)

async def read_some(router, requests, leaves, has_died):
    """Read a call as some caller does, who may leave: all that is told is right, and an error comes only from
    an engine that died"""
    stream, told, ends = router.stream(requests), {r.rid: [] for r in requests}, {}
    try:
        async for o in stream:
            assert o.rid not in ends, 'something after the end'
            told[o.rid] += o.token_ids
            if o.finish_reason: ends[o.rid] = o
            if leaves(): break
        else: assert ends.keys() == told.keys()
    except QueueFull: assert has_died()
    finally: await stream.aclose()
    for r in requests:
        end, tokens = ends.get(r.rid), told[r.rid]
        assert tokens == right(r)[:len(tokens)], 'another answer'
        if end and end.finish_reason is FinishReason.ERROR: assert has_died() and 'has ended' in end.error
        elif end and end.finish_reason is not FinishReason.ABORT: assert tokens == right(r)

def blocks(replica):
    "What a replica's tree really holds"
    return {*KVEventLog(replica.client.process.scheduler.cache.prefix).take().stored.tolist()}

def run(main): asyncio.run(asyncio.wait_for(main, 15))

async def settle(router):
    "Wait until every engine that lives has nothing to do and has told all"
    live = [o for o in router.replicas.values() if o.client.alive]
    while any(o.client.process.scheduler.alive or not o.load.index.complete for o in live):
        await asyncio.sleep(.001)
    for o in live: await o.client.stats()
    for _ in range(5): await asyncio.sleep(.001)
    return live

SYSTEM = [[*range(100*k, 100*k + 30)] for k in range(1, 4)]

@pytest.mark.parametrize('seed', range(6))
def test_whatever_happens(seed):
    """Requests with common beginnings; callers that leave; engines that die, freeze and come back; batches of
    events that are lost.

    Whoever is answered is answered rightly; an error comes only from an engine that died; at the end nothing
    is left, and every copy is its tree."""
    rng = random.Random(seed)
    async def main():
        router, deaths, n = await cluster(num_pages=48, max_running_req=4), 0, 0
        started, joins = dict(router.replicas), 0
        async def call():
            nonlocal n
            n += 1
            requests = [request(f'{n}-{i}', rng.choice(SYSTEM)[:rng.randrange(1, 31)]
                + [n]*rng.randrange(1, 4), rng.randrange(1, 20)) for i in range(rng.choice([1, 1, 2, 5]))]
            await read_some(router, requests, lambda: rng.random() < .02, lambda: deaths)
        async def trouble():
            nonlocal deaths, joins
            for _ in range(12):
                await asyncio.sleep(rng.random()*.01)
                name = rng.choice([*router.replicas])
                replica, core = router.replicas[name], router.replicas[name].client.process
                match rng.choice(['die', 'die', 'freeze', 'lose', 'leave']):
                    case 'die':
                        deaths += 1
                        core.kill()
                        await asyncio.sleep(rng.random()*.01)
                        router.leave(name)
                        await router.join(name, client(num_pages=48, max_running_req=4))
                        joins += 1
                    case 'freeze':
                        core.trouble = 'the engine has not been heard of for 4 s'
                        await asyncio.sleep(.005)
                        if not core.killed: core.trouble = ''
                    case 'lose': core.core.kv_events and core.core.kv_events.take()
                    case 'leave':
                        router.leave(name)
                        await asyncio.sleep(.005)
                        replica.joined = True
        await asyncio.gather(trouble(), *[call() for _ in range(40)])
        # a change after the last batch that was lost
        for i, r in enumerate(SYSTEM): await read(router, request(f'last{i}', r*2, 2))
        assert router._rids == {} and router.calls == 0
        live = await settle(router)
        assert len(live) == 3 and joins == deaths
        for o in [*live, *started.values()]:
            assert not (o.load.open or o.load._misses or o.load._coming or o.load.waiting_tokens)
        for o in live: await o.sync()
        for o in await settle(router): assert o.load.index.blocks == blocks(o)
    run(main())

class Adapters:
    "Two, of which the toys compute nothing; the names of their prefixes begin with digests"
    digests, paths, most = dict(sql='5e1', poet='90e7'), dict(sql='', poet=''), 8
    def validate(self, params): pass
    def resolve(self, params):
        own = self.digests[params.lora] + (params.extra_key or '')
        return params.within(own), 1 + (params.lora == 'poet')
    def stats(self): return {}

def test_a_prompt_of_an_adapter_goes_where_its_pages_are():
    async def main():
        router, clients = Router('toy'), [client(num_pages=64) for _ in range(3)]
        for i, o in enumerate(clients):
            o.process.scheduler.adapters = Adapters()
            o.process.scheduler.table.max_adapters = 8
            o.process.core.adapters = AdapterOrders(Adapters())
            await router.join(str(i), o)
        asked = [dict(lora='sql'), dict(lora='poet'), dict(lora='poet', extra_key='a tenant'), {}]
        for again in range(2):
            for i, more in enumerate(asked): await read(router, request(f'{again} {i}', SYSTEM[0], **more))
            live = await settle(router)
            cached = [o.client.process.scheduler.counts['cached_tokens'] for o in live]
            assert sum(cached) == again*len(asked)*28   # all of a prompt but what fills no page
    run(main())

def test_a_lost_batch_is_noticed_and_mended():
    async def main():
        router = await cluster(1)
        replica = router.replicas['0']
        for i in range(3): await read(router, request(f'a{i}', [i]*20))
        await settle(router)
        assert replica.load.index.blocks == blocks(replica)
        apply, lost = replica.client.on_kv_events, []
        replica.client.on_kv_events = lost.append
        await read(router, request('b', [7]*20))
        await settle(router)
        assert lost and replica.load.index.blocks != blocks(replica)
        replica.client.on_kv_events = apply
        await read(router, request('c', [8]*20))
        await settle(router)
        assert replica.load.index.complete and replica.load.index.blocks == blocks(replica)
    run(main())

def test_a_request_that_kills_does_not_kill_all():
    "It is tried on two replicas; the third is spared, and the caller is told"
    async def main():
        router = await cluster(3)
        killed = []
        for o in router.replicas.values():
            def send(message, core=o.client.process, send=o.client.process.send):
                send(message)
                if b'poison' in message: killed.append(core.kill())
            o.client.process.send = send
        [(ids, end)] = await read(router, request('poison', [1, 2, 3]))
        assert ((ids, end.finish_reason, len(killed)) == ([], FinishReason.ERROR, 2)
                and 'has ended' in end.error)
        [(ids, _)] = await read(router, r := request('next', [1, 2, 3]))
        assert ids == right(r)
    run(main())

def test_a_full_queue_is_left_for_another():
    async def main():
        router = await cluster(2, max_queued_req=1, max_running_req=1)
        busy = router.replicas['0'].client
        held = [asyncio.ensure_future(read(busy, request('h0', [1], 200)))]
        while not busy.process.scheduler.decode.running: await asyncio.sleep(0)
        held.append(asyncio.ensure_future(read(busy, request('h1', [2], 200))))
        while len(busy.process.scheduler.alive) < 2: await asyncio.sleep(0)
        answers = [asyncio.ensure_future(read(router, request(f'r{i}', [i, 5, 6], 2))) for i in range(2)]
        for i, [(ids, end)] in enumerate(await asyncio.gather(*answers)):
            assert ids == expected_output([i, 5, 6], 2, 1000), end
        for o in held: o.cancel()
    run(main())

def test_a_replica_that_drains_ends_what_it_has_begun():
    async def main():
        router = await cluster(2)
        asked = [request(f's{i}', [i], 60) for i in range(4)]
        streams = [router.stream([r]) for r in asked]
        first = [(await anext(o)).token_ids for o in streams]
        router.leave('0')
        later = await read(router, *[request(f'l{i}', [i, 1], 3) for i in range(4)])
        assert (all(o.finish_reason == 'length' for _, o in later)
                and not any(rid.startswith('l') for rid in router.replicas['0'].load.open))
        for r, ids, stream in zip(asked, first, streams):
            assert ids + [t async for o in stream for t in o.token_ids] == right(r)
        assert not router.replicas['0'].load.open
    run(main())


# ---- commands

@pytest.mark.parametrize('moment', range(12))
def test_a_command_while_one_joins(moment):
    "It is told each command once, and is then as the others are"
    async def main():
        router = await cluster(2)
        await router.control('pause', 'in_place')
        await router.control('weight_version', 'v2')
        new, heard = client(), []
        def send(message, send=new.process.send):
            heard.append(decode(message))
            send(message)
        new.process.send = send
        joining = asyncio.ensure_future(router.join('2', new))
        for _ in range(moment): await asyncio.sleep(0)
        await router.control('weight_version', 'v3')
        await router.control('resume')
        await joining
        for o in router.replicas.values():
            await o.client.stats()
            assert ((o.client.process.scheduler.paused, o.client.process.scheduler.weight_version)
                    == (False, 'v3'))
        told = [(m.command, m.argument) for m in heard if isinstance(m, ControlMsg) and m.command != 'stats']
        assert len({*told}) == len(told)
    run(main())

def test_commands_that_are_refused_while_others_are_under_way():
    "Whoever joins later is told what lasts, and nothing that was refused, in whatever order they were sent"
    async def main():
        router = await cluster(2)
        both = await asyncio.gather(router.control('pause', 'soon'), router.control('pause', 'later'),
                                    return_exceptions=True)
        assert all(isinstance(o, RequestError) for o in both)
        await router.join('2', new := client())
        assert not new.process.scheduler.paused
        for first, second in (('soon', 'in_place'), ('in_place', 'soon')):
            await router.control('resume')
            await asyncio.gather(*(router.control('pause', o) for o in (first, second)),
                                 return_exceptions=True)
            await router.join('2', new := client())
            assert new.process.scheduler.paused
        assert sum(map(len, router._told.values())) == 1
    run(main())

def test_a_replica_that_stands_still_holds_up_nobody():
    "It is left out of an answer once that is known; what it was told meanwhile it does when it goes on"
    async def main():
        router = await cluster(3)
        still = router.replicas['0'].client.process
        turn, still._turn = still._turn, list   # no one can know it yet
        asked = [asyncio.ensure_future(o)
                 for o in (router.stats(), router.control('live'), router.control('pause', 'in_place'))]
        await asyncio.sleep(.01)
        assert not any(o.done() for o in asked)
        still.trouble = 'the engine has not been heard of for 4 s'
        for o in await asyncio.gather(*asked[:2]):
            assert ['pages' in each for each in o['per_replica']] == [False, True, True]
        await asked[2]
        await router.control('weight_version', 'v2')
        n_waiting = len(router.replicas['0'].client._control_replies)
        for _ in range(5): await router.stats()
        # it is not asked over and over
        assert len(router.replicas['0'].client._control_replies) == n_waiting
        still.trouble, still._turn = '', turn
        await router.replicas['0'].client.stats()
        assert still.scheduler.paused and still.scheduler.weight_version == 'v2'
    run(main())

def test_a_replica_dies_while_it_is_asked():
    "The others have answered; when the last dies, the caller is told so"
    async def main():
        router = await cluster(2)
        cores = [o.client.process for o in router.replicas.values()]
        cores[0]._turn = list
        asked = asyncio.ensure_future(router.control("pause", "in_place"))
        await asyncio.sleep(.01)
        assert not asked.done()
        cores[0].kill()
        assert await asked == {} and cores[1].scheduler.paused
        cores[1]._turn = list
        asked = asyncio.ensure_future(router.control("resume"))
        await asyncio.sleep(.01)
        cores[1].kill()
        with pytest.raises(RuntimeError, match="has ended"): await asked
        await router.join("2", new := client())
        assert not new.process.scheduler.paused   # it has been told what they were
    run(main())

def test_counts_do_not_fall():
    "Prometheus would take that for a server that has begun anew"
    async def main():
        router = await cluster(2)
        for i in range(4): await read(router, request(f'a{i}', [i]*9))
        before = await router.stats()
        def same(stats):
            assert all(stats[k] == before[k]
                       for k in ('prompt_tokens', 'cached_tokens', 'generated_tokens', 'hit_rate'))
        router.replicas['0'].client.process.kill()
        while router.replicas['0'].client.alive or not router.replicas['0'].client.failed:
            await asyncio.sleep(0)
        same(after := await router.stats())
        assert (after['pages']['total']*2 == before['pages']['total']
                and 'pages' not in after['per_replica'][0])
        router.leave('0')
        same(await router.stats())
        await router.join('0', client())
        same(await router.stats())
        await read(router, request('b', [9]*9))
        assert (await router.stats())['prompt_tokens'] == before['prompt_tokens'] + 9
    run(main())

def test_hashes_hold_up_nobody():
    "Of a long prompt only so many pages are looked at; between the prompts of a call others have their turn"
    async def main():
        router, turns, sent = await cluster(2, page_size=1, num_pages=240), 0, []
        prompt = router._prompt(request('x', np.arange(100_000) % 999))
        assert prompt.n_tokens == 100_000 and len(prompt.hashes) == 8192
        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)
        for o in router.replicas.values():
            def send(message, send=o.client.process.send):
                sent.append(turns)
                send(message)
            o.client.process.send = send
        task = asyncio.ensure_future(others())
        await asyncio.sleep(0)
        before = turns
        answers = await read(router, *(requests := [request(f'r{i}', [i]*200, 1) for i in range(20)]))
        assert sent[0] >= before + 19 and [ids for ids, _ in answers] == [right(r) for r in requests]
        task.cancel()
    run(main())


# ---- commands that some take and others refuse

class Weights:
    "Those of a toy engine: where they are from"
    def __init__(self, fails=False): self.path, self.fails = 'start', fails
    def check(self, path): pass
    def check_release(self, parts): pass
    def release(self, parts): pass
    def reload(self): pass
    def load(self, path):
        if self.fails: raise OSError('short read')
        self.path = path

def with_weights(fails=False, **settings):
    "A client of a toy engine that can load weights and release memory"
    it = client(**settings)
    core, it.weights = it.process.core, Weights(fails)
    core.updates.weights = core.memory.weights = it.weights
    return it

async def two(*fails, **settings):
    router = Router('toy')
    for i, o in enumerate(fails): await router.join(str(i), with_weights(o, **settings))
    return router

def update(path, version, **more):
    return 'update_weights', json.dumps(dict(model_path=path, weight_version=version, **more))
def weights(router): return [o.client.weights.path for o in router.replicas.values()]
def available(router): return [name for name, o in router.replicas.items() if o.available]

@pytest.mark.parametrize('commands', [
    [('pause', 'in_place'), update('/B', '2', keep_pause=True), ('resume', '')],
    [update('/A', '1'), ('weight_version', '1b'), ('release_memory', 'kv_cache weights'), update('/B', '2')]],
                         ids=['paused', 'released'])
def test_a_newcomer_hears_commands_in_their_order(commands):
    "So it is as the others are, and answers"
    async def main():
        router = await two(False, False)
        for o in commands: await router.control(*o)
        await router.join('2', with_weights())
        assert (len({(o.client.process.scheduler.paused, o.client.weights.path,
                      o.client.process.scheduler.weight_version) for o in router.replicas.values()}) == 1)
        for i in range(4):
            assert (await read(router, request(str(i), [i]*9)))[0][1].finish_reason is FinishReason.LENGTH
        assert all(o.load.n_sent for o in router.replicas.values())
    run(main())

def test_memory_is_released_by_all_or_by_none():
    """One has a request, so it refuses; who has released its memory gets it back, and so does whoever joins
    now"""
    async def main():
        router = await two(False, False, step_seconds=.002)
        busy = router.stream([request('busy', [1, 2, 3], 200)])
        await anext(busy)
        with pytest.raises(RequestError, match='1 requests are alive'):
            await router.control('release_memory', 'kv_cache weights')
        await router.join('2', with_weights())
        for i in range(6):
            assert (await read(router, request(str(i), [i]*9)))[0][1].finish_reason is FinishReason.LENGTH
        assert available(router) == ['0', '1', '2']
        await busy.aclose()
    run(main())

def test_two_models_are_not_one_server():
    """Who refuses weights that another has loaded gets no requests until it has them, too; what it has begun
    goes on"""
    async def main():
        router = await two(False, False, step_seconds=.002)
        busy = router.stream([request('busy', [1, 2, 3], 100)])
        await anext(busy)
        await router.control('pause', 'in_place')
        with pytest.raises(RequestError, match='begun their answer and are paused'):
            await router.control(*update('/B', '2'))
        await router.control('resume')
        assert weights(router) == ['start', '/B'] and available(router) == ['1']
        [other, mine] = (await router.control('stats'))['per_replica']
        assert 'refused what others have done (weights)' in other['why'] and not mine['why']
        ends = [o async for o in busy]
        assert ends[-1].finish_reason is FinishReason.LENGTH
        await router.control(*update('/B', '2'))
        assert weights(router) == ['/B', '/B'] and available(router) == ['0', '1']
    run(main())

def test_an_engine_that_cannot_load_gets_no_requests():
    "Nor does a resume that it refuses leave others paused, or those that join later"
    async def main():
        router = await two(False, True)
        with pytest.raises(RuntimeError, match='short read'): await router.control(*update('/B', '2'))
        await router.control('pause', 'in_place')
        with pytest.raises(RequestError): await router.control('resume')
        assert available(router) == ['0']
        for i in range(3):
            assert (await read(router, request(str(i), [i]*9)))[0][1].finish_reason is FinishReason.LENGTH
        await router.join('1', with_weights())
        assert (weights(router) == ['/B', '/B'] and available(router) == ['0', '1']
                and not any(o.client.process.scheduler.paused for o in router.replicas.values()))
    run(main())

def test_what_was_aborted_is_not_begun_again_elsewhere():
    "Its engine stands still, and then dies: the caller is told of the abort, and no other engine computes it"
    async def main():
        router = await two(False, False)
        still = router.replicas['0'].client.process
        still._turn = list
        asked = asyncio.ensure_future(read(router, request('x1', [1]*20), request('y', [1]*20)))
        await asyncio.sleep(.02)
        still.trouble = 'the engine has not been heard of for 4 s'
        assert await router.control('abort', 'x*') == {'aborted': 0}
        still.kill()
        assert ([end.finish_reason for _, end in await asked] == [FinishReason.ABORT, FinishReason.LENGTH]
                and router._rids == {})
    run(main())


# ---- adapters that all have, or none

class Kept:
    "Adapters of a toy engine that cannot read paths with its name in them"
    most = 8
    def __init__(self, name, **paths):
        self.name, self.paths, self.busy, self.leaving = name, paths, False, []
    @property
    def digests(self): return {k: f'digest of {path}' for k, path in self.paths.items()}
    def stats(self): return {}
    def load(self, name, path):
        if self.name in path: raise ValueError(f'{self.name} cannot read {path}')
        assert name not in self.paths, 'there is one already'
        self.paths[name] = path
    def unload(self, name):
        if name not in self.paths: raise RequestError('lora', f'no adapter is called {name!r}')
        self.leaving.append(name)
    def drop_unused(self):
        gone, self.leaving = ([], self.leaving) if self.busy else (self.leaving, [])
        for name in gone: del self.paths[name]
        return gone

def with_adapters(name, **paths):
    it = client()
    it.kept = Kept(name, **paths)
    it.process.core.adapters = AdapterOrders(it.kept)
    return it

async def declared(**paths):
    router = Router('toy', AdapterSet(paths))
    for name in ('one', 'two'): await router.join(name, with_adapters(name, **paths))
    return router

def load(name, path): return 'load_adapter', AdapterLoad(name, path).argument
def kept(router): return [dict(o.client.kept.paths) for o in router.replicas.values()]

def test_adapters_are_loaded_by_all_or_kept_by_none():
    async def main():
        router = await declared(sql='/v1')
        assert await router.control(*load('poet', '/p')) == {'adapters': dict(sql='/v1', poet='/p')}
        assert kept(router) == [dict(sql='/v1', poet='/p')] * 2
        assert {o.load.adapters['poet'] for o in router.replicas.values()} == {'digest of /p'}
        for bad in 'one', 'two':
            with pytest.raises(RequestError, match=f'{bad} cannot read /{bad}'):
                await router.control(*load('bad', f'/{bad}'))
        assert (kept(router) == [dict(sql='/v1', poet='/p')] * 2 and available(router) == ['one', 'two']
                and await router.control('adapters') == {'adapters': dict(sql='/v1', poet='/p')})
        await router.control('unload_adapter', 'poet')
        await router.control(*load('poet', '/p2'))   # another path under the name
        assert kept(router) == [dict(sql='/v1', poet='/p2')] * 2
    run(main())

def test_an_engine_that_starts_again_is_brought_to_the_adapters_of_now():
    "Whether it begins with none, or with those of long ago; what it cannot read keeps requests from it"
    async def main():
        router = await declared(sql='/v1', old='/o')
        await router.control('unload_adapter', 'sql')
        await router.control('unload_adapter', 'old')
        await router.control(*load('sql', '/v2'))
        for before in ({}, dict(sql='/v1', old='/o')):
            router.replicas['one'].client.process.kill()
            await router.join('one', with_adapters('one', **before))
            assert kept(router) == [dict(sql='/v2')] * 2 and available(router) == ['one', 'two']
        router.replicas['one'].client.process.kill()
        await router.control(*load('poet', '/one'))   # which the dead is not asked
        await router.join('one', with_adapters('one'))
        assert kept(router) == [dict(sql='/v2'), dict(sql='/v2', poet='/one')]
        assert available(router) == ['two']
        assert 'refused what others have done (adapter poet)' in router.replicas['one'].why
        await router.control('unload_adapter', 'poet')
        assert kept(router) == [dict(sql='/v2')] * 2 and available(router) == ['one', 'two']
    run(main())

@pytest.mark.parametrize('moment', range(14))
def test_an_engine_joins_while_adapters_change(moment):
    "At whatever moment it comes, it has what is declared, and only that, before it is sent requests"
    async def main():
        router = await declared(sql='/v1', old='/o')
        joining = asyncio.ensure_future(router.join('three', with_adapters('three', sql='/v1', old='/o')))
        for _ in range(moment): await asyncio.sleep(0)
        changes = (('unload_adapter', 'old'), load('poet', '/p'), load('bad', '/two'),
                   load('worse', '/three'))
        told = await asyncio.gather(*(router.control(*o) for o in changes), return_exceptions=True)
        assert not any(isinstance(o, Exception) for o in told[:2]) and isinstance(told[2], RequestError)
        await joining
        # unless it came too late to refuse
        worse = {} if isinstance(told[3], RequestError) else dict(worse='/three')
        shall = dict(sql='/v1', poet='/p') | worse
        assert router.adapters.ready == shall == kept(router)[0] == kept(router)[1]
        assert kept(router)[2] == dict(sql='/v1', poet='/p')
        assert available(router) == ['one', 'two'] + ([] if worse else ['three'])
    run(main())

def test_an_unload_holds_up_only_its_name():
    async def main():
        router = await declared(sql='/v1')
        busy = router.replicas['two'].client.kept
        busy.busy = True   # a request of it runs
        leaving = asyncio.ensure_future(router.control('unload_adapter', 'sql'))
        await asyncio.sleep(.01)
        with pytest.raises(RequestError, match="adapter 'sql' is being unloaded"):
            await router.control(*load('sql', '/v2'))
        await router.control(*load('poet', '/p'))
        assert (await router.control('adapters'))['adapters'] == dict(poet='/p') and not leaving.done()
        await router.join('three', with_adapters('three', sql='/v1'))
        assert kept(router) == [dict(poet='/p'), dict(sql='/v1', poet='/p'), dict(poet='/p')]
        router.replicas['two'].client.process.kill()   # whoever dies has nothing to unload
        assert await leaving == {'adapters': dict(poet='/p')}
    run(main())

def test_an_engine_that_stands_still_hears_of_adapters_afterwards():
    "It holds nobody up; when it goes on, it loads what was loaded, and forgets what was refused"
    async def main():
        router = await declared()
        still = router.replicas['two'].client
        still.process.trouble = 'the engine has not been heard of for 4 s'
        await router.control(*load('poet', '/p'))
        with pytest.raises(RequestError, match='one cannot read /one'):
            await router.control(*load('bad', '/one'))
        assert kept(router) == [dict(poet='/p'), {}]
        still.process.trouble = ''
        await still.stats()   # behind all that it was told
        assert kept(router) == [dict(poet='/p')] * 2 and available(router) == ['one', 'two']
    run(main())

def test_other_servers_decide_too():
    async def main():
        router = await two(False)
        with pytest.raises(RequestError, match='other servers share these engines'):
            await router.control(*load('a', '/a'))
    run(main())
