"""Accidents: damaged and planted libraries, orphans, engines that fail again and again, bugs that one request
meets, idle hours, busy cores."""
import asyncio, itertools, os, signal, subprocess, sys, threading, time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zmq

from minisgl_lit import LLM, process, threads_wait
from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.core.request import SearchedTokens
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import InlineStream
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit import assembly as worker
from minisgl_lit.kernels import compiler
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.engine_driver import EngineDriver
from minisgl_lit.core.scheduler import control
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.loop.engine_core import EngineCore
from minisgl_lit.server.engine_process import run_engine_core
from minisgl_lit.loop.messages import ControlMsg, StopMsg, UserMsg, encode
from minisgl_lit.server.engines import Backoff
from minisgl_lit.server.serve import Server
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere the kernel watches no parent')


# --- the folder of compiled kernels

try:
    with compiler.library_folder() as folder: compiler.compile_c('void nothing(void *to) {}', folder)
except RuntimeError: has_compiler = False
else: has_compiler = True
needs_compiler = pytest.mark.skipif(not has_compiler, reason='needs a C compiler')

ADD = '#include <stdint.h>\nvoid add(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += 1; }\n'

@pytest.fixture
def cache(tmp_path, monkeypatch):
    "An empty cache folder of this user, and an empty TMPDIR"
    (tmp_path/'tmp').mkdir()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path/'tmp'))
    for o in (compiler.load, compiler.warn_once): o.cache_clear()
    yield tmp_path/'minisgl_lit'
    compiler.load.cache_clear()
    assert not os.listdir(tmp_path/'tmp'), 'something stays in TMPDIR'

def adds(source=ADD):
    "Whether the library of this text works"
    compiler.load.cache_clear()
    lib, x = compiler.load(source), torch.zeros(3)
    if lib: lib.add(x, 3)
    return x.tolist() == [1, 1, 1]

@needs_compiler
def test_a_damaged_library_is_made_again(cache):
    "Empty, half, or longer than it was; it is seen before it is loaded, since half a file is a SIGBUS"
    with compiler.library_folder() as folder: path = compiler.compile_c(ADD, folder)
    whole = path.read_bytes()
    for left in (0, .5, 2):
        os.truncate(path, int(len(whole) * left))
        with compiler.library_folder() as folder: assert compiler.compile_c(ADD, folder).read_bytes() == whole
    assert adds() and len(os.listdir(cache)) == 1

@pytest.fixture(scope='module')
def libraries(tmp_path_factory):
    "Ours, and one that has the same function, and leaves a mark in the current folder when it is loaded"
    evil = (ADD + '#include <stdio.h>\n__attribute__((constructor)) static void f(void) { fclose(fopen("it '
                  'ran", "w")); }\n')
    return [compiler.compile_c(o, tmp_path_factory.mktemp('made')) for o in (ADD, evil)]

def plant(libraries, cache):
    "Put the other one where ours would be"
    ours, theirs = libraries
    cache.mkdir(mode=0o700)
    (planted := cache
     /f"{ours.stem.split('-')[0]}-{compiler._checksum(theirs)}.so").write_bytes(theirs.read_bytes())
    planted.chmod(0o700)
    return planted

@needs_compiler
def test_a_library_is_whole_or_not_there(cache, monkeypatch):
    "It gets its name last, in one move; who is stopped before leaves nothing that looks like a library"
    def stopped(*_): raise OSError('no more')
    monkeypatch.setattr(Path, 'replace', stopped)
    with pytest.raises(OSError, match='no more'), compiler.library_folder() as folder:
        compiler.compile_c(ADD, folder)
    assert not [*cache.rglob('*.so')]

@needs_compiler
@pytest.mark.parametrize('how',
    ['folder for all', 'folder is a link', "somebody else's folder", 'file for all', "somebody else's file"])
def test_planted_code_does_not_run(libraries, cache, tmp_path, monkeypatch, capfd, how):
    monkeypatch.chdir(tmp_path)
    library, mark = plant(libraries, cache), tmp_path/'it ran'
    match how:
        case 'folder for all': cache.chmod(0o777)
        case 'folder is a link': cache.rename(tmp_path/'theirs'), cache.symlink_to(tmp_path/'theirs')
        case "somebody else's folder": monkeypatch.setattr(os, 'geteuid', lambda: cache.stat().st_uid + 1)
        case 'file for all': library.chmod(0o777)
        case "somebody else's file":
            if os.geteuid(): pytest.skip('only root can give a file away')
            os.chown(library, 12345, -1)
    assert adds() and not mark.exists()
    assert 'file' in how or str(cache) in capfd.readouterr().err   # it says what is not used
    assert not cache.is_symlink() or len(os.listdir(cache)) == 1
    assert 'folder' in how or all(map(compiler.is_ours, cache.iterdir()))

@needs_compiler
def test_a_planted_library_would_run_else(libraries, cache, tmp_path, monkeypatch):
    "In a folder that is ours; so the test above shows something"
    monkeypatch.chdir(tmp_path)
    plant(libraries, cache)
    assert adds() and (tmp_path/'it ran').exists()

@needs_compiler
@pytest.mark.parametrize('where', ['/dev/null', 'no home'])
def test_where_nothing_can_be_kept_nothing_is_left(cache, monkeypatch, capfd, where):
    "Neither in TMPDIR, which the fixture looks at"
    if where == 'no home':
        monkeypatch.delenv('XDG_CACHE_HOME')
        def homeless(): raise RuntimeError('Could not determine home directory.')
        monkeypatch.setattr(Path, 'home', homeless)
    else: monkeypatch.setenv('XDG_CACHE_HOME', where)
    assert adds() and adds(ADD + '// another')
    assert capfd.readouterr().err.count('compiles its kernels anew') == 1

@needs_compiler
def test_a_function_that_was_left_out_is_named(cache, capfd):
    assert compiler.load(ADD + '#ifdef NOWHERE\nvoid gone(float *x) {}\n#endif\n') is None
    assert 'in plain torch: ' in (said := capfd.readouterr().err) and 'gone' in said


# --- nothing outlives its parent

def test_ranks_are_killed_with_rank_0(monkeypatch):
    "And threads of every process that we start soon wait asleep, unless the user wants it otherwise"
    started, policy = [], threads_wait
    def popen(command, env, **_):
        started.append((command, {k: v for k, v in env.items() if k in policy}))
        return SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(process.subprocess, 'Popen', popen)
    for name in policy: monkeypatch.delenv(name, raising=False)
    worker.start_ranks(2)
    process.start_program('json.tool:main', stdin=0, stdout=1)
    monkeypatch.setenv('OMP_WAIT_POLICY', 'active')
    process.start_program('json.tool:main', stdin=0, stdout=1)
    me = str(os.getpid())
    assert [command[5:7] for command, _ in started] == [[str(o), m] for o, m in (
        (9, 'minisgl_lit.assembly:worker_main'), *2*[(int(signal.SIGCONT), 'json.tool:main')])]
    assert all(command[3:5] == ['minisgl_lit.process', me] for command, _ in started)
    assert [env for _, env in started] == [policy, policy, dict(OMP_WAIT_POLICY='active')]

def test_the_command_line_waits_asleep():
    "The variables are set before anything can have imported torch"
    code = ('import sys, os\nclass Finder:\n    def find_spec(self, name, path=None, target=None):\n'
            '        if name == "torch": print(os.environ.get("OMP_WAIT_POLICY"), '
            'os.environ.get("GOMP_SPINCOUNT")); sys.stdout.flush(); os._exit(0)\n'
            'sys.meta_path.insert(0, Finder())\nimport runpy\nsys.argv = ["x", "generate", "Hi"]\n'
            'runpy.run_module("minisgl_lit", run_name="__main__", alter_sys=True)')
    env = {k: v for k, v in os.environ.items() if k not in threads_wait}
    assert (subprocess.run([sys.executable, '-c', code], env=env, cwd=ROOT, capture_output=True, text=True,
                           timeout=60).stdout == 'passive 100000\n')

def test_an_import_keeps_nothing_of_the_user_for_ever():
    "The collector rests meanwhile, and then works on all there is; one that the user has stopped stays so"
    code = ('import gc, minisgl_lit\nif {0}: gc.disable()\nminisgl_lit.LLM\n'
            'print(gc.isenabled(), gc.get_freeze_count())')
    told = [subprocess.run([sys.executable, '-c', code.format(o)], cwd=ROOT, capture_output=True, text=True,
                           timeout=60).stdout for o in (False, True)]
    assert told == ['True 0\n', 'False 0\n']

def test_a_driver_that_is_forgotten_ends_its_engine():
    closed = []
    runtime = SimpleNamespace(core=None, tokenizer=None, close=lambda: closed.append(1))
    driver = EngineDriver(runtime)
    stream = driver.read(None)   # it has not begun, and refers to the driver
    del driver
    assert closed == []
    del stream
    assert closed == [1]

def alive(pid):
    "Whether it is there and has not ended; one that is stopped is alive"
    try: return Path(f'/proc/{pid}/stat').read_text().rsplit(')')[1].split()[0] != 'Z'
    except OSError: return False

def gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end: time.sleep(.02)
    if not (ended := not alive(pid)): os.kill(pid, signal.SIGKILL)
    return ended

LEADER = '''
import sys, time
from minisgl_lit import LLM
llm = LLM(device='cpu', num_pages=50, tp=2, max_seq_len=128)
print(llm.runtime.ranks.processes[0].pid, flush=True)
if sys.argv[1] == 'forget': del llm
time.sleep(100)
'''

PARENT = ('''
import signal, subprocess, time
from minisgl_lit.process import start_program
child = start_program('code:interact', stdin=subprocess.PIPE, stdout=subprocess.PIPE, orphaned=signal.SIGKILL)
child.stdout.read(1)
print(child.pid, flush=True)
time.sleep(100)
''')   # noqa: E501

@linux
def test_a_module_does_not_outlive_who_started_it():
    parent = subprocess.Popen([sys.executable, '-c', PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              env=os.environ | dict(PYTHONUNBUFFERED='1'))
    try: child = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.communicate()
    assert gone(child)

@linux
def test_who_is_an_orphan_already_ends():
    "The parent may have gone before the kernel was asked to watch it"
    code = 'from minisgl_lit.process import signal_when_orphaned; signal_when_orphaned(2**22 + 1, 9)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=60).returncode == -9

@linux
@pytest.mark.long
@pytest.mark.parametrize('how', ['forget', 'stop the rank and kill us'])
def test_a_rank_does_not_outlive_its_model(how):
    leader = subprocess.Popen([sys.executable, '-c', LEADER, how], cwd=ROOT, stdout=subprocess.PIPE,
                              text=True)
    rank = int(leader.stdout.readline())
    try:
        if how != 'forget':
            os.kill(rank, signal.SIGSTOP)
            leader.kill()
        assert gone(rank)
    finally:
        leader.kill()
        leader.communicate()

@linux
@pytest.mark.long
@pytest.mark.parametrize('stopped', ['rank', 'engine core', 'both'])
def test_nothing_outlives_a_server_that_is_killed(tmp_path, stopped):
    "Whoever is stopped meanwhile; and no folder stays"
    def children(pid):
        return [int(o) for f in Path('/proc').glob(f'{pid}/task/*/children') for o in f.read_text().split()]
    command = [sys.executable, '-m', 'minisgl_lit', 'serve', '--port', '0', '--tp', '2', '--num-pages', '50',
               '--device', 'cpu']
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              env=os.environ | dict(TMPDIR=str(tmp_path)))
    try:
        assert 'served on' in server.stdout.readline()
        engine, = children(server.pid)
        rank, = children(engine)
        for pid, name in ((rank, 'rank'), (engine, 'engine core')):
            if stopped in (name, 'both'): os.kill(pid, signal.SIGSTOP)
    finally:
        server.kill()
        server.communicate()
    assert [gone(engine), gone(rank)] == [True, True]
    assert not [*tmp_path.glob('minisgl_lit-*')]


# --- an engine that fails again and again

def no_sleep(monkeypatch):
    "Nobody sleeps in this thread (others may have servers); the seconds that were asked for"
    slept, here, sleeps = [], threading.get_ident(), asyncio.sleep
    async def sleep(seconds):
        if threading.get_ident() != here: await sleeps(seconds)
        else: slept.append(seconds)
    monkeypatch.setattr(asyncio, 'sleep', sleep)
    return slept

def test_an_engine_that_always_fails_is_given_up(monkeypatch, capfd):
    "Four more starts, each later than the one before, then an error; a start that fails counts, too"
    slept, loads = no_sleep(monkeypatch), []
    async def load(replica):
        loads.append(1)
        if len(loads) % 2: raise RuntimeError('it has no memory')
        return client.process, None
    async def listen(): raise RuntimeError('the engine process has ended with code 70')
    async def close(): pass
    def fail(why): client.failed = why
    client = SimpleNamespace(listen=listen, fail=fail, failed='', process=SimpleNamespace(close=close))
    server = object.__new__(Server)
    server._config, server._load, server._processes, server._router = (ServerConfig(restart=True), load,
        {0: client.process}, None)
    server._stopping, server._log_file = asyncio.Event(), sys.stderr
    server._loop = SimpleNamespace(time=lambda: 0.)
    with pytest.raises(RuntimeError, match='^the engine process has ended with code 70; 5 failures within 10 '
                                           'minutes, so it is not started again$'):
        asyncio.run(server._supervise(0, client))
    assert (slept, len(loads)) == ([0, 1, 2, 4], 4)
    assert capfd.readouterr().err.count('starting another') == 4

@pytest.mark.parametrize("restart", [False, True])
def test_a_replica_that_has_failed_for_good_is_said_and_ended(restart, monkeypatch, capfd):
    "The others go on; a start that fails for want of anything is one more failure"
    closed = []
    no_sleep(monkeypatch)
    async def load(replica): raise OSError("no space is left")
    async def fails(): raise RuntimeError("the engine process has ended with code 70")
    async def lives(): await asyncio.Event().wait()
    async def join(name, client): pass
    def client(i, listen):
        async def close(): closed.append(i)
        it = SimpleNamespace(listen=listen, failed="", process=SimpleNamespace(close=close))
        it.fail = lambda why: setattr(it, "failed", why)
        return it
    clients = [client(0, fails), client(1, lives)]
    server = object.__new__(Server)
    server._config, server._load, server._processes = (ServerConfig(restart=restart), load,
        {i: o.process for i, o in enumerate(clients)})
    server._router, server._stopping, server._log_file = (SimpleNamespace(join=join, leave=lambda name: None),
        asyncio.Event(), sys.stderr)
    server._cluster = None
    server._loop = SimpleNamespace(time=lambda: 0.)
    async def main():
        supervising = asyncio.ensure_future(server._supervise_all(clients))
        await asyncio.wait({supervising}, timeout=.1)
        assert not supervising.done()
        supervising.cancel()
    asyncio.run(main())
    *before, last = capfd.readouterr().err.splitlines()
    assert ([o.startswith("minisgl_lit: replica 0: the engine") and "starting another" in o for o in before]
            == [True]*4*restart)
    said = ("the engine could not be started: no space is left; 5 failures within 10 minutes, so it is not "
            "started again")
    assert last == "minisgl_lit: replica 0: " + (said if restart
        else "the engine process has ended with code 70")
    assert closed == [0]*(1 + 4*restart) and clients[0].failed and not clients[1].failed

def test_without_rays_head_all_engines_have_failed(capfd):
    "Though they live still; whoever is asked next says why"
    def fail(why): client.failed = why
    async def lives(): await asyncio.Event().wait()
    async def watch(log): raise RuntimeError("Ray has not answered for 45 s")
    client, server = SimpleNamespace(listen=lives, fail=fail, failed=""), object.__new__(Server)
    server._config, server._router, server._log_file, server._cluster = (ServerConfig(), None, sys.stderr,
        SimpleNamespace(watch=watch))
    server._loop = SimpleNamespace(time=lambda: 0.)
    with pytest.raises(RuntimeError, match="^Ray has not answered for 45 s; without its head all engines "
                                           "end. Start this server again once Ray is there$") as e:
        asyncio.run(server._supervise_all([client]))
    assert client.failed == str(e.value) and not capfd.readouterr().err

def test_failures_are_forgotten():
    hours = itertools.count(step=3600)
    backoff = Backoff(lambda: next(hours))
    assert [backoff.failed() for _ in range(20)] == [0] * 20


# --- a bug that one request meets

PAGES = 40

class Bug(Exception): "What nobody has foreseen"

class Grammar:
    "Allows everything, and fails after two tokens where it should"
    def __init__(self, where): self.where, self.seen = where, 0
    def mask(self, out):
        out[:] = -1
        if self.where == 'mask' and self.seen == 2: raise Bug
    def accept(self, token):
        self.seen += 1
        if self.where == 'accept' and self.seen == 2: raise Bug
        return False

class Check:
    "Finds no stop, and fails at its third token where it should"
    behind = False
    def __init__(self, where): self.where, self.new, self.seen = where, [], 0
    def push(self, token, logprob, end):
        self.new, self.end, self.seen = [*self.new, token], end, self.seen + 1
        if self.where == 'push' and self.seen == 3: raise Bug
    def take(self):
        if self.where == 'take' and self.seen == 3: raise Bug
        new, self.new = SearchedTokens(self.new, None, None, self.end), []
        return new

class Checks:
    def __init__(self, where): self.where = where
    def validate(self, params): pass
    def search(self, checks): pass
    def make(self, pending, thinking, follow):
        if self.where == 'make stop check': raise Bug
        return Check(self.where)

def toy(overlap=False, where=''):
    "A scheduler in which the requests of rid `bad` meet a bug there"
    table = TableManager(4, 48, page_size=4, dummy_page=PAGES)
    engine = ToyEngine(table.page_table, table.token_pool, 4, PAGES, 50,
                       ManualStream() if overlap else InlineStream())
    def make_grammar(pending):
        if where == 'make_grammar': raise Bug
        return Grammar(where)
    s = Scheduler(engine, CacheManager(PAGES, table, RadixCache(4)), 50, itertools.count().__next__,
                  EngineConfig(overlap=overlap),
                  rules=TextRules(Checks(where), make_grammar))
    if where == 'validate':
        validate = s.validator.validate
        def check(ids, params):
            if params.stop: raise Bug
            return validate(ids, params)
        s.validator.validate = check
    return s

def compiled(params):
    (done := Future()).set_result(None)
    return done

@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('where',
    ['validate', 'make stop check', 'make_grammar', 'compile', 'push', 'take', 'mask', 'accept'])
def test_a_bug_that_one_request_meets_ends_that_request(overlap, where, caplog):
    """One error for it, with a traceback in the log; the others get what they get alone, and every page comes
    back"""
    s = toy(overlap, where)
    def compile(params):
        if where == 'compile' and params.regex: raise Bug
    core = EngineCore(s, compile)
    prompts = dict(a=[1, 2, 3, 4, 5], bad=[1, 2, 3, 4, 5, 6], b=[7])
    ends, tokens = {}, {rid: [] for rid in prompts}
    def take(outputs):
        for o in outputs:
            tokens[o.rid] += o.token_ids
            if o.finish_reason: assert ends.setdefault(o.rid, o) is o
    for rid, ids in prompts.items():
        special = dict(stop=['x'], regex='x') if rid == 'bad' else {}
        take(core.handle(UserMsg(rid, np.array(ids), SamplingParams(max_tokens=6, **special))) or [])
    while s.has_work: take(s.step())
    assert {rid: o.finish_reason for rid, o in ends.items()} == dict(a='length', bad='error', b='length')
    assert ends['bad'].error == 'this request has failed because of a bug in the server: Bug'
    assert all(tokens[rid] == expected_output(prompts[rid], 6, 50) for rid in 'ab')
    assert len(caplog.records) == 1 and 'Bug' in caplog.text and 'Traceback' in caplog.text
    s.self_check()
    assert s.cache.held_size == s.cache.prefix.protected_size == 0

def test_a_refusal_is_still_a_refusal(caplog):
    "One sentence for its caller, and nothing in the log"
    s = toy()
    def refuse(pending): raise RequestError('regex', 'unclosed group')
    s.rules.make_grammar = refuse
    answer = EngineCore(s).handle(UserMsg('a', np.array([1]), SamplingParams(regex='(')))
    assert (answer.rid, answer.message) == ('a', 'unclosed group') and not caplog.records

@pytest.mark.parametrize('where', ['queue', 'pages'])
def test_a_bug_of_the_scheduler_is_not_caught(where):
    "What belongs to all: to go on with half-written tables could show one caller another's text"
    core = EngineCore(s := toy())
    def bug(*_): raise Bug
    if where == 'queue': s.prefill.add = bug
    else: s.cache.allocate = bug
    with pytest.raises(Bug):
        core.handle(UserMsg('a', np.array([1, 2]), SamplingParams(max_tokens=3)))
        s.step()


# --- an idle server

def with_cached(n_nodes):
    "A scheduler with so many cached prefixes of one page"
    table = TableManager(2, 48, page_size=4, dummy_page=n_nodes)
    engine = ToyEngine(table.page_table, table.token_pool, 4, n_nodes, 10**6)
    s = Scheduler(engine, cache := CacheManager(n_nodes, table, RadixCache(4)), 10**6,
                  itertools.count().__next__, EngineConfig(overlap=False))
    for i in range(n_nodes): cache.prefix.insert(np.array([i, 1, 2, 3]), cache.allocate(1))
    cache._allocated[:], cache.held_size = False, 0
    return s

def test_tidying_is_done_in_slices(monkeypatch):
    "However many pages are cached, no slice looks at more than so many claims; together they look at all"
    s, looked, most = with_cached(1000), [0], control._CHECKS_PER_SLICE
    claims = RadixCache._claims
    def counted(self):
        for claim in claims(self):
            looked[-1] += 1
            yield claim
    monkeypatch.setattr(RadixCache, '_claims', counted)
    for _ in s.tidy(): looked.append(0)
    assert len(looked) > 3 and max(looked) <= most and sum(looked) > 13 * 1000

@pytest.mark.parametrize('reads_only', [False, True])
def test_who_comes_while_the_server_tidies_does_not_wait(monkeypatch, reads_only):
    "It is answered after one slice; then tidying begins anew, unless nothing has changed"
    monkeypatch.setattr('minisgl_lit.loop.engine_core._IDLE_WAIT', .01)
    s, events = with_cached(300), []
    come = ControlMsg(1, 'stats') if reads_only else UserMsg('a', np.array([7]), SamplingParams(max_tokens=1))
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind('inproc://tidy')
        there.connect('inproc://tidy')
        def tidy():
            events.append('begin')
            for i in range(5):
                events.append(i)
                if i == 1 and 'come' not in events:
                    here.send(encode(come))
                    events.append('come')
                yield
            events.append('done')
            if events.count('done') <= 1: here.send(encode(StopMsg()))
        step, s.tidy = s.step, tidy
        def stepped():
            if outputs := step(): events.append('answered')
            return outputs
        class Core(EngineCore):
            def handle(self, message):
                if isinstance(message, ControlMsg): events.append('answered')
                return super().handle(message)
        s.step = stepped
        run_engine_core(there, Core(s))
    first = ['begin', 0, 1, 'come', 'answered']
    assert events == first + ([2, 3, 4, 'done'] if reads_only else ['begin', 0, 1, 2, 3, 4, 'done'])


# --- cores that others use

DECODE = '''
import time
from minisgl_lit import LLM, SamplingParams
llm, n = LLM(threads=2, num_pages=100, max_running_req=2, max_seq_len=256), 32
p = SamplingParams(max_tokens=n, ignore_eos=True, temperature=0)
llm.generate('Hello', p)
best = 0
for _ in range(3):
    start = time.perf_counter()
    llm.generate('Hello', p)
    best = max(best, n / (time.perf_counter() - start))
print(best)
'''

def test_a_model_is_loaded_with_a_look_at_the_cores(monkeypatch):
    "Chapter 39 shows what is said where they are busy"
    looked = []
    monkeypatch.setattr('minisgl_lit.runtime.warn_if_spinning', looked.append)
    LLM(device='cpu', num_pages=20, max_running_req=2, max_seq_len=64, threads=1).close()
    assert looked == [1]

@pytest.mark.long
def test_decoding_beside_two_busy_loops(record_property):
    "Threads that soon sleep while they wait get their share of the cores"
    def rate(**env):
        env = {k: v for k, v in os.environ.items() if not k.startswith(('OMP_', 'GOMP_'))} | env
        return float(subprocess.run([sys.executable, '-c', DECODE], cwd=ROOT, env=env, capture_output=True,
                                    text=True, timeout=500, check=True).stdout)
    alone = rate()
    loops = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(2)]
    try: asleep, awake = rate(), rate(OMP_WAIT_POLICY='active')
    finally:
        for o in loops: o.kill(), o.wait()
    record_property('tok/s alone, beside two busy loops, and the same with threads that spin',
                    f'{alone:.1f}, {asleep:.1f}, {awake:.1f}')
    assert asleep > alone / 8
