"""What hostile callers cost: some of the corpus in this process, with work counted (characters tokenized,
patterns and grammars compiled, bytes sent on); and all of it, in the long suite, sent to a server with eight
streams running."""
import asyncio, json, threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import httpx
import llguidance
import pytest
import regex

from beside import Beside, hostile_callers, program, until
from hostile import (
    CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, chat, completion, corpus, generate, messages,
    read_statuses, responses, text)
from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.text.grammar import GrammarCompiler
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.server import middleware
from minisgl_lit.server.api_server import Api, create_app
from minisgl_lit.server.engine_client import AsyncEngineClient
from minisgl_lit.loop.engine_core import EngineCore
from minisgl_lit.loop.messages import UserMsg, decode
from minisgl_lit.testing.toy_engine import ToyEngine
from minisgl_lit.text import tokenizer as tokenizers
from minisgl_lit.text.tokenizer import ChatTemplate, Tokenizer

VOCAB, MAX_SEQ_LEN, PAGE = 4096, 256, 16


@dataclass
class Work:
    "What was done, all in all, and of this on the event loop."
    loop: int = field(default_factory=threading.get_ident)
    chars: int = 0         # tokenized
    chars_on_loop: int = 0
    ids_on_loop: int = 0   # decoded
    messages: int = 0      # rendered by a chat template
    messages_on_loop: int = 0
    patterns: list[str] = field(default_factory=list)   # given to `regex`
    grammars: list[str] = field(default_factory=list)   # given to llguidance
    sent: list[UserMsg] = field(default_factory=list)   # to the scheduler

    def on_loop(self, n: int) -> int: return n if threading.get_ident() == self.loop else 0


class CountingBackend:
    """A tokenizers library that counts what it is given; of a long text it encodes only the beginning, so
    that no test waits for it."""
    def __init__(self, backend, work): self._backend, self._work = backend, work
    def __getattr__(self, name): return getattr(self._backend, name)

    def _count(self, text):
        self._work.chars += len(text)
        self._work.chars_on_loop += self._work.on_loop(len(text))
        return text[:1000]

    def encode(self, text, *args, **more): return self._backend.encode(self._count(text), *args, **more)
    def encode_batch(self, texts, *args, **more):
        return self._backend.encode_batch([self._count(o) for o in texts], *args, **more)
    def encode_batch_fast(self, texts, *args, **more):
        return self._backend.encode_batch_fast([self._count(o) for o in texts], *args, **more)
    def decode(self, ids, *args, **more):
        self._work.ids_on_loop += self._work.on_loop(len(ids))
        return self._backend.decode(ids[:1000], *args, **more)
    def decode_batch(self, lists, *args, **more):
        self._work.ids_on_loop += self._work.on_loop(sum(map(len, lists)))
        return self._backend.decode_batch([o[:1000] for o in lists], *args, **more)


class Engine:
    """The engine core in this process, over the toy engine: an `EngineCoreHandle` to the client, as far as it
    looks at one."""
    trouble, silence = '', 0.
    def __init__(self, tokenizer, work, **settings):
        self.work = work
        table = TableManager(16, MAX_SEQ_LEN, PAGE, dummy_page=256)
        config = EngineConfig(**dict(num_pages=256, page_size=PAGE, seed=0) | settings)
        grammars = GrammarCompiler(tokenizer.backend, VOCAB)
        self.scheduler = Scheduler(
            ToyEngine(table.page_table, table.token_pool, PAGE, 256, VOCAB),
            CacheManager(256, table, RadixCache(PAGE, 'lru')), VOCAB, lambda: 0.,
            config, frozenset(), None, TextRules(tokenizers.TextStopChecks(tokenizer), grammars))
        self.core, self.stopped = EngineCore(self.scheduler, grammars.begin), False

    def send(self, data):
        message = decode(data)
        if isinstance(message, UserMsg): self.work.sent.append(message)
        loop = asyncio.get_running_loop()
        if answer := self.core.handle(message): loop.call_soon(self.client.dispatch, answer)
        loop.call_soon(self._turn)

    def _turn(self):
        for message in () if self.stopped else self.core.turn(): self.client.dispatch(message)
        if self.scheduler.has_work and not self.stopped: asyncio.get_running_loop().call_soon(self._turn)
        elif self.core.grammar_queue: asyncio.get_running_loop().call_later(self.core.wait, self._turn)


@pytest.fixture(scope='module')
def tokenizer(): return Tokenizer(embedded_path())

@pytest.fixture
def server(tokenizer, monkeypatch):
    "`work`, and `run`, which calls a function with a client of the web application"
    work, backend = Work(), tokenizer.backend
    monkeypatch.setattr(tokenizer, 'backend', CountingBackend(backend, work))
    def compiled(pattern, *args, compile=regex.compile, **more):
        work.patterns.append(pattern)
        return compile(pattern if len(pattern) < 200 and pattern.count('{') < 2 else 'never', *args, **more)
    monkeypatch.setattr(regex, 'compile', compiled)
    def rendered(self, messages, *args, render=ChatTemplate.render, **more):
        work.messages += len(messages)
        work.messages_on_loop += work.on_loop(len(messages))
        return render(self, messages[:10], *args, **more)
    monkeypatch.setattr(ChatTemplate, 'render', rendered)
    def grammar(source, *args, **more):
        work.grammars.append(source)
        raise ValueError('counted')
    monkeypatch.setattr(llguidance, 'LLTokenizer', lambda *args, **more: SimpleNamespace(eos_tokens=[]))
    monkeypatch.setattr(llguidance, 'LLMatcher', SimpleNamespace(grammar_from_json_schema=grammar))
    monkeypatch.setattr(llguidance, 'grammar_from', lambda kind, source: grammar(source))

    def run(use, **settings):
        async def main():
            engine = Engine(tokenizer, work, **settings)
            engine.client = client = AsyncEngineClient(engine, 'toy', max_open=4608)
            app = create_app(client, tokenizer,
                             dict(asdict(engine.scheduler.config), max_seq_len=MAX_SEQ_LEN, vocab_size=VOCAB))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://x') as web:
                return await use(web, engine)
        return asyncio.run(asyncio.wait_for(main(), 30))
    return SimpleNamespace(work=work, run=run)

def sent(server, name):
    "The reply to the first caller of an entry"
    o = corpus[name]
    async def use(web, engine):
        return await web.post(o.path, content=o.content(0), headers={'content-type': 'application/json'})
    return server.run(use)

async def post(web, path, **body): return await web.post(path, json=body, timeout=20)

def refused(reply, field):
    "A 400 in one short sentence that names the field"
    error = reply.json()['error']
    assert reply.status_code == 400 and error['param'] == (field or error['param']), error
    assert len(reply.content) < 2000 and '\n' not in error['message']


# ---- text

@pytest.mark.parametrize('name, field',
    [('completions', 'prompt'), ('chat', 'messages'), ('tokenize', 'prompt'), ('tokenize messages', None)])
def test_a_text_that_cannot_fit_is_not_tokenized(server, name, field):
    refused(sent(server, f'text of 10 MB, {name}'), field)
    assert server.work.chars == 0

@pytest.mark.parametrize('name', ['a document of 10 MB', 'a query of 1 MB for 10,000 documents',
                                  '5,000 documents of a letter', 'texts and objects as documents'])
def test_documents_that_are_too_much_are_not_tokenized(server, name):
    refused(sent(server, name), 'documents' if '5,000' not in name else None)
    assert server.work.chars <= len('yes' + 'no')

@pytest.mark.parametrize('path', [COMPLETIONS, '/tokenize'])
def test_many_texts_are_not_tokenized_on_the_event_loop(server, path):
    "Each is short enough for the model, and short enough for the loop"
    limit = dict(max_tokens=1) if path == COMPLETIONS else {}
    async def use(web, engine): return await post(web, path, prompt=['x'*250]*200, **limit)
    assert (server.run(use).status_code == 200 and server.work.chars >= 50_000
            and server.work.chars_on_loop == 0)

def test_many_messages_are_not_rendered_on_the_event_loop(server):
    "No more than a call may have"
    async def use(web, engine):
        message = dict(role='user', content='x')
        # what the template wants is found out once in a process
        await post(web, '/tokenize', messages=[message])
        server.work.messages = server.work.messages_on_loop = 0
        return await post(web, '/tokenize', messages=[message]*9_000)
    assert (server.run(use).status_code == 200 and server.work.messages == 9_000
            and server.work.messages_on_loop == 0)

@pytest.mark.parametrize('n', ['15,000', '30,000'])
def test_more_messages_are_refused(server, n):
    assert (sent(server, f'{n} messages of a letter, tokenize').status_code in (400, 413)
            and server.work.messages == 0)

def test_many_tokens_are_not_decoded_on_the_event_loop(server):
    sent(server, '490,000 token ids, detokenize')
    sent(server, '490,000 token ids, echo')
    assert server.work.ids_on_loop <= 100_000


# ---- stops

@pytest.mark.parametrize('name, field', [('a stop string of 5 MB', 'stop'), ('20,000 stop strings', 'stop'),
    ('stop_regex whose repeats multiply', 'stop_regex'), ('stop_regex that takes all memory', 'stop_regex'),
    ('stop_regex of repeats in a row', 'stop_regex'),
    ('stop_regex whose repeats hide in a lookbehind', 'stop_regex')])
def test_a_stop_that_costs_much_is_never_compiled(server, name, field):
    refused(sent(server, name), field)
    assert sum(map(len, server.work.patterns)) == 0

def test_no_cache_of_patterns_grows(server):
    kept = len(regex._main._cache)
    async def use(web, engine):
        for i in range(20):
            assert (await post(web, GENERATE, **generate('x', stop_regex=f'[{i}]x+y'))).status_code == 200
    server.run(use)
    assert len(regex._main._cache) == kept


# ---- grammars

@pytest.mark.parametrize('name, field', [('schema with an enum of 500,000', 'json_schema'),
                                         ('ebnf of 20,000 rules', 'ebnf'), ('regex of 1 MB', 'regex'),
    ('ebnf with a chain of 4,000 short rules', 'ebnf'), ('ebnf with a chain of 5,000 names', 'ebnf'),
    ('schema with a chain of 1,500 short references', 'json_schema'),
    ('schema nested 5,000 deep', 'json_schema')])
def test_a_grammar_that_costs_much_is_never_compiled(server, name, field):
    reply = sent(server, name)
    assert server.work.grammars == []
    error = reply.json()['error']
    if error['code'] == 'too_many_values': return   # it has not even been parsed
    refused(reply, f'sampling_params.{field}' if error['param'].startswith('sampling') else field)


# ---- JSON

def test_many_small_values_are_not_parsed(server, monkeypatch):
    parsed = []
    def loads(body, *args, loads=json.loads, **more):
        parsed.append(len(body))
        return loads(body, *args, **more)
    body = b'{"prompt":"x"' + b''.join(b',"%d":1' % i for i in range(150_000)) + b'}'
    async def use(web, engine):
        monkeypatch.setattr(json, 'loads', loads)
        reply = await web.post(COMPLETIONS, content=body, headers={'content-type': 'application/json'})
        monkeypatch.undo()
        return reply
    reply = server.run(use)
    assert (reply.status_code, reply.json()['error']['code'], parsed) == (413, 'too_many_values', [])


def test_memory_of_large_bodies_is_given_back_once(monkeypatch):
    calls, trimmed = [], asyncio.Event()
    async def app(scope, receive, send): await receive()
    async def trim():
        calls.append(0)
        await trimmed.wait()
    async def main():
        monkeypatch.setattr(middleware, 'trim_memory', trim)
        limited, scope = (middleware.BodyLimitMiddleware(app),
                          {'type': 'http', 'headers': [], 'path': '/', 'method': 'POST'})
        async def receive(n): return {'type': 'http.request', 'body': b' ' * n}
        async def call(n):
            await limited(scope, lambda: receive(n), None)
            await asyncio.sleep(.001)
            return len(calls)
        few = [await call(n) for n in (100, 2 << 20, 3 << 20)]
        trimmed.set()
        await asyncio.sleep(.01)
        return [*few, await call(2 << 20)]
    assert asyncio.run(main()) == [0, 1, 1, 2]


def test_large_bodies_rest_by_their_size(monkeypatch):
    "So that a crowd of smaller ones, each longer than what counts as large, does not hold up the others"
    rests, sleep = [], asyncio.sleep
    async def app(scope, receive, send): await receive()
    async def counted(seconds):
        rests.append(seconds)
        await sleep(0)
    async def main(sizes):
        limited, scope = (middleware.BodyLimitMiddleware(app),
                          {'type': 'http', 'headers': [], 'path': '/', 'method': 'POST'})
        async def call(n):
            async def receive(): return {'type': 'http.request', 'body': b' ' * n}
            await limited(scope, receive, None)
        await asyncio.gather(*map(call, sizes))
    async def trim(): pass
    monkeypatch.setattr(middleware, 'trim_memory', trim)
    monkeypatch.setattr(middleware, 'asyncio', SimpleNamespace(**vars(asyncio) | dict(sleep=counted)))
    asyncio.run(main([300_000]*40))
    crowd = sum(rests)
    rests.clear()
    asyncio.run(main([12_000_000]))
    assert crowd == pytest.approx(sum(rests)) and 0 < crowd < .2   # as many bytes


# ---- names and numbers

@pytest.mark.parametrize('name, field', [('rid of 1 MB', 'rid'), ('extra_key of 1 MB', 'extra_key')])
def test_a_long_name_is_refused(server, name, field):
    refused(sent(server, name), field)
    assert server.work.sent == []

@pytest.mark.parametrize('name', ['10,000 prompts', '100 prompts, n=128'])
def test_what_can_never_fit_is_not_told_to_try_again(server, name):
    reply = sent(server, name)
    assert reply.status_code == 400 and server.work.sent == [] and server.work.chars_on_loop <= 1000
    # a limit of the engine's, and not of what the server has open
    assert 'max_queued_req' in reply.json()['error']['message']


# ---- isolation

def cached_tokens(told):
    "As each route calls them"
    usage = told['usage'] if 'usage' in told else told['meta_info']
    details = usage.get('prompt_tokens_details') or usage.get('input_tokens_details') or usage
    return details.get('cached_tokens', details.get('cache_read_input_tokens'))

@pytest.mark.parametrize('path, name', [(GENERATE, 'extra_key'), (COMPLETIONS, 'cache_salt'),
    (CHAT, 'cache_salt'), (RESPONSES, 'cache_salt'), (MESSAGES, 'extra_key')])
def test_tenants_do_not_find_each_others_tokens(server, path, name):
    base = {GENERATE: generate, COMPLETIONS: completion, CHAT: chat, RESPONSES: responses,
            MESSAGES: messages}[path](text(150))
    async def use(web, engine):
        found = []
        for tenant in ('A', 'B', 'A', 'B'):
            told = (await post(web, path, **base | {name: tenant})).json()
            found.append(cached_tokens(told))
        return found
    a, b, again, and_again = server.run(use)
    assert a == b == 0 < again == and_again


# ---- who is displaced

def test_a_request_that_is_refused_displaces_nobody(server):
    async def use(web, engine):
        engine.stopped = True   # no step: all that come must wait
        waiting = asyncio.ensure_future(post(web, GENERATE, **generate('x')))
        while not engine.scheduler.prefill.waiting: await asyncio.sleep(.001)
        bad = asyncio.ensure_future(post(web, GENERATE, **generate('x', regex='(', priority=9)))
        with suppress(asyncio.TimeoutError): await asyncio.wait_for(asyncio.shield(bad), 1)
        engine.stopped = False
        engine._turn()
        return await asyncio.gather(waiting, bad)
    innocent, bad = server.run(use, max_queued_req=1)
    assert (innocent.status_code, bad.status_code) == (200, 400)


# ---- control

def test_many_who_ask_for_a_step_share_it(server):
    async def use(web, engine):
        steps, step = [], engine.scheduler.idle_step
        engine.scheduler.idle_step = lambda: steps.append(step())
        replies = await asyncio.gather(*(web.get('/health_generate') for _ in range(50)))
        return {o.status_code for o in replies}, len(steps)
    statuses, n_steps = server.run(use)
    assert statuses == {200} and n_steps <= 3


# ---- the tests' own tools

def test_each_row_and_route_has_its_entries(tokenizer):
    """A new route that takes a body needs hostile ones: `post(…)` in tests/hostile.py; another path of the
    same is the same"""
    assert len(corpus) >= 60 and all(o.allowed for o in corpus.values())
    paths, engine = {o.path for o in corpus.values()}, SimpleNamespace(model='scripted', max_open=9)
    routes = [r for r in Api(engine, tokenizer, {}).routes if r.method == 'POST' and r.in_schema]
    covered = {r.handler for r in routes if r.path in paths}
    assert (paths >= {'/v1/files', '/v1/batches'}
            and not (bare := [r.path for r in routes
                              if r.handler not in covered])), f'without a hostile body: {bare}'
    assert {o.row for o in corpus.values()} == {'text', 'stop', 'grammar', 'names', 'json', 'http', 'control'}

def test_statuses_are_read():
    whole = b'HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc'
    chunked = b'HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n'
    assert (read_statuses(whole + b'HTTP/1.1 100 Continue\r\n\r\n' + chunked + whole) == [200, 404, 200]
            and read_statuses(b'') == [])


# ---- all of it

# seconds of the baseline; seconds that hostile callers may add to a gap; MB that may stay
BUSY, SLACK, KEPT = 40., .25, 50.

@pytest.mark.long
@pytest.mark.parametrize('rows', ['text,stop,names,json', 'grammar', 'http', 'control'])
def test_hostile_callers_stop_nobody(tmp_path, rows, capsys, record_property):
    """Beside the corpus, 8 streams and /health go on as beside nothing; in the end memory and pages are back,
    and the texts are the same"""
    table, wrong = asyncio.run(beside_the_corpus(tmp_path, rows))
    with capsys.disabled(): print('', *table, sep='\n')
    record_property(f'beside the rows {rows}', table[-1])
    assert not wrong, '\n'.join(wrong)

async def beside_the_corpus(folder, rows):
    "A table of what came of each entry, and what is wrong"
    table, wrong = [], []
    # no prompt makes a long step, and there is room for all that one caller may ask for at once: this is
    # about work, not about queues
    room = '--max-prefill-tokens', '128', '--max-running-req', '192', '--num-pages', '2048'
    files = '--batch-folder', str(folder/'files'), '--batch-folder-mb', '50'
    with program(folder, '--log-interval', '0', *room, *files, key='ordinary') as server:
        async def load():
            async with Beside(server) as beside:
                await asyncio.sleep(BUSY)
                return beside
        for _ in range(2): await load()   # what is loaded when it is first needed is there now
        # whose pages are memory from then on
        for body in (generate('x', regex='[ab]+'), generate('x', json_schema='{"type": "integer"}'),
                     generate('x', stop_regex='a+b', stop=['z']),
                     generate('x', max_new_tokens=200, ignore_eos=True, n=128)):
            await asyncio.to_thread(server.ask, GENERATE, body)
        assert await until(server.idle, 30)
        before = server.memory()
        async with Beside(server) as beside:
            callers = await hostile_callers(server, '--rows', rows)
            start = asyncio.get_running_loop().time()
            await asyncio.sleep(BUSY)
            assert await until(lambda: all(beside.texts), 120), 'the streams do not end'
            begin = asyncio.get_running_loop().time()
            expected = [texts[0] for texts in beside.texts]
            alone = beside.worst_gap(start, begin), beside.worst_health(start, begin)
            callers.stdin.write(b'\n')
            async for line in callers.stdout:
                o = json.loads(line)
                gap, health = (f(o['begin'], o['end'] + .2) for f in (beside.worst_gap, beside.worst_health))
                table.append(f"{o['name']:60} {' '.join(f'{s}×{n}' for s, n in o['statuses'].items()):16} "
                             f"{o['end'] - o['begin']:6.2f} s  gap {gap:.3f}  /health {health:.3f}  "
                             f"{o['wrong']}")
                if o['wrong']: wrong.append(f"{o['name']}: {o['wrong']}: {o['reply'][:200]}")
            end = asyncio.get_running_loop().time()
            await asyncio.sleep(2)
        worst = beside.worst_gap(begin, end), beside.worst_health(begin, end)
        for name, mine, allowed in zip(('gap', '/health'), worst, alone):
            if mine > allowed + SLACK: wrong.append(f'{name}: {mine:.3f} s, alone {allowed:.3f}')
        wrong += (beside.errors[:3] + [f'stream {i}: another text'
                                       for i, texts in enumerate(beside.texts) if {*texts} != {expected[i]}])
        if not all(status == 200 for _, _, status in beside.health): wrong.append('/health said no')
        if not await until(server.idle, 30): wrong.append('pages or requests are left')
        def kept(): return sum(server.memory().values()) - sum(before.values())
        if not await until(lambda: kept() < KEPT, 30):
            wrong.append(f'{kept():.0f} MB more than before: {before} {server.memory()}')
        table.append(f'worst gap {worst[0]:.3f} s (alone {alone[0]:.3f}), /health {worst[1]:.3f} s (alone '
                     f'{alone[1]:.3f}), {kept():+.0f} MB')
    return table, wrong
