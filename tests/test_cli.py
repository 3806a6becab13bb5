"""The command line as people and scripts use it: lines of JSON, a chat with any server, benchmarks by name,
and pipes."""
import inspect, io, json, os, pty, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings, strategies as st

import minisgl_lit
from minisgl_lit import LLM, SamplingParams, cli
from minisgl_lit.config import EngineConfig

TINY = ['--device', 'cpu', '--max-seq-len', '64', '--num-pages', '16', '--temperature', '0', '--max-tokens',
        '3']
FEW = SamplingParams(max_tokens=3, temperature=0)
HI = [dict(role='user', content='Hi')]

@pytest.fixture(scope='module')
def llm():
    with LLM(device='cpu', max_seq_len=64, num_pages=16) as llm: yield llm

@pytest.fixture
def run(capsys, monkeypatch):
    "(exit code, standard output, standard error) of the program, with lines to read"
    def run(*args, stdin=''):
        monkeypatch.setattr(sys, 'stdin', io.StringIO(stdin))
        try: code = cli.main([*args])
        except SystemExit as e: code = e.code
        return code, *capsys.readouterr()
    return run

# lines of JSON

def test_each_line_has_its_answer_in_order(run, llm, tmp_path):
    asked = ['"Hi"', '', json.dumps(dict(id='b', messages=HI, max_tokens=2)),
             json.dumps(dict(id=[3], input_ids=[5, 6, 7], n=2)), '{"prompt": "Hi\u2028", "id": null}']
    file = tmp_path/'asked.jsonl'
    file.write_text('\n'.join(asked) + '\n', encoding='utf-8')
    code, out, err = run('generate', '--file', str(file), *TINY)
    told = [json.loads(o) for o in out.rstrip('\n').split('\n')]
    assert ((code, err) == (0, '') and [o.get('id') for o in told] == [None, 'b', [3], [3], None]
            and len(told[1]['token_ids']) == 2)
    want = [llm.generate('Hi', FEW)[0], llm.chat(HI, SamplingParams(max_tokens=2, temperature=0)),
            *llm.generate([[5, 6, 7]]*2, FEW), llm.generate('Hi\u2028', FEW)[0]]
    assert ([o['text'] for o in told] == [o.text for o in want] and told[1]['messages'] == HI
            and told[2]['input_ids'] == [5, 6, 7])
    again = run('generate', '--jsonl', *TINY, stdin='\n'.join(asked))[1].rstrip('\n').split('\n')
    assert [json.loads(o)['text'] for o in again] == [o.text for o in want]

def test_nothing_is_loaded_for_a_wrong_line(run, monkeypatch):
    monkeypatch.setattr(minisgl_lit, 'LLM', None)
    lines = ['"a"', '', '{"prompt": "b", "id": 1}', '{"prompt": "c", "temperature": "hot"}', '{']
    code, out, err = run('generate', '--jsonl', stdin='\n'.join(lines))
    assert ((code, out, err.count('\n')) == (2, '', 1)
            and err.startswith('minisgl-lit generate: line 4: temperature must be'))

anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
                        | st.text(max_size=3),
                        lambda o: st.lists(o, max_size=3)
                        | st.dictionaries(st.text(max_size=3), o, max_size=3), max_leaves=4)
names = st.sampled_from(['prompt', 'messages', 'input_ids', 'id', *SamplingParams.__dataclass_fields__])

@settings(max_examples=100)
@given(st.dictionaries(names, anything, max_size=4) | anything)
def test_any_json_is_understood_or_refused_in_one_sentence(told):
    try: asked, params = cli.question(json.dumps(told), FEW)
    except ValueError as e: assert str(e) and '\n' not in str(e)
    else:
        assert isinstance(told, str) and asked == dict(prompt=told) or {k: told[k] for k in asked} == asked
        own = {} if isinstance(told, str) else {k: o for k, o in told.items() if k not in asked}
        assert params == SamplingParams(**dict(max_tokens=3, temperature=0) | own)

# chat

class Scripted(BaseHTTPRequestHandler):
    "A server that speaks OpenAI's language and says what it was asked; `script` is what it answers"
    def log_message(self, *args): pass
    def do_GET(self): self.answer(b'{"data": [{"id": "first"}, {"id": "second"}]}')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.asked.append((self.path, self.headers['Authorization'], body))
        self.answer(self.server.script.pop(0))
    def answer(self, data):
        self.send_response(400 if data.startswith(b'{"error"') else 200)
        self.end_headers()
        self.wfile.write(data)

def words(*texts, end=b'data: [DONE]\n\n'):
    "An answer as a stream of events"
    events = [dict(choices=[dict(delta=dict(role='assistant'))]),
              *(dict(choices=[dict(delta=dict(content=o))]) for o in texts), dict(choices=[], usage={})]
    return b''.join(b'data: ' + json.dumps(o).encode() + b'\n\n' for o in events) + b': a comment\n\n' + end

@pytest.fixture
def server():
    with ThreadingHTTPServer(('127.0.0.1', 0), Scripted) as server:
        server.asked, server.url = [], f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
        yield server
        server.shutdown()

def test_a_conversation_with_a_server(run, server, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'secret')
    server.script = [words('Hel', 'lo'), words('more'), words('new')]
    code, out, err = run('chat', '--url', server.url + '/v1/', '--max-tokens', '7', '--stop', 'x', '--system',
                         'Be kind.', stdin='Hi\nAnd?\n/reset\nHi\n')
    assert (code, out) == (0, 'Hello\nmore\nnew\n') and err.startswith('first at ') and err.count('\n') == 1
    (path, key, body), second, third = server.asked
    kind = dict(role='system', content='Be kind.')
    assert (path, key) == ('/v1/chat/completions', 'Bearer secret')
    assert body == dict(model='first', messages=[kind, *HI], stream=True, max_tokens=7, stop=['x'])
    assert second[2]['messages'] == [kind, *HI, dict(role='assistant', content='Hello'),
                                     dict(role='user', content='And?')]
    assert third[2]['messages'] == [kind, *HI]
    server.script = [words('yes')]
    assert run('chat', '--url', server.url, '--model', 'mine', '--api-key', 'own', stdin='Hi')[1] == 'yes\n'
    assert server.asked[-1][1:] == ('Bearer own', dict(model='mine', messages=HI, stream=True))

def test_answers_that_go_wrong_are_taken_back(run, server):
    server.script = [b'{"error": {"message": "too\\nlong"}}', words('half', end=b''),
                     words(end=b'data: {"error": {"message": "no memory"}}\n\n'),
                     b'data: {]\n', words('good')]
    code, out, err = run('chat', '--url', server.url, stdin='a\nb\nc\nd\ne\n')
    assert ((code, out) == (0, 'halfgood\n') and 'answers 400: too long' in err and 'broke off' in err
            and 'no memory' in err)
    assert (err.count('/reset begins anew\n') == 4
            and server.asked[-1][2]['messages'] == [dict(role='user', content='e')])

def test_without_torch(server):
    "To talk with a server needs no library for models"
    server.script = [words('Hello')]
    code = ('import sys; from minisgl_lit.cli import main; main(); print({"torch", "transformers"} & '
            'sys.modules.keys())')
    done = subprocess.run([sys.executable, '-c', code, 'chat', '--url', server.url], input='Hi\n',
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == 'Hello\nset()\n', done.stderr

def test_ctrl_c_stops_the_answer_and_not_the_program(server):
    "In a terminal of its own: the second answer never ends, until somebody presses Ctrl-C"
    class Endless(Scripted):
        def answer(self, data):
            super().answer(data)
            if data == words('half', end=b''): time.sleep(30)
    server.RequestHandlerClass, server.script, server.daemon_threads = (Endless,
        [words('half', end=b''), words('whole')], True)
    here, there = pty.openpty()
    process = subprocess.Popen([sys.executable, '-m', 'minisgl_lit', 'chat', '--url', server.url],
                               stdin=there, stdout=there, stderr=there, start_new_session=True)
    os.close(there)
    seen = b''
    def until(text):
        nonlocal seen
        while text not in seen: seen += os.read(here, 999)
        seen = seen.split(text, 1)[1]
    try:
        until(b'> '); os.write(here, b'one\n'); until(b'half')
        process.send_signal(signal.SIGINT)
        until(b'> '); os.write(here, b'two\n'); until(b'whole')
        until(b'> '); os.write(here, b'\x04')
        assert (process.wait(20) == 0
                and server.asked[1][2]['messages'][1] == dict(role='assistant', content='half'))
    finally:
        process.kill()
        process.wait()
        os.close(here)

def test_a_closed_pipe_is_no_error():
    "As after `| head -1`: code 0, and no message"
    with subprocess.Popen([sys.executable, '-m', 'minisgl_lit', '--help'], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ('', 0)

def test_a_conversation_here(run, llm):
    "The second question is answered with the first in mind, and what stands before all survives a reset"
    first = llm.chat(HI, FEW).text
    second = llm.chat([*HI, dict(role='assistant', content=first), *HI], FEW).text
    kind = llm.chat([dict(role='system', content='Be kind.'), *HI], FEW).text
    code, out, err = run('chat', *TINY, stdin='Hi\nHi\n/hello\n/reset\nHi\n')
    assert (code, out) == (0, f'{first}\n{second}\n{first}\n') and '/hello is no command' in err
    assert err.startswith('weights ') and 'pages of 16 tokens' in err.split('\n')[0]
    assert run('chat', *TINY, '--system', 'Be kind.', stdin='Hi\n/reset\nHi\n')[1] == f'{kind}\n{kind}\n'

def test_one_question(run, llm, tmp_path):
    "Nothing but its answer; with what a conversation was before; words need no quotes"
    assert run('chat', 'Hi', *TINY) == (0, llm.chat(HI, FEW).text + '\n', '')
    assert run('chat', *TINY, 'Hi', 'you')[1] == llm.chat('Hi you', FEW).text + '\n'
    before = [*HI, dict(role='assistant', content='Hello')]
    (tmp_path/'talk.json').write_text(json.dumps(before))
    assert (run('chat', 'Hi', *TINY, '--load', str(tmp_path/'talk.json'))[1]
            == llm.chat([*before, *HI], FEW).text + '\n')
    kind = [dict(role='system', content='Be kind.'), *HI]
    assert run('chat', 'Hi', *TINY, '--system', 'Be kind.')[1] == llm.chat(kind, FEW).text + '\n'
    code, out, err = run('chat', 'a '*99, *TINY)
    assert (code, out, err.count('\n')) == (2, '', 1) and 'max_seq_len' in err and '/reset' not in err

def test_one_question_to_a_server(run, server):
    server.script = [words('Hel', 'lo'), b'{"error": {"message": "no"}}', words('half', end=b'')]
    assert (run('chat', '--url', server.url, 'Hi') == (0, 'Hello\n', '')
            and server.asked[0][2]['messages'] == HI)
    code, out, err = run('chat', '--url', server.url, 'Hi')
    assert (code, out) == (2, '') and err.endswith('answers 400: no\n') and err.count('\n') == 1
    code, out, err = run('chat', '--url', server.url, 'Hi')
    assert (code, out) == (2, 'half') and 'broke off' in err

def test_generate_says_that_a_chat_model_is_asked_otherwise(run):
    "A line for people, and none for programs or beside an error"
    code, out, err = run('generate', 'Hi', *TINY)
    assert code == 0 and err.count('\n') == 1 and 'minisgl-lit chat' in err
    assert run('generate', 'Hi', 'you', *TINY)[2] == err and run('generate', 'Hi', '--json', *TINY)[2] == ''
    assert 'chat' not in run('generate', 'x '*99, *TINY)[2]

# what a model is called

def test_a_folder_that_holds_one_gguf(run, tmp_path):
    """Every command that loads a model says which name to give; with that name it works. Ollama's names are
    hashes"""
    import shutil
    from pathlib import Path
    file = shutil.copy(Path(__file__).parent/'data'/'embedded-Q4_K_M.gguf', tmp_path/'some.gguf')
    for command in ('generate', 'Hi'), ('chat', 'Hi'), ('doctor',):
        code, out, err = run(*command, '--model', str(tmp_path), *(TINY if command != ('doctor',) else []))
        assert (code, out, err.count('\n')) == (2, '', 1) and err.endswith(f' {file}\n'), err
    told = run('chat', 'Hi', '--model', err.split()[-1], *TINY)
    assert told[0] == 0 and told[1]
    blob = shutil.copy(file, tmp_path/'sha256-93a1')
    assert run('chat', 'Hi', '--model', str(blob), *TINY) == told

def test_a_model_without_its_flag(run, server):
    "As other programs take it; a question may be of any length, and the name of a file beside it is one"
    for command in (('serve', 'x.gguf'), ('batch', 'a', '-o', 'b', 'x.gguf'), ('chat', 'x.gguf'),
                    ('chat', 'x.gguf', 'Hi')):
        code, out, err = run(*command)
        assert (code, out, err.count('\n')) == (2, '', 1) and 'a model is given as --model x.gguf' in err, err
    server.script = [words('yes'), words('no')]
    assert (run('chat', '--url', server.url, 'tests/ ' * 999)[:2] == (0, 'yes\n')
            and run('chat', '--url', server.url, 'tests')[1] == 'no\n')

def test_help_and_errors_name_all_that_a_model_may_be(run):
    for command in 'serve', 'chat', 'generate':
        shown = ' '.join(run(command, '--help')[1].split())
        assert '.gguf' in shown and 'owner/model:Q4_K_M' in shown and 'folder' in shown, command
    for name in 'smollm2:135m', './nowhere', '/no/such/file.bin':
        err = run('generate', 'Hi', '--model', name)[2]
        assert err.count('\n') == 1 and 'owner/model:file.gguf or owner/model:Q4_K_M' in err, err

# doctor

def test_doctor_lists_what_a_file_is(run):
    "A compressed file has one format; others are not offered. What is not compressed may be"
    from pathlib import Path
    from minisgl_lit.formats.hub import embedded_path
    for path in [*(Path(__file__).parent/'data').glob('*.gguf'),
                 *(o.parent for o in (Path(__file__).parent/'data').glob('*/config.json'))]:
        found = {o['name']: o['found'] for o in json.loads(run('doctor', '--json', '--model', str(path))[1])}
        assert [o for o in found if o.startswith('weights ')] == ['weights as stored'], path
        kind = path.stem.split('-')[1] if path.suffix else path.name.split('-')[0]
        assert kind.split('_')[0] in found['stored as'] or kind == 'fp8', (kind, found['stored as'])
    found = [o['name'] for o in json.loads(run('doctor', '--json', str(embedded_path()))[1])]
    assert found[-5:] == ['weights 16 bits', 'weights int8', 'weights int4', 'weights fp8', 'served']

# bench

def test_every_benchmark_has_flags_for_all_it_takes():
    from minisgl_lit.tools.busy import benchmarks
    assert (cli.benchmarks.keys() - benchmarks.keys() == {'serving'}
            and not benchmarks.keys() - cli.benchmarks.keys())
    for name, function in benchmarks.items():
        params = inspect.signature(function).parameters
        parsed = cli.make_parser().parse_args(['bench', name])
        config = cli.from_args(parsed.config, parsed)
        assert {k: getattr(config, k) for k in params if k != 'config'} == {k: o.default
            for k, o in params.items() if k != 'config'}
        assert isinstance(config, EngineConfig) == ('config' in params)
        parsed.parser.show_all()
        text = parsed.parser.format_help()
        for k in params.keys() - {'config'}: assert '--' + k.replace('_', '-') in text

def test_bench_serving_asks_a_server(run, server):
    "One that runs already, and then one that does not"
    sizes = ['--requests', '3', '--input-len', '5', '--output-len', '4', '--warmup', '1', '--rate', '100',
             '--arrivals', 'fixed', '--answer-limit', '60000']
    server.script = [words('a', 'b', 'c')]*3 + [b'{"error": {"message": "too many"}}']
    code, out, err = run('bench', 'serving', '--url', server.url, '--json', *sizes)
    found = json.loads(out)
    assert ((code, err) == (0, '1 times: 400: too many\n') and (found['answers'], found['errors']) == (2, 1)
            and found['goodput'] == found['answer_rate'] > 0)
    assert (found['setting']['model'] == 'first' and found['setting']['rate'] == 100
            and 'page_size' not in found['setting'])
    assert [len(o[2]['prompt']) for o in server.asked] == [5]*4
    code, out, err = run('bench', 'serving', '--url', 'http://127.0.0.1:9', *sizes)
    assert (code, out, err.count('\n')) == (2, '', 1) and 'cannot be reached' in err
    code, out, err = run('bench', 'serving', '--url', server.url, '--page-size', '4')
    assert code == 2 and 'page_size is a setting of the engine' in err

# errors

@pytest.mark.parametrize('typed, meant', [('srve', 'serve'), ('chatt', 'chat'), ('generat', 'generate'),
                                          ('bnech', 'bench'), ('bench servin', 'serving')])
def test_the_nearest_command_is_named(run, typed, meant):
    code, out, err = run(*typed.split())
    assert (code, out, err.count('\n')) == (2, '', 1) and f'did you mean {meant}?' in err

def test_nothing_is_near(run):
    code, out, err = run('nonsense')
    assert ((code, out, err.count('\n')) == (2, '', 1)
            and 'nonsense is none of serve, chat, generate, batch, bench, quantize, doctor, models, pull, '
                'list, ps, cp, rm, config, completion; see' in err)

def test_a_failed_request_is_code_1(run, monkeypatch, llm):
    "Others' answers are printed all the same"
    class Half:
        runtime = llm.runtime
        def __init__(self, **settings): pass
        def __enter__(self): return self
        def __exit__(self, *error): pass
        def generate(self, prompts, params):
            outs = llm.generate(prompts, params)
            object.__setattr__(outs[0], 'error', 'the model is tired')
            return outs
    monkeypatch.setattr(minisgl_lit, 'LLM', Half)
    code, out, err = run('generate', 'Hi', 'you', *TINY[:-2], '--max-tokens', '3')
    assert (code, out.count('\n'), err) == (1, 2, 'the model is tired\n')
