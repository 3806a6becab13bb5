"""Everything that can go wrong with a running server, on real sockets: who is told, what ends, and what is
left (nothing)."""
import asyncio, json, os, random, re, signal, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import warm
import zmq

from minisgl_lit import serve
from minisgl_lit.core.request import FinishReason
from minisgl_lit.core.sampling_params import QueueFull, RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.outputs import EngineCoreOutputs, EngineCoreOutput
from minisgl_lit.loop.messages import (
    AbortMsg, ControlReply, ReadyMsg, RefusedMsg, StopMsg, UserMsg, decode, encode)
from minisgl_lit.server.engine_client import AsyncEngineClient
from minisgl_lit.loop.engine_core import EngineCore
from minisgl_lit.server.engine_process import run_engine_core
from test_serve import SMALL, alive, before_engine_core, engines, events, idle, info, post, until, web

LONG = dict(sampling_params=dict(max_tokens=1800, ignore_eos=True, temperature=1))


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    with serve(**SMALL, log_interval=0, batch_folder=str(tmp_path_factory.mktemp('kept'))) as s: yield s

def health(url): return web.get(url + '/health').status_code

def request(body):
    "The bytes of a request to /generate"
    text = json.dumps(body)
    return ('POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: '
            'close\r\n'
            f'Content-Length: {len(text)}\r\n\r\n{text}').encode()

def connect(server, body, buffer=None):
    "A connection on which this has been asked, with a small receive buffer if that is wanted"
    s = socket.socket()
    if buffer: s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    s.settimeout(60)
    s.connect(('127.0.0.1', int(server.url.rsplit(':', 1)[1])))
    s.sendall(request(body))
    return s

def read_all(s):
    "What comes until the other side closes"
    with s: return b''.join(iter(lambda: s.recv(65536), b'')).decode()

def told(raw):
    "The events in what a stream has sent"
    return [json.loads(o) for o in re.findall(r'data: (\{.*\})\r?\n', raw)]


@contextmanager
def program(tmp_path, *flags):
    "The command line's server: the process, its url, its engine's process id and folder"
    command = [sys.executable, '-m', 'minisgl_lit', 'serve', '--port', '0', '--num-pages', '512',
               '--max-running-req', '16', *flags]
    with open(tmp_path/'stderr', 'w') as log:
        p = warm.Popen(
            command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            env=os.environ | dict(TMPDIR=str(tmp_path)))
    try:
        url = re.search(r'(http://127.0.0.1:\d+)\n$', p.stdout.readline())[1]
        (engine, folder), = engines(p.pid).items()
        yield p, url, engine, folder
        p.wait(60)
        until(lambda: not alive(engine) and not folder.exists())
    finally: p.kill()

class At:
    "As much of a `Server` as `events` and `post` need"
    def __init__(self, url): self.url = url


def test_engine_is_killed_under_16_streams(capfd):
    """kill -9: every stream ends with an error event, /health says so, newcomers are refused; with `restart`
    it goes on"""
    before = engines()
    with serve(**SMALL | dict(num_pages=2048, log_interval=0,
                              restart=True)) as s, ThreadPoolExecutor(17) as pool:
        (pid, folder), = engines().items() - before.items()
        streams = [events(s, '/generate', text='Hello', rid=f's{i}', **LONG) for i in range(16)]
        [*pool.map(next, streams)]   # at once: one after the other, the first might have ended
        # so that nobody ends before it is killed
        assert post(s, '/pause_generation', mode='in_place').status_code == 200
        whole = pool.submit(post, s, '/generate', text='Hello', **LONG)
        until(lambda: info(s)['running'] + info(s)['waiting'] == 17)
        os.kill(pid, signal.SIGKILL)
        until(lambda: health(s.url) == 503)
        assert post(s, '/generate', text='Hello').status_code == 503
        assert all('has ended with code -9' in list(o)[-1]['error']['message'] for o in streams)
        assert whole.result().status_code == 500
        until(lambda: health(s.url) == 200)
        assert post(s, '/generate', text='x', rid='s3', sampling_params=dict(max_tokens=2)).status_code == 200
        until(lambda: idle(s))
        assert not folder.exists()
    assert engines() == before
    assert capfd.readouterr().err.count('starting another') == 1


@pytest.mark.long
def test_a_replica_is_killed_under_16_streams():
    """Its streams end with an error, those of the others go on and are whole; newcomers are served at once;
    when the last has died, the server ends"""
    before = engines()
    with (serve(**SMALL | dict(num_pages=2048, log_interval=0, replicas=3)) as s,
          ThreadPoolExecutor(16) as pool):
        until(lambda: all(o["joined"] for o in info(s)["per_replica"]))
        streams = [events(s, "/generate", text=f"Hello {i}", rid=f"s{i}", **LONG) for i in range(16)]
        [*pool.map(next, streams)]
        # so that nobody ends before it is killed
        assert post(s, "/pause_generation", mode="in_place").status_code == 200
        there = [o["running"] + o["waiting"] for o in info(s)["per_replica"]]
        assert sum(there) == 16 and all(there)
        s._processes[1].process.kill()
        until(lambda: info(s)["per_replica"][1]["why"])
        assert post(s, "/continue_generation").status_code == 200 and health(s.url) == 200
        assert post(s, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code == 200
        ends = [list(o)[-1] for o in streams]
        died = [o for o in ends if "error" in o]
        assert len(died) == there[1] and all("has ended with code -9" in o["error"]["message"] for o in died)
        assert all(o["meta_info"]["finish_reason"]["type"] == "length" for o in ends if "error" not in o)
        up = [o for o in web.get(s.url + "/metrics").text.splitlines() if o.startswith("minisgl:replica_up")]
        assert [o[-3:] for o in up] == ["1.0", "0.0", "1.0"]
        for i in (0, 2): s._processes[i].process.kill()
        until(lambda: health(s.url) == 503)
        with pytest.raises(RuntimeError, match="has ended with code -9"): s.wait()
    assert engines() == before

def assert_all_replicas_wait(s):
    "All are paused: who comes waits, at each of them, and is answered when they go on"
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(post, s, "/generate", text=f"{i} pages", sampling_params=dict(max_tokens=2))
                 for i in range(8)]
        until(lambda: info(s)["waiting"] == 8)
        assert all(o["waiting"] and not o["running"] for o in info(s)["per_replica"])
        post(s, "/continue_generation")
        assert all(o.result().status_code == 200 for o in calls)

@pytest.mark.long
def test_a_replica_comes_back_as_the_others_are():
    "Restarted while all are paused, it is paused, too; afterwards it serves"
    with serve(**SMALL | dict(log_interval=0, replicas=2, restart=True)) as s:
        until(lambda: all(o["joined"] for o in info(s)["per_replica"]))
        post(s, "/pause_generation", mode="in_place")
        s._processes[0].process.kill()
        until(lambda: not info(s)["per_replica"][0]["joined"])
        until(lambda: all(o["joined"] for o in info(s)["per_replica"]))
        assert_all_replicas_wait(s)


@pytest.mark.long
def test_a_replica_stands_still():
    "SIGSTOP: all is answered without it; when it goes on it is paused, as it was told meanwhile"
    with serve(**SMALL | dict(log_interval=0, replicas=2)) as s:
        until(lambda: all(o["joined"] for o in info(s)["per_replica"]))
        engine = s._processes[1].process.pid
        os.kill(engine, signal.SIGSTOP)
        try:
            assert "has not been heard of" in info(s)["per_replica"][1]["why"]
            assert (health(s.url) == web.get(s.url + "/health_generate").status_code
                    == web.get(s.url + "/metrics").status_code == 200)
            assert post(s, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code == 200
            assert post(s, "/pause_generation", mode="in_place").status_code == 200
        finally: os.kill(engine, signal.SIGCONT)
        until(lambda: not info(s)["per_replica"][1]["why"])
        assert_all_replicas_wait(s)

def test_engine_is_frozen(tmp_path, record_property):
    """SIGSTOP: /health says so; after `watchdog_timeout` it is killed, callers are told, the exit code is not
    0"""
    with program(tmp_path, '--watchdog-timeout', '6') as (p, url, engine, folder):
        stream = events(At(url), '/generate', text='Hello', **LONG)
        next(stream)
        os.kill(engine, signal.SIGSTOP)
        start = time.monotonic()
        until(lambda: health(url) == 503)
        record_property('a frozen engine is told after', f'{time.monotonic() - start:.1f} s')
        assert post(At(url), '/generate', text='x').status_code == 503
        assert 'code -9' in list(stream)[-1]['error']['message']
        assert health(url) == 503
        assert p.wait(60) == 1 and 'code -9' in (tmp_path/'stderr').read_text()


def test_callers_hang_up(server):
    "200 requests, most left at random moments, by closing or by reset; afterwards nobody and nothing is left"
    rng, body = random.Random(1), dict(text='The page', **LONG)
    for _ in range(10):
        socks = [connect(server, body | dict(stream=rng.random() < .7)) for _ in range(20)]
        for s in socks:
            time.sleep(rng.random()*.01)
            # reset
            if rng.random() < .3: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')
            s.close()
    until(lambda: idle(server))
    client = server.client
    until(lambda: not client._open and not client.calls)
    assert not client._control_replies and client.alive


def test_slow_readers(server, record_property):
    "64 streams, 4 of which do not read: the others are not slowed, and the slow ones miss nothing"
    params = dict(max_tokens=150, ignore_eos=True, temperature=0)
    body = dict(input_ids=[5, 6, 7], stream=True, sampling_params=params)
    slow = [connect(server, body, buffer=2048) for _ in range(4)]
    with ThreadPoolExecutor(60) as pool:
        start = time.monotonic()
        quick = [*pool.map(lambda _: told(read_all(connect(server, body))), range(60))]
        seconds = time.monotonic() - start
        late = [*pool.map(lambda s: told(read_all(s)), slow)]
    ids = lambda events: events[-1]['output_ids']
    assert len(ids(quick[0])) == 150 and all(ids(o) == ids(quick[0]) for o in quick + late)
    assert all(o[-1]['meta_info']['finish_reason']['type'] == 'length' for o in quick + late)
    record_property('60 streams beside 4 that do not read',
                    f'{seconds:.1f} s; events of a quick one {len(quick[0])}, of a slow one {len(late[0])}')
    until(lambda: idle(server))


def test_more_than_fit():
    "A full queue is a 503 for whoever is too many, and for nobody else; a drain does not wait for ever"
    how = dict(max_running_req=2, max_queued_req=4, max_recv_per_step=2, log_interval=0, drain_seconds=1)
    with serve(**SMALL | how) as s, ThreadPoolExecutor(64) as pool:
        ask = dict(text='The page', sampling_params=dict(max_tokens=20, ignore_eos=True))
        answers = [*pool.map(lambda _: post(s, '/generate', **ask), range(64))]
        assert {r.status_code for r in answers} == {200, 503}
        assert all(len(r.json()['output_ids']) == 20 for r in answers if r.status_code == 200)
        until(lambda: idle(s))
        assert post(s, '/generate', **ask).status_code == 200 and not s.client._open
        stuck = connect(s, dict(text='Hello', stream=True, **LONG), buffer=2048)
        until(lambda: info(s)['running'] == 1)
        # so that it does not end by itself
        assert post(s, '/pause_generation', mode='in_place').status_code == 200
        s.drain()
        last = told(read_all(stuck))[-1]
        assert 'was stopped' in last['error']['message']
        s.wait()


def test_sigterm_drains(tmp_path):
    "Who has been accepted gets all of its answer, newcomers get 503, and the exit code is 0"
    with program(tmp_path, '--log-json', 'true') as (p, url, engine, folder), ThreadPoolExecutor(8) as pool:
        def few(n): return dict(text='The page', sampling_params=dict(max_tokens=n, ignore_eos=True))
        ask, begun = few(200), events(At(url), '/generate', **few(700))   # for as long as all else takes
        next(begun)
        # so that none ends before all have come
        assert post(At(url), '/pause_generation', mode='in_place').status_code == 200
        streams = [pool.submit(list, events(At(url), '/generate', **ask)) for _ in range(3)]
        whole = [pool.submit(post, At(url), '/generate', **ask) for _ in range(2)]
        until(lambda: info(At(url))['waiting'] == 5)
        assert post(At(url), '/continue_generation').status_code == 200
        for pid in (engine, p.pid): os.kill(pid, signal.SIGTERM)   # a machine that shuts down asks everybody
        until(lambda: health(url) == 503)
        assert post(At(url), '/generate', **ask).status_code == 503
        assert [len(r.result().json()['output_ids']) for r in whole] == [200, 200]
        assert all('error' not in (last := o[-1]) and last['meta_info']['finish_reason']['type'] == 'length'
                   for o in [[*begun], *(o.result() for o in streams)])
        assert p.wait(60) == 0
        lines = [json.loads(o) for o in (tmp_path/'stderr').read_text().splitlines()
                 if not o.startswith('Without native kernels')]
        assert len([o for o in lines if o.get('path') == '/generate' and o['status'] == 200]) == 6


def test_a_drain_hears_operators():
    "What is paused can be let go on, aborted and counted while a server drains; then it ends before its time"
    with serve(**SMALL | dict(log_interval=0, drain_seconds=600)) as s, ThreadPoolExecutor(2) as pool:
        assert post(s, '/pause_generation', mode='in_place').status_code == 200
        ask = dict(text='The page', sampling_params=dict(max_tokens=20, ignore_eos=True))
        goes_on, aborted = (pool.submit(post, s, '/generate', rid=rid, **ask) for rid in 'ab')
        until(lambda: info(s)['waiting'] == 2)
        s.drain()
        until(lambda: health(s.url) == 503)
        assert (post(s, '/generate', **ask).status_code == web.get(s.url + '/health_generate').status_code
                == 503)
        assert post(s, '/abort_request', rid='b').status_code == 200
        assert aborted.result().json()['meta_info']['finish_reason']['type'] == 'abort'
        assert info(s)['waiting'] == 1 and web.get(s.url + '/metrics').status_code == 200
        assert post(s, '/continue_generation').status_code == 200
        assert len(goes_on.result().json()['output_ids']) == 20
        s.wait()


def test_sigterm_twice(tmp_path):
    "The second does not wait: open requests are told, and all is over"
    with program(tmp_path) as (p, url, *_):
        streams = [connect(At(url), dict(text='Hello', stream=True, **LONG), buffer=2048) for _ in range(2)]
        until(lambda: info(At(url))['running'] == 2)
        assert post(At(url), '/pause_generation', mode='in_place').status_code == 200
        p.send_signal(signal.SIGTERM)
        until(lambda: health(url) == 503)
        p.send_signal(signal.SIGTERM)
        # a drain would let them end
        assert all('was stopped' in told(read_all(o))[-1]['error']['message'] for o in streams)
        assert p.wait(60) == 0


def test_engine_dies_during_a_drain(tmp_path):
    "Then it is no good end"
    with program(tmp_path) as (p, url, engine, _):
        stream = connect(At(url), dict(text='Hello', stream=True, **LONG), buffer=2048)
        until(lambda: info(At(url))['running'] == 1)
        assert post(At(url), '/pause_generation', mode='in_place').status_code == 200
        p.send_signal(signal.SIGTERM)
        until(lambda: health(url) == 503)
        os.kill(engine, signal.SIGKILL)
        assert 'code -9' in told(read_all(stream))[-1]['error']['message']
        assert p.wait(60) == 1 and 'code -9' in (tmp_path/'stderr').read_text()


def test_parent_is_killed_while_others_live(tmp_path, server):
    "kill -9 of one of two servers of one tree: its engine goes within seconds, the other's stays"
    with program(tmp_path) as (p, url, engine, folder):
        streams = [events(At(url), '/generate', text='Hello', **LONG) for _ in range(4)]
        for o in streams: next(o)
        p.kill()
        until(lambda: not alive(engine) and not folder.exists())
    assert health(server.url) == 200 and engines()


HANGS = '''
import sys, time
from minisgl_lit.server import engine_process as workers
def load_and_hang(*args):
    runtime = workers.load_runtime(*args)
    def step_that_never_ends():
        if runtime.scheduler.has_work: time.sleep(600)
    runtime.scheduler.step = step_that_never_ends
    return runtime
workers.main(*sys.argv[1:], load=load_and_hang)'''

def test_step_that_hangs(tmp_path):
    "It still has a pulse, so it ends itself, and says where it hangs"
    with zmq.Context() as context, context.socket(zmq.PAIR) as here:
        here.linger = 0
        here.bind(endpoint := f'ipc://{tmp_path}/engine')
        ours, its = socket.socketpair()
        settings = json.dumps(dict(num_pages=32, max_running_req=2, watchdog_timeout=1.))
        with ours, its, subprocess.Popen([sys.executable, '-c', HANGS, endpoint, str(tmp_path/'x'),
                                          str(os.getpid()), settings],
                                         stdin=its, stderr=subprocess.PIPE, text=True) as p:
            try:
                assert here.poll(60_000) and isinstance(decode(here.recv()), ReadyMsg)
                # nobody has come, so nothing hangs
                with pytest.raises(subprocess.TimeoutExpired): p.wait(1.5)
                here.send(encode(UserMsg('a', np.array([1]), SamplingParams(max_tokens=5))))
                assert p.wait(60) == 70
            finally: p.kill()
            said = p.stderr.read()
            assert 'the engine hangs' in said and 'step_that_never_ends' in said


def test_idle(server, record_property):
    "A server that nobody asks leaves the processor to others"
    until(lambda: idle(server))
    pid = server._processes[0].process.pid
    def seconds():
        return (sum(map(int, open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[11:13]))
                / os.sysconf('SC_CLK_TCK') + time.process_time())
    before = seconds()
    time.sleep(2)
    share = (seconds() - before) / 2
    record_property('an idle server', f'{share:.1%} of a core')
    assert share < .05   # 0.5 % on a quiet machine


def test_nobody_reads_the_news():
    "The engine waits for a parent that does not read, and goes on when it does"
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.rcvhwm = there.sndhwm = 2
        here.bind('inproc://news')
        there.connect('inproc://news')
        class Steps:
            "As much of a scheduler as the loop needs"
            has_work, taken = True, 0
            def tidy(self): return iter(())
            def step(self):
                self.taken += 1
                return EngineCoreOutputs([f'{self.taken}'], [1])
        steps = Steps()
        loop = threading.Thread(target=run_engine_core, args=(there, EngineCore(steps)), daemon=True)
        loop.start()
        until(lambda: steps.taken >= 4)
        time.sleep(.2)
        assert steps.taken < 9
        heard = [decode(here.recv()).rids[0] for _ in range(30)]
        assert heard == [f'{i + 1}' for i in range(30)]
        here.send(encode(StopMsg()))
        while loop.is_alive():
            here.poll(50) and here.recv()


SLOW = """import time
from pathlib import Path
from minisgl_lit.text.grammar import GrammarCompiler
compile_ = GrammarCompiler._compile
def slow(self, form):
    while not Path(%r).exists(): time.sleep(.01)
    return compile_(self, form)
GrammarCompiler._compile = slow
"""

def test_slow_compiler(tmp_path, monkeypatch):
    """While a form is compiled others go on; whoever leaves meanwhile ends once, and the rest is served or
    refused afterwards"""
    pytest.importorskip('llguidance')
    before_engine_core(monkeypatch, SLOW % str(tmp_path/'go'))
    yes = dict(text='Well?', sampling_params=dict(regex='yes|no', max_tokens=9))
    with serve(**SMALL, log_interval=0) as s, ThreadPoolExecutor(9) as pool:
        ask = lambda form, **more: pool.submit(post, s, '/generate', text='Well?',
                                               sampling_params=dict(regex=form, max_tokens=9), **more)
        served, refused, aborted = ask('yes|no'), ask('('), ask('maybe', rid='me')
        leaves = connect(s, yes | dict(rid='leaves', stream=True))
        until(lambda: info(s)['waiting'] == 4)
        hurry = dict(text='The page', sampling_params=dict(max_tokens=20, ignore_eos=True))
        assert len(post(s, '/generate', **hurry).json()['output_ids']) == 20
        assert post(s, '/generate', **yes, rid='me').json()['error']['param'] == 'rid'
        # too long: not compiled at all
        assert post(s, '/generate', **yes | dict(text='a '*9999)).status_code == 400
        assert post(s, '/abort_request', rid='me').json()['aborted'] == 1
        assert aborted.result(60).json()['meta_info']['finish_reason']['type'] == 'abort'
        leaves.close()
        until(lambda: info(s)['waiting'] == 2)
        assert ([*events(s, '/generate', **hurry)][-1]['meta_info']['finish_reason'] and not served.done()
                and not refused.done())
        (tmp_path/'go').touch()
        assert served.result(60).json()['text'] in ('yes', 'no')
        assert refused.result(60).status_code == 400 and refused.result().json()['error']['param'] == 'regex'
        until(lambda: idle(s) and not s.client._open)


# The client alone, with an engine that only listens

class Mute:
    "Plays the engine as far as asked: takes requests, makes tokens 0, 1, 2… for each, ends them"
    def __init__(self): self.said, self.at, self.trouble = [], {}, ''

    def send(self, message):
        message = decode(message)
        self.said.append(message)
        if isinstance(message, UserMsg): self.at[message.rid] = 0

    def end(self, rid, reason=FinishReason.STOP):
        "A request's last word; None if it has been said"
        if (n := self.at.pop(rid, None)) is None: return None
        if n == 0 and reason == FinishReason.STOP: return RefusedMsg(rid, 'prompt', 'no', False)
        return EngineCoreOutputs(outputs=[EngineCoreOutput(rid, [n], reason)])

    def answers(self, rng, p_token, p_end):
        "What it says at one step"
        for m in self.said:
            if isinstance(m, AbortMsg) and (last := self.end(m.rid, FinishReason.ABORT)): yield last
        self.said.clear()
        goers = [o for o in self.at if rng.random() < p_token]
        yield EngineCoreOutputs(goers, [self.at[o] for o in goers])
        for o in goers: self.at[o] += 1
        for o in [o for o in self.at if rng.random() < p_end]: yield self.end(o)

def user(rid): return UserMsg(rid, np.array([1]), SamplingParams())

async def one_call(client, rid, rng, got):
    stream = client.stream([user(rid)])
    try:
        async for reply in stream:
            got += reply.token_ids
            if reply.finish_reason: return 'ended'
            if rng.random() < .1: return 'left'
            for _ in range(rng.randrange(3)): await asyncio.sleep(0)
    except QueueFull: return 'full'
    except RequestError: return 'refused'
    finally: await stream.aclose()

async def many_calls(seed):
    rng, engine = random.Random(seed), Mute()
    client, calls = AsyncEngineClient(engine, 'toy', max_open=rng.choice([4, 12, 99])), []
    for turn in range(150):
        if turn < 100 and rng.random() < .5:
            calls.append((got := [], asyncio.ensure_future(one_call(client, f'r{turn}', rng, got))))
        await asyncio.sleep(0)
        for m in engine.answers(rng, .6, .05): client.dispatch(m)
        assert len(client._open) <= client.max_open
    while client._open:
        await asyncio.sleep(0)
        for m in engine.answers(rng, 0, 1): client.dispatch(m)
    ends = [await asyncio.wait_for(o, 5) for _, o in calls]
    assert all(got == [*range(len(got))] for got, _ in calls) and not client.calls
    return ends

def test_random_lives_of_calls():
    """Callers come, read, leave; the engine answers, refuses, ends: each token comes once and in order, and
    nothing is left"""
    ends = [o for seed in range(20) for o in asyncio.run(many_calls(seed))]
    assert {'ended', 'left', 'full', 'refused'} == set(ends)


def test_abort_follows_its_request():
    async def main():
        client = AsyncEngineClient(engine := Mute(), 'toy')
        for i in range(50):
            stream = client.stream([user(f'a{i}'), user(f'b{i}')])
            task = asyncio.ensure_future(anext(stream))
            for _ in range(i % 3): await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        named = [(type(m), m.rid) for m in engine.said]
        for kind, rid in named:
            if kind is AbortMsg:
                assert (named.index((UserMsg, rid)) < named.index((AbortMsg, rid))
                        and named.count((AbortMsg, rid)) == 1)
        assert sum(kind is UserMsg for kind, _ in named) == sum(kind is AbortMsg for kind, _ in named) > 0
    asyncio.run(main())


def test_answers_find_their_askers():
    async def main():
        client = AsyncEngineClient(engine := Mute(), 'toy')
        askers = [asyncio.ensure_future(client.control('abort', f'{i}')) for i in range(20)]
        await asyncio.sleep(0)
        askers[3].cancel()
        for m in random.Random(0).sample(engine.said, 20):
            client.dispatch(ControlReply(m.id, {'aborted': int(m.argument)}))
        assert ([(await o)['aborted'] for i, o in enumerate(askers) if i != 3]
                == [i for i in range(20) if i != 3])
        assert not client._control_replies
    asyncio.run(main())


# as Python's audit calls them, but for the last
CHANGES = {'os.remove', 'os.rename', 'os.mkdir', 'os.rmdir', 'os.truncate', 'fsync'}

def test_a_slow_disk_holds_up_no_one(server, monkeypatch):
    """What an upload, a batch, one that is cancelled and a deletion write and remove is written and removed
    in threads: the event loop has others to answer"""
    done, fsync, watching = [], os.fsync, False
    def note(event, args=()):
        writes = event == 'open' and args[2] & (os.O_WRONLY | os.O_RDWR)
        if watching and (event in CHANGES or writes):
            done.append((event, threading.current_thread().name, str(args[:1])))
    def noted(handle):
        note('fsync')
        fsync(handle)
    monkeypatch.setattr(os, 'fsync', noted)
    sys.addaudithook(note)   # stays, and sees nothing after this test
    def upload(n):
        return web.post(server.url + '/v1/files',
                        files={'file': ('asked', b'{"prompt": "x", "max_tokens": 1}\n' * n)},
                        data={'purpose': 'batch'}).json()['id']
    def batch(file):
        return post(server, '/v1/batches', input_file_id=file, endpoint='/v1/completions',
                    completion_window='24h').json()['id']
    def state(id): return web.get(f'{server.url}/v1/batches/{id}').json()['status']
    watching = True
    file = upload(3)
    first, second = batch(file), batch(upload(40_000))
    until(lambda: state(first) == 'completed')
    post(server, f'/v1/batches/{second}/cancel')
    until(lambda: state(second) == 'cancelled')
    assert web.delete(f'{server.url}/v1/files/{file}').json()['deleted']
    watching = False
    assert {'fsync', 'open', 'os.rename', 'os.remove'} <= {event for event, *_ in done}   # it has seen them
    # the event loop, and the threads that others need
    assert not [o for o in done if o[1].startswith(('minisgl_lit', 'asyncio'))]
