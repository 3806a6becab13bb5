"One pipeline: a script of requests gives the same events in Python and over HTTP."
import json
from itertools import accumulate

import httpx
import pytest

from minisgl_lit import LLM, SamplingParams, serve

SETTINGS = dict(num_pages=256, max_running_req=8, max_seq_len=256, seed=3)
PREFIX = 'A page holds the keys and values of some tokens. '*3
# prompt, wishes: in this order, one after the other, so that caches are filled alike
SCRIPT = [
    ('The page', dict(temperature=0, max_tokens=20)),
    ('The page', dict(temperature=0, max_tokens=20, stop=['e ', 'zz'])),
    ('The page', dict(temperature=0, max_tokens=20, stop='e ', no_stop_trim=True)),
    (PREFIX + 'The tree', dict(temperature=1, seed=1, max_tokens=24)),
    (PREFIX + 'The rows', dict(temperature=1, seed=1, max_tokens=24)),
    (PREFIX + 'The rows',
     dict(temperature=.8, top_p=.9, top_k=40, min_p=.01, seed=2**40, max_tokens=24, ignore_eos=True)),
    ([5, 6, 7, 8], dict(temperature=2, seed=4, max_tokens=40, ignore_eos=True, skip_special_tokens=False)),
    ([5, 6, 7, 8], dict(temperature=2, seed=4, max_tokens=40, ignore_eos=True)),
    ([5, 6, 7, 8], dict(temperature=2, seed=4, max_tokens=40, stop_token_ids=list(range(100, 300)))),
    ('Grüße, 世界 👋', dict(temperature=1.5, seed=9, max_tokens=30, ignore_eos=True)),
    ('Hello', dict(max_tokens=0)),
    ('Hello', dict(temperature=0)),
]
WRONG = [('', {}), ([], {}), ([-1], {}), ([10**6], {}), ('x '*400, {}), ('x', dict(max_tokens=1000)),
         ('x', dict(max_tokens=-1)),
         ('x', dict(top_p=1.5)), ('x', dict(temperature=-.5)), ('x', dict(stop=''))]


@pytest.fixture(scope='module')
def llm():
    with LLM(**SETTINGS) as o: yield o

@pytest.fixture(scope='module')
def server():
    with serve(port=0, incremental_streaming_output=True, **SETTINGS) as o: yield o


def ask(server, prompt, wishes, stream=False):
    body = {'text' if isinstance(prompt, str) else 'input_ids': prompt, 'sampling_params': wishes,
            'stream': stream}
    return httpx.post(server.url + '/generate', json=body, timeout=60)

def split_at(ends, pieces):
    """Pieces of an answer, joined as a reader got them who fell behind: each joined one ends after so many
    tokens"""
    pieces, joined = iter(pieces), []
    for end in ends:
        text, ids, reason = '', [], None
        while len(ids) < end or not ids and end == 0 and reason is None:
            t, i, reason = next(pieces)
            text, ids = text + t, ids + i
        joined.append((text, ids, reason))
    return joined + list(pieces)

def test_same_events(llm, server):
    "Token by token, but that a reader over HTTP who falls behind gets several pieces as one"
    for prompt, wishes in SCRIPT:
        ours = [(p.text, p.token_ids, p.finish_reason) for p in llm.stream(prompt, SamplingParams(**wishes))]
        lines = ask(server, prompt, wishes, stream=True).text.split('\n\n')[:-2]
        theirs = [(e['text'], e['output_ids'], (e['meta_info']['finish_reason'] or {}).get('type'))
                  for e in (json.loads(o[6:]) for o in lines)]
        assert split_at([len(ids) for _, ids, _ in theirs], ours) == theirs, (prompt, wishes)
        metas = [json.loads(o[6:])['meta_info'] for o in lines]
        assert ([m['completion_tokens'] for m in metas]
                == [*accumulate(len(ids) for _, ids, _ in theirs)]), (prompt, wishes)
        # the same from the first event on
        counts = {(m['prompt_tokens'], m['cached_tokens'], m['weight_version']) for m in metas}
        assert len(counts) == 1 and min(counts)[0] > 0, (prompt, wishes, counts)

def test_same_answers(llm, server):
    "A second time: now the cache has everything, on both sides"
    for prompt, wishes in SCRIPT:
        o = llm.generate(prompt, SamplingParams(**wishes))[0]
        r = ask(server, prompt, wishes).json()
        meta = r['meta_info']
        assert (o.text, o.token_ids, o.finish_reason) == (r['text'], r['output_ids'],
            meta['finish_reason']['type']), (prompt, wishes)
        assert (o.prompt_tokens, len(o.token_ids), o.cached_tokens) == (meta['prompt_tokens'],
            meta['completion_tokens'], meta['cached_tokens'])
    assert (o.prompt_tokens
            and any(ask(server, p, w).json()['meta_info']['cached_tokens'] for p, w in SCRIPT[3:5]))

def test_same_refusals(llm, server):
    for prompt, wishes in WRONG:
        with pytest.raises(ValueError) as e: llm.generate([prompt], SamplingParams(**wishes))
        r = ask(server, prompt, wishes)
        assert (r.status_code, r.json()['error']['message']) == (400, str(e.value)), (prompt, wishes)

def test_same_counts(llm, server):
    ours, theirs = llm.stats(), httpx.get(server.url + '/get_server_info').json()
    assert ({k: theirs[k] for k in ('running', 'waiting')} == {k: ours[k] for k in ('running', 'waiting')}
            == dict(running=0, waiting=0))
    assert set(ours['pages']) == set(theirs['pages']) == {'total', 'free', 'evictable', 'protected', 'held'}
    assert ours['pages']['total'] == theirs['pages']['total'] == SETTINGS['num_pages']

def test_same_chat(llm, server):
    dialog = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'What is a page?'}]
    ours = llm.chat(dialog, SamplingParams(temperature=0, max_tokens=40))
    theirs = httpx.post(server.url + '/v1/chat/completions',
                        json=dict(messages=dialog, temperature=0, max_tokens=40), timeout=60).json()
    choice = theirs['choices'][0]
    assert (ours.text, ours.finish_reason) == (choice['message']['content'], choice['finish_reason'])
    assert theirs['usage']['completion_tokens'] == len(ours.token_ids)
