# %%
#| default_exp weekend.server
# %% [markdown]
# # A server for many callers
# > One thread steps the scheduler, every caller has a thread that waits for its tokens: OpenAI's chat over HTTP, streamed and cancelled.
#
# The engine is complete, and nobody can reach it. *How do many callers share one loop?* Two threads that step one scheduler get in each other's way, so one thread owns it, and all others leave orders. Around it we put what a chat needs: text that comes as tokens come, HTTP, and the page of the real server, opened on your own engine.
#
# After this chapter you can say who may touch a scheduler, stream an answer as OpenAI's API does it, and give back what a caller has left behind.
# %%
#| export
import json
import mimetypes
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from urllib.parse import urlsplit
from uuid import uuid4

import jinja2
from fastcore.basics import patch
from tokenizers import Tokenizer

from minisgl_lit.weekend.batch import Engine, PendingReq, TorchAttention
from minisgl_lit.weekend.decode import Output, Scheduler
from minisgl_lit.weekend.model import Decoder
from minisgl_lit.weekend.overlap import Device, OverlapScheduler
from minisgl_lit.weekend.pages import KVPool, TableManager
from minisgl_lit.weekend.prefill import PrefillManager
from minisgl_lit.weekend.radix import CacheManager
from minisgl_lit.weekend.sampling import Sampling, sample
# %%
#| hide
import http.client, socket
import torch
from fastcore.test import test_eq
from minisgl_lit.testing.weekend_table import QUESTION, Step, fixed_requests, folder, measure, print_table, prompt_of, tokenizer
from minisgl_lit.tools.drawing import Box, Row, draw_rows
torch.set_num_threads(1); torch.set_grad_enabled(False);
# %% [markdown]
# ## The engine, put together
# All parts of nine chapters, in one function.
# %%
#| export
def build(
    folder: Path,            # of the checkpoint
    num_pages: int = 512,
    page_size: int = 8,
    max_running_req: int = 16,
    max_seq_len: int = 1024,
    max_prefill_tokens: int = 256,
) -> OverlapScheduler:
    "An engine that serves a checkpoint"
    model = Decoder(folder)
    config = model.config
    pool = KVPool(num_pages, page_size, config.num_hidden_layers, config.num_key_value_heads,
                  config.head_dim)
    table = TableManager(max_running_req, max_seq_len, page_size)
    cache = CacheManager(num_pages, table)
    engine = Device(Engine(model, table, TorchAttention(pool, table), sample))
    queue = PrefillManager(cache, max_prefill_tokens)
    return OverlapScheduler(engine, table, cache, queue, config.eos_token_id)
# %% [markdown]
# ## Two callers, one loop
# The simplest server: every caller's thread adds its request and steps the scheduler until its own answer has ended. What becomes of outputs that belong to another caller? Each `step` hands out what it has made to whoever called it. Two callers take turns here, as two threads would.
# %%
scheduler = build(folder, num_pages=64)
got = {'a': [], 'b': []}
for name in got: scheduler.add(PendingReq(name, prompt_of(QUESTION), 12))
while scheduler.has_work:
    for caller in got:   # each caller keeps what is its own
        got[caller] += [o.token for o in scheduler.step() if o.rid == caller]
{name: len(tokens) for name, tokens in got.items()}
# %% [markdown]
# Each caller asked for twelve tokens, and half of them went to the other, who had no use for them. Real threads would in addition change one dictionary at the same moment. A lock around `step` cures that, and not the first.
#
# So *one thread owns the scheduler*, and nobody else touches it. A caller leaves an order in a queue, a function that the owner will call between two steps, and gets a queue of its own, in which its outputs will come. When there is nothing to do the owner waits for the next order, without using the processor.
# %%
#| export
class EngineThread:
    "Owns a scheduler: others leave orders, and read what comes back."
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.readers: dict[str, SimpleQueue[Output]] = {}   # by rid
        Thread(target=self.run, daemon=True).start()

    def add(self, pending: PendingReq) -> 'SimpleQueue[Output]':
        "Where its tokens will come"
        reader: SimpleQueue[Output] = SimpleQueue()
        self.readers[pending.rid] = reader
        self.orders.put(partial(self.scheduler.add, pending))
        return reader

    def abort(self, rid: str) -> None:
        "Its caller has gone"
        self.orders.put(partial(self.scheduler.abort, rid))

    def run(self) -> None:
        while True:
            while not self.orders.empty() or not self.scheduler.has_work: self.orders.get()()
            for output in self.scheduler.step():
                self.readers[output.rid].put(output)
                if output.finish_reason: del self.readers[output.rid]
# %%
engine = EngineThread(build(folder))

def tokens_of(reader):
    "All tokens of an answer, and why it ended"
    tokens = []
    while True:
        output = reader.get()
        if output.token is not None: tokens.append(output.token)
        if output.finish_reason: return tokens, output.finish_reason

readers = [engine.add(PendingReq(f'{i}', prompt_of(QUESTION), 12)) for i in range(3)]
[len(tokens_of(reader)[0]) for reader in readers]
# %% [markdown]
# The threads, and what goes between them:
#
# ```mermaid
# flowchart LR
#     a([caller]) --- ta[thread of a] -- order --> q[[orders]]
#     b([caller]) --- tb[thread of b] -- order --> q
#     q --> e["EngineThread: orders, step, orders, step …"]
#     e -- tokens of a --> ra[[queue of a]] --> ta
#     e -- tokens of b --> rb[[queue of b]] --> tb
#     e -- batch --> d[device's thread]
#     d -- tokens --> e
# ```
#
# ## Text as it comes
# A caller wants text. Decoding each token by itself is not enough: a character may take several tokens. So all tokens so far are decoded, and what is new since the last time is sent; half a character waits for its other half.
# %%
#| export
class Text:
    "From tokens to text, as they come."
    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.said = 0      # characters that were handed out

    def push(self, token: int) -> str:
        "What is new; half a character waits for its other half"
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith('\N{REPLACEMENT CHARACTER}'): return ''
        new, self.said = text[self.said:], len(text)
        return new
# %%
text, ids = Text(tokenizer), tokenizer.encode('Ü is 1 € 🙂').ids
[text.push(token) for token in ids]
# %%
#| checks
test_eq(text.tokenizer.decode(ids), 'Ü is 1 € 🙂')
text = Text(tokenizer)
test_eq(''.join(text.push(token) for token in ids), 'Ü is 1 € 🙂')
# %% [markdown]
# ## A chat is a prompt
# A request for a chat holds messages. The checkpoint brings a *template* that makes one text of them, with the marks that the model was trained on. It is a program in jinja's language. What else a caller may set becomes a `PendingReq`. Whatever is wrong with a request is told here, in one sentence, before the scheduler hears of it: an error in the owner's thread would end all answers.
# %%
#| export
class Chats:
    "From requests of OpenAI's chat to requests of the engine."
    def __init__(self, folder: Path, longest: int):
        self.tokenizer, self.longest = Tokenizer.from_file(str(folder / 'tokenizer.json')), longest
        settings = json.loads((folder / 'tokenizer_config.json').read_text())
        jinja = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self.template = jinja.from_string(settings['chat_template'])

    def pending(self, body: dict) -> PendingReq:
        "`ValueError` says what is wrong"
        messages = body.get('messages')
        if not isinstance(messages, list) or not messages: raise ValueError('messages is an empty list')
        text = self.template.render(messages=messages, add_generation_prompt=True)
        ids = self.tokenizer.encode(text).ids
        room = self.longest - len(ids)
        if room < 1: raise ValueError(f'prompt is too long: {len(ids)} tokens > {self.longest - 1} maximum')
        wanted = body.get('max_completion_tokens') or body.get('max_tokens') or room
        return PendingReq(f'chatcmpl-{uuid4().hex}', ids, min(int(wanted), room), self.sampling(body))

    def sampling(self, body: dict) -> Sampling | None:
        "How tokens are chosen; `None`: always the likeliest"
        temperature, top_p = float(body.get('temperature') or 0), float(body.get('top_p') or 1)
        if not (0 <= temperature <= 2 and 0 < top_p <= 1): raise ValueError('temperature is 0 to 2, top_p above 0 to 1')
        seed = body.get('seed')
        return Sampling(temperature, top_p, random.getrandbits(62) if seed is None else int(seed))
# %%
chats = Chats(folder, 1024)
hello = dict(messages=[dict(role='user', content=QUESTION)], max_tokens=40)
pending = chats.pending(hello)
len(pending.input_ids), pending.max_tokens, tokenizer.decode(pending.input_ids, skip_special_tokens=False)
# %%
#| checks
for body, said in ((dict(messages=[]), 'empty list'), (hello | dict(temperature=7), '0 to 2'),
                   (dict(messages=[dict(role='user', content='word ' * 2000)]), 'too long')):
    try: chats.pending(body)
    except ValueError as e: assert said in str(e), e
    else: raise AssertionError(body)
test_eq(chats.pending(hello | dict(temperature=.5, seed=7)).sampling, Sampling(.5, 1., 7))
test_eq(pending.sampling.temperature, 0)
# %% [markdown]
# ## Events
# An answer that is *streamed* comes as server-sent events: lines that begin with `data: `, each with a piece of JSON, and an empty line behind each. OpenAI's API says what the JSON looks like. A plain answer is the same pieces, joined.
# %%
#| export
def pieces(
    engine: EngineThread,
    pending: PendingReq,
    text: Text,          # takes in the tokens
) -> Iterator[tuple[str, str | None]]:   # new text, and at the end the finish reason
    "An answer until it ends; when it is read no further, the request is aborted"
    reader, reason = engine.add(pending), None
    try:
        while reason is None:
            output = reader.get()
            reason = output.finish_reason
            new = '' if output.token is None else text.push(output.token)
            if new or reason: yield new, reason
    finally:
        if reason is None: engine.abort(pending.rid)

def chunk(rid: str, kind: str, **choice: object) -> dict:
    "What OpenAI's API calls a chunk, or a completion"
    return dict(id=rid, object=kind, created=int(time.time()), model='weekend',
                choices=[dict(index=0, **choice)])
# %%
''.join(new for new, _ in pieces(engine, chats.pending(hello), Text(tokenizer)))
# %% [markdown]
# What if the caller leaves in the middle? Then nobody reads on, the generator is closed, and its `finally` leaves an order: abort. Pages are free again before the next batch is made.
# %%
def running(): return len(engine.scheduler.alive) + len(engine.scheduler.prefill.waiting)

def wait_until(done):
    "Look again and again, for five seconds at most"
    until = time.monotonic() + 5
    while not done() and time.monotonic() < until: time.sleep(.01)
    return done()

reading = pieces(engine, chats.pending(hello | dict(max_tokens=900)), Text(tokenizer))
next(reading)
before = running()
reading.close()
before, wait_until(lambda: not running())
# %% [markdown]
# ## HTTP
# The standard library has a server with a thread for each caller. A handler is told what was asked, and writes the answer. Three things are not for show, even in a small server. It listens on this machine alone. It answers no web page of another site, which could otherwise operate it from your browser. And it reads no body without a bound.
# %%
#| export
class Handler(BaseHTTPRequestHandler):
    "One call: a chat, the list of models, or a file of the page."
    most_bytes = 1 << 20   # of a body
    engine: EngineThread
    chats: Chats
    page: Path             # the folder of the page

    def log_message(self, *_: object) -> None:
        "Nothing is logged"

    def answer(self, status: int, data: bytes, kind: str = 'application/json') -> None:
        self.send_response(status)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, sentence: str) -> None:
        self.answer(status, json.dumps(dict(error=dict(message=sentence, type='invalid_request_error'))).encode())

    def is_foreign(self) -> bool:
        "Whether another site's page asks, or asks by another name of this machine"
        here = {'localhost', '127.0.0.1', '::1'}
        named = urlsplit('//' + self.headers.get('Host', '')).hostname
        origin = self.headers.get('Origin')
        return named not in here or origin is not None and urlsplit(origin).hostname not in here
# %%
#| export
@patch
def do_GET(self: Handler) -> None:
    "A file of the page, or what there is to know"
    path = urlsplit(self.path).path
    if self.is_foreign(): return self.refuse(403, 'this server answers pages of its own only')
    if path == '/health': return self.answer(200, b'{}')
    if path == '/v1/models':
        models = dict(object='list', data=[dict(id='weekend', object='model', owned_by='you')])
        return self.answer(200, json.dumps(models).encode())
    file = self.page / ('index.html' if path == '/' else path.removeprefix('/webui/'))
    if not file.resolve().is_relative_to(self.page.resolve()) or not file.is_file():
        return self.refuse(404, f'there is no {path} here')
    self.answer(200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or 'text/plain')

@patch
def do_POST(self: Handler) -> None:
    "A chat"
    size = int(self.headers.get('Content-Length') or 0)
    if self.is_foreign(): return self.refuse(403, 'this server answers pages of its own only')
    if urlsplit(self.path).path != '/v1/chat/completions': return self.refuse(404, 'there is only /v1/chat/completions')
    if not 0 < size <= self.most_bytes: return self.refuse(413, f'a body has 1 to {self.most_bytes} bytes')
    try:
        body = json.loads(self.rfile.read(size))
        pending = self.chats.pending(body)
    except (ValueError, TypeError, AttributeError, jinja2.TemplateError) as e:
        return self.refuse(400, str(e))
    if body.get('stream'): self.stream(pending)
    else: self.whole(pending)
# %% [markdown]
# A plain answer says at its end what it has cost. A stream writes piece by piece; when the caller has gone, writing fails, the generator is closed, and the request with it.
# %%
#| export
@patch
def usage(self: Handler, pending: PendingReq, text: Text) -> dict:
    "What an answer has cost, in tokens"
    n, made = len(pending.input_ids), len(text.ids)
    return dict(prompt_tokens=n, completion_tokens=made, total_tokens=n + made)

@patch
def whole(self: Handler, pending: PendingReq) -> None:
    "An answer in one piece"
    text = Text(self.chats.tokenizer)
    said = list(pieces(self.engine, pending, text))
    message = dict(role='assistant', content=''.join(new for new, _ in said))
    answer = chunk(pending.rid, 'chat.completion', finish_reason=said[-1][1], message=message)
    answer['usage'] = self.usage(pending, text)
    self.answer(200, json.dumps(answer).encode())

@patch
def stream(self: Handler, pending: PendingReq) -> None:
    "An answer as it comes"
    self.send_response(200)
    self.send_header('Content-Type', 'text/event-stream')
    self.end_headers()
    text = Text(self.chats.tokenizer)
    reading = pieces(self.engine, pending, text)
    try:
        for new, reason in reading:
            event = chunk(pending.rid, 'chat.completion.chunk', finish_reason=reason,
                          delta=dict(role='assistant', content=new))
            if reason: event['usage'] = self.usage(pending, text)
            self.wfile.write(f'data: {json.dumps(event)}\n\n'.encode())
        self.wfile.write(b'data: [DONE]\n\n')
    except OSError: pass   # its caller has gone
    finally: reading.close()
# %%
#| export
def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    "Serves a checkpoint on 127.0.0.1; port 0: any that is free"
    scheduler = build(folder)
    parts = dict(engine=EngineThread(scheduler), page=Path(str(files('minisgl_lit') / 'webui')),
                 chats=Chats(folder, scheduler.table.token_pool.shape[1]))
    return ThreadingHTTPServer(('127.0.0.1', port), type('Serving', (Handler,), parts))
# %% [markdown]
# And that is a server. A client of OpenAI's API cannot tell it from another one, as long as it asks for what there is.
# %%
server = make_server(folder)
port = server.server_address[1]
Thread(target=server.serve_forever, daemon=True).start()

def ask(path, body=None, **headers):
    "(status, text) of a call"
    call = http.client.HTTPConnection('127.0.0.1', port)
    call.request('POST' if body else 'GET', path, json.dumps(body) if body else None, headers)
    response = call.getresponse()
    return response.status, response.read().decode()

status, told = ask('/v1/chat/completions', hello)
status, json.loads(told)['choices'][0]['message']['content'], json.loads(told)['usage']
# %%
status, told = ask('/v1/chat/completions', hello | dict(stream=True, max_tokens=3))
print(*[line[:230] for line in told.split('\n\n')], sep='\n')
