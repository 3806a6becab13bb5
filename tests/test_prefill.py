"""Prefill apart from decode, in real processes: the same tokens as one server's, and a prefill engine that is
killed, frozen, or never was."""
import asyncio, errno, os, random, shutil, signal, subprocess, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from minisgl_lit import cluster, serve
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.core.request import FinishReason, PendingReq
from minisgl_lit.core.sampling_params import QueueFull
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.distributed.handoff import Handoffs
from minisgl_lit.distributed.page_file import PageFile
from minisgl_lit.process import _locked, own_folder
from minisgl_lit.server import prefill_router
from minisgl_lit.server.engine_client import AsyncEngineClient
from minisgl_lit.loop.messages import UserMsg
from minisgl_lit.server.prefill_router import PrefillRouter, handoff_folder
from minisgl_lit.testing.toy_core import ToyEngineCore
from minisgl_lit.testing.toy_engine import expected_output
from test_router import read, read_some
from test_scheduler import SecondTier

SMALL = dict(device='cpu', port=0, dtype='float32', num_pages=400, max_running_req=8, log_interval=0,
             threads=1)
PROMPTS = [np.random.default_rng(i).integers(100, 500, 300 + 50*i).tolist() for i in range(6)]

def ask(url, prompt, n=24):
    body = {'input_ids': prompt,
            'sampling_params': {'max_new_tokens': n, 'temperature': 0, 'ignore_eos': True}}
    answer = httpx.post(url + '/generate', json=body, timeout=120).json()
    return answer['text'], answer['meta_info']['cached_tokens'], answer['meta_info']['finish_reason']['type']

def ask_all(url, prompts=PROMPTS):
    with ThreadPoolExecutor(len(prompts)) as threads: return [*threads.map(ask, [url]*len(prompts), prompts)]

def test_somebody_must_answer():
    with pytest.raises(ValueError, match='prefill_replicas=2 must be less than replicas=2: others make the '
                                         'answers'):
        serve(**SMALL, replicas=2, prefill_replicas=2)

def test_where_the_pages_cannot_travel():
    "Engines of several machines need a folder that all reach, and engines of Ray Serve are all alike"
    with pytest.raises(ValueError, match="prefill_replicas=1 with ray_address='auto' needs kv_handoff_path, "
                                         "a folder that all machines reach"):
        serve(**SMALL, replicas=2, prefill_replicas=1, ray_address='auto')
    with pytest.raises(ValueError, match='prefill_replicas is a setting of minisgl-lit serve, not of an '
                                         'application of Ray Serve'):
        cluster.app({'replicas': 2, 'prefill_replicas': 1})

@pytest.mark.long
def test_engines_that_ray_has_started():
    "Greedy, float32: the tokens of one server, and all full pages of the prompts have travelled"
    if not find_spec('ray'): pytest.skip('ray is not installed: make .venv/.ray')
    with serve(**SMALL) as s: right = ask_all(s.url)
    with serve(**SMALL, replicas=2, prefill_replicas=1, ray_address='local') as s:
        assert ask_all(s.url) == right
        answers, prompts = httpx.get(s.url + '/get_server_info').json()['per_replica']
        assert (prompts['handoffs']['sent'] == answers['handoffs']['received']
                == sum((len(o) - 1) // 16 for o in PROMPTS))

@pytest.mark.long
def test_two_processes_give_the_tokens_of_one():
    """Greedy, float32; the prompts are computed by one, and all but the last page of each travels; then the
    first is killed, and the second goes on alone"""
    with serve(**SMALL) as s: right = ask_all(s.url)
    with serve(**SMALL, replicas=2, prefill_replicas=1) as s:
        folder = s._config.kv_handoff_path
        assert ask_all(s.url) == right
        answers, prompts = (o for o in httpx.get(s.url + '/get_server_info').json()['per_replica'])
        n_pages = sum((len(o) - 1) // 16 for o in PROMPTS)
        assert (prompts['handoffs']['sent'] == answers['handoffs']['received'] == n_pages
                and answers['handoffs']['missed'] == 0)
        assert os.listdir(folder) == []
        others = [o[::-1] for o in PROMPTS]
        killing = threading.Timer(.2, lambda: os.kill(s._processes[1].process.pid, signal.SIGKILL))
        killing.start()
        first = ask_all(s.url, others)
        assert {end for *_, end in first} == {'length'}
        with serve(**SMALL) as alone:
            assert [o for o, *_ in ask_all(alone.url, others)] == [o for o, *_ in first]
        assert ask(s.url, PROMPTS[0][5:])[2] == 'length'
    assert not os.path.exists(folder)

@pytest.mark.long
def test_a_frozen_prefill_engine_is_passed_by():
    """Its heartbeat stops: after three seconds the prompts that wait there are computed by the other, and
    later ones at once"""
    with serve(**SMALL) as s: right = ask_all(s.url)
    with serve(**SMALL, replicas=2, prefill_replicas=1) as s:
        frozen = s._processes[1].process.pid
        os.kill(frozen, signal.SIGSTOP)
        try: assert [o for o, *_ in ask_all(s.url)] == [o for o, *_ in right]
        finally: os.kill(frozen, signal.SIGCONT)

@pytest.mark.long
def test_all_kinds_of_requests_are_answered_as_by_one_engine():
    """Logprobs, echo, several answers, stops at the first token, forms, tenants: the same bodies, but for
    ids, times and what was cached"""
    text = 'Once upon a time there was a small engine. ' * 30
    base = dict(model='embedded', prompt=text, max_tokens=8, temperature=0)
    asked = [base, base | dict(logprobs=3), base | dict(echo=True, logprobs=1),
             base | dict(n=3, temperature=1, seed=7), base | dict(stop=['e']), base | dict(max_tokens=1),
             base | dict(min_tokens=6), base | dict(max_tokens=0, echo=True), base | dict(regex='[0-9]{4}'),
             base | dict(max_tokens=10**6), base | dict(extra_key='ann'),
             base | dict(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}, '
                                     '"required": ["a"]}', max_tokens=40)]
    def bodies(s):
        for i, body in enumerate(asked):
            a = httpx.post(s.url + '/v1/completions', json=body | dict(prompt=str(i) + body['prompt']),
                           timeout=60)
            yield a.status_code, a.json().get('choices') or a.json()
    with serve(**SMALL) as s: right = [*bodies(s)]
    with serve(**SMALL, replicas=2, prefill_replicas=1) as s:
        assert [*bodies(s)] == right
        assert [code for code, _ in right].count(200) == len(asked) - 1
        folder, (answers, prompts) = (s._config.kv_handoff_path,
                                      httpx.get(s.url + '/get_server_info').json()['per_replica'])
        # pages of the prompt whose max_tokens is too much, which only the engine for answers sees
        refused = 24
        assert (answers['handoffs']['received'] == prompts['handoffs']['sent'] - refused > 100
                and answers['handoffs']['missed'] == 0)
    assert not os.path.exists(folder)

@pytest.mark.long
def test_the_next_server_removes_what_a_killed_one_has_left(tmp_path):
    code = ('import sys; from minisgl_lit import serve; s = serve(device="cpu", port=0, num_pages=100, '
            'threads=1, replicas=2, prefill_replicas=1, kv_handoff_path=sys.argv[1]); s.wait()')
    child = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert 'is served on' in child.stdout.readline()
    left, = tmp_path.iterdir()
    (left/'x.kv').write_bytes(bytes(9))
    # it lives
    with serve(**SMALL, replicas=2, prefill_replicas=1, kv_handoff_path=str(tmp_path)): assert left.exists()
    child.kill()
    child.wait()
    with serve(**SMALL, replicas=2, prefill_replicas=1, kv_handoff_path=str(tmp_path)) as s:
        assert [str(o) for o in tmp_path.iterdir()] == [s._config.kv_handoff_path]
    assert [*tmp_path.iterdir()] == []

# ---- toy engines: what may happen on the way

PROMPT = [*range(100, 120)]     # five pages, of which four travel

class Engines:
    "A router over toy engines in pages of four tokens; `p` computes prompts"
    def __init__(self, names='abp', folder=None, **settings):
        self.folder, self.settings = folder or tempfile.mkdtemp(dir=SecondTier.memory), settings
        self.router = PrefillRouter('toy', {'p'}, self.folder, 8)
        self.names, self.listening, self.cores = names, [], {}

    async def join(self, name):
        self.cores[name] = core = ToyEngineCore(kv_handoff_path=str(self.folder), **self.settings)
        client = AsyncEngineClient(core, 'toy')
        async def listen():
            try: await client.listen()
            except Exception as e: client.fail(str(e))
        self.listening.append(asyncio.ensure_future(listen()))
        await self.router.join(name, client)

    async def __aenter__(self):
        for name in self.names: await self.join(name)
        return self

    async def __aexit__(self, *error):
        for task in self.listening: task.cancel()
        await asyncio.gather(*self.listening, return_exceptions=True)
        if error[0] is None:
            assert not any(o.load.open for o in self.router.replicas.values()) and not self.router._rids
        shutil.rmtree(self.folder, ignore_errors=True)

    def handoffs(self, name): return self.cores[name].scheduler.cache.sources['handoffs']

    async def read(self, *requests): return await read(self.router, *requests)

    async def ask(self, rid, prompt=PROMPT, n=6, **params):
        "Whether it is answered rightly"
        (told, end), = await self.read(request(rid, prompt, n, **params))
        assert end.finish_reason is FinishReason.LENGTH
        return told == expected_output(list(prompt), n, 1000)

    async def files(self, seconds=1.):
        "What is left in the folder once nobody wants anything"
        end = asyncio.get_running_loop().time() + seconds
        while (os.path.isdir(self.folder) and os.listdir(self.folder)
               and asyncio.get_running_loop().time() < end):
            await asyncio.sleep(.005)
        return os.listdir(self.folder) if os.path.isdir(self.folder) else []

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition(): await asyncio.sleep(.001)

def request(rid, prompt=PROMPT, n=6, **params):
    return UserMsg(rid, np.array(prompt),
                   SamplingParams(max_tokens=n, temperature=0, **dict(ignore_eos=True) | params))

def run(main): asyncio.run(asyncio.wait_for(main, 20))

@pytest.fixture
def impatient(monkeypatch):
    "Seconds become tenths"
    monkeypatch.setattr(prefill_router, 'PATIENCE', .1)

def test_half_a_file_of_a_dead_engine_is_removed(impatient):
    "It is killed while it writes"
    async def main():
        async with Engines() as e:
            e.handoffs('p')._write = lambda name, *args: open(f'{e.folder}/{name}.part', 'w').close()
            asked = asyncio.ensure_future(e.ask('x'))
            await e.until(lambda: os.listdir(e.folder))
            e.cores['p'].kill()
            assert await asked and await e.files() == []
    run(main())

def test_a_folder_that_cannot_be_looked_into(impatient):
    "Neither to write nor to look: an error of the operating system is a file that is not there"
    async def main():
        async with Engines(folder='/tmp/' + 300*'x', step_seconds=.001) as e:
            assert await e.ask('x') and await e.ask('y', PROMPT[::-1])
            assert e.handoffs('a')._stream._error is e.handoffs('p')._stream._error is None
    run(main())

def test_an_engine_whose_file_never_came_is_passed_by(impatient):
    "For a while: then it gets prompts again"
    async def main():
        async with Engines() as e:
            sent = e.handoffs('p').send
            e.handoffs('p').send = lambda *args: None
            def computed(): return e.cores['p'].scheduler.counts['prompt_tokens']
            assert await e.ask('x') and computed() == 20
            assert await e.ask('y', PROMPT[::-1]) and computed() == 20   # it does not go there
            e.handoffs('p').send = sent
            for replica in (rests := e.router._rests): rests[replica] -= prefill_router.REST   # it is over
            assert (await e.ask('z', PROMPT[::-2]*2) and computed() == 40
                    and e.handoffs('p').counts['sent'] == 4)
    run(main())

def test_as_much_of_a_prompt_travels_as_there_is_room_for():
    async def main():
        async with Engines() as e:
            e.handoffs('p').most_pages = 3
            assert await e.ask('x')
            assert e.handoffs('p').counts['sent'] == sum(e.handoffs(o).counts['received'] for o in 'ab') == 3
            e.handoffs('a').most_pages = e.handoffs('b').most_pages = 2
            assert await e.ask('y', PROMPT[::-1]) and sum(e.handoffs(o).counts['received'] for o in 'ab') == 5
            assert await e.files() == []
    run(main())

def test_an_abort_between_the_engines_is_not_lost():
    """Three answers to one prompt: one is aborted while it is computed; while its caller reads that, another
    one"""
    async def main():
        async with Engines(step_seconds=.01, max_prefill_tokens=4) as e:
            ends, stream = {}, e.router.stream([request(o) for o in 'xyz'])
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(.02)
            await e.router.control('abort', 'x')
            assert (await first).finish_reason is FinishReason.ABORT
            await e.router.control('abort', 'y')
            async for o in stream:
                if o.finish_reason: ends[o.rid] = o.finish_reason.value
            assert ends == dict(y='abort', z='length')
    run(main())

def test_only_who_computes_prompts_sends_them():
    "Of two requests with one prompt, one wants no answer"
    async def main():
        async with Engines() as e:
            (told, _), (nothing, end) = await e.read(request('x'), request('y', n=0))
            assert (told == expected_output(PROMPT, 6, 1000) and nothing == []
                    and end.finish_reason is FinishReason.LENGTH)
            assert (e.handoffs('a').counts['sent'] == e.handoffs('b').counts['sent'] == 0
                    and await e.files() == [])
    run(main())

def test_a_server_that_ends_leaves_no_traceback():
    "What is to be removed is removed with the folder then"
    async def main():
        loop, errors = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        prefill_router._remove_file(Path("/nowhere/x.kv"))
        await loop.shutdown_default_executor()
        await asyncio.sleep(.01)
        assert not errors
    run(main())

@pytest.mark.parametrize('error', [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize('written', [0, 1, 4, 7])
def test_a_full_disk_costs_time_and_no_answer(written, error):
    "After so many writes, of a header and then two for each page"
    left, write = [written], os.pwrite
    def pwrite(*args):
        left[0] -= 1
        if left[0] < 0: raise OSError(error, 'no')
        return write(*args)
    async def main():
        async with Engines() as e:
            with patch('minisgl_lit.distributed.page_file.os.pwrite', pwrite): assert await e.ask('x')
            received = sum(e.handoffs(o).counts['received'] for o in 'ab')
            assert received == max(written - 1, 0) // 2 and await e.files() == []
    run(main())

def test_a_decode_engine_that_dies_before_its_first_token():
    "Another one takes the same file"
    async def main():
        async with Engines() as e:
            dead = []
            for name in 'ab':
                def arriving(pending, start, end, name=name):
                    if not dead:
                        dead.append(name)
                        e.cores[name].kill()
                        return True
                    return really(pending, start, end)
                really = e.handoffs(name).arriving
                e.handoffs(name).arriving = arriving
            assert await e.ask('x')
            other, = {*'ab'} - {*dead}
            assert e.handoffs(other).counts['received'] == 4 and await e.files() == []
    run(main())

@pytest.mark.parametrize('what', ['pause', 'flush', 'weights', 'nan'])
def test_something_happens_between_prompt_and_answer(what):
    "The file is written, and not yet asked for; what comes is right, and nobody waits"
    async def main():
        async with Engines(step_seconds=.001) as e:
            appears, happened = prefill_router._appears, asyncio.Event()
            async def looked(path):
                came = await appears(path)
                if what == 'pause': await e.router.control('pause', 'in_place')
                if what == 'flush': await e.router.control('flush_cache')
                for core in e.cores.values():
                    handoffs = core.scheduler.cache.sources['handoffs']
                    handoffs._make_fingerprint = lambda: bytes([1]*20)
                    if what == 'weights': core.scheduler.cache.renew()
                if what == 'nan': e.cores['a'].scheduler.engine.nan_rids |= {'x'}
                happened.set()
                return came
            with patch.object(prefill_router, '_appears', looked):
                asked = asyncio.ensure_future(e.read(request('x')))
                await happened.wait()
                if what == 'pause':
                    await asyncio.sleep(.05)
                    assert not asked.done()
                    await e.router.control('resume')
                (told, end), = await asked
            received = sum(e.handoffs(o).counts['received'] for o in 'ab')
            if what == 'nan': assert end.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
            else:
                assert (told == expected_output(PROMPT, 6, 1000)
                        and received == (0 if what == 'weights' else 4))
            assert await e.files() == []
    run(main())

@pytest.mark.parametrize('params', [dict(extra_key='ann'), dict(logprobs=2),
                                    dict(min_tokens=3, ignore_eos=False), dict(n=1), dict(max_tokens=1),
                                    dict(stop_token_ids=expected_output(PROMPT, 1, 1000)), dict(seed=3),
                                    dict(logit_bias={7: 100.})], ids=str)
def test_parameters_mean_what_they_always_mean(params):
    "The same outputs as without an engine for prompts"
    def asked():
        return request('x', **{'n': params.get('max_tokens', 6)}
                       | {k: v for k, v in params.items() if k not in ('n', 'max_tokens')})
    async def main():
        async with Engines('a') as alone, Engines('ap') as e:
            (right, end), = await alone.read(asked())
            (told, other), = await e.read(asked())
            assert (told == right and (other.finish_reason, other.matched,
                                       other.logprobs) == (end.finish_reason, end.matched, end.logprobs))
            assert e.handoffs('a').counts['received'] == 4
    run(main())

@pytest.mark.parametrize('settings', [dict(cache='none'), dict(max_prefill_tokens=3),
    dict(max_running_req=1, max_queued_req=2), dict(admission='optimistic', num_pages=16)], ids=str)
def test_under_other_settings(settings):
    async def main():
        async with Engines('ap', **settings) as e:
            prompts = [[*range(i, 24*i + i, i)] for i in range(1, 4)]
            assert await asyncio.gather(*(e.ask(str(i), o) for i, o in enumerate(prompts))) == [True]*3
            assert await e.files() == []
    run(main())

def test_a_queue_that_may_be_full():
    """Of three at once each is answered, or refused in one sentence where neither engine has room yet; no
    file is left"""
    async def main():
        async with Engines('ap', max_running_req=1, max_queued_req=1) as e:
            prompts = [[*range(i, 24*i + i, i)] for i in range(1, 4)]
            told = await asyncio.gather(*(e.ask(str(i), o) for i, o in enumerate(prompts)),
                                        return_exceptions=True)
            assert (True in told and all(o is True or isinstance(o, QueueFull) and 'waiting already' in str(o)
                                         for o in told)), told
            assert await e.files() == [] and not e.router.calls
    run(main())

def test_an_abort_does_not_wait_for_a_file():
    "The prompt is computed, and its file does not come"
    async def main():
        async with Engines() as e:
            e.handoffs('p').send = lambda *args: None
            asked = asyncio.ensure_future(e.read(request('x'), request('y')))
            await e.until(lambda: e.cores['p'].scheduler.counts['prompt_tokens']
                          and not e.cores['p'].scheduler.alive)
            await e.router.control('abort', '*')
            async with asyncio.timeout(2):
                assert {end.finish_reason for _, end in await asked} == {FinishReason.ABORT}
    run(main())

def test_a_pause_that_aborts_reaches_who_is_at_no_engine():
    async def main():
        async with Engines(step_seconds=.005, max_prefill_tokens=4) as e:
            asked = asyncio.ensure_future(e.read(request('x'), request('y')))
            await e.until(lambda: 'x' in e.cores['p'].scheduler.alive)
            await e.router.control('pause', 'abort')
            assert {end.finish_reason for _, end in await asked} == {FinishReason.ABORT}
    run(main())

def test_what_was_computed_a_moment_ago_was_not_cached():
    "But what the engine for prompts had cached was"
    async def main():
        async with Engines('ap') as e:
            (_, first), = await e.read(request('x'))
            await e.router.replicas['a'].client.control('flush_cache')
            await e.until(lambda: not e.router.replicas['a'].load.index.blocks)
            (_, second), = await e.read(request('y'))
            assert (first.cached_tokens, second.cached_tokens) == (0, 16)
    run(main())

def test_what_an_engine_aborts_by_itself_is_aborted():
    "As it does before new weights, if it is told to: then no command has named the request"
    async def main():
        async with Engines(step_seconds=.005, max_prefill_tokens=4) as e:
            asked = asyncio.ensure_future(e.read(request('x')))
            await e.until(lambda: 'x' in e.cores['p'].scheduler.alive)
            e.cores['p'].core.abort('', whole=False)
            (told, end), = await asked
            assert told == [] and end.finish_reason is FinishReason.ABORT
    run(main())

def test_who_leaves_stops_the_computation():
    async def main():
        async with Engines(step_seconds=.005, max_prefill_tokens=4) as e:
            asked, scheduler = asyncio.ensure_future(e.ask('x')), e.cores['p'].scheduler
            await e.until(lambda: 'x' in scheduler.alive)
            pending = scheduler.alive['x']
            asked.cancel()
            await e.until(lambda: pending.finish_reason)
            assert pending.finish_reason is FinishReason.ABORT and await e.files() == []
    run(main())

def test_the_prompt_is_as_important_as_its_answer():
    async def main():
        async with Engines(step_seconds=.005, max_prefill_tokens=4) as e:
            asked, scheduler = asyncio.ensure_future(e.ask('x', priority=5)), e.cores['p'].scheduler
            await e.until(lambda: 'x' in scheduler.alive)
            assert scheduler.alive['x'].params.priority == 5 and await asked
    run(main())

def test_a_file_goes_when_the_answer_begins():
    async def main():
        async with Engines(step_seconds=.005) as e:
            stream = e.router.stream([request('x', n=100)])
            await anext(stream)
            assert await e.files() == []
            await stream.aclose()
    run(main())

def test_a_file_that_comes_late_is_removed(impatient):
    async def main():
        async with Engines() as e:
            write, loop, late = e.handoffs('p')._write, asyncio.get_running_loop(), []
            def written(*args):
                write(*args)
                late.append(os.listdir(e.folder))
            e.handoffs('p')._write = lambda *args: loop.call_later(.15, written, *args)
            assert await e.ask('x')
            await e.until(lambda: late)
            assert len(late[0]) == 1 and await e.files() == []
    run(main())

def test_whoever_wants_logprobs_of_a_prompt_keeps_it():
    async def main():
        async with Engines('ap') as e:
            await e.read(request('x', prompt_logprobs=1))
            assert e.handoffs('p').counts['sent'] == e.cores['p'].scheduler.counts['prompt_tokens'] == 0
    run(main())

def test_a_prompt_that_lost_its_numbers_is_not_sent():
    "What it has read of another one's turns out to be NaN while it is computed"
    async def main():
        async with Engines('ap') as e:
            cache = e.cores['p'].scheduler.cache
            finished = cache.cache_finished
            cache.cache_finished = lambda req, keep=True: finished(req, False)
            assert (await e.ask('x')
                    and e.handoffs('p').counts['sent'] == e.handoffs('a').counts['received'] == 0)
    run(main())

def test_what_the_dead_had_cached_does_not_count():
    async def main():
        async with Engines() as e:
            assert await e.ask('x')
            answered, = (o for o in 'ab' if e.handoffs(o).counts['received'])
            e.cores[answered].kill()
            assert await e.ask('y') and e.handoffs('p').counts['sent'] == 8
    run(main())

def test_whoever_removes_a_file_early_causes_no_warning(tmp_path, caplog):
    "Its caller leaves while it is written; and nobody sees a part of it before"
    file, seen, close = PageFile.write, [], PageFile.close
    def write(self, *args):
        seen.extend(os.listdir(tmp_path))
        return file(self, *args)
    def closed(self):
        close(self)
        self.path.unlink()
    async def main():
        async with Engines('ap', tmp_path) as e:
            with (patch.object(PageFile, 'write', write), patch.object(PageFile, 'close', closed),
                  patch.object(prefill_router, 'PATIENCE', .1)):
                assert await e.ask('x')
            assert (seen and {os.path.splitext(o)[1] for o in seen} == {'.part'}
                    and e.handoffs('a').counts['received'] == 0 and not caplog.text)
    run(main())

def damage(path, at):
    "Cut a file and add a byte, unless a thread of the router removes it just now"
    with suppress(FileNotFoundError), path.open('r+b') as file:
        file.truncate(at)
        file.seek(0, os.SEEK_END)
        file.write(b'?')

@pytest.mark.parametrize('seed', range(4))
def test_whatever_happens_on_the_way(seed, impatient, monkeypatch):
    """Engines die, freeze and come back; files vanish, or are damaged; callers leave, abort, pause.

    Whoever is answered is answered rightly; an error comes only from an engine that died; at the end nothing
    is left."""
    rng = random.Random(seed)
    monkeypatch.setattr(prefill_router, '_ALIVE_POLL', .005)
    async def main():
        async with Engines(step_seconds=.001, max_prefill_tokens=8, num_pages=48, max_running_req=3) as e:
            deaths = 0
            async def call(n):
                await asyncio.sleep(rng.random()*.1)
                prompt = [rng.randrange(3)]*rng.randrange(1, 9) + [*range(n, n + rng.randrange(30))]
                requests = [request(f'{n}-{i}', prompt, rng.randrange(8))
                            for i in range(rng.choice([1, 1, 2]))]
                await read_some(e.router, requests, lambda: rng.random() < .03, lambda: deaths)
            async def trouble():
                nonlocal deaths
                for _ in range(25):
                    await asyncio.sleep(rng.random()*.01)
                    name, files = rng.choice('abpp'), [*Path(e.folder).iterdir()]
                    match rng.choice(['die', 'freeze', 'vanish', 'damage', 'abort', 'pause']):
                        case 'die':
                            deaths += 1
                            e.cores[name].kill()
                            e.router.leave(name)
                            await asyncio.sleep(rng.random()*.01)
                            await e.join(name)
                        case 'freeze':
                            core = e.cores[name]
                            core.trouble = core.trouble or 'the engine has not been heard of for 4 s'
                            await asyncio.sleep(.01)
                            if not core.killed: core.trouble = ''
                        case 'vanish': [o.unlink(missing_ok=True) for o in files]
                        case 'damage': [damage(o, rng.randrange(4096, 6000)) for o in files]
                        case 'abort': await e.router.control('abort', f'{rng.randrange(40)}*')
                        case 'pause':
                            await e.router.control('pause', rng.choice(['in_place', 'retract', 'abort']))
                            await asyncio.sleep(rng.random()*.005)
                            await e.router.control('resume')
            await asyncio.gather(trouble(), *(call(n) for n in range(40)))
            assert await e.files() == []
            for name, core in e.cores.items():
                await e.until(lambda: not core.scheduler.has_work)
                core.scheduler.self_check()
            assert e.router.calls == 0 and not e.router._rids
    run(main())

# ---- the folder

def test_a_folder_of_the_dead_is_removed_and_one_of_the_living_never(tmp_path):
    "Three servers with one path; one of them is killed, and what it has left goes with the next start"
    config = ServerConfig(replicas=2, prefill_replicas=1, kv_handoff_path=str(tmp_path))
    code = ('import sys, time; from minisgl_lit.server.config import ServerConfig; from '
            'minisgl_lit.server.prefill_router import handoff_folder\n'
            'with handoff_folder(ServerConfig(replicas=2, prefill_replicas=1, kv_handoff_path=sys.argv[1])) '
            'as path: print(path, flush=True); time.sleep(60)')
    with handoff_folder(config) as mine:
        child = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE,
                                 text=True)
        theirs = Path(child.stdout.readline().strip())
        (theirs/'x.part').write_bytes(b'half')
        (tmp_path/'notes').mkdir()
        # all live
        with handoff_folder(config) as other: assert {Path(mine), theirs, Path(other)} < {*tmp_path.iterdir()}
        child.kill()
        child.wait()
        with handoff_folder(config) as other:
            assert {*tmp_path.iterdir()} == {Path(mine), Path(other), tmp_path/'notes'}
    assert [*tmp_path.iterdir()] == [tmp_path/'notes']

def test_a_link_is_no_leftover(tmp_path):
    "What it leads to is neither removed nor locked"
    config = ServerConfig(replicas=2, prefill_replicas=1, kv_handoff_path=str(tmp_path/'a'))
    with handoff_folder(config) as path: name = Path(path).name
    (tmp_path/'kept').mkdir()
    (tmp_path/'a'/name).symlink_to(tmp_path/'kept')
    with pytest.raises(OSError): _locked(tmp_path/'a'/name).__enter__()
    (tmp_path/'a'/(name + 'f')).write_text('a file')
    with handoff_folder(config): pass
    assert (tmp_path/'kept').is_dir() and (tmp_path/'a'/(name + 'f')).exists()

def test_folders_of_others_stay(tmp_path, monkeypatch):
    (left := tmp_path/'minisgl_lit-x-1').mkdir()
    with monkeypatch.context() as other:
        other.setattr(os, 'geteuid', lambda: -1)
        with pytest.raises(OSError, match='it is no folder of this user'):
            own_folder(tmp_path, 'x').__enter__()
    assert left.exists()
    with own_folder(tmp_path, 'x'): assert not left.exists()

def test_a_fork_owns_no_folder(tmp_path):
    code = ('import os, sys; from pathlib import Path; from minisgl_lit.process import own_folder\n'
            'with own_folder(Path(sys.argv[1]), "x") as path:\n'
            '    if not os.fork(): sys.exit()\n'
            '    os.wait(); print(path.exists())')
    assert (subprocess.check_output([sys.executable, '-c', code, str(tmp_path)], text=True) == 'True\n'
            and not [*tmp_path.iterdir()])

def test_a_folder_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    with handoff_folder(ServerConfig(replicas=2, prefill_replicas=1, kv_handoff_path='~/x/y')) as path:
        assert Path(path).is_dir() and tmp_path in Path(path).parents

def test_a_folder_that_cannot_be():
    with pytest.raises(ValueError, match="kv_handoff_path='/dev/null/x' cannot be used: Not a directory"):
        serve(**SMALL, replicas=2, prefill_replicas=1, kv_handoff_path='/dev/null/x')

def test_several_ranks_hand_nothing_over():
    with pytest.raises(ValueError, match='prefill_replicas=1 is for tp=1, not tp=2'):
        serve(**SMALL, replicas=2, prefill_replicas=1, tp=2)

# ---- one engine's part, on streams that work when told to

class Pages:
    "A pool of pages of one byte"
    def __init__(self): self.pool, self.stream, self.version = np.arange(9, dtype=np.uint8), ManualStream(), 0
    def empty_pages(self, n): return [np.zeros(1, np.uint8) for _ in range(n)]
    def read_pages(self, pages, out):
        for page, data in zip(pages, out): data[:] = self.pool[page]
        return self.stream.record()

@pytest.fixture
def pages(tmp_path):
    "Handoffs of a server to itself, of prompts of seven tokens, pages 1, 2, 3; the first is there"
    copies = Pages()
    made = Handoffs(copies, 2, lambda: bytes([copies.version]*20), ManualStream(), tmp_path)
    made.send(waiting(), np.arange(1, 4))
    copies.stream.run_all()
    made._stream.run_all()
    return made

def waiting():
    pending = PendingReq('r', np.arange(7), SamplingParams(), max_len=12)
    pending.handoff = 'x'
    return pending

def test_the_last_page_of_a_prompt_does_not_travel(pages):
    "At least one token is computed where the answer is; here the prompt is four full pages"
    assert pages.n_pages(PendingReq('r', np.arange(8), SamplingParams(), max_len=12)) == 3

def test_pages_of_another_tenant_are_not_taken(pages):
    "Though the file is called as it should be"
    other = PendingReq('r', np.arange(7), SamplingParams(extra_key='bob'), max_len=12)
    other.handoff = 'x'
    assert pages.arriving(other, 0, 3)
    pages._stream.run_all()
    assert pages.take(other, 0, 3) == [] and pages.counts['missed'] == 3

def test_a_match_that_grows_or_shrinks_meanwhile(pages):
    asked = waiting()
    assert pages.arriving(asked, 1, 3)
    pages._stream.run_all()
    assert not pages.arriving(asked, 2, 3) and [int(o[0]) for o in pages.take(asked, 2, 9)] == [3]
    assert pages.arriving(asked, 1, 3) and pages.arriving(asked, 0, 3)   # from further ahead: read anew
    pages._stream.run_all()
    assert [int(o[0]) for o in pages.take(asked, 0, 2)] == [1, 2]        # as many as there is room for

def test_what_is_being_read_is_not_taken(pages):
    "Its read took too long, and it is admitted without"
    asked = waiting()
    assert pages.arriving(asked, 0, 3)
    pages._leases[asked].n_right = 2   # and a third is on its way
    assert pages.take(asked, 0, 3) == []

def test_who_waits_gets_no_pages_of_old_weights(pages):
    asked = waiting()
    assert pages.arriving(asked, 0, 3)
    pages._stream.run_all()
    pages.copies.version = 1
    pages.renew()
    pages._stream.run_all()
    assert not pages.arriving(asked, 0, 3) and pages.take(asked, 0, 3) == []
