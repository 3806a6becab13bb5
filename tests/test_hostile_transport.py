"""What a caller can do to a connection, a reader to a log, and a standstill to the truth: each stops nobody
else."""
import asyncio, io, json, logging, os, re, resource, signal, socket, subprocess, sys, threading, time
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from minisgl_lit.cli import serve as serve_command
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.log import LogFile
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server import engine_process, middleware
from minisgl_lit.server.api_server import create_app
from minisgl_lit.server.callers import Account, Callers
from minisgl_lit.server.connection import ConnectionAcceptor
from minisgl_lit.server.engine_client import EngineCoreHandle
from minisgl_lit.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, ErrorMiddleware
from minisgl_lit.server.serve import Server
from minisgl_lit.text.tokenizer import Tokenizer
from nbrun import cfg, root

HEALTH = b'GET /health HTTP/1.1\r\nConnection: close\r\n\r\n'
HALF_HEADER = b'GET / HTTP/1.1\r\nX: '
CHUNKED = b'POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n'
HALF_BODY = b'POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc'
MB = b'x'*(1 << 20)


# -- connections: a server whose seconds pass when the test says so ---------------------------------

async def echo_length(scope, receive, send):
    size, more = 0, True
    while more:
        message = await receive()
        if message['type'] == 'http.disconnect': return
        size, more = size + len(message['body']), message.get('more_body')
    await send({'type': 'http.response.start', 'status': 200,
                'headers': [(b'content-length', b'%d' % len(str(size)))]})
    await send({'type': 'http.response.body', 'body': str(size).encode()})

@asynccontextmanager
async def limited(app=echo_length, most=8, listener=None):
    "It is not served, which would take two tenths of a second to end: its protocol needs only its settings"
    http, lines = (uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan='off',
        ws='none')), [])
    with listener or socket.create_server(('127.0.0.1', 0)) as listener:
        acceptor = ConnectionAcceptor(http, listener, most, lines.append)
        acceptor.lines, acceptor.http = lines, http
        try: yield acceptor
        finally:
            acceptor.close()
            for connection in list(http.server_state.connections): connection.abort()
            await asyncio.sleep(.001)

async def connect(server, sent=b''):
    reader, writer = await asyncio.open_connection(*server.listener.getsockname())
    writer.write(sent)
    return reader, writer

async def until(true):
    for _ in range(2000):
        if true(): return
        await asyncio.sleep(.002)
    raise AssertionError('this did not happen in time')

def status(answer): return int(answer[9:12]) if answer.startswith(b'HTTP/1.1 ') else answer

@pytest.mark.parametrize('begin, piece, megabytes, said', [(HALF_HEADER, MB, 100, 431),
    (b'GET /', MB, 50, 414), (b'', b'GET / HTTP/1.1\r\nX: ' + MB[:40_000] + b'\r\n\r\n', 1, 431),
                                                           (b'GET / HTTP/1.1\r\n', b'X: y\r\n'*170_000, 100,
                                                               431),
                                                           (CHUNKED + b'0\r\nX: ', MB, 20, 400),
                                                           (CHUNKED + b'0\r\n', b'X: y\r\n'*170_000, 20, 400),
                                                           (CHUNKED, b'1\r\nx\r\n'*170_000, 20, 400)])
def test_a_header_is_cut_off(begin, piece, megabytes, said, monkeypatch):
    """100 MB of header, 50 of URL, 20 of trailers or of chunks of a byte: refused when a read or two have
    come, however much is sent; what is parsed is counted"""
    parsed = []
    async def life():
        async with limited() as server:
            kind = type(server)._accept.__globals__['LimitedProtocol']
            feed = kind.__mro__[1].data_received
            monkeypatch.setattr(kind.__mro__[1], 'data_received',
                                lambda self, data: (parsed.append(len(data)), feed(self, data))[1])
            reader, writer = await connect(server, begin)
            answer = asyncio.ensure_future(reader.read())
            for _ in range(megabytes):
                writer.write(piece)
                try: await asyncio.wait_for(writer.drain(), .05)
                except (OSError, TimeoutError): break
                if answer.done(): break
            assert status(await answer) == said
            writer.close()
    asyncio.run(life())
    assert sum(parsed) <= 1 << 20

@pytest.mark.parametrize('trickle', [b'', b'x'])
@pytest.mark.parametrize('sent, seconds, said',
                         [(b'', 10, b''), (HALF_HEADER, 10, 408), (HALF_BODY, 30, 408)])
def test_what_does_not_come_ends(sent, seconds, said, trickle):
    """Nothing, half a header, half a body: each has its seconds, and a byte in each of them is no reason for
    more"""
    async def life():
        async with limited() as server:
            reader, writer = await connect(server, sent)
            await until(lambda: server.connections.open)
            if sent: await until(lambda: all(c.scope for c in server.connections.open))
            for _ in range(seconds - 1):
                server.second()
                if sent: writer.write(trickle)
                await asyncio.sleep(.001)
            assert server.connections.open and not server.lines
            server.second()
            assert status(await reader.read()) == said and len(server.lines) == 1
            writer.close()
    asyncio.run(life())

def test_a_kept_connection_ends():
    "After an answer: 60 seconds of silence, and then it is closed; empty lines are silence"
    async def life():
        async with limited() as server:
            reader, writer = await connect(server, b'GET / HTTP/1.1\r\n\r\n')
            await reader.readuntil(b'\r\n\r\n0')
            for _ in range(60):
                writer.write(b'\r\n')
                await asyncio.sleep(.001)
                server.second()
            assert await reader.read() == b''
            writer.close()
    asyncio.run(life())

def test_slow_but_honest_bodies_are_read():
    "16 KB in each second go on for as long as they come: three times as long as nothing may"
    async def life():
        async with limited() as server:
            reader, writer = await connect(server,
                b'POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n' % (90 << 14))
            for i in range(90):
                writer.write(MB[:1 << 14])
                await until(lambda: any(c._body == (i + 1) << 14 for c in server.connections.open) or i == 89)
                server.second()
            assert status(await reader.read()) == 200
            writer.close()
    asyncio.run(life())

def test_idle_connections_keep_nobody_out():
    "Room for 8: others are answered at once, and one line says what happened"
    async def life():
        async with limited() as server:
            writers = []
            for i in range(300):
                writers.append((await connect(server, HALF_HEADER if i % 2 else b''))[1])
                if i % 50: continue
                reader, writer = await connect(server, HEALTH)
                assert status(await reader.read()) == 200
                writer.close()
            await until(lambda: len(server.connections.open) <= 8)
            for _ in range(9): server.second()
            assert len(server.lines) == 1 and 'closed to make room' in server.lines[0]
            for writer in writers: writer.close()
    asyncio.run(life())

def test_all_busy_is_a_503():
    let_go = None
    async def busy(scope, receive, send):
        await receive()
        await let_go.wait()
        await echo_length(scope, no_more, send)
    async def no_more(): return {'type': 'http.request', 'body': b'', 'more_body': False}
    async def life():
        nonlocal let_go
        let_go = asyncio.Event()
        async with limited(busy, most=2) as server:
            inside = [await connect(server, HEALTH) for _ in range(2)]
            await until(lambda: len(server.http.server_state.tasks) == 2)
            answers = []
            for _ in range(50):
                reader, writer = await connect(server, HEALTH)
                answers.append(await reader.read())
                writer.close()
            assert {status(o) for o in answers} == {503} and b'retry-after: 1' in answers[0].lower()
            let_go.set()
            assert [status(await reader.read()) for reader, _ in inside] == [200, 200]
            for _, writer in inside: writer.close()
    asyncio.run(life())

def test_no_descriptors_are_one_line(caplog):
    "asyncio would log a traceback for each try, two thousand a second"
    class NoFiles(socket.socket):
        def accept(self): raise OSError(24, 'Too many open files')
    async def life():
        listener = NoFiles()
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        async with limited(listener=listener) as server:
            _, writer = await connect(server)
            for _ in range(9):
                await asyncio.sleep(.002)
                server.second()
            writer.close()
            assert server.lines == ['connections: 1 not accepted: Too many open files']
    asyncio.run(life())
    assert not caplog.records

@pytest.mark.parametrize('how', ['half', 'gone', 'old', 'half a body'])
def test_half_closed_callers(how):
    """A caller who has only ended its half is answered; one who has gone is noticed, also one that speaks
    HTTP 1.0"""
    noticed, let_go = [], None
    async def app(scope, receive, send):
        message = {'more_body': True}
        while message.get('more_body'): message = await receive()
        if message['type'] == 'http.disconnect': return noticed.append('early')
        waiting, going = asyncio.ensure_future(receive()), asyncio.ensure_future(let_go.wait())
        await asyncio.wait({waiting, going}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done(): return noticed.append('late')
        waiting.cancel()
        await send({'type': 'http.response.start', 'status': 200, 'headers': []})
        await send({'type': 'http.response.body', 'body': b'answer'})
    async def life():
        nonlocal let_go
        let_go = asyncio.Event()
        async with limited(app) as server:
            sent = {'old': HEALTH.replace(b'1.1', b'1.0'), 'half a body': HALF_BODY}.get(how, HEALTH)
            reader, writer = await connect(server, sent)
            await until(lambda: server.http.server_state.tasks)
            await asyncio.sleep(.01)
            if how == 'gone': writer.close()
            else: writer.write_eof()
            if how == 'half':
                await asyncio.sleep(.25)   # two looks whether it is there
                let_go.set()
                assert b'answer' in await reader.read() and not noticed
            else: await until(lambda: noticed)
            writer.close()
            let_go.set()
    asyncio.run(life())

def test_uvicorn_is_within_bounds():
    "Its protocol class is extended, so its next version is tried before it is allowed"
    [bound] = [o for o in cfg['requirements'].split() if o.startswith('uvicorn')]
    low, high = re.fullmatch(r'uvicorn>=(\d+\.\d+),<(\d+\.\d+)', bound).groups()
    assert float(low) <= float('.'.join(uvicorn.__version__.split('.')[:2])) < float(high)


# -- HTTP -------------------------------------------------------------------------------------------

class Engine:
    model, alive, why, trouble = 'x', True, '', ''

def ask(app, method, path, **kw):
    async def life():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://x') as client:
            return await client.request(method, path, **kw)
    return asyncio.run(life())

def test_head_and_allow():
    app = create_app(Engine(), Tokenizer(embedded_path()))
    assert [ask(app, 'HEAD', path).status_code for path in ('/health', '/', '/v1/models')] == [200]*3
    for method, path, allowed in (('POST', '/health', 'GET, HEAD'), ('GET', '/v1/completions', 'POST'),
                                  ('DELETE', '/', 'GET, HEAD')):
        answer = ask(app, method, path)
        assert (answer.status_code, answer.headers['allow']) == (405, allowed)

@pytest.mark.parametrize('encoding, said',
    [('gzip', 415), ('br', 415), ('gzip, identity', 415), ('identity', 200), ('Identity', 200), ('', 200)])
def test_compressed_bodies_are_refused_by_name(encoding, said):
    answer = ask(ErrorMiddleware(BodyLimitMiddleware(echo_length)), 'POST', '/', content=b'x',
                 headers={'content-encoding': encoding})
    assert answer.status_code == said and (said == 200 or encoding in answer.json()['error']['message'])

@pytest.mark.parametrize('given, said', [('Bearer open', 200), ('bearer open', 200), ('BEARER  open', 200),
    ('Basic open', 401), ('bearer opem', 401), ('open', 401), ('bearer', 401)])
def test_the_scheme_may_be_written_in_any_case(given, said):
    assert (ask(ErrorMiddleware(ApiKeyMiddleware(echo_length, Callers({'open': Account('ann')}))), 'GET', '/',
                headers={'authorization': given}).status_code == said)

def test_a_key_on_the_command_line_is_warned_about(monkeypatch, capsys):
    def start(**settings): raise RuntimeError('enough')
    monkeypatch.setattr('minisgl_lit.serve', start)
    monkeypatch.setattr('minisgl_lit.cli.signal',
                        SimpleNamespace(**vars(signal) | dict(signal=lambda *_: None)))
    for name, variable in (('api_key', 'MINISGL_LIT_API_KEY'), ('admin_key', 'MINISGL_LIT_ADMIN_KEY')):
        for given, said in (({name: 'secret'}, True), ({}, False)):
            serve_command(SimpleNamespace(**given))
            err = capsys.readouterr().err
            assert (variable in err) is said and 'secret' not in err

def test_the_command_keeps_little_memory(monkeypatch):
    "Before it starts; what that saves, the long test of the corpus measures"
    def start(**settings): raise RuntimeError('enough')
    called = []
    monkeypatch.setattr('minisgl_lit.server.middleware.keep_little_memory', lambda: called.append('kept'))
    monkeypatch.setattr('minisgl_lit.serve', start)
    monkeypatch.setattr('minisgl_lit.cli.signal',
                        SimpleNamespace(**vars(signal) | dict(signal=lambda *_: None)))
    assert serve_command(SimpleNamespace()) == 1 and called == ['kept']

def test_the_command_takes_its_keys_from_the_environment(monkeypatch):
    def start(**settings):
        taken.append((settings['api_key'], settings['admin_key']))
        raise RuntimeError('enough')
    taken = []
    monkeypatch.setattr('minisgl_lit.serve', start)
    monkeypatch.setattr('minisgl_lit.cli.signal',
                        SimpleNamespace(**vars(signal) | dict(signal=lambda *_: None)))
    monkeypatch.setenv('MINISGL_LIT_API_KEY', 'callers')
    monkeypatch.setenv('MINISGL_LIT_ADMIN_KEY', 'operator')
    serve_command(SimpleNamespace())
    serve_command(SimpleNamespace(api_keys='a file'))   # in which each caller has a key
    assert taken == [('callers', 'operator'), (None, 'operator')]

@pytest.mark.parametrize('host, keys, said', [('0.0.0.0', {}, True), ('0.0.0.0', {'api_key': 'k'}, False),
    ('0.0.0.0', {'api_keys': 'a file'}, False), ('127.0.0.1', {}, False)])
def test_an_open_door_is_warned_about(host, keys, said):
    lines = []
    with socket.create_server((host, 0)) as listener:
        server = SimpleNamespace(_listener=listener, _config=ServerConfig(host=host, **keys),
                                 _log=lines.append)
        Server._warn_of_strangers(server)
    assert len(lines) == said

def test_the_guide_publishes_to_this_machine_alone():
    for file in ('docs/guides/deploy.md', 'Containerfile'):
        published = re.findall(r' -p (\S+)', (root/file).read_text())
        assert published and all(o.startswith('127.0.0.1:') for o in published), file


# -- who stood still --------------------------------------------------------------------------------

@contextmanager
def handle(silent):
    """A handle as it is when its last heartbeat was read so many seconds ago, and the engine's end of the
    socket"""
    ours, its = socket.socketpair()
    with ours, its:
        ours.setblocking(False)
        loop = SimpleNamespace(time=lambda: 1000., remove_reader=lambda _: None)
        o = EngineCoreHandle.__new__(EngineCoreHandle)
        o.loop, o.ready, o._gone, o._heartbeat_socket, o._last_heartbeat = (loop, True, False, ours,
            1000. - silent)
        o.exited = SimpleNamespace(done=lambda: False)
        yield o, its

def test_our_own_standstill_is_not_the_engines():
    with handle(43) as (o, its):
        assert o.trouble == 'the engine has not been heard of for 43 s'
        its.sendall(b'.'*80)   # came while the event loop stood still
        assert o.trouble == '' and o.silence == 0

def test_health_knows_a_dead_engine_at_once():
    with handle(.1) as (o, its):
        assert o.trouble == ''
        its.close()
        assert o.trouble == 'the engine process has ended' == o.trouble


# -- logs -------------------------------------------------------------------------------------------

class Broken(io.StringIO):
    def write(self, text): raise BrokenPipeError(32, 'Broken pipe')

class Stuck(io.StringIO):
    "A pipe that is full, and whose reader does not read until told to"
    def __init__(self): super().__init__(); self.go = threading.Event()
    def write(self, text): self.go.wait(20); return super().write(text)

@pytest.mark.parametrize('make', [Broken, Stuck])
def test_no_writer_of_lines_waits_or_fails(make, monkeypatch):
    """The access log, the server's own lines and the step loop's: where they would stand still, this test
    would, too"""
    file = make()
    monkeypatch.setattr(sys, 'stderr', file)
    monkeypatch.setattr(middleware, 'log', logging.Logger('alone'))
    monkeypatch.setattr(middleware.log, 'hasHandlers', lambda: False)
    middleware.log_to_stderr()
    server = SimpleNamespace(_config=ServerConfig(), _log_file=LogFile(file))
    lines = LogFile(file)
    for _ in range(20):
        middleware.log.info('a call')
        Server._log(server, 'a sentence')
        print('step 40: 12 tok/s', file=lines, flush=True)
    if make is Stuck: file.go.set()
    for log in (middleware.log.handlers[0].stream, server._log_file, lines):
        assert isinstance(log, LogFile)
        log.close()
        assert log.dropped == (20 if make is Broken else 0)
    assert make is Broken or file.getvalue().count('\n') == 60

def test_what_waits_for_a_reader_is_bounded():
    file = Stuck()
    log = LogFile(file)
    for _ in range(3000): log.write('x'*999 + '\n')
    assert log.dropped > 1500 and log._size <= 1 << 20
    file.go.set()
    log.close()
    told = re.findall(r'(\d+) log lines could not be written\n', file.getvalue())
    assert sum(map(int, told)) == log.dropped == 3000 - file.getvalue().count('\n') + len(told)

def test_the_engine_core_writes_through_a_thread(monkeypatch):
    """Whatever Python code there prints, and its tracebacks: before anything else is done, standard error is
    put behind a queue"""
    class First(Exception): pass
    def unblock(as_json): raise First(as_json)
    monkeypatch.setattr(engine_process, 'unblock_stderr', unblock)
    def too_late(*_): raise AssertionError('something else came first')
    monkeypatch.setattr(engine_process, 'signal', SimpleNamespace(SIGINT=2, SIGTERM=15, signal=too_late))
    with pytest.raises(First, match='True'): engine_process.main('', '', '1', json.dumps(dict(log_json=True)))


# -- the whole server -------------------------------------------------------------------------------

@contextmanager
def program(stderr, *flags, before=''):
    "The command line's server, with this for a standard error: process and port"
    command = (f'{before} exec {sys.executable} -m minisgl_lit serve --port 0 --num-pages 512 '
               '--max-running-req 16 ' + ' '.join(flags))
    p = subprocess.Popen(['bash', '-c', command], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=stderr, cwd=root)
    try: yield p, int(re.search(r':(\d+)\n$', p.stdout.readline())[1])
    finally:
        p.kill()
        p.wait()

def told(port, sent, seconds=20):
    "All that is answered"
    with socket.create_connection(('127.0.0.1', port), seconds) as s:
        s.sendall(sent)
        return b''.join(iter(lambda: s.recv(1 << 16), b''))

def completion(n):
    body = json.dumps(dict(prompt='The page', max_tokens=n, ignore_eos=True)).encode()
    return (b'POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Type: '
            b'application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body)

@pytest.mark.long
@pytest.mark.parametrize('kind', ['full disk', 'no reader', 'a reader that does not read'])
def test_a_log_that_cannot_be_written_stops_nothing(kind):
    """A line at each step and call, more of them than a pipe holds; afterwards the server ends as it should,
    with code 0"""
    read_end, write_end = os.pipe()
    if kind == 'no reader': os.close(read_end)
    with open('/dev/full', 'w') if kind == 'full disk' else os.fdopen(write_end, 'w') as stderr:
        with program(stderr, '--log-interval', '1') as (p, port):
            assert all(status(told(port, completion(200))) == 200 for _ in range(5))
            for _ in range(600): assert status(told(port, HEALTH)) == 200
            assert p.poll() is None
            p.terminate()
            assert p.wait(30) == 0
    if kind == 'a reader that does not read': os.close(read_end)

def ended(caller):
    "Whether it has been answered, or its connection closed"
    try: return caller.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) is not None
    except BlockingIOError: return False
    except OSError: return True

@pytest.mark.long
def test_1500_connections_where_256_files_may_be_open(tmp_path):
    "`/health` and completions are answered beside them, and the log stays short"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    idle = []
    try:
        with open(tmp_path/'log', 'w') as log, program(log, before='ulimit -n 256;') as (p, port):
            for i in range(1500):
                idle.append(socket.create_connection(('127.0.0.1', port)))
                if i % 3: idle[-1].sendall(HALF_HEADER if i % 3 == 1 else HALF_BODY)
                if i % 100 == 0: assert status(told(port, HEALTH)) == 200
            assert status(told(port, completion(5))) == 200
            end = time.monotonic() + 40
            while time.monotonic() < end and not all(map(ended, idle)): time.sleep(.5)
            assert all(map(ended, idle))
            p.terminate()
            assert p.wait(30) == 0
    finally:
        for o in idle: o.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    lines = (tmp_path/'log').read_text().splitlines()
    assert (len([o for o in lines if 'connections:' in o]) <= 6
            and not any('Traceback' in o for o in lines)), lines
