"""Guesses change no token: greedy and sampled, with grammars, stops, penalties and logprobs, in any company,
by every kind of engine; and they end where a request does."""
import gc, itertools, json, re, shutil
from copy import copy
from dataclasses import replace
from time import thread_time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_lit import LLM, SamplingParams, serve
from minisgl_lit.core.config import EngineConfig as CoreConfig
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.request import PendingReq
from minisgl_lit.core.sampling_params import SamplingParams as P
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.assembly import ResolvedConfig
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.engine.assembly import plan_memory
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.runtime import make_draft
from minisgl_lit.testing.toy_engine import ToyEngine, ToyRules, expected_output
from minisgl_lit.speculation.drafts import Speculation, StepCosts, how_far
from minisgl_lit.speculation.ngram import NgramGuesser
from minisgl_lit.text.grammar import GrammarMatcher, GrammarSpec
from minisgl_lit.text.tokenizer import Tokenizer
from minisgl_lit.tools.guesses import Scripted

VOCAB = 50

class Far:
    "Guesses what a toy says, far too far, whatever the end of a request"
    def __init__(self, n=9): self.n, self.told = n, []
    def wants(self, reqs): return True
    def propose(self, reqs):
        return [np.array(expected_output(o.pending.input_ids.tolist(), self.n, VOCAB)) for o in reqs]
    def learn(self, reqs, proposed, accepted): self.told += zip(proposed, accepted)

def toy(grammar=None, rows=2, longest=24, **settings):
    table = TableManager(rows, longest, 2, dummy_page=40)
    engine = ToyEngine(table.page_table, table.token_pool, 2, 40, VOCAB)
    clock = map(float, itertools.count()).__next__
    return Scheduler(engine, CacheManager(40, table, RadixCache(2)), VOCAB, clock, CoreConfig(**settings),
                     rules=ToyRules(grammar) if grammar else None, drafter=Far())

def served(s, *prompts, **params):
    asked = [s.add(str(i), o, P(**params)) for i, o in enumerate(prompts)]
    errors = [o.error for _ in itertools.takewhile(lambda _: s.has_work, itertools.count())
              for o in s.step() if o.error]
    s.self_check()
    return [o.output_ids.tolist() for o in asked], errors

@pytest.mark.parametrize('n', [1, 2, 5, 20])
def test_guesses_end_where_their_request_does(n):
    "Up to the last token of the longest sequence there is; and nothing is computed that nobody needs"
    s = toy()
    answers, errors = served(s, [1, 2, 3, 4], [5, 6, 7, 8], max_tokens=n)
    assert answers == [expected_output(o, n, VOCAB) for o in ([1, 2, 3, 4], [5, 6, 7, 8])] and not errors
    # the first token comes from the prompt, and a step makes one without a guess
    assert sum(a + 1 for _, a in s.drafter.told) <= 2*(n - 1)
    assert [a for a, b in s.drafter.told] == [b for a, b in s.drafter.told]

class Even:
    "Even tokens only; it fails in a text that has `fails` tokens, and says how far it was led"
    def __init__(self, pending, fails=99, forks=True): self.n, self.fails, self.forks = 0, fails, forks
    def mask(self, out):
        if self.n == self.fails: raise ValueError('nothing goes on from here')
        out[:] = 0x55555555
    def accept(self, token):
        self.n += 1
        return False
    def fork(self): return copy(self) if self.forks else None

def test_a_guess_that_a_grammar_cannot_follow_harms_nobody():
    "It fails behind a token that is only guessed: if another one comes, that must not have been an error"
    right, _ = served(toy(Even), [1, 2, 3], max_tokens=9)
    s = toy(lambda pending: Even(pending, fails=4))
    s.drafter.propose = lambda reqs: [np.array([right[0][o.pending.n_tokens - 3], 1, 1, 1, 1]) for o in reqs]
    answers, errors = served(s, [1, 2, 3], max_tokens=4)   # the fifth would fail
    assert answers == [right[0][:4]] and not errors and sum(a for a, _ in s.drafter.told) > 0
    answers, errors = served(toy(lambda pending: Even(pending, fails=4)), [1, 2, 3], max_tokens=9)
    assert answers == [right[0][:4]] and len(errors) == 1

def test_where_a_grammar_cannot_be_led_ahead_nothing_is_guessed():
    s = toy(lambda pending: Even(pending, forks=False))
    s.drafter.propose = lambda reqs: [np.array([right[o.pending.n_tokens - 3]] * 3) for o in reqs]
    [right], _ = served(toy(Even), [1, 2, 3], max_tokens=9)
    assert served(s, [1, 2, 3], max_tokens=9)[0] == [right] and not s.counts['drafted_tokens']
    assert {*s.drafter.told} <= {(o, 0) for o in range(4)}   # it is told that they were of no use

def test_every_guess_is_told_of():
    s = toy()
    s.drafter.propose = lambda reqs: [np.array([], dtype=np.int64) if o.rid == '0' else
        np.array(expected_output(o.pending.input_ids.tolist(), 1, VOCAB) + [49, 49]) for o in reqs]
    served(s, [1, 2, 3], [4, 5], max_tokens=8)
    assert {*s.drafter.told} <= {(0, 0), (3, 1), (2, 1), (1, 1)} and (3, 1) in s.drafter.told
    assert s.counts['drafted_tokens'] == sum(a for a, _ in s.drafter.told)
    assert s.counts['accepted_tokens'] == sum(b for _, b in s.drafter.told)

def test_what_is_computed_again_was_not_guessed():
    "The numbers behind right guesses were NaN, so their tokens never came"
    s = toy()
    [right], _ = served(s, [1, 2, 3, 4], max_tokens=12)
    sample, spoiled = s.engine.sample, []
    def spoil(batch, *more):
        output = sample(batch, *more)
        if batch.drafts is not None and not spoiled:
            spoiled.append(batch)
            output.finite[:] = False
        return output
    s.engine.sample = spoil
    pending, before = s.add('again', [1, 2, 3, 4], P(max_tokens=12)), s.counts['accepted_tokens']
    while s.has_work: s.step()
    # three were not guessed: the first, the one that came when all was computed again, and the last
    assert spoiled and pending.output_ids.tolist() == right
    assert s.counts['accepted_tokens'] - before == 9 and pending.drafted_tokens > 9

# --- real models

class Seldom:
    "Guesses n-grams, and now and then nonsense"
    def __init__(self): self.ngrams, self.calls = NgramGuesser(), 0
    def guess(self, pendings, most):
        self.calls += 1
        guesses = self.ngrams.guess(pendings, most)
        return [o if len(o) and self.calls % 3 else np.full(min(n, 3), self.calls % 90)
                for o, n in zip(guesses, most)]

class Always(Speculation):
    "Guesses whether it pays or not"
    def wants(self, reqs): return True
    def propose(self, reqs):
        return self.guesser.guess([o.pending for o in reqs], [1 + len(self.chances) % 5]*len(reqs))

TEXT = 'name: ann, age: 31\nname: bob, age: 32\nname: '
ASKED = [(TEXT, dict(max_tokens=40)), (TEXT*2, dict(max_tokens=30, temperature=1., seed=3)),
         ('one two one two one', dict(max_tokens=30, ignore_eos=True, logprobs=2)),
         ('a', dict(max_tokens=24, ignore_eos=True, presence_penalty=.7, frequency_penalty=.2, logprobs=1)),
         (TEXT, dict(max_tokens=40, stop=['2\n', 'bo'])), (TEXT, dict(max_tokens=30, min_tokens=20)),
         (TEXT, dict(max_tokens=24, regex=r'(ab|ba)+[0-9]{4}')),
         (TEXT, dict(max_tokens=40, json_schema='{"type": "array", "items": {"type": "integer"}}')),
         (TEXT, dict(max_tokens=16, ignore_eos=True, temperature=.8, top_p=.8, top_k=9, seed=5,
                     repetition_penalty=1.2)), (TEXT, dict(max_tokens=0)), ('b', dict(max_tokens=1))]

def answers(monkeypatch, speculation, **settings):
    monkeypatch.setattr('minisgl_lit.runtime.Speculation', Always)
    plain = dict(dtype='float32', num_pages=400, max_running_req=16, speculation=speculation)
    with LLM(**plain | settings) as llm:
        out = llm.generate([o for o, _ in ASKED], [SamplingParams(**p) for _, p in ASKED])
        counts = llm.runtime.scheduler.counts
        llm.runtime.scheduler.self_check()
    told = [o.logprobs or () for o in out]
    likeliest = [[(t.token, [i for i, _ in t.top]) for t in each] for each in told]
    said = [(o.text, o.token_ids, str(o.finish_reason), top) for o, top in zip(out, likeliest)]
    return said, np.array([t.logprob for each in told for t in each]), counts

@pytest.fixture(scope='module')
def alone():
    with pytest.MonkeyPatch.context() as patch: return answers(patch, 'off')

@pytest.mark.parametrize('settings', [
    dict(), dict(overlap=True), dict(page_size=1, num_pages=4000), dict(attention='torch'),
    dict(cuda_graph_max_bs=0), dict(mixed_chunk=True, chunked_prefill_size=16), dict(max_running_req=3),
    dict(cache='none', page_size=5, num_pages=900), dict(tp=2)],
    ids=lambda o: ' '.join(f'{k}={v}' for k, v in o.items()) or 'as it is')
def test_no_answer_is_changed(alone, monkeypatch, settings):
    said, logprobs, counts = answers(monkeypatch, 'test_speculation:Seldom', **settings)
    assert said == alone[0]
    np.testing.assert_allclose(logprobs, alone[1], atol=2e-4)
    assert 0 < counts['accepted_tokens'] < counts['drafted_tokens'] and not alone[2]['drafted_tokens']

PENALIZED = [dict(presence_penalty=.9), dict(frequency_penalty=.6, temperature=1.),
             dict(repetition_penalty=1.4), dict(logit_bias={7: 2.}, temperature=.7),
             dict(stop=['ezq', 'tzq', ' q', 'aq']), dict(stop=['ezq', 'nzq', 'sq', ' zq'], temperature=1.)]

class Sure(Speculation):
    "Guesses five tokens, in two steps of three"
    calls = 0
    def wants(self, reqs):
        self.calls += 1
        return self.calls % 3 > 0
    def propose(self, reqs): return self.guesser.guess([o.pending for o in reqs], [5]*len(reqs))

@pytest.mark.parametrize('settings', [dict(), dict(overlap=True), dict(cuda_graph_max_bs=0)], ids=str)
def test_no_answer_is_changed_where_most_guesses_are_right(settings):
    "What reads the tokens before reads guesses; and callers get in order what several come in one step"
    asked = [(f'{i}: {TEXT}', SamplingParams(**dict(max_tokens=40, seed=i, ignore_eos=True) | p))
             for i, p in enumerate(PENALIZED * 3)]
    with LLM(dtype='float32', num_pages=900, max_running_req=4, **settings) as llm:
        def said(): return [(o.text, o.token_ids) for o in llm.generate(*map(list, zip(*asked)))]
        right, scheduler = said(), llm.runtime.scheduler
        answers = {np.array(llm.tokenizer.encode(o), np.int32).tobytes(): np.array(ids)
                   for (o, _), (_, ids) in zip(asked, right)}
        scheduler.drafter = Sure(Scripted(answers, .9), StepCosts((1, 2), (1., 1.)))
        assert said() == right and scheduler.counts['accepted_tokens'] > 300

@pytest.mark.parametrize('settings', [dict(), dict(overlap=True)], ids=str)
def test_guesses_count_where_their_tokens_do(settings):
    "Of five right guesses and a token of the model's own in a step; what stands behind a stop is none"
    usual, prompts = dict(max_tokens=40, ignore_eos=True), [f'{i}: {TEXT}' for i in range(8)]
    with LLM(dtype='float32', num_pages=900, max_running_req=4, **settings) as llm:
        whole = llm.generate(prompts, SamplingParams(**usual | dict(max_tokens=50)))
        stops = [re.escape(o.text[3*i:3*i + 3]) for i, o in enumerate(whole)]
        more = [dict(), dict(max_tokens=20), dict(max_tokens=1), dict(logprobs=1),
                *(dict(stop=stops[i]) for i in (4, 5)), *(dict(stop_regex=stops[i]) for i in (6, 7))]
        asked = [SamplingParams(**usual | o) for o in more]
        def served(): return [llm.generate(*o)[0] for o in zip(prompts, asked)]
        answers = {np.array(llm.tokenizer.encode(o), np.int32).tobytes(): np.array(a.token_ids)
                   for o, a in zip(prompts, whole)}
        right, scheduler = served(), llm.runtime.scheduler
        assert not any(o.drafted_tokens or o.accepted_tokens for o in right)
        scheduler.drafter = Sure(Scripted(answers, 1.), StepCosts((1, 2), (1., 1.)))
        scheduler.drafter.wants = lambda reqs: True
        outs, counts = served(), scheduler.counts
    for a, b in zip(outs, right):
        n = a.completion_tokens - 1   # the first token comes from the prompt
        steps = -(-n//6) if a.finish_reason == 'length' else n//6   # whose last token counts
        assert (a.text, a.finish_reason, a.accepted_tokens) == (b.text, b.finish_reason, n - steps)
    assert sum(o.matched is not None for o in outs) > 1
    assert counts['accepted_tokens'] == sum(o.accepted_tokens for o in outs) > 60
    assert counts['drafted_tokens'] == sum(o.drafted_tokens for o in outs)

def test_usage_and_metrics_tell_the_same():
    with serve(port=0, speculation='ngram', dtype='float32', num_pages=900, log_interval=0) as server:
        def ask(path, **body):
            return httpx.post(f'{server.url}/{path}', json=body, timeout=60).raise_for_status().json()
        more, found = dict(max_tokens=150, temperature=0, ignore_eos=True), []
        chat = dict(messages=[dict(role='user', content=TEXT)], **more)
        for answer in (ask('v1/completions', prompt=[TEXT, 'a'*9], **more),
                       ask('v1/completions', prompt=TEXT, stop=' q', **more),
                       ask('v1/chat/completions', n=2, **chat)):
            details = answer['usage']['completion_tokens_details']
            accepted = details.get('accepted_prediction_tokens', 0)
            found.append((accepted, accepted + details.get('rejected_prediction_tokens', 0)))
            assert accepted <= answer['usage']['completion_tokens']
        meta = ask('generate', text=TEXT, sampling_params=dict(max_new_tokens=150, ignore_eos=True,
                                                               temperature=0))['meta_info']
        found.append((meta.get('spec_accept_token_num', 0), meta.get('spec_draft_token_num', 0)))
        text = httpx.get(f'{server.url}/metrics').text
        told = [float(re.search(rf'^minisgl:{o}_tokens_total.* (\S+)$', text, re.M)[1])
                for o in ('accepted', 'draft')]
        assert told == np.sum(found, axis=0).tolist() and told[0] > 0

class Eager(Speculation):
    "Guesses five tokens in each step"
    def wants(self, reqs): return True
    def propose(self, reqs): return self.guesser.guess([o.pending for o in reqs], [5]*len(reqs))

@pytest.fixture
def eager(monkeypatch):
    "A model that guesses from its cache, and how it answers: tokens, and how many of them were guessed"
    monkeypatch.setattr('minisgl_lit.runtime.Speculation', Eager)
    with LLM(dtype='float32', num_pages=900, page_size=4, speculation='ngram_cache') as llm:
        def asked(prompt='Tell me of pages. ', **params):
            usual = dict(max_tokens=60, temperature=3., ignore_eos=True, seed=1)
            [out] = llm.generate(prompt, SamplingParams(**usual | params))
            return out.token_ids, out.accepted_tokens
        yield llm, asked
        llm.runtime.scheduler.self_check()

def test_a_text_that_comes_again_is_guessed(eager):
    "but for its last page; not by another namespace, nor once it is flushed"
    llm, asked = eager
    said, n = asked()
    assert n < 15   # the n-grams of its own
    # of six tokens a step the last is never a guess
    assert asked() == (said, pytest.approx(50, abs=3))
    for key in 'bank', 'shop': assert asked(extra_key=key) == (said, n)
    assert asked(extra_key='bank') == (said, pytest.approx(50, abs=3))
    llm.runtime.scheduler.flush_cache()
    assert asked(extra_key='bank') == (said, n)
    other, n = asked(seed=2)   # the beginning may be the same, by chance
    assert other != said and n < 15

def test_guesses_from_the_cache_change_no_answer(alone, eager):
    llm, _ = eager
    for k in range(3):
        out = llm.generate([o for o, _ in ASKED], [SamplingParams(**p) for _, p in ASKED])
        assert [(o.text, o.token_ids, str(o.finish_reason)) for o in out] == [o[:3] for o in alone[0]], k
    assert llm.runtime.scheduler.counts['accepted_tokens'] > 400

def test_a_guesser_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=re.escape("speculation must be 'off'")): LLM(speculation='oracle')

def test_masks_behind_guesses_are_charged():
    "A grammar that is slow is so for what it is led through, too"
    spec = GrammarSpec('regex', 'a*')
    class Slow:
        def deep_copy(self): return self
        def unsafe_compute_mask_ptr(self, at, n): spin(.02)
        def is_error(self): return False
        def is_accepting(self): return True
    matcher, out = GrammarMatcher(Slow(), spec, 1, {1}, ()), np.zeros(1, np.int32)
    for _ in range(5): matcher.fork().mask(out)
    late = matcher._late[0]
    matcher.fork().mask(out)
    assert matcher._late[0] > late > 0

def spin(seconds):
    end = thread_time() + seconds
    while thread_time() < end: pass

def test_who_finds_nothing_to_guess_is_not_waited_for():
    "After a few steps it looks on, which holds up no step"
    s = Speculation(NgramGuesser(), StepCosts((1, 2), (1., 1.1)))
    pending = PendingReq('a', np.arange(4), P(), 2000)
    req, wanted = SimpleNamespace(pending=pending), 0
    for token in range(100, 200):
        if s.wants([req]):
            wanted += 1
            assert not len(s.propose([req])[0])
        pending.append(token)
    assert 0 < wanted < 9, wanted

class Nonsense:
    def guess(self, pendings, most): return [np.full(n, 7) for n in most]

def test_a_wrong_guess_costs_its_row_alone():
    "Where none comes true, so few are computed that they cost a hundredth"
    s = Speculation(Nonsense(), StepCosts((1, 2), (1., 1.1)))
    pending = PendingReq('a', np.array([1]), P(), 2000)
    req, computed = SimpleNamespace(pending=pending), 0
    for _ in range(1000):
        if s.wants([req]):
            [guess] = s.propose([req])
            s.learn([req], [len(guess)], [0])
            computed += len(guess)
        pending.append(3)
    assert .1*computed < 10, computed

# --- a draft model

@pytest.fixture(scope='module')
def random_draft(tmp_path_factory):
    "A model of one layer that says the same tokens by chance"
    path = tmp_path_factory.mktemp('draft')/'model'
    shutil.copytree(embedded_path(), path)
    change(path, num_hidden_layers=1, layer_types=['full_attention'])
    torch.manual_seed(0)
    save_file({name: torch.randn_like(o)*.05 for name, o in load_file(path/'model.safetensors').items()
               if '.layers.' not in name or '.layers.0.' in name}, path/'model.safetensors')
    return path

def change(path, **fields):
    file = path/'config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))

def nothing_left(guesser):
    "No request has a row or a page there any more"
    gc.collect()
    guesser.guess([], [])
    guesser.cache.check_integrity()
    counts = guesser.cache.page_counts
    return not guesser.reqs and counts['held'] == counts['protected'] == 0 \
        and guesser.table.available_size == guesser.table.dummy_row

@pytest.mark.parametrize('settings', [
    dict(overlap=True), dict(cache='none', page_size=1, num_pages=4000),
    dict(mixed_chunk=True, chunked_prefill_size=16, num_pages=50, admission='optimistic'),
    dict(max_running_req=3, attention='torch', cuda_graph_max_bs=0)],
    ids=lambda o: ' '.join(f'{k}={v}' for k, v in o.items()))
def test_no_answer_is_changed_by_a_draft(alone, monkeypatch, settings):
    said, logprobs, counts = answers(monkeypatch, 'draft:embedded', **settings)
    assert said == alone[0]
    np.testing.assert_allclose(logprobs, alone[1], atol=2e-4)
    assert .5*counts['drafted_tokens'] < counts['accepted_tokens']

def test_no_answer_is_changed_by_a_draft_that_is_always_wrong(alone, monkeypatch, random_draft):
    said, _, counts = answers(monkeypatch, f'draft:{random_draft}')
    assert said == alone[0] and counts['accepted_tokens'] < .2*counts['drafted_tokens']

@pytest.fixture(scope='module')
def own():
    "The embedded model with itself as its draft, which it asks in each step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('minisgl_lit.runtime.Speculation', Always)
        with LLM(dtype='float32', num_pages=200, max_running_req=4,
                 speculation='draft:embedded') as llm: yield llm

@pytest.mark.parametrize('temperature', [0., 1.])
def test_a_model_guesses_itself(own, temperature):
    before = dict(own.runtime.scheduler.counts)
    own.generate([TEXT, 'a', 'one two', TEXT*3, 'b'],
                 SamplingParams(max_tokens=30, temperature=temperature, ignore_eos=True, seed=7))
    drafted, accepted = (own.runtime.scheduler.counts[o] - before[o]
                         for o in ('drafted_tokens', 'accepted_tokens'))
    assert drafted > 80 and accepted > .95*drafted
    assert nothing_left(own.runtime.scheduler.drafter.guesser)

def test_what_ends_midway_leaves_nothing_in_the_draft(own):
    "Aborted, retracted, or ended by itself; others go on as if they were alone"
    s, asked = own.runtime.scheduler, dict(max_tokens=40, ignore_eos=True, temperature=0., seed=1)
    ids = [own.tokenizer.encode(TEXT), own.tokenizer.encode('b'), own.tokenizer.encode('one two')]
    right = own.generate([ids[1].tolist()], SamplingParams(**asked))[0].token_ids
    guesser = s.drafter.guesser
    a, b, c = (s.add(o, i, P(**asked | more))
               for o, i, more in zip('abc', ids, [{}, {}, dict(max_tokens=16)]))
    for _ in range(3): s.step()
    assert len(guesser.reqs) == 3
    s.abort('a')
    s.pause('retract')
    for _ in range(2): s.step()
    guesser.guess([], [])
    assert not guesser.reqs and b.req is None
    s.resume()
    while s.has_work: s.step()
    assert b.output_ids.tolist() == right and len(c.output_ids) == 16
    del a, b, c
    assert nothing_left(guesser)

@pytest.mark.parametrize('why, changes', [
    ('it has 1024 tokens and the served model 1536; give a smaller model', dict(vocab_size=1024)),
    ('its tokens are others than those of the served model; give', dict(swap=(575, 731))),
    ('has no head', dict(architectures=['Qwen3Model'])), ('there is no such folder', dict(missing=True)),
    ('is not served', dict(architectures=['NovaForCausalLM']))], ids=str)
def test_a_draft_that_does_not_fit_is_refused(tmp_path, random_draft, why, changes):
    path = tmp_path/'model'
    if 'missing' not in changes: shutil.copytree(random_draft, path)
    if 'swap' in changes:
        file, (a, b) = path/'tokenizer.json', changes['swap']
        said = {a: f': {b},', b: f': {a},'}
        file.write_text(re.sub(f': ({a}|{b}),', lambda o: said[int(o[1])], file.read_text()))
    elif path.exists(): change(path, **changes)
    with pytest.raises(ValueError, match=re.escape(why)) as e: LLM(speculation=f'draft:{path}')
    assert str(e.value).startswith(f"speculation='draft:{path}': ") and '\n' not in str(e.value)

def test_a_draft_that_is_not_named_is_refused():
    with pytest.raises(ValueError, match="^speculation='draft:': behind draft: stands what model= could be"):
        LLM(speculation='draft:')

def test_a_draft_is_refused_in_several_ranks():
    with pytest.raises(ValueError, match="speculation='draft:embedded': a draft model needs tp=1"):
        LLM(speculation='draft:embedded', tp=2, device='cpu')

def test_a_draft_shares_the_memory(monkeypatch, random_draft):
    "As many pages as its target, and what they will take is not planned twice"
    config = EngineConfig(dtype='float32', max_seq_len=64, device='cpu', speculation=f'draft:{random_draft}')
    resolved, tokenizer = ResolvedConfig.of(config), Tokenizer(embedded_path())
    for free, most in (20 << 20, 9999), (1 << 40, 256*4), (1 << 40, 7):
        monkeypatch.setattr('minisgl_lit.assembly.free_memory', lambda *_, free=free: free)
        asked = replace(resolved, config=replace(config, num_pages=7 if most == 7 else None))
        guesser, beside, stream = make_draft(asked, tokenizer, False)
        n, pool = guesser.cache.num_pages, guesser.engine.attention.pool
        assert beside.reserved == (n + 1) * plan_memory(beside, free, 0).page_bytes // 4   # one layer of four
        assert beside.free() == free - beside.reserved and pool.dummy_page == n
        assert stream is guesser.engine.stream
        plan = plan_memory(beside, beside.free() - beside.needed().nbytes, 0)
        assert n <= plan.num_pages + 1 and n <= most and (n == most or n > 50)
    with pytest.raises(ValueError, match=re.escape(f"speculation='draft:{random_draft}': ")):
        monkeypatch.setattr('minisgl_lit.assembly.free_memory', lambda *_: 1000)
        make_draft(resolved, tokenizer, overlap=False)

def test_the_setting_says_draft():
    assert EngineConfig(speculation='draft:some/where').speculation == 'draft:some/where'
    with pytest.raises(ValueError, match="speculation must be 'off', 'draft:PATH', 'ngram'"):
        EngineConfig(speculation='draft')

class Dear(Nonsense):
    "As if it computed, in steps that take a tenth of those that check it; sometimes right"
    calls = 0
    def guess(self, pendings, most):
        self.calls += any(most)
        return super().guess(pendings, most)

def test_what_a_guess_costs_is_counted():
    flat, one = StepCosts((1, 2), (1., 1.)), np.array([.6])
    assert [how_far(one, flat, 8, 64, o).item() for o in (0., .5, .9)] == [8, 1, 0]

@pytest.mark.parametrize('token, most', [(3, 30), (7, 1000)])
def test_a_guesser_that_computes_is_asked_as_often_as_it_pays(token, most):
    "If it is wrong, hardly ever: other requests begin with what is known by then"
    s, tried = Speculation(Dear(), StepCosts((1, 2), (1., 1.1)), StepCosts((1, 2), (.1, .1))), []
    for _ in range(20):
        pending = PendingReq('a', np.array([1]), P(), 2000)
        req = SimpleNamespace(pending=pending)
        for _ in range(50):
            wanted = s.wants([req])
            if wanted:
                [guess] = s.propose([req])
                s.learn([req], [len(guess)], [len(guess)*(token == 7)])
            tried.append(wanted)
            pending.append(token)
    assert sum(tried) <= most and (token == 3 or all(tried))
    looked = s.guesser.calls - sum(tried)
    assert looked == 0 if token == 7 else 50 < looked <= 100   # a hundredth of the time
