"A real server, real sockets, and everything that may end before its time."
import json, os, random, re, shutil, signal, socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import warm

from minisgl_lit import serve
from minisgl_lit.log import LogFile
from minisgl_lit.formats.hub import embedded_path

SMALL = dict(port=0, num_pages=512, max_running_req=16)
# one for all: to make one takes 40 ms
web = httpx.Client(timeout=60, trust_env=False, headers={'connection': 'close'})
HELLO = [{'role': 'user', 'content': 'Hello, what is a page?'}]


def post(server, path, **body):
    return web.post(server.url + path, content=json.dumps(body), headers={'content-type': 'application/json'})

def info(server): return web.get(server.url + '/get_server_info').json()

def until(true, seconds=60):
    "Wait for something, but not for ever: how long a step takes is the machine's affair"
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, 'this did not happen in time'
        time.sleep(.02)

def idle(server):
    "Whether nothing runs and every page is back"
    stats = info(server)
    pages = stats['pages']
    return (stats['running'] == stats['waiting'] == pages['held'] == pages['protected'] == 0
            and pages['free'] + pages['evictable'] == pages['total'])

def engines(parent=None):
    "Engine processes started by this process, or by another, that are still alive: pid and folder"
    lines = subprocess.run(['ps', '-A', '-ww', '-o', 'pid=,ppid=,stat=,command='], capture_output=True,
                           text=True).stdout.splitlines()
    rows = [line.split(None, 3) for line in lines if 'minisgl_lit.server.engine_process' in line]
    return {int(pid): Path(re.search(r' (\S*minisgl_lit-engine-\w+) ', command)[1])
            for pid, ppid, stat, command in rows
            if int(ppid) == (parent or os.getpid()) and stat[0] != 'Z'}

def alive(pid):
    return (subprocess.run(['ps', '-o', 'stat=', '-p', str(pid)], capture_output=True,
                           text=True).stdout[:1] not in ('', 'Z'))

def events(server, path, **body):
    "The events of a stream, as they come"
    with web.stream('POST', server.url + path, json=body | {'stream': True}) as r:
        for line in r.iter_lines():
            if line.startswith('data: {'): yield json.loads(line[6:])


SHAPES = dict(alone=dict(), three=dict(replicas=3), ray=dict(replicas=3, ray_address='local'))

@pytest.fixture(scope='module',
                params=[pytest.param(o, marks=[pytest.mark.long]*(o != 'alone')) for o in SHAPES])
def server(request):
    if request.param == 'ray': pytest.importorskip('ray', reason='the extra ray is not installed')
    with serve(**SMALL, **SHAPES[request.param]) as s: yield s

@pytest.fixture(scope='module')
def client(server): return openai.OpenAI(base_url=server.url + '/v1', api_key='none', max_retries=0)


def test_what_a_server_says_at_its_start(tmp_path, monkeypatch, capsys):
    """A chat template that cannot be used, callers from elsewhere who need no key; through a queue, so that
    it never waits for its reader"""
    model = tmp_path/'model'
    shutil.copytree(embedded_path(), model)
    for file in model.glob('chat_template*'): file.unlink()
    settings = json.loads((model/'tokenizer_config.json').read_text())
    (model/'tokenizer_config.json').write_text(json.dumps(settings | dict(chat_template='{{ 1/0 }}')))
    monkeypatch.setattr('minisgl_lit.server.serve.ipaddress',
                        SimpleNamespace(ip_address=lambda _: SimpleNamespace(is_loopback=False)))
    with serve(str(model), **SMALL) as s: assert isinstance(s._log_file, LogFile)
    said = capsys.readouterr().err
    assert (said.count('the chat template of this checkpoint cannot be used: ') == 1
            and said.count('lets other machines in') == 1)

def test_chat(client, server):
    ask = dict(model=server.model, messages=HELLO, max_tokens=12, temperature=0)
    whole = client.chat.completions.create(**ask)
    assert (whole.choices[0].message.role == 'assistant'
            and whole.choices[0].finish_reason in ('stop', 'length'))
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={'include_usage': True}))
    assert ''.join(c.choices[0].delta.content or '' for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions(client, server):
    ask = dict(model=server.model, max_tokens=5, temperature=0)
    one = client.completions.create(prompt='The page', **ask)
    many = client.completions.create(prompt=['The page', 'The page'], **ask)
    assert [c.text for c in many.choices] == [one.choices[0].text]*2
    assert many.usage.completion_tokens == 2*one.usage.completion_tokens
    streamed = ['', '']
    for c in client.completions.create(prompt=['The page', 'The page'], stream=True, **ask):
        streamed[c.choices[0].index] += c.choices[0].text
    assert streamed == [one.choices[0].text]*2
    unlimited = client.completions.create(prompt='x', model=server.model, extra_body=dict(ignore_eos=True))
    assert unlimited.usage.completion_tokens == 16


def test_cached_prefix_and_seed(client, server):
    prompt = 'The pages of a tree are shared by requests that begin alike. '*8
    ask = dict(model=server.model, prompt=prompt, max_tokens=8, temperature=1, seed=5)
    first, again = client.completions.create(**ask), client.completions.create(**ask)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_stop_string(client, server):
    ask = dict(model=server.model, prompt='The page', max_tokens=30, temperature=0)
    text = client.completions.create(**ask).choices[0].text
    stop = text[len(text)//2:][:3]
    ended = client.completions.create(**ask, stop=stop)
    assert ended.choices[0].text == text[:text.index(stop)] and ended.choices[0].finish_reason == 'stop'
    streamed = ''.join(c.choices[0].text for c in client.completions.create(**ask, stop=[stop], stream=True))
    assert streamed == ended.choices[0].text


def test_models_and_errors(client, server):
    assert [m.id for m in client.models.list()] == [server.model]
    with pytest.raises(openai.NotFoundError, match='not served here'):
        client.completions.create(model='other', prompt='x')
    with pytest.raises(openai.BadRequestError, match='temperature must be'):
        client.completions.create(model=server.model, prompt='x', temperature=-1)
    with pytest.raises(openai.BadRequestError, match='n must be'):
        client.chat.completions.create(model=server.model, messages=HELLO, n=0)


bad = [
    ('prompt', dict(prompt='')), ('prompt', dict(prompt=[])), ('prompt', dict(prompt=[[]])),
    ('prompt', dict(prompt=[10**6])), ('prompt', dict(prompt=[-1])), ('prompt', dict(prompt=[2**70])),
    ('prompt', dict(prompt=[2**63])), ('prompt', dict(prompt='a '*40_000)),
    ('prompt', dict(prompt='\ud800')), ('prompt', dict(prompt={'a': 1})), ('prompt', dict(prompt=None)),
    ('prompt', {}), ('max_tokens', dict(prompt='x', max_tokens=-1)),
    ('max_tokens', dict(prompt='x', max_tokens=10**6)), ('max_tokens', dict(prompt='x', max_tokens=2**70)),
    ('max_tokens', dict(prompt='x', max_tokens='5')), ('max_tokens', dict(prompt='x', max_tokens=1.5)),
    ('temperature', dict(prompt='x', temperature=-.1)),
    ('temperature', dict(prompt='x', temperature=float('nan'))),
    ('temperature', dict(prompt='x', temperature=float('inf'))), ('top_p', dict(prompt='x', top_p=0)),
    ('top_p', dict(prompt='x', top_p=1.1)), ('top_k', dict(prompt='x', top_k=-2)),
    ('min_p', dict(prompt='x', min_p=2)), ('seed', dict(prompt='x', seed=-2**70)),
    ('seed', dict(prompt='x', seed=2**70)), ('stop', dict(prompt='x', stop='')),
    ('stop[0]', dict(prompt='x', stop=[1])), ('stop_token_ids', dict(prompt='x', stop_token_ids=[-1])),
    ('n', dict(prompt='x', n=0)), ('n', dict(prompt='x', n=1.5)), ('best_of', dict(prompt='x', best_of=2)),
    ('logprobs', dict(prompt='x', logprobs=-2)), ('presence_penalty', dict(prompt='x', presence_penalty=3)),
    ('logit_bias', dict(prompt='x', logit_bias={'5': 1000})), ('stream', dict(prompt='x', stream='yes')),
    ('model', dict(prompt='x', model=5)), (None, dict(prompt='x', stop='\ud800')),
    ('stream_options', dict(prompt='x', stream_options=3)), ('min_tokens', dict(prompt='x', min_tokens=-3)),
    ('regex', dict(prompt='x', regex='('))]

def test_bad_input_touches_nobody(server):
    """Each has its 400, its sentence and its field; a request that runs meanwhile gets what it would have got
    alone"""
    ask = dict(text='The page', sampling_params=dict(temperature=0, max_tokens=300, ignore_eos=True))
    alone = post(server, '/generate', **ask).json()
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(post, server, '/generate', **ask)
        for field, body in bad:
            for stream in ({}, {'stream': True}):
                r = post(server, '/v1/completions', **stream | body)
                error = r.json()['error']
                assert ((r.status_code, error['param'], error['type'])
                        == (400, field, 'invalid_request_error')), (body, error)
                assert error['message'] and '\n' not in error['message']
        for silent in (dict(n=1.0), dict(min_tokens=0.0), dict(priority=0.0), dict(logprobs=False),
                       dict(logit_bias={}), dict(repetition_penalty=1)):
            assert (post(server, '/v1/completions', prompt='x', max_tokens=1, **silent).status_code
                    in (200, 400)), silent
        for body in ('{', '[]', 'null', '"x"', '[' * 40_000, '{"prompt": "x", "seed": ' + '9'*5000 + '}'):
            assert (web.post(server.url + '/v1/completions', content=body,
                             headers={'content-type': 'application/json'}).status_code == 400)
        deep = web.post(server.url + '/v1/completions', content='[' * 100_000,
                        headers={'content-type': 'application/json'})
        assert (deep.status_code, deep.json()['error']['code']) == (413, 'too_many_values')
        assert beside.result().json()['output_ids'] == alone['output_ids']
    until(lambda: idle(server))


def test_rid_of_a_running_request(server):
    stream = events(server, '/generate', text='The page', rid='mine',
                    sampling_params=dict(max_tokens=1800, ignore_eos=True))
    next(stream)
    r = post(server, '/generate', text='x', rid='mine')
    assert (r.status_code, r.json()['error']['param']) == (400, 'rid')
    stream.close()
    until(lambda: post(server, '/generate', text='x', rid='mine',
                       sampling_params=dict(max_tokens=1)).status_code == 200)


def test_callers_who_leave(server):
    "They hang up at random moments, reading along or not; in the end every row and page is back"
    rng = random.Random(0)
    host, port = re.match(r'http://(.*):(\d+)', server.url).groups()
    body = json.dumps(dict(prompt=['The page', 'Hello'], max_tokens=900, ignore_eos=True, temperature=1))
    def leave(stream, seconds):
        text = body[:-1] + f', "stream": {json.dumps(stream)}}}'
        with socket.create_connection((host, int(port))) as s:
            s.sendall('POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: '
                      f'application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}'.encode())
            time.sleep(seconds)
    before = info(server)['generated_tokens']
    with ThreadPoolExecutor(10) as pool:
        for i in range(20): pool.submit(leave, i % 2 == 0, rng.random()*.4)
    until(lambda: idle(server))
    assert info(server)['generated_tokens'] - before < 20*2*900/2


def test_stop_ends_everything():
    "With streams running: an error event for each, and nothing is left"
    before = engines()
    s = serve(**SMALL)
    (mine, folder), = engines().items() - before.items()
    assert folder.is_dir()
    streams = [events(s, '/generate', text='Hello', sampling_params=dict(max_tokens=1500, ignore_eos=True))
               for _ in range(4)]
    for o in streams: next(o)
    s.stop()
    s.stop()
    for o in streams: assert 'the server was stopped' in list(o)[-1]['error']['message']
    assert not alive(mine) and not folder.exists() and engines() == before
    with pytest.raises(httpx.ConnectError): web.get(s.url + '/health')


def test_two_servers(server):
    b = server
    with serve(**SMALL) as a:
        assert a.url != b.url
        ask = dict(text='The page', sampling_params=dict(temperature=0, max_tokens=9))
        assert (post(a, '/generate', **ask).json()['output_ids']
                == post(b, '/generate', **ask).json()['output_ids'])
        a.stop()
        assert web.get(b.url + '/health').status_code == 200


def test_wrong_starts(tmp_path, server, monkeypatch):
    "One sentence each, and nothing is left behind"
    before, folders = engines(), tmp_path/'folders'   # of its own: other tests start servers at the same time
    folders.mkdir()
    monkeypatch.setattr('tempfile.tempdir', str(folders))
    corrupt = tmp_path/'corrupt'
    corrupt.mkdir()
    (corrupt/'config.json').write_text('{"architectures"')
    port = int(server.url.rsplit(':', 1)[1])
    for words, how in [('/no/such/model', dict(model='/no/such/model')), ('config.json', dict(model=corrupt)),
                       (f'port {port} is in use', dict(port=port)),
                       ('did you mean page_size', dict(pagesize=4)), ('page_size must be', dict(page_size=0)),
                       ('max_seq_len', dict(max_seq_len=10**9))]:
        with pytest.raises(ValueError, match=words) as e: serve(**SMALL | how)
        assert '\n' not in str(e.value)
    assert engines() == before and not list(folders.iterdir())


def before_engine_core(monkeypatch, code):
    "Engine processes that are started from now on do this first"
    program = f'{code}\nimport sys\nfrom minisgl_lit.server.engine_process import main\nmain(*sys.argv[1:])'
    def start(_, *args, **streams):
        return warm.Popen([sys.executable, '-c', program, *args], start_new_session=True, **streams)
    monkeypatch.setattr('minisgl_lit.server.engine_client.start_program', start)


def hang(monkeypatch, what='time.sleep(600)'):
    "Engine processes that are started from now on do this first"
    before_engine_core(monkeypatch, f'import time\n{what}')


def test_engine_dies_while_it_loads(monkeypatch):
    "Whoever started the server is told, and nothing is left"
    before = engines()
    hang(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(serve, **SMALL)
        until(lambda: engines().keys() - before.keys())
        (pid, folder), = engines().items() - before.items()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match='has ended with code -9'): starting.result(60)
    assert not folder.exists() and engines() == before


@pytest.mark.parametrize('end', [pytest.param('stop', marks=pytest.mark.long), 'drain'])
def test_end_in_the_middle_of_a_restart(monkeypatch, end):
    "The engine that is being started is ended, too"
    before = engines()
    with serve(**SMALL, log_interval=0, restart=True, drain_seconds=3) as s:
        (pid, folder), = engines().items() - before.items()
        hang(monkeypatch)
        os.kill(pid, signal.SIGKILL)
        until(lambda: engines().keys() - before.keys() - {pid})
        (_, second), = engines().items() - before.items()
        assert not folder.exists() and second.is_dir() and web.get(s.url + '/health').status_code == 503
        getattr(s, end)()
        s.wait()
        assert not second.exists() and engines() == before


script = '''
import sys, threading
from minisgl_lit import serve
s = serve(port=0, num_pages=64)
assert 'torch' not in sys.modules and 'transformers' not in sys.modules
try: s.wait()
except KeyboardInterrupt: s.stop()
'''

@pytest.mark.parametrize(('way', 'end'), [
    ('file', signal.SIGINT), ('stdin', signal.SIGKILL),
    *(pytest.param(*o, marks=pytest.mark.long)
      for o in (('file', signal.SIGKILL), ('stdin', signal.SIGINT)))])
def test_in_a_script(tmp_path, way, end):
    """Without a guard, from a file or from stdin; one line on stdout; ended by Ctrl-C or brutally, it leaves
    nothing"""
    (tmp_path/'script.py').write_text(script)
    p = subprocess.Popen([sys.executable, *(['script.py'] if way == 'file' else ['-'])], cwd=tmp_path,
                         text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                         env=os.environ | dict(TMPDIR=str(tmp_path)))
    try:
        if way == 'stdin': p.stdin.write(script)
        p.stdin.close()
        url = re.search(r'(http://127.0.0.1:\d+)\n$', p.stdout.readline())[1]
        with socket.create_connection(('127.0.0.1', int(url.rsplit(':', 1)[1]))) as s:
            s.sendall(b'this is no HTTP\r\n\r\n')
            assert b'400' in s.recv(99)
        assert web.post(url + '/v1/completions', json=dict(prompt='Hello', max_tokens=3)).status_code == 200
        # written behind the answer
        line = next(o for o in iter(p.stderr.readline, '') if not o.startswith('Without native kernels'))
        assert re.fullmatch(r"POST '/v1/completions' 200 [\d.]+ ms [0-9a-f]{32}\n", line)
        (engine, folder), = engines(p.pid).items()
        assert folder.is_dir()
        os.killpg(p.pid, end) if end is signal.SIGINT else p.kill()
        assert p.wait(60) == (0 if end is signal.SIGINT else -9)
        until(lambda: not alive(engine) and not folder.exists())
        assert p.stdout.read() == '' and p.stderr.read() == ''
    finally: p.kill()

def test_ctrl_c_ends_open_streams():
    """Their callers are told so, and each leaves its line in the log, before the program ends; a host that is
    open to all left one at the start"""
    with warm.Popen([sys.executable, '-m', 'minisgl_lit', 'serve', '--port', '0', '--host', '0.0.0.0',
                           '--num-pages', '128', '--log-interval', '0'],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        url, said = p.stdout.readline().split()[-1], []
        while sum(' lets other machines in' in o or 'serve: weights' in o for o in said) < 2:
            said.append(p.stderr.readline().rstrip('\n'))
        with web.stream('POST', url + '/v1/completions',
                        json=dict(prompt='Hello', max_tokens=1500, ignore_eos=True, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            p.send_signal(signal.SIGINT)
            rest = [o for o in lines if o]
        assert 'the server was stopped' in rest[-2] and rest[-1] == 'data: [DONE]'
        assert p.wait(60) == 0
        *start, line = [o for o in said + p.stderr.read().splitlines()
                        if not o.startswith("Without native kernels")]
        assert re.fullmatch(r"POST '/v1/completions' 200 [\d.]+ ms [0-9a-f]{32}", line), [*start, line]
        opened, memory = sorted(start, key=lambda o: "weights" in o)   # of two processes, in any order
        assert (opened.startswith("minisgl_lit: host 0.0.0.0 lets other machines in")
                and memory.startswith("minisgl-lit serve: weights "))

def test_ctrl_c_in_the_first_moment_stops_the_server():
    """It may come while the line on memory is written: the server is stopped then, too, before the logs are
    closed"""
    code = '''
import minisgl_lit
from unittest.mock import Mock
from minisgl_lit import cli
server = Mock(memory='m')
minisgl_lit.serve = lambda **settings: server
def say(sentence): raise KeyboardInterrupt
cli._say = say
print(cli.main(['serve']), server.stop.called)
'''
    assert (subprocess.run([sys.executable, '-c', code], timeout=60, stdout=subprocess.PIPE,
                           text=True).stdout.split() == ['0', 'True'])

def test_a_fork_may_end():
    "It has no thread of the server, so it must not wait for one; and it must not stop the parent's"
    code = '''
import os, sys
from urllib.request import urlopen
from minisgl_lit import serve
with serve(port=0, num_pages=64) as s:
    if (child := os.fork()) == 0: sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert urlopen(s.url + '/health').status == 200
'''
    assert subprocess.run([sys.executable, '-c', code], timeout=60, stdout=subprocess.DEVNULL).returncode == 0

LOST = """
import signal
from minisgl_lit import cli
class Told:
    def __del__(self): signal.raise_signal(signal.SIGTERM)   # Python drops what is raised here
cli._say = lambda sentence: Told() and None
raise SystemExit(cli.main(['serve', '--port', '0', '--num-pages', '50']))
"""

def test_a_signal_before_it_waits_is_not_lost():
    "Also where the exception that a signal raises is dropped, as it is while an object is finalized"
    with warm.Popen([sys.executable, '-c', LOST], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True) as process:
        try: assert process.stdout.readline() and process.wait(60) == 0
        finally: process.kill()
