"""A corpus of hostile callers: what each sends, and which answers are allowed. Each is cheap to send; what it
may cost the server is the question. Run as a program it sends them to a server, one after the other, and
prints a line of JSON for each."""
import argparse, dataclasses, json, os, re, socket, sys, threading, time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

from minisgl_lit.core.config import kinds
from minisgl_lit.text.sampling_params import SamplingParams

CLOSED = 0                             # no reply: the connection was closed, for bytes that are not HTTP
REFUSED = frozenset({400, 413})
NEVER = frozenset({400})               # not 503, which would say that the same may succeed later
LEGAL = frozenset({200, 400, 413})     # odd, but not wrong: to be served cheaply, or refused
NOT_HTTP = frozenset({CLOSED, 400})
NOT_FOUND = frozenset({400, 404})
HALF_CLOSE, HANG_UP = object(), object()   # steps: this side has nothing more to say; nor will it listen
Step = bytes | float | object          # bytes to send; seconds to pause; HALF_CLOSE or HANG_UP


@dataclass(frozen=True)
class Hostile:
    "One entry of the corpus."
    name: str
    row: str                                          # what it attacks
    allowed: frozenset[int]                           # statuses of its replies
    # what the i-th of its callers sends, given the header line with the key
    steps: Callable[[bytes, int], Iterable[Step]]
    path: str = ''                                    # of the route, if it is an ordinary POST of JSON
    content: Callable[[int], bytes] | None = None     # and its body
    callers: int = 1                                  # at once
    patience: float = 60.                             # seconds until a caller gives up
    longest_reply: int = 20_000                       # bytes of one caller's replies
    # may take all memory of a machine whose server does not bound it
    dangerous: bool = False


corpus: dict[str, Hostile] = {}

def add(name: str, row: str, allowed: Iterable[int], steps: Callable[[bytes, int], Iterable[Step]],
        **more) -> None:
    assert name not in corpus, name
    corpus[name] = Hostile(name, row, frozenset(allowed), steps, **more)

def head(start: str, *headers: str | bytes, close: bool = True) -> bytes:
    "The head of a request, such as `GET /health`"
    lines = [f'{start} HTTP/1.1', 'Host: localhost', *headers, *(['Connection: close'] if close else [])]
    return b'\r\n'.join(o if isinstance(o, bytes) else o.encode() for o in lines if o) + b'\r\n\r\n'

def posted(path: str, body: bytes, key: bytes = b'', *headers: str, kind: str = 'application/json',
           close: bool = True) -> bytes:
    "A whole request with a body"
    return (head(f'POST {path}', f'Content-Type: {kind}', f'Content-Length: {len(body)}', key, *headers,
                 close=close) + body)

def post(name: str, row: str, path: str, body: Callable[[int], object], allowed: Iterable[int] = REFUSED,
         **more) -> None:
    "Add a POST of JSON; `body` makes an object, or the bytes themselves, for the i-th caller"
    def content(i: int = 0) -> bytes:
        made = body(i)
        return made if isinstance(made, bytes) else json.dumps(made).encode()
    def steps(key: bytes, i: int) -> Iterator[Step]: yield posted(path, content(i), key)
    add(name, row, allowed, steps, path=path, content=content, **more)

MODEL = {'max_tokens': 2, 'temperature': 0}
def completion(prompt: object = 'x', **fields: object) -> dict: return MODEL | {'prompt': prompt} | fields
def chat(content: object = 'x', **fields: object) -> dict:
    return MODEL | {'messages': [{'role': 'user', 'content': content}]} | fields
def generate(text: object = 'x', **sampling: object) -> dict:
    return {'text': text, 'sampling_params': {'max_new_tokens': 2, 'temperature': 0} | sampling}
def tool(name: str, **parameters: object) -> dict:
    return {'type': 'function', 'function': {'name': name, 'parameters': {'type': 'object', **parameters}}}
COMPLETIONS, CHAT, GENERATE = '/v1/completions', '/v1/chat/completions', '/generate'

# ---- long texts and many of them: refused by length, before anything is tokenized
@cache
def text(n: int) -> str: return ('The pages of a tree are shared by requests. ' * (n // 44 + 1))[:n]
TEN_MB = 10_000_000

post('text of 10 MB, completions', 'text', COMPLETIONS, lambda i: completion(text(TEN_MB)))
post('text of 10 MB, generate', 'text', GENERATE, lambda i: generate(text(TEN_MB)))
post('text of 10 MB, generate, streamed', 'text', GENERATE,
     lambda i: generate(text(TEN_MB)) | {'stream': True})
post('text of 10 MB, chat', 'text', CHAT, lambda i: chat(text(TEN_MB)))
post('text of 10 MB, tokenize', 'text', '/tokenize', lambda i: {'prompt': text(TEN_MB)})
post('text of 10 MB, tokenize messages', 'text', '/tokenize',
     lambda i: {'messages': chat(text(TEN_MB))['messages']})
post('text of 10 MB, ten at once', 'text', COMPLETIONS, lambda i: completion(text(TEN_MB)), callers=10)
post('one letter 10 million times', 'text', COMPLETIONS, lambda i: completion('a' * TEN_MB))
post('two million combining accents', 'text', COMPLETIONS, lambda i: completion('a' + '\u0301' * 2_000_000))
post('200 prompts of 9,999 letters', 'text', COMPLETIONS,
     lambda i: completion([text(9_999)] * 200, echo=True))
post('200 prompts of 9,999 letters, tokenize', 'text', '/tokenize', lambda i: {'prompt': [text(9_999)] * 200},
     LEGAL, longest_reply=10_000_000)
post('a million token ids', 'text', GENERATE, lambda i: {'input_ids': [5] * 1_000_000})
post('490,000 token ids, echo', 'text', COMPLETIONS, lambda i: completion([5] * 490_000, echo=True))
# the text, under two names
post('490,000 token ids, detokenize', 'text', '/detokenize', lambda i: {'tokens': [5] * 490_000}, LEGAL,
     longest_reply=12_000_000)
post('a million token ids, echo', 'text', COMPLETIONS, lambda i: completion([5] * 1_000_000, echo=True))
post('a million token ids, detokenize', 'text', '/detokenize', lambda i: {'tokens': [5] * 1_000_000})
post('45,000 lists, detokenize', 'text', '/detokenize', lambda i: {'tokens': [[5, 6]] * 45_000}, LEGAL,
     longest_reply=10_000_000)
post('90,000 lists, detokenize', 'text', '/detokenize', lambda i: {'tokens': [[5, 6]] * 90_000})
post('30,000 messages of a letter, tokenize', 'text', '/tokenize',
     lambda i: {'messages': [{'role': 'user', 'content': 'x'}] * 30_000})
post('24,000 content parts', 'text', CHAT, lambda i: chat([{'type': 'text', 'text': 'x'}] * 24_000))
post('100,000 messages of a letter', 'text', CHAT,
     lambda i: {'messages': [{'role': 'user', 'content': 'x'}] * 100_000})
post('10,000 tools, tokenize', 'grammar', '/tokenize',
     lambda i: {'messages': chat()['messages'], 'tools': [tool(f'f{k}') for k in range(10_000)]})
post('switches of a template, tokenize', 'text', '/tokenize', lambda i: {'messages': chat()['messages'],
    'chat_template_kwargs': {f's{k}': False for k in range(100_000)}})
post('100,000 messages of a letter, tokenize', 'text', '/tokenize',
     lambda i: {'messages': [{'role': 'user', 'content': 'x'}] * 100_000})
post('15,000 messages of a letter, tokenize', 'text', '/tokenize',
     lambda i: {'messages': [{'role': 'user', 'content': 'x'}] * 15_000})
post('16,000 content parts', 'text', CHAT, lambda i: chat([{'type': 'text', 'text': 'x'}] * 16_000))
post('100,000 content parts', 'text', CHAT, lambda i: chat([{'type': 'text', 'text': 'x'}] * 100_000))
post('arguments of a call of 10 MB', 'text', CHAT,
     lambda i: {'messages': [{'role': 'assistant', 'tool_calls': [
    {'id': 'a', 'type': 'function',
     'function': {'name': 'f', 'arguments': json.dumps({'x': text(TEN_MB)})}}]}]})
post('arguments of a call, nested 100,000 deep', 'text', CHAT,
     lambda i: {'messages': [{'role': 'assistant', 'tool_calls': [
    {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '[' * 100_000}}]}]})

# what goes to the chat template, and thinking
def switches(name: str, make: Callable[[int], object], allowed: Iterable[int] = REFUSED,
             **fields: object) -> None:
    post(f'switches of a template, {name}', 'text', CHAT,
         lambda i: chat(chat_template_kwargs=make(i), **fields), allowed)
switches('10 MB', lambda i: {'enable_thinking': text(TEN_MB)})
switches('100,000 of them', lambda i: {f's{k}': False for k in range(100_000)})
switches('nested 900 deep', lambda i: {'enable_thinking': json.loads('[' * 900 + ']' * 900)}, LEGAL)
switches('a name of 1 MB', lambda i: {'e' * 1_000_000: True})
switches('those of the request', lambda i: {'messages': [], 'tools': [], 'self': 1, 'budget': 1})
switches('what the template calls',
         lambda i: {'range': 1, 'namespace': 2, 'raise_exception': 'x', 'strftime_now': []}, LEGAL)
post('a thought of 10 MB', 'text', CHAT,
    lambda i: {'messages': [{'role': 'assistant', 'content': 'x', 'reasoning_content': text(TEN_MB)}]}, LEGAL)
post('a message of 10 MB, to be continued', 'text', CHAT, lambda i: MODEL
     | {'messages': [{'role': 'assistant', 'content': text(TEN_MB)}], 'continue_final_message': True})
post('reasoning_effort of 1 MB', 'text', CHAT, lambda i: chat(reasoning_effort='much' * 250_000))
post('a budget for thinking of 10³⁰ tokens', 'text', CHAT, lambda i: chat(max_thinking_tokens=10**30))
post('a budget for thinking of half a token', 'text', GENERATE,
     lambda i: generate('x', max_thinking_tokens=.5))
post('a prompt of marks of thinking', 'text', COMPLETIONS,
     lambda i: completion('<think></think>' * 900, separate_reasoning=True), LEGAL)

EMBEDDINGS, SCORE, RERANK = '/v1/embeddings', '/v1/score', '/v1/rerank'
post('text of 10 MB, embeddings', 'text', EMBEDDINGS, lambda i: {'input': text(TEN_MB)})
post('a million token ids, embeddings', 'text', EMBEDDINGS, lambda i: {'input': [5] * 1_000_000})
post('100,000 texts of a letter, embeddings', 'text', EMBEDDINGS, lambda i: {'input': ['x'] * 100_000})
post('4,000 texts of a letter, embeddings', 'text', EMBEDDINGS, lambda i: {'input': ['x'] * 4_000},
     {200, 400, 503}, longest_reply=40_000_000)
post('dimensions of 10⁹', 'text', EMBEDDINGS, lambda i: {'input': 'x', 'dimensions': 10**9})
post('a query of 1 MB for 10,000 items', 'text', SCORE,
     lambda i: {'query': text(1_000_000), 'items': ['x'] * 10_000, 'label_token_ids': [1]})
post('a query of 1 MB for 10,000 documents', 'text', RERANK,
     lambda i: {'query': text(1_000_000), 'documents': ['x'] * 10_000})
post('a document of 10 MB', 'text', RERANK, lambda i: {'query': 'x', 'documents': [text(TEN_MB)]})
post('a million documents of a letter', 'text', RERANK,
     lambda i: {'query': 'x', 'documents': ['x'] * 1_000_000})
post('5,000 documents of a letter', 'text', RERANK,
     lambda i: {'query': 'x', 'documents': [{'text': 'x'}] * 5_000})
post('text of 10 MB, Ollama embeds', 'text', '/api/embed', lambda i: {'input': text(TEN_MB)})
post('text of 10 MB, Ollama embeds as it once did', 'text', '/api/embeddings',
     lambda i: {'prompt': text(TEN_MB)})
post('100,000 texts of a letter, Ollama embeds', 'text', '/api/embed', lambda i: {'input': ['x'] * 100_000})
post('texts and objects as documents', 'json', RERANK,
     lambda i: {'query': 'x', 'documents': ['x', {'text': 'x'}] * 1_000})
post('documents that close their turn', 'text', RERANK, lambda i: {'query': 'x',
    'documents': ['<|im_end|>' * 100, '<think>' * 100], 'instruct': '<|im_start|>'}, {200, 400})
post('the best 10³⁰ documents', 'json', RERANK, lambda i: {'query': 'x', 'documents': ['x'], 'top_n': 10**30},
     LEGAL)
post('a million labels', 'text', SCORE,
     lambda i: {'query': 'x', 'items': ['x'], 'label_token_ids': [1] * 1_000_000})

def hang_up(key: bytes, i: int) -> Iterator[Step]:
    yield posted(COMPLETIONS, json.dumps(completion(text(TEN_MB))).encode(), key)
    yield from (.5, HANG_UP)
add('text of 10 MB, the caller hangs up', 'text', {400, CLOSED}, hang_up, callers=5)

# ---- other protocols: the same orders in other bodies
RESPONSES, MESSAGES, COUNT, OLLAMA, SHOW = ('/v1/responses', '/v1/messages', '/v1/messages/count_tokens',
                                            '/api/chat', '/api/show')
def responses(given: object = 'x', **fields: object) -> dict:
    return {'max_output_tokens': 2, 'temperature': 0, 'input': given} | fields
def messages(content: object = 'x', **fields: object) -> dict:
    return MODEL | {'messages': [{'role': 'user', 'content': content}]} | fields
def flat(name: str, **more) -> dict:
    return {'type': 'function', 'name': name, 'parameters': {'type': 'object'}, **more}
USER = {'role': 'user', 'content': 'x'}

for path, body in {RESPONSES: responses, MESSAGES: messages, COUNT: messages, OLLAMA: messages}.items():
    post(f'text of 10 MB, {path}', 'text', path, lambda i, body=body: body(text(TEN_MB)))
    post(f'wrong types, {path}', 'json', path, lambda i, body=body: body(7) | {'tools': 5})
    post(f'NaN, {path}', 'json', path, lambda i, body=body: body('x') | {'temperature': float('nan'),
        'options': {'temperature': float('nan')}})
    post(f'nested 900 deep, {path}', 'json', path,
         lambda i, body=body: body('x') | {'tools': [{'type': 'function', 'name': 'f',
             'parameters': json.loads('{"a":' * 900 + '1' + '}' * 900)}]}, LEGAL)
post('30,000 items', 'text', RESPONSES, lambda i: responses([USER] * 30_000))
post('9,000 items, each another turn', 'text', RESPONSES,
     lambda i: responses([USER, USER | {'role': 'assistant'}] * 4_500))
post('9,000 references', 'text', RESPONSES,
     lambda i: responses([{'type': 'item_reference', 'id': f'msg_{k}'} for k in range(9_000)]), NOT_FOUND)
post('16,000 parts of an item', 'text', RESPONSES,
     lambda i: responses([{'role': 'user', 'content': [{'type': 'input_text', 'text': 'x'}] * 16_000}]))
post('instructions of 10 MB', 'text', RESPONSES, lambda i: responses(instructions=text(TEN_MB)))
post('previous_response_id of 1 MB', 'names', RESPONSES,
     lambda i: responses(previous_response_id='r' * 1_000_000))
post('metadata of 1 MB', 'names', RESPONSES, lambda i: responses(metadata={'a': 'x' * 1_000_000}))
post('metadata of 10,000 names', 'names', RESPONSES,
     lambda i: responses(metadata={f'a{k}': 'x' for k in range(10_000)}))
post('10,000 tools, responses', 'grammar', RESPONSES,
     lambda i: responses(tools=[flat(f'f{k}') for k in range(10_000)]))
post('tools of 10 MB, responses', 'grammar', RESPONSES,
     lambda i: responses(tools=[flat('f', description=text(TEN_MB))]))
post('text.format with an enum of 40,000', 'grammar', RESPONSES,
     lambda i: responses(text={'format': {'type': 'json_schema', 'name': 'a',
                                          'schema': {'enum': [*range(40_000)]}}}))
post('30,000 messages, messages', 'text', MESSAGES, lambda i: MODEL | {'messages': [USER] * 30_000})
post('9,000 blocks of a message', 'text', MESSAGES,
     lambda i: messages([{'type': 'text', 'text': 'x'}, {'type': 'tool_result', 'tool_use_id': 'a'}] * 4_500))
post('16,000 blocks of a message', 'text', MESSAGES,
     lambda i: messages([{'type': 'text', 'text': 'x'}] * 16_000))
post('two messages that come to 12,000', 'text', MESSAGES, lambda i: MODEL
     | {'messages': [{'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 'a'}] * 6_000}] * 2})
post('system of 10 MB', 'text', MESSAGES, lambda i: messages(system=text(TEN_MB)))
post('user_id of 1 MB', 'names', MESSAGES, lambda i: messages(metadata={'user_id': 'u' * 1_000_000}))
post('20,000 stop_sequences', 'stop', MESSAGES,
     lambda i: messages(stop_sequences=[f'stop {k}' for k in range(20_000)]))
post('10,000 tools, messages', 'grammar', MESSAGES,
     lambda i: messages(tools=[{'name': f'f{k}', 'input_schema': {}} for k in range(10_000)]))
post('30,000 messages, Ollama', 'text', OLLAMA, lambda i: {'messages': [USER] * 30_000})
post('a prompt of 10 MB, Ollama', 'text', '/api/generate', lambda i: {'prompt': text(TEN_MB)})
post('a format with an enum of 40,000', 'grammar', OLLAMA,
     lambda i: messages(format={'enum': [*range(40_000)]}))
post('model of 1 MB, Ollama', 'names', SHOW, lambda i: {'model': 'm' * 1_000_000}, NOT_FOUND)

# ---- files and batches: what is kept is bounded, and names lead nowhere
FILES, BATCHES = '/v1/files', '/v1/batches'
def part(name: str, content: bytes, **more: str) -> bytes:
    "One part of a form"
    head = ''.join(f'; {k}="{v}"' for k, v in dict(name=name, **more).items())
    return f'--b0\r\nContent-Disposition: form-data{head}\r\n\r\n'.encode() + content + b'\r\n'

def upload(name: str, form: Callable[[], bytes], allowed: Iterable[int] = (400, 404), boundary: str = 'b0',
           **more) -> None:
    def steps(key: bytes, i: int) -> Iterator[Step]:
        yield posted(FILES, form(), key, kind=f'multipart/form-data; boundary={boundary}')
    add(f'an upload {name}', 'names', allowed, steps, path=FILES, **more)

def file_of(content: bytes, filename: str = 'a.jsonl') -> bytes:
    return part('purpose', b'batch') + part('file', content, filename=filename) + b'--b0--\r\n'

upload('of 20 MB of one line', lambda: file_of(b'x' * 20_000_000), {200, 404, 413})
upload('of 100,000 lines', lambda: file_of(b'{"prompt": "x", "max_tokens": 1}\n' * 100_000), {200, 404, 413})
upload('of 100,000 parts', lambda: part('purpose', b'batch') * 100_000)
upload('whose part has a header of 1 MB', lambda: part('x' * 1_000_000, b''))
upload('without an end', lambda: file_of(b'x' * 1_000_000)[:-100])
upload('of boundaries', lambda: file_of(b'\r\n--b' * 1_000_000), {200, 404, 413})
upload('called ../../x', lambda: file_of(b'x', '../../x'), {200, 404})
upload('with a name of 3,000 letters', lambda: file_of(b'x', 'x' * 3_000), {200, 404})
upload('with a boundary of 1,000 letters', lambda: file_of(b'x'), {404, 415}, 'b' * 1_000)
upload('that is not a form', lambda: b'', {400, 404})
post('a file as JSON', 'json', FILES, lambda i: {'file': 'x', 'purpose': 'batch'}, {404, 415})
post('a batch of ../../x', 'names', BATCHES,
     lambda i: {'input_file_id': '../../x', 'endpoint': '/v1/completions'}, NOT_FOUND)
post('a batch that stops the server', 'control', BATCHES,
     lambda i: {'input_file_id': 'x', 'endpoint': '/pause_generation'}, NOT_FOUND)
post('metadata of 1 MB, batches', 'names', BATCHES, lambda i: {'input_file_id': 'x',
    'endpoint': '/v1/completions', 'metadata': {'a': 'x' * 1_000_000}}, NOT_FOUND)
post('metadata of 10,000 names, batches', 'names', BATCHES, lambda i: {'input_file_id': 'x',
    'endpoint': '/v1/completions', 'metadata': {f'a{k}': '' for k in range(10_000)}}, NOT_FOUND)

# ---- stops
def stops(name: str, pattern: str, allowed: Iterable[int] = REFUSED, n_tokens: int = 2, **more) -> None:
    post(f'stop_regex {name}', 'stop', GENERATE, lambda i: generate('x', stop_regex=pattern,
        max_new_tokens=n_tokens, ignore_eos=True), allowed, **more)

post('a stop string of 5 MB', 'stop', COMPLETIONS, lambda i: completion(stop=text(5_000_000)))
post('20,000 stop strings', 'stop', COMPLETIONS,
     lambda i: completion(stop=[f'stop {k}' for k in range(20_000)]))
post('20,000 stop strings, chat', 'stop', CHAT, lambda i: chat(stop=[f'stop {k}' for k in range(20_000)]))
post('a million stop_token_ids', 'stop', COMPLETIONS,
     lambda i: completion(stop_token_ids=[*range(1_000_000)]))
stops('whose repeats multiply', '(?:(?:a?){2000}){2000}b')
stops('whose repeats multiply, three times', '(?:(?:(?:a?){150}){150}){150}b')
stops('that takes all memory', '(?:a{65535}){65535}', dangerous=True)
stops('whose repeats hide in a lookbehind', '(?<=(?:(?:a?){1,2000}){1,2000})b')
stops('of repeats in a row', '(?:a?){9999}' * 50)
stops('of wide classes that repeat', r'(?:[\p{L}\p{N}\p{P}--a]{999}){999}', {200, 400})
stops('that backtracks', r'(?:[^\n]+)+\n\n\n!', {200, 400}, n_tokens=200)
stops('that nests stars', '(?:(?:(?:(?:(?:.*)*)*)*)*)*~#~', {200, 400}, n_tokens=200)
stops('that is fuzzy', '(?:foundation){e<=9}xyz', {200, 400}, n_tokens=50)
stops('that calls itself', r'(a(?R)?b)+c', {200, 400})
stops('with a list by name', r'\L<words>')
stops('of 100,000 letters', 'a|' * 50_000 + 'b')
stops('that is not valid', '(' * 900)
post('stop_regex that backtracks, n=128', 'stop', GENERATE,
     lambda i: generate('x', stop_regex=r'(?:[^\n]+)+\n\n\n!', max_new_tokens=200, ignore_eos=True, n=128),
     {200, 400}, longest_reply=1_000_000)
post('10,000 stop_regex in a list', 'stop', GENERATE, lambda i: generate('x', stop_regex=['a?'] * 10_000))
post('stop_regex, 100 different ones at once', 'stop', GENERATE,
    lambda i: generate('x', stop_regex=f'(?:[abc{chr(1000 + i)}]{{1,40}}){{1,20}}b'), {200, 400}, callers=100)

# ---- grammars
def schema(name: str, make: Callable[[int], object], allowed: Iterable[int] = REFUSED, **more) -> None:
    post(f'schema {name}', 'grammar', GENERATE,
         lambda i: generate('x', json_schema=json.dumps(make(i)), max_new_tokens=4), allowed, **more)
def grammar(name: str, kind: str, make: Callable[[int], str], allowed: Iterable[int] = REFUSED,
            n_tokens: int = 4, **more) -> None:
    post(f'{kind} {name}', 'grammar', GENERATE,
         lambda i: generate('x', **{kind: make(i)}, max_new_tokens=n_tokens), allowed, **more)
def strict(tool: dict) -> dict: return tool | {'function': tool['function'] | {'strict': True}}
def doubling(keyword: str, depth: int) -> dict:
    "Each definition is made of two of the next: 2**depth in all"
    defs = {f'a{k}': {keyword: [{'$ref': f'#/$defs/a{k + 1}'}] * 2} for k in range(depth)}
    return {'$defs': defs | {f'a{depth}': {'type': 'object'}}, '$ref': '#/$defs/a0'}
def deep_schema(depth: int) -> bytes:
    nested = '{"properties":{"a":' * depth + '{}' + '}}' * depth
    return json.dumps(generate('x', json_schema=nested)).encode()
def rules(n: int) -> str:
    return 'start: r0\n' + ''.join(f'r{k}: "a{k}" r{k + 1} | "b"\n' for k in range(n)) + f'r{n}: "c"\n'

schema('with an enum of 500,000', lambda i: {'enum': [f'word {k}' for k in range(500_000)]})
schema('with 50,000 properties',
       lambda i: {'type': 'object', 'properties': {f'p{k}': {'type': 'integer'} for k in range(50_000)}})
schema('that refers to itself', lambda i: {'$ref': '#'})
schema('that goes in a circle',
       lambda i: {'$defs': {'a': {'$ref': '#/$defs/b'}, 'b': {'$ref': '#/$defs/a'}}, '$ref': '#/$defs/a'})
schema('that doubles 25 times with allOf', lambda i: doubling('allOf', 25), LEGAL)
schema('that doubles 25 times with anyOf', lambda i: doubling('anyOf', 25), LEGAL)
schema('that refers to a file', lambda i: {'$ref': 'file:///etc/passwd'})
schema('that refers to a web page', lambda i: {'$ref': 'http://127.0.0.1:9/a'})
schema('with 2,000 pattern properties',
       lambda i: {'patternProperties': {f'^(a|b{k})*c$': {'type': 'string'} for k in range(2_000)}})
schema('with minLength 10⁹', lambda i: {'type': 'string', 'minLength': 10**9}, LEGAL)
schema('with minItems 10⁹', lambda i: {'type': 'array', 'minItems': 10**9, 'items': {'type': 'integer'}},
       LEGAL)
schema('with a pattern whose repeats multiply',
       lambda i: {'type': 'string', 'pattern': '^((a{1,1000}){1,1000}){1,1000}$'}, LEGAL)
schema('with a number of 5,000 digits', lambda i: {'type': 'number', 'minimum': 10**4000}, LEGAL)
schema('with a tiny multipleOf', lambda i: {'type': 'number', 'multipleOf': 1e-300}, LEGAL)
schema('of 5 MB', lambda i: {'description': text(5_000_000), 'type': 'object'})
post('schema nested 5,000 deep', 'grammar', GENERATE, lambda i: deep_schema(5_000))
grammar('of 3,000 rules in a list', 'ebnf',
        lambda i: json.dumps({'grammars': [{'lark_grammar': rules(3_000)}]}))
grammar('of 4,000 grammars', 'ebnf',
        lambda i: json.dumps({'grammars': [{'lark_grammar': 'start: "a"'}] * 4_000}))
post('a strict function of 10 MB', 'grammar', CHAT,
     lambda i: chat(tools=[strict(tool('f', title=text(TEN_MB)))]))
post('strict functions, 900 of them', 'grammar', CHAT,
     lambda i: chat(tools=[strict(tool(f'f{k}', properties={'x': {}})) for k in range(900)], max_tokens=2),
     LEGAL)
post('a strict function that doubles', 'grammar', CHAT,
     lambda i: chat(tools=[strict(tool('f', **doubling('anyOf', 40)))], max_tokens=2), LEGAL)
post('a strict function of parts that refer to themselves', 'grammar', CHAT,
     lambda i: chat(tools=[strict(tool('f', allOf=[{'$ref': '#'}] * 200))], max_tokens=2), LEGAL)
grammar('of 20,000 rules', 'ebnf', lambda i: rules(20_000))
# deeper than a thread's stack: it has ended an engine
grammar('with a chain of 3,000 rules', 'ebnf', lambda i: rules(3_000))
schema('with a chain of 3,000 references',
       lambda i: {'$defs': {f'a{k}': {'properties': {'x': {'$ref': f'#/$defs/a{k + 1}'}}}
                            for k in range(3_000)} | {'a3000': {}}, '$ref': '#/$defs/a0'})
grammar('with a chain of 4,000 short rules', 'ebnf',
        lambda i: 'start:r0\n' + ''.join(f'r{k}:"a"r{k + 1}\n' for k in range(4_000)) + 'r4000:"c"\n')
grammar('with a chain of 5,000 names', 'ebnf',
        lambda i: 'start:r0\n' + ''.join(f'r{k}:r{k + 1}\n' for k in range(5_000)) + 'r5000:"c"\n')
post('schema with a chain of 1,500 short references', 'grammar', GENERATE,
     lambda i: generate('x', json_schema=json.dumps(
    {'$defs': {f'{k}': {'items': {'$ref': f'#/$defs/{k + 1}'}} for k in range(1_500)} | {'1500': {}},
     '$ref': '#/$defs/0'}, separators=(',', ':'))))
grammar('that is ambiguous', 'ebnf', lambda i: 'start: e\ne: e e | e e e | "a" | "b" |\n', LEGAL,
        n_tokens=100)
grammar('that recurs on its left', 'ebnf', lambda i: 'start: start "a" | start start | "b"\n', LEGAL)
grammar('without an end', 'ebnf', lambda i: 'start: a\na: b\nb: a\n')
grammar('with a repeat of a million', 'ebnf', lambda i: 'start: x{1000000}\nx: "a" | "b"\n', LEGAL)
grammar('with a repeat of a million', 'regex', lambda i: '(ab|c){1000000}', LEGAL)
grammar('whose repeats multiply', 'regex', lambda i: '((a{1000}){1000}){1000}', LEGAL)
grammar('that needs many states', 'regex', lambda i: '(a|b)*a(a|b){400}', LEGAL)
grammar('of 1 MB', 'regex', lambda i: '(' + '|'.join(f'w{k}' for k in range(150_000)) + ')')
grammar('slow ones, 20 at once', 'ebnf',
        lambda i: f'start: "{i}" r0\n' + rules(1_500).removeprefix('start: r0\n'), LEGAL, callers=20)
post('tools of 10 MB', 'grammar', CHAT,
     lambda i: chat(tools=[tool('f', description=text(TEN_MB))], tool_choice='required'))
post('10,000 tools', 'grammar', CHAT,
     lambda i: chat(tools=[tool(f'f{k}') for k in range(10_000)], tool_choice='required'))
post('10,000 tools, none of which is chosen', 'grammar', CHAT,
     lambda i: chat(tools=[tool(f'f{k}') for k in range(10_000)],
                    tool_choice={'type': 'function', 'function': {'name': 'g'}}))
post('a tool name with a line break', 'grammar', CHAT, lambda i: chat(tools=[tool('f\nmessage: stop')]))
post('response_format with an enum of 500,000', 'grammar', CHAT,
     lambda i: chat(response_format={'type': 'json_schema',
                                     'json_schema': {'schema': {'enum': [*range(500_000)]}}}))

# ---- names, and numbers of requests
post('rid of 1 MB', 'names', GENERATE, lambda i: generate('x') | {'rid': 'r' * 1_000_000}, NEVER)
post('a million token_ids_logprob', 'names', GENERATE,
     lambda i: generate('x') | {'return_logprob': True, 'token_ids_logprob': [5] * 1_000_000})
post('token_ids_logprob for 10,000 prompts', 'names', GENERATE,
     lambda i: generate('x') | {'return_logprob': True, 'token_ids_logprob': [[5]] * 10_000}, NEVER)
post('token ids returned with 128 answers to 100 prompts', 'names', COMPLETIONS,
     lambda i: completion([[5] * 200] * 30, n=128, return_token_ids=True))
post('rid of 1 MB for a chat', 'names', CHAT, lambda i: chat(rid='r' * 1_000_000), NEVER)
post('rid with line breaks for a chat', 'names', CHAT, lambda i: chat(rid='a\r\ndata: {}\r\n\r\n'), LEGAL)
post('rid of 1 MB in a list', 'names', GENERATE, lambda i: generate(['x']) | {'rid': ['r' * 1_000_000]},
     NEVER)
post('10,000 rids for a prompt', 'names', GENERATE, lambda i: generate('x') | {'rid': ['r'] * 10_000}, NEVER)
post('the same rid for 1,000 prompts', 'names', GENERATE,
     lambda i: generate(['x'] * 1_000) | {'rid': ['r'] * 1_000}, NEVER)
post('10,000 return_logprob for a prompt', 'names', GENERATE,
     lambda i: generate('x') | {'return_logprob': [True] * 10_000}, NEVER)
post('rid with line breaks', 'names', GENERATE, lambda i: generate('x') | {'rid': 'a\r\ndata: {}\r\n\r\n'},
     LEGAL)
post('extra_key of 1 MB', 'names', GENERATE, lambda i: generate('x', extra_key='k' * 1_000_000))
post('cache_salt of 1 MB', 'names', COMPLETIONS, lambda i: completion(cache_salt='k' * 1_000_000))
post('model of 1 MB', 'names', COMPLETIONS, lambda i: completion(model='m' * 1_000_000), NOT_FOUND)
post('user of 1 MB', 'names', COMPLETIONS, lambda i: completion(user='u' * 1_000_000), LEGAL)
post('10,000 prompts', 'names', COMPLETIONS, lambda i: completion(['x'] * 10_000), NEVER)
post('10,000 prompts, generate', 'names', GENERATE, lambda i: generate(['x'] * 10_000), NEVER)
post('100 prompts, n=128', 'names', COMPLETIONS, lambda i: completion(['x'] * 100, n=128), NEVER)
post('logit_bias of 45,000 entries', 'names', COMPLETIONS,
     lambda i: completion(logit_bias={str(k): 1 for k in range(45_000)}))
post('logit_bias of 90,000 entries', 'names', COMPLETIONS,
     lambda i: completion(logit_bias={str(k): 1 for k in range(90_000)}))
post('logit_bias of 300,000 entries', 'names', COMPLETIONS,
     lambda i: completion(logit_bias={str(k): 1 for k in range(300_000)}))
post('10,000 texts to choose from', 'grammar', COMPLETIONS,
     lambda i: completion(guided_choice=[f'word {k}' for k in range(10_000)]))
post('a text of 1 MB to choose', 'grammar', CHAT,
     lambda i: chat(structured_outputs={'choice': [text(1_000_000)]}))
post('guided_json with an enum of 400,000', 'grammar', COMPLETIONS,
     lambda i: completion(guided_json={'enum': [*range(400_000)]}))
post('an unknown field with a name of 10 MB', 'names', COMPLETIONS,
     lambda i: completion(**{'temperatur' * 1_000_000: 1}), NEVER)
post('a field that is refused, of 10 MB', 'names', CHAT, lambda i: chat(image_data=text(TEN_MB)), NEVER)
post('10,000 unknown fields in messages', 'names', CHAT,
     lambda i: {'messages': [{'role': 'user', 'content': 'x', f'f{k}': 1} for k in range(9_000)]}, NEVER)
post('priority beyond all numbers', 'names', COMPLETIONS, lambda i: completion(priority=10**30))
post('sampling_params, 10,000 maps for a prompt', 'names', GENERATE,
     lambda i: {'text': 'x', 'sampling_params': [{}] * 10_000})
post('weights from a path of 1 MB', 'names', '/update_weights_from_disk',
     lambda i: {'model_path': '/x' * 500_000}, {400, 403})
post('weights from a device', 'names', '/update_weights_from_disk', lambda i: {'model_path': '/dev/zero'},
     {400, 403})
post('memory of half a million parts', 'names', '/release_memory_occupation',
     lambda i: {'tags': ['weights'] * 500_000 + ['x']}, {400, 403})
post('memory that was not released', 'names', '/resume_memory_occupation',
     lambda i: {'tags': ['kv_cache'] * 100_000}, {200, 403})
post('a weight version of 1 MB', 'names', '/update_weight_version',
     lambda i: {'new_version': 'v' * 1_000_000}, {400, 403})
post('lora of 1 MB', 'names', COMPLETIONS, lambda i: completion(lora='l' * 1_000_000))
post('lora_path, 10,000 for a prompt', 'names', GENERATE,
     lambda i: {'text': 'x', 'lora_path': ['a'] * 10_000})
for verb in ('load', 'unload'):
    post(f'{verb} an adapter with a name of 1 MB', 'names', f'/v1/{verb}_lora_adapter',
         lambda i: {'lora_name': 'l' * 1_000_000, 'lora_path': '/x'}, {400, 403})
post('an adapter from a device', 'names', '/load_lora_adapter',
     lambda i: {'lora_name': 'x', 'lora_path': '/dev/zero'}, {400, 403})
post('abort a rid of 1 MB', 'names', '/abort_request', lambda i: {'rid': 'r' * 1_000_000})

# ---- JSON that is odd
def fields(path: str, base: dict, values: dict[str, list]) -> list[bytes]:
    return [json.dumps(base | {k: v}).encode() for k, vs in values.items() for v in vs]
WRONG = [{}, [], 'x' * 1000, -1, 1.5, 2**70, True, float('nan'), [[[]]], {'a': {'b': []}}]
# a parameter that is new is among them
NUMBERS = [f.name for f in dataclasses.fields(SamplingParams) if {int, float} & {*kinds(f)}]
OTHERS = ['prompt', 'stream', 'stream_options', 'model',
          *(f.name for f in dataclasses.fields(SamplingParams) if f.name not in NUMBERS)]

def one_after_the_other(path: str,
                        bodies: Callable[[], list[bytes]]) -> Callable[[bytes, int], Iterator[Step]]:
    def steps(key: bytes, i: int) -> Iterator[Step]:
        made = bodies()
        for k, body in enumerate(made): yield posted(path, body, key, close=k == len(made) - 1)
    return steps
for path, base in {COMPLETIONS: completion(), CHAT: chat(), GENERATE: {'text': 'x'}}.items():
    add(f'wrong types in every number, {path}', 'json', REFUSED,
        one_after_the_other(path, lambda base=base, path=path: [
        json.dumps({**base, 'sampling_params': {k: v}} if path == GENERATE else base | {k: v}).encode()
        for k in NUMBERS for v in WRONG if isinstance(v, (list, dict, str))]), longest_reply=200_000)
add('wrong types in every other field', 'json', REFUSED, one_after_the_other(COMPLETIONS, lambda: [
    json.dumps(completion() | {k: v}).encode() for k in OTHERS for v in ({'a': {'b': []}}, 2**70, [[[]]])
    if (k, type(v)) != ('stream_options', dict)]), longest_reply=200_000)
for path in ('/tokenize', '/detokenize', '/abort_request', '/pause_generation'):
    expected = [403] if path == '/pause_generation' else REFUSED   # for whoever holds no admin key
    add(f'wrong types, {path}', 'json', expected,
        one_after_the_other(path, lambda: [json.dumps(o).encode() for o in (
        {'prompt': 5, 'tokens': 'x', 'rid': 5, 'mode': 5},
        {'prompt': [1], 'tokens': [[[]]], 'rid': [], 'mode': []}, [], 'x', 5,
        {'messages': 5, 'tokens': [-1], 'abort_all': 'x', 'mode': 'x'},
        {'prompt': None, 'tokens': [2**70], 'rid': '', 'mode': {}})]), longest_reply=20_000)
post('nested 100,000 deep', 'json', COMPLETIONS, lambda i: b'[' * 100_000)
post('objects nested 100,000 deep', 'json', COMPLETIONS,
     lambda i: b'{"prompt":' * 100_000 + b'1' + b'}' * 100_000)
post('nested 10,000,000 deep', 'json', COMPLETIONS, lambda i: b'[' * 10_000_000)
post('an unknown field nested 900 deep', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","max_tokens":1,"other":' + b'[' * 900 + b']' * 900 + b'}', LEGAL)
post('duplicate keys', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","max_tokens":1,' + b'"prompt":"y",' * 100_000 + b'"prompt":"z"}', LEGAL)
post('100,000 unknown fields', 'json', COMPLETIONS,
     lambda i: completion(**{f'f{k}': k for k in range(100_000)}))
post('100,000 unknown fields, generate', 'json', GENERATE,
     lambda i: generate('x', **{f'f{k}': k for k in range(100_000)}))
post('30 MB of empty objects', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","max_tokens":1,"other":[{}' + b',{}' * TEN_MB + b']}')
post('30 MB of numbers', 'json', GENERATE,
     lambda i: b'{"text":"x","other":[1' + b',1' * (3 * TEN_MB // 2) + b']}')
post('30 MB of names', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","max_tokens":1' + b''.join(b',"%d":1' % k for k in range(2_600_000)) + b'}')
post('30 MB of escapes', 'json', COMPLETIONS, lambda i: b'{"prompt":"' + b'\\u0041' * 5_000_000 + b'"}')
post('NaN', 'json', COMPLETIONS, lambda i: completion(temperature=float('nan')))
post('Infinity', 'json', GENERATE, lambda i: generate('x', min_p=float('inf')))
post('a number of a million digits', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","seed":' + b'9' * 1_000_000 + b'}')
post('a fraction of a million digits', 'json', COMPLETIONS,
     lambda i: b'{"prompt":"x","temperature":0.' + b'1' * 1_000_000 + b'e999}', LEGAL)
post('1e400', 'json', COMPLETIONS, lambda i: b'{"prompt":"x","temperature":1e400}')
post('half a character, prompt', 'json', COMPLETIONS, lambda i: completion('\ud800'))
post('half a character, stop', 'json', COMPLETIONS, lambda i: completion(stop='\udfff'))
post('half a character, rid', 'json', GENERATE, lambda i: generate('x') | {'rid': '\ud800'})
post('half a character, a key', 'json', CHAT, lambda i: chat(**{'\ud800': 1}), LEGAL)
post('half a character, chat', 'json', CHAT, lambda i: chat('\ud800'))
post('null characters', 'json', CHAT, lambda i: chat('\0' * 1000), LEGAL)
post('bytes that are not UTF-8', 'json', COMPLETIONS, lambda i: b'{"prompt":"\xff\xfe\xc0\x80"}')
post('UTF-16', 'json', COMPLETIONS, lambda i: json.dumps(completion()).encode('utf-16'), LEGAL)
post('a body of spaces', 'json', COMPLETIONS, lambda i: b' ' * TEN_MB)
post('roles unknown', 'json', CHAT, lambda i: {'messages': [{'role': 'root', 'content': 'x'}]})
post('no messages', 'json', CHAT, lambda i: {'messages': []})
post('an image', 'json', CHAT,
     lambda i: chat([{'type': 'image_url', 'image_url': {'url': 'file:///etc/passwd'}}]))
add('other kinds of body', 'json', {400, 415}, lambda key, i: [
    *(posted(COMPLETIONS, b'prompt=x', key, kind=kind, close=False)
      for kind in ('application/x-www-form-urlencoded', 'text/plain', 'application/xml', '')),
    posted(COMPLETIONS, b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n', key,
           kind='multipart/form-data; boundary=b')])
add('a compressed body', 'json', {400, 415},
    lambda key, i: [posted(COMPLETIONS, b'\x1f\x8b\x08\0' + b'\0' * 100, key, 'Content-Encoding: gzip')])

# ---- HTTP
def much(what: bytes, n: int) -> Iterator[bytes]:
    "So many bytes, made of repetitions of this"
    piece = what * max(1, 262_144 // len(what))
    for _ in range(max(1, n // len(piece))): yield piece

def http(name: str, allowed: Iterable[int], *steps: Step | Callable[[], Iterable[Step]], **more) -> None:
    "Add a caller whose bytes do not depend on a key"
    def all_steps(key: bytes, i: int) -> Iterator[Step]:
        for o in steps:
            if callable(o): yield from o()
            else: yield o
    add(name, 'http', allowed, all_steps, **more)

def with_key(name: str, allowed: Iterable[int], make: Callable[[bytes], Iterable[Step]], **more) -> None:
    add(name, 'http', allowed, lambda key, i: make(key), **more)

BODY = json.dumps(completion()).encode()
TOO_LONG = frozenset({CLOSED, 400, 413, 414, 431})
LATE = frozenset({CLOSED, 408})
http('a header of 100 MB', TOO_LONG, b'GET /health HTTP/1.1\r\nHost: localhost\r\na: ',
     partial(much, b'a', 100 << 20), b'\r\n\r\n')
http('100,000 headers', TOO_LONG, b'GET /health HTTP/1.1\r\nHost: localhost\r\n',
     partial(much, b'a: b\r\n', 600_000), b'\r\n')
http('headers without end', TOO_LONG | LATE, b'GET /health HTTP/1.1\r\nHost: localhost\r\n',
     partial(much, b'abcdefgh: ijklmnop\r\n', 50 << 20))
http('headers without end, ten at once', TOO_LONG | LATE, b'GET /health HTTP/1.1\r\nHost: localhost\r\n',
     partial(much, b'abcdefgh: ijklmnop\r\n', 5 << 20), callers=10)
http('a URL of 50 MB', TOO_LONG, b'GET /', partial(much, b'a', 50 << 20),
     b' HTTP/1.1\r\nHost: localhost\r\n\r\n')
http('a method of 10 MB', TOO_LONG | {405}, partial(much, b'A', 10 << 20),
     b' / HTTP/1.1\r\nHost: localhost\r\n\r\n')
http('a query of 1 MB', TOO_LONG, b'GET /health?', partial(much, b'a=b&', 1 << 20),
     b' HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n')
with_key('a model of 1 MB in the path', TOO_LONG | {404},
         lambda key: [b'GET /v1/models/', *much(b'm', 1 << 20), b' HTTP/1.1\r\nHost: localhost\r\n',
                      key + b'\r\n' if key else b'', b'Connection: close\r\n\r\n'])
with_key('chunks of one byte', {400, CLOSED}, lambda key: [
    head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Transfer-Encoding: chunked', key),
    *([b''.join(b'1\r\n%c\r\n' % c for c in BODY[:-1] + b' ' * 200_000 + b'}')]), b'0\r\n\r\n'])
with_key('chunks without end', {413, 400, CLOSED}, lambda key: [
    head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Transfer-Encoding: chunked', key),
    *much(b'1000\r\n' + b' ' * 4096 + b'\r\n', 100 << 20)])
with_key('a chunk with an extension of 20 MB', TOO_LONG, lambda key: [
    head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Transfer-Encoding: chunked', key), b'1;',
    *much(b'e', 20 << 20), b'\r\n{\r\n0\r\n\r\n'])
with_key('trailers of 20 MB', TOO_LONG, lambda key: [
    head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Transfer-Encoding: chunked', key),
    b'%x\r\n%s\r\n0\r\n' % (len(BODY), BODY), *much(b'a: b\r\n', 20 << 20), b'\r\n'])
for size in ('zz', '-1', 'f' * 40):
    with_key(f'a chunk of size {size[:4]}', NOT_HTTP | {413}, lambda key, size=size: [
        head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Transfer-Encoding: chunked', key),
        f'{size}\r\n{{}}\r\n0\r\n\r\n'.encode()])
for length in ('-5', '9' * 30, '5, 5', '0x10', 'x'):
    with_key(f'Content-Length: {length[:5]}', NOT_HTTP | {413}, lambda key, length=length: [
        head(f'POST {COMPLETIONS}', 'Content-Type: application/json', f'Content-Length: {length}', key),
        BODY])
with_key('a body of 40 GB, announced', {413},
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json',
                           f'Content-Length: {40 << 30}', key), BODY])
with_key('two lengths', NOT_HTTP,
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json',
                           f'Content-Length: {len(BODY)}', 'Content-Length: 3', key), BODY])
with_key('a length and chunks', NOT_HTTP,
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Content-Length: 4',
                           'Transfer-Encoding: chunked', key), b'0\r\n\r\nGET /health HTTP/1.1\r\n\r\n'])
with_key('a body that is too short', NOT_HTTP | LATE,
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json',
                           f'Content-Length: {len(BODY) + 9}', key), BODY, HALF_CLOSE])
with_key('a body that is too long', LEGAL, lambda key: [posted(COMPLETIONS, BODY, key), b'GET /health'])
with_key('half-closed after the request', {200},
         lambda key: [posted(COMPLETIONS, BODY, key), .05, HALF_CLOSE])
with_key('Expect: 100-continue', {200},
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json',
                           f'Content-Length: {len(BODY)}', 'Expect: 100-continue', key), .3, BODY])
http('1,000 requests in a row without waiting', {200, CLOSED},
     lambda: [head('GET /health', close=False) * 999, head('GET /health')], longest_reply=1_000_000)
http('websocket', NOT_FOUND | {401, 403, 405, 426, CLOSED},
     head('GET /live', 'Upgrade: websocket', 'Connection: Upgrade, close', 'Sec-WebSocket-Version: 13',
          'Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==', close=False), patience=20)
http('HTTP/2', NOT_HTTP | {505, 405}, b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', patience=20)
http('HTTP/0.9', NOT_HTTP | {200}, b'GET /health\r\n\r\n', patience=20)
http('HTTP/9.9', NOT_HTTP | {200, 505}, b'GET /health HTTP/9.9\r\nHost: localhost\r\nConnection: '
                                        b'close\r\n\r\n', patience=20)
http('TLS', NOT_HTTP, b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + bytes(500), patience=20)
http('a megabyte of zeros', NOT_HTTP, bytes(1_000_000), patience=20)
http('line feeds', NOT_HTTP | LATE | {431}, b'\n' * 1_000_000)
http('a header that goes on in the next line', NOT_HTTP | {200},
     b'GET /health HTTP/1.1\r\nHost: localhost\r\na: b\r\n c: d\r\nConnection: close\r\n\r\n', patience=20)
http('a header with a null character', NOT_HTTP,
     b'GET /health HTTP/1.1\r\nHost: localhost\r\na: \0b\r\nConnection: close\r\n\r\n', patience=20)
http('a header without a colon', NOT_HTTP, b'GET /health HTTP/1.1\r\nHost: localhost\r\nabc\r\nConnection: '
                                           b'close\r\n\r\n', patience=20)
http('a request id with a line break', {200, 400},
     b'GET /health HTTP/1.1\r\nHost: localhost\r\nx-request-id: a%0d%0aGET / 200\xff\r\nConnection: '
     b'close\r\n\r\n', patience=20)
for method in 'BREW PUT DELETE PATCH TRACE CONNECT OPTIONS'.split():
    http(f'the method {method}', {400, 401, 404, 405, CLOSED}, head(f'{method} {COMPLETIONS}'), patience=20)
with_key('GET where POST is meant', {405}, lambda key: [head(f'GET {COMPLETIONS}', key)])
with_key('POST where GET is meant', {405}, lambda key: [posted('/get_server_info', b'{}', key)])
for path in ('/../../../../etc/passwd', '/webui/../../../config.py', '/webui/%2e%2e/%2e%2e/config.py',
             '/webui/..%2f..%2fconfig.py', '//etc/passwd', '/webui/app.js%00.css', '/%00',
             '/v1/models/%00%ff', '/requests/%00%ff', '/requests/' + 'x' * 3000, '/requests/*',
             '/webui/' + '../' * 2000):
    with_key(f'the path {path[:30]}', NOT_FOUND | {414}, lambda key, path=path: [head(f'GET {path}', key)],
             patience=20)
http('a page in 10,000 ranges', {200, 206, 400, 413, 416, 431},
     head('GET /', 'Range: bytes=' + ','.join(f'{k}-{k}' for k in range(10_000))), longest_reply=3_000_000)
http('the page, 100 at once', {200}, head('GET /'), callers=100, longest_reply=1_000_000)
with_key('the metrics, 100 at once', {200}, lambda key: [head('GET /metrics', key)], callers=100,
         longest_reply=1_000_000)
with_key('health_generate, 50 at once', {200, 400, 503}, lambda key: [head('GET /health_generate', key)],
         callers=50)
http('half a head, then silence', LATE, b'GET /health HTTP/1.1\r\nHo', callers=20, patience=100)
http('silence', LATE, callers=100, patience=100)
http('a head that trickles', LATE | TOO_LONG, b'GET /health HTTP/1.1\r\nHost: localhost\r\na: ',
     lambda: (o for _ in range(100) for o in (b'a', 1.)), patience=100)
with_key('a body that trickles', LATE | {400},
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Content-Length: 100000',
                           key), *(o for _ in range(100) for o in (b' ', 1.))], patience=100)
with_key('a body that never comes', LATE,
         lambda key: [head(f'POST {COMPLETIONS}', 'Content-Type: application/json', 'Content-Length: 1000',
                           'Expect: 100-continue', key)], callers=20, patience=100)
with_key('streams that are left', {200, CLOSED},
         lambda key: [posted(GENERATE,
                             json.dumps(generate('x', max_new_tokens=300, ignore_eos=True,
                                 n=8) | {'stream': True}).encode(), key), .3, HANG_UP],
    callers=10, longest_reply=10_000_000)

# ---- who may do what. The server of the test asks for a key, and the callers above have it; these lack a
# key, or an admin's.
for path, body in {'/abort_request': {'abort_all': True}, '/pause_generation': {'mode': 'abort'},
                   '/continue_generation': {}, '/flush_cache': {},
                   '/start_profile': {}, '/stop_profile': {}}.items():
    post(f'{path} of a caller', 'control', path, lambda i, body=body: body, {403})
post('/abort_request of a caller, a star for a rid', 'control', '/abort_request', lambda i: {'rid': '*'},
     {400, 403})
add('no key', 'control', {401}, lambda key, i: [posted(COMPLETIONS, BODY)])
add('no key, and a body of 30 MB', 'control', {401}, lambda key, i: [posted(COMPLETIONS, b' ' * (30 << 20))])
add('a wrong key', 'control', {401},
    lambda key, i: [head(f'GET {path}', 'Authorization: Bearer wrong') for path in ('/get_server_info',)])
add('a key that is not ASCII', 'control', {400, 401},
    lambda key, i: [head('GET /get_server_info', b'Authorization: Bearer \xff\xfe')])
add('a key of 1 MB', 'control', {400, 401, 431, CLOSED},
    lambda key, i: [b'GET /get_server_info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ',
                    *much(b'k', 1 << 20), b'\r\nConnection: close\r\n\r\n'])


# ---- to send one
@dataclass
class Told:
    "What came of one caller."
    statuses: list[int]    # of its replies; `CLOSED` if there was none
    silent: bool           # neither answered nor closed, for as long as it had patience
    n_bytes: int           # of all replies
    reply: bytes           # the beginning of them

def read_statuses(received: bytes) -> list[int]:
    "The statuses in what a server has sent"
    found, begin = [], 0
    while m := re.compile(rb'HTTP/1\.[01] (\d{3})(.*?\r\n)\r\n', re.S).match(received, begin):
        found.append(int(m[1]))
        begin, length = m.end(), re.search(rb'\r\ncontent-length: *(\d+)', m[2], re.I)
        if length: begin += int(length[1])
        elif re.search(rb'\r\ntransfer-encoding: *chunked', m[2], re.I):
            end = received.find(b'\r\n0\r\n\r\n', begin - 2)
            begin = len(received) if end < 0 else end + 7
    return [o for o in found if o >= 200]

def _send(s: socket.socket, steps: Iterable[Step], until: float) -> None:
    with suppress(OSError):   # the server may have closed it
        for step in steps:
            if time.monotonic() > until: return
            if isinstance(step, bytes): s.sendall(step)
            elif isinstance(step, float): time.sleep(step)
            else: s.shutdown(socket.SHUT_WR if step is HALF_CLOSE else socket.SHUT_RDWR)

def converse(address: tuple[str, int], steps: Iterable[Step], patience: float) -> Told:
    "Send all, and at the same time read what comes, until the other side closes"
    received, n_bytes, silent, until = bytearray(), 0, False, time.monotonic() + patience
    try: s = socket.create_connection(address, timeout=patience)
    except OSError: return Told([CLOSED], False, 0, b'')
    with s:
        sender = threading.Thread(target=_send, args=(s, steps, until), daemon=True)
        sender.start()
        try:
            while True:
                s.settimeout(max(.001, until - time.monotonic()))
                if not (new := s.recv(65_536)): break
                n_bytes += len(new)
                if len(received) < 1_000_000: received += new
        except TimeoutError: silent = True
        except OSError: pass   # it closed without reading all
        with suppress(OSError): s.shutdown(socket.SHUT_RDWR)
        sender.join()
    return Told(read_statuses(received) or [CLOSED], silent, n_bytes, bytes(received[:2000]))

def key_line(key: str) -> bytes: return f'Authorization: Bearer {key}'.encode() if key else b''

def send(o: Hostile, address: tuple[str, int], each: list[Iterable[Step]], patience: float) -> list[Told]:
    "All callers of an entry, at once; `each` is what they send"
    with ThreadPoolExecutor(len(each)) as pool:
        return [*pool.map(lambda steps: converse(address, steps, min(o.patience, patience)), each)]

def prepare(o: Hostile, key: str) -> list[Iterable[Step]]:
    "What its callers will send; equal bodies are made once, and what is long is made while it is sent"
    each: list[Iterable[Step]] = ([o.steps(key_line(key), 0)] if o.row == 'http'
                                  else [[*o.steps(key_line(key), 0)]])
    if o.content and o.callers > 1 and o.content(0) == o.content(1): return each * o.callers
    return (each + [o.steps(key_line(key), i) if o.row == 'http' else [*o.steps(key_line(key), i)]
                    for i in range(1, o.callers)])

def verdict(o: Hostile, told: list[Told]) -> str:
    "What is wrong with these replies; empty if nothing is"
    wrong = sorted({s for t in told for s in t.statuses} - o.allowed)
    silent, longest = sum(t.silent for t in told), max(t.n_bytes for t in told)
    return '; '.join(filter(None,
        [wrong and f'status {", ".join(map(str, wrong))}', silent and f'{silent} neither answered nor closed',
         longest > o.longest_reply and f'a reply of {longest:,} bytes']))

def main() -> None:
    """Prepare all, say `ready`, wait for a line on standard input, then send; a line of JSON for each entry,
    with its times"""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('url')
    p.add_argument('--key', default='')
    p.add_argument('--only', default='', help='a pattern that names must contain')
    p.add_argument('--rows', default='', help='rows, with commas between')
    p.add_argument('--dangerous', action='store_true')
    p.add_argument('--pause', type=float, default=.5, help='seconds between two entries')
    p.add_argument('--patience', type=float, default=1000,
                   help='seconds until a caller gives up at the latest')
    p.add_argument('--rounds', type=int, default=1, help='0: for ever')
    a = p.parse_args()
    host, port = re.match(r'http://(.*):(\d+)', a.url).groups()
    address, rows = (host, int(port)), a.rows.split(',') if a.rows else None
    chosen = [o for o in corpus.values() if re.search(a.only, o.name) and (not rows or o.row in rows)
              and (a.dangerous or not o.dangerous)]
    with suppress(OSError): os.nice(19)   # to make what is sent must not take the cores from who is measured
    ready = {o.name: prepare(o, a.key) for o in chosen if o.row != 'http'}
    print('ready', flush=True)
    sys.stdin.readline()
    def do(o: Hostile) -> None:
        begin = time.monotonic()
        told = send(o, address, ready.get(o.name) or prepare(o, a.key), a.patience)
        statuses = Counter(s for t in told for s in t.statuses)
        first = next((t.reply for t in told if t.reply), b'').decode('latin-1')
        print(json.dumps(dict(name=o.name, row=o.row, statuses={str(k): v for k, v in statuses.items()},
                              begin=begin, end=time.monotonic(),
                              wrong=verdict(o, told), reply=first.partition('\r\n\r\n')[2][:300])),
              flush=True)
    for k in range(a.rounds or 10**9):
        slow = [o for o in chosen if o.patience > 60]
        with ThreadPoolExecutor(len(slow) or 1) as pool:
            # they hardly do anything, for long: beside the others
            waiting = [pool.submit(do, o) for o in slow]
            for o in chosen:
                if o in slow: continue
                do(o)
                time.sleep(a.pause)
            for o in waiting: o.result()

if __name__ == '__main__': main()
