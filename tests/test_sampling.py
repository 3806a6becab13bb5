"""Penalties, biases, minimum lengths and log-probabilities equal the reference's, whatever the settings that
must not matter; samplers draw from the right distribution."""
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from minisgl_lit import serve as serve_http
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import (
    Batch, LogitEdits, ForwardOutput, Logprob, SamplingArrays, LogprobResults)
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.runtime import build
from minisgl_lit.core.engine.sampler import (
    apply_mask, apply_logit_edits, logprobs, plan_sampling, sample, top_k_threshold, top_p_threshold)
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.llm import LLM
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output, nan_hash, prefix_hashes
from reference import load, make_checkpoint, prompts

EOS, MAX_NEW = 198, 12

# ---- the choice is the chance that was asked for

N = 8_000
LOGITS = np.array([1.5, -2, .3, 2, 0, -.5, 1, -4, .8, 1.9])

def by_the_book(logits, temperature=1., top_k=0, top_p=1., min_p=0.):
    "The distribution, token by token"
    p = np.exp(logits / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k: p[order[top_k:]] = 0
    held = np.cumsum(p[order]) / p.sum()
    p[order[np.searchsorted(held, top_p) + 1:]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()

def chi2_ok(tokens, p):
    """Whether so many choices stray no further than one fair experiment in ten thousand does (Wilson and
    Hilferty)"""
    counts, some = np.bincount(tokens, minlength=len(p)), p > 0
    assert counts[~some].sum() == 0, 'a token of probability 0 was sampled'
    expected, df = counts.sum() * p[some], some.sum() - 1
    chi2 = ((counts[some] - expected)**2 / expected).sum()
    return chi2 < df * (1 - 2/(9*df) + 3.72 * (2/(9*df))**.5)**3 if df else True

def settings_of(n, **params):
    "So many rows with these sampling parameters, and the seeds 0, 1, 2, …"
    s = SamplingArrays.empty(1)
    s.put(0, SamplingParams(**params).resolve({}))
    return SamplingArrays(s.at(np.zeros(n, int)), seed=np.arange(n))

def choose(logits, **params):
    return sample(torch.tensor(logits, dtype=torch.float32).expand(N, -1),
                  plan_sampling(settings_of(N, **params), np.full(N, 3)))[0].numpy()

FILTERS = [dict(), dict(temperature=.5), dict(temperature=3.), dict(top_k=1), dict(top_k=4), dict(top_p=.8),
           dict(top_p=.3), dict(min_p=.3),
           dict(top_k=6, top_p=.7), dict(top_p=.9, min_p=.2),
           dict(temperature=1.5, top_k=6, top_p=.9, min_p=.2)]

@pytest.mark.parametrize('params', FILTERS, ids=str)
def test_each_filter_samples_what_it_says(params):
    right = by_the_book(LOGITS, **params)
    assert chi2_ok(choose(LOGITS, **params), right)
    if (right > 0).sum() > 1:
        assert not chi2_ok(choose(LOGITS + .25 * params.get('temperature', 1.) * (np.arange(10) == 3),
                                  **params), right), 'the test sees nothing'

def test_edits_change_the_distribution_as_they_say():
    "Repetition, presence, frequency and a bias, then sampling: chi-squared against the formula"
    pool = torch.tensor([[3, 1, 0, 0, 5, 9]])      # a prompt of two, an answer of three, and a stale token
    right = LOGITS.copy()
    for t in {3, 1, 0, 5}: right[t] = right[t] / 1.5 if right[t] > 0 else right[t] * 1.5
    for t in (0, 5): right[t] -= .25
    for t in (0, 0, 5): right[t] -= .125
    right[8], right[2] = right[8] + 1.5, -np.inf
    logits = torch.tensor(LOGITS, dtype=torch.float32)[None].clone()
    apply_logit_edits(logits, LogitEdits(np.array([0]), np.array([2]), np.float32([[1.5], [.25], [.125]]),
                                         np.array([[0, 0], [8, 2]]), np.float32([1.5, -np.inf])),
         np.array([[0], [5]]), pool)
    assert np.allclose(logits[0], right, atol=1e-6)
    assert chi2_ok(choose(logits[0].numpy(), top_p=.9), by_the_book(right, top_p=.9))

@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=5),
       st.integers(0, 2**30))
def test_penalties_of_ragged_rows(lens, number):
    """Prompts and answers of any length, rows in any order, some without penalties: as the formula has it,
    token by token"""
    g, vocab_size = np.random.default_rng(number), 9
    pool, rows = g.integers(0, vocab_size, (7, 18)), g.permutation(7)[:len(lens)]
    starts, ends = np.array([a for a, _ in lens]), np.array([a + b for a, b in lens])
    who = np.flatnonzero(g.random(len(lens)) < .8)
    penalties = np.float32([g.uniform(.5, 2, len(who)), g.uniform(-2, 2, len(who)),
                            g.uniform(-2, 2, len(who))])
    places = np.array([np.arange(len(lens)), g.integers(0, vocab_size, len(lens))])
    added = np.where(g.random(len(lens)) < .3, -np.inf, g.normal(size=len(lens))).astype(np.float32)
    logits = g.normal(size=(len(lens), vocab_size)).astype(np.float32)
    right = logits.copy()
    for i, (repetition, presence, frequency) in zip(who, penalties.T):
        prompt, answer = np.split(pool[rows[i], :ends[i]], [starts[i]])
        for t in {*prompt, *answer}: right[i, t] *= repetition if right[i, t] < 0 else 1 / repetition
        for t in set(answer): right[i, t] -= presence + frequency * (answer == t).sum()
    right[tuple(places)] += added
    changed = torch.from_numpy(logits)
    apply_logit_edits(changed, LogitEdits(who, starts[who], penalties, places, added), np.stack([rows, ends]),
                      torch.from_numpy(pool.astype(np.int32)))
    assert np.allclose(changed.numpy(), right, atol=1e-5)

@given(st.integers(1, 3), st.integers(1, 300), st.floats(.001, .999), st.floats(.1, 30),
       st.integers(0, 2**30))
def test_nucleus_finds_what_sorting_finds(n, size, top_p, spread, number):
    g = torch.Generator().manual_seed(number)
    probs = torch.softmax(torch.randn(n, size, generator=g).round(decimals=1) * spread, -1)   # with ties
    p, found = torch.full((n, 1), top_p), top_p_threshold(probs, torch.full((n, 1), top_p))
    kept = (probs * (probs >= found)).double().sum(-1)
    less = (probs * (probs > found)).double().sum(-1)
    assert (kept >= p[:, 0] - 1e-6).all() and (less < p[:, 0] + 1e-6).all()
    sorted_ = top_k_threshold(probs, torch.full((n, 1), size), p.double(), size)
    assert ((found == sorted_) | ((kept - p[:, 0]).abs() < 1e-6) | ((less - p[:, 0]).abs() < 1e-6)).all()

@given(st.integers(1, 4), st.integers(1, 100), st.data())
def test_packed_masks(n, vocab_size, data):
    wanted = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=vocab_size, max_size=vocab_size),
                                         min_size=n, max_size=n)))
    words = np.packbits(wanted, axis=1, bitorder='little')
    mask = np.zeros((n, -(-vocab_size // 32) * 4), dtype=np.uint8)
    mask[:, :words.shape[1]] = words
    logits = torch.zeros(n, vocab_size)
    apply_mask(logits, mask.view(np.int32))
    assert np.array_equal(logits.numpy() == 0, wanted)

@given(st.integers(1, 5), st.integers(2, 50), st.integers(0, 2**30))
def test_logprobs_are_log_softmax(n, vocab_size, number):
    g = torch.Generator().manual_seed(number)
    logits, targets = (torch.randn(n, vocab_size, generator=g) * 9,
                       torch.randint(0, vocab_size, (n,), generator=g))
    right, width = logits.log_softmax(-1), min(vocab_size, 7)
    names = torch.randint(0, vocab_size, (n, number % 3), generator=g)
    own, ids, top, named = logprobs(logits, targets, width, names)
    assert torch.allclose(named, right.gather(1, names), atol=1e-5)
    assert torch.allclose(own, right[torch.arange(n), targets], atol=1e-5)
    assert (torch.allclose(top, right.topk(width).values, atol=1e-5)
            and torch.equal(right.gather(1, ids), right.topk(width).values))

def test_greedy_batches_draw_nothing(monkeypatch):
    from minisgl_lit.core.engine import sampler as sampling
    monkeypatch.setattr(sampling, 'sample_random',
                        lambda *a: pytest.fail('a greedy batch was sampled at random'))
    s = settings_of(3)
    for arrays in (SamplingArrays(s, temperature=np.zeros(3, np.float32)),
                   SamplingArrays(s, top_k=np.ones(3, int))):
        assert sample(torch.eye(3), plan_sampling(arrays, np.zeros(3, int)))[0].tolist() == [0, 1, 2]

# ---- a model against transformers, token by token

@pytest.fixture(scope='module')
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp('qwen')
    # flatter than for parity: changes of logits must matter
    make_checkpoint('Qwen3', path, initializer_range=.08)
    return path

PARAMS = [    # one for each of the eight prompts
    dict(repetition_penalty=1.6, logprobs=3, prompt_logprobs=2),
    dict(presence_penalty=1.5, logprobs=0, prompt_logprobs=0, logprob_start_len=35),
    dict(frequency_penalty=1.2, logprobs=5),
    dict(repetition_penalty=1.2, presence_penalty=.5, frequency_penalty=.5, prompt_logprobs=3,
         logprob_start_len=1),
    dict(logit_bias={7: 3., 8: -100.}, logprobs=1),
    dict(min_tokens=6, stop_token_ids=(*range(0, 190, 2),), prompt_logprobs=1, logprob_start_len=20),
    dict(),
    dict(frequency_penalty=-1., logit_bias={EOS: 2.}, min_tokens=3, logprobs=20, prompt_logprobs=20,
         logprob_start_len=48),
]

def params_of(i): return SamplingParams(temperature=0, max_tokens=MAX_NEW, **PARAMS[i])

@torch.inference_mode()
def reference(path, prompt, params):
    """Tokens, and the log-softmax of every token's successor, with the penalty of transformers and plain
    formulas"""
    from transformers import RepetitionPenaltyLogitsProcessor
    model, ids = load(path), list(prompt)
    while True:
        logits = model(torch.tensor([ids])).logits[0]
        made, logs = ids[len(prompt):], logits.log_softmax(-1)
        if (len(made) == params.max_tokens or made and len(made) > params.min_tokens
                and made[-1] in {EOS, *params.stop_token_ids}):
            return made, logs
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty or 1.)(torch.tensor([ids]),
            logits[-1:].clone())[0]
        for t in set(made): logits[t] -= params.presence_penalty + params.frequency_penalty * made.count(t)
        for t, x in (params.logit_bias or {}).items(): logits[t] += x
        if len(made) < params.min_tokens: logits[[EOS, *params.stop_token_ids]] = -torch.inf
        ids.append(int(logits.argmax()))

@pytest.fixture(scope='module')
def right(path):
    "The reference's answers, and the same without any of them"
    asked = [reference(path, o, params_of(i)) for i, o in enumerate(prompts())]
    plain = [reference(path, o, SamplingParams(temperature=0, max_tokens=MAX_NEW))[0] for o in prompts()]
    assert sum(a != b for (a, _), b in zip(asked, plain)) >= 5, 'the sampling parameters must matter'
    return asked

def serve(runtime, prefix, params=params_of):
    "All prompts at once: tokens and log-probabilities told step by step, and the last reply"
    told, last = {}, {}
    for i, prompt in enumerate(prompts()): runtime.scheduler.add(f'{prefix}{i}', prompt, params(i))
    while runtime.scheduler.has_work:
        for o in runtime.scheduler.step():
            assert (o.logprobs is None) == (params(int(o.rid[1:])).logprobs is None) or not o.token_ids
            assert o.logprobs is None or [x.token for x in o.logprobs] == o.token_ids
            tokens, logs = told.setdefault(int(o.rid[1:]), ([], []))
            tokens += o.token_ids
            logs += o.logprobs or []
            if o.finish_reason:
                assert o.error is None, o.error
                last[int(o.rid[1:])] = o
    runtime.scheduler.self_check()
    return told, last

def check_told(told, positions, ids, logs, width, what):
    "Each of these positions once, in order, and the numbers of the reference"
    assert [o.token for o in told] == [ids[p] for p in positions], what
    for o, p in zip(told, positions):
        if p == 0:
            assert (o.logprob, o.top) == (None, []), what
            continue
        best = logs[p - 1].topk(width).values.tolist()
        assert abs(o.logprob - float(logs[p - 1, o.token])) < 2e-4, (what, p, o)
        assert (np.allclose([x for _, x in o.top], best, atol=2e-4)
                and len({t for t, _ in o.top}) == width), (what, p, o)
        assert all(abs(float(logs[p - 1, t]) - x) < 2e-4 for t, x in o.top), (what, p, o)

def check_all(told, last, right, what):
    for i, prompt in enumerate(prompts()):
        (tokens, logs), params, (want, reference_logs) = told[i], params_of(i), right[i]
        assert tokens == want, (what, i)
        ids = [*prompt, *tokens]
        if params.logprobs is not None:
            check_told(logs, range(len(prompt), len(ids)), ids, reference_logs, params.logprobs, (what, i))
        start = params.logprob_start_len or 0
        if params.prompt_logprobs is None: assert last[i].prompt_logprobs is None
        else:
            check_told(last[i].prompt_logprobs, range(start, len(prompt)), ids, reference_logs,
                       params.prompt_logprobs, (what, i))

PLAIN = dict(page_size=4, num_pages=400)
COMBOS = [
    PLAIN, PLAIN | dict(page_size=16, max_prefill_tokens=16), PLAIN | dict(overlap=True),
    PLAIN | dict(overlap=True, max_prefill_tokens=7), PLAIN | dict(cache='none', mixed_chunk=True,
        max_prefill_tokens=12), PLAIN | dict(overlap=True, mixed_chunk=True, chunked_prefill_size=9),
    dict(page_size=1, num_pages=80, admission='optimistic', schedule_conservativeness=.05),
    dict(page_size=4, num_pages=20, admission='optimistic', schedule_conservativeness=.05, overlap=True,
         max_prefill_tokens=9),
    dict(page_size=4, num_pages=20, admission='optimistic', schedule_conservativeness=.05, overlap=True,
         mixed_chunk=True, max_prefill_tokens=30)]

@pytest.mark.parametrize('combo', COMBOS, ids=str)
def test_same_as_transformers(path, right, combo):
    "Twice: the second time much is in the cache, but nothing that is to be told"
    runtime = build(EngineConfig.of(path, **combo, max_running_req=6, device='cpu', dtype='float32'))
    for prefix in 'xy':
        told, last = serve(runtime, prefix)
        check_all(told, last, right, (combo, prefix))
    if combo.get('cache') != 'none':
        assert last[2].cached_tokens == 0 and sum(o.cached_tokens for o in last.values()) > 0
        for i in (0, 1, 3, 5, 7):
            assert last[i].cached_tokens < max(params_of(i).logprob_start_len or 0, 1), i
    if combo.get('admission') == 'optimistic': assert runtime.scheduler.counts['retracted'] > 0
    runtime.close()

def test_scoring_alone(path, right):
    "max_tokens=0: the prompt is told and nothing is made; in pieces, and again behind what is cached"
    with LLM(path, device='cpu', page_size=4, num_pages=100, max_prefill_tokens=7) as llm:
        for start in (0, 0, 9, 49):
            params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprob_start_len=start)
            out = llm.generate(prompts()[4], params)[0]
            assert (out.token_ids, out.logprobs, out.finish_reason) == ([], None, 'length')
            check_told(out.prompt_logprobs, range(start, 50), prompts()[4], right[4][1], 1, start)

def test_output_has_them_too(path, right):
    "Through `LLM`, whole and in pieces"
    with LLM(path, device='cpu', num_pages=100) as llm:
        out = llm.generate([prompts()[0]], params_of(0))[0]
        pieces = list(llm.stream(prompts()[0], params_of(0)))
    assert out.token_ids == right[0][0] == [o.token for o in out.logprobs] == [o.token for p in pieces
        for o in p.logprobs]
    assert len(out.prompt_logprobs) == len(prompts()[0]) == len(pieces[-1].prompt_logprobs)

CHANCE = [dict(temperature=1.), dict(temperature=.7, top_k=20), dict(top_p=.8, repetition_penalty=1.3),
          dict(min_p=.05, presence_penalty=1.),
          dict(temperature=2., top_p=.9, frequency_penalty=.5), dict(top_k=5, logit_bias={3: 4.}),
          dict(temperature=0), dict(min_tokens=5, logprobs=2)]

def test_alone_or_among_sixteen(path):
    "float32: the same tokens, whoever else is there"
    asked = [(prompts()[i % 8], SamplingParams(max_tokens=MAX_NEW, seed=i, **CHANCE[i % 7 if i > 7 else i]))
             for i in range(16)]
    with LLM(path, device='cpu', page_size=4, num_pages=600, cache='none') as llm:
        together = llm.generate([p for p, _ in asked], [w for _, w in asked])
        by_itself = [llm.generate(p, w)[0] for p, w in asked]
    assert [o.token_ids for o in together] == [o.token_ids for o in by_itself]
    assert len({tuple(o.token_ids) for o in together}) > 10

def test_seeded_answers_survive_retraction(path):
    asked = [(o, SamplingParams(max_tokens=MAX_NEW, seed=i, ignore_eos=True, **CHANCE[i]))
             for i, o in enumerate(prompts())]
    answers = []
    for sizes in (dict(num_pages=600),
                  dict(num_pages=20, admission='optimistic', schedule_conservativeness=.05, overlap=True)):
        with LLM(path, device='cpu', page_size=4, **sizes) as llm:
            answers.append([o.token_ids for o in llm.generate([p for p, _ in asked], [w for _, w in asked])])
            retracted = llm.stats()['retracted']
    assert answers[0] == answers[1] and retracted

def test_a_checkpoint_may_advise_a_repetition_penalty(tmp_path):
    import json
    make_checkpoint('Qwen3', tmp_path, initializer_range=.08)
    (tmp_path/'generation_config.json').write_text(json.dumps(dict(repetition_penalty=1.6, eos_token_id=EOS)))
    greedy = SamplingParams(temperature=0, max_tokens=MAX_NEW)
    asked = replace(greedy, repetition_penalty=1.6)
    with LLM(tmp_path, device='cpu', num_pages=100) as llm: out = llm.generate(prompts()[0], greedy)[0]
    assert (out.token_ids == reference(tmp_path, prompts()[0], asked)[0]
            != reference(tmp_path, prompts()[0], greedy)[0])

def test_refusals(path):
    with LLM(path, device='cpu', num_pages=100) as llm:
        for params, message in [(dict(logit_bias={199: 1.}),
                                 'token id 199 in logit_bias is outside the vocabulary, 0 to 198'),
                                (dict(prompt_logprobs=1, logprob_start_len=3),
                                 'logprob_start_len=3 must be less than the length of the prompt, 3'),
                                (dict(min_tokens=1, stop_token_ids=range(199)), 'has them all')]:
            params = {k: list(v) if isinstance(v, range) else v for k, v in params.items()}
            with pytest.raises(RequestError, match=message): llm.generate([1, 2, 3], SamplingParams(**params))

def test_stop_strings_wait_for_min_tokens():
    "The embedded model: the text before is not cut, and the first match after it ends"
    with LLM() as llm:
        plain = llm.generate('The page', SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        late = llm.generate('The page',
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop='e', min_tokens=20))[0]
        pieces = list(llm.stream('The page',
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop='e', min_tokens=20)))
    assert (late.finish_reason == 'stop' and len(late.token_ids) > 20 and 'e' in late.text
            and plain.text.startswith(late.text + 'e'))
    assert ''.join(p.text for p in pieces) == late.text

# ---- random lives of a server, with a toy that knows how likely everything is

VOCAB = 13

def toy_logprob(hash_before: np.uint64, token: int) -> float:
    "What the toy says of a token after a prefix; nothing, if its keys and values have lost their numbers"
    if hash_before == nan_hash: return float('nan')
    return -float((int(hash_before) >> 40) % 9973 + token)

class TalkingToy(ToyEngine):
    "A toy engine that answers reports, from the keys and values it has"
    def sample(self, batch: Batch, launched, mask=None) -> ForwardOutput:
        r = batch.logprob_requests
        if r is None: return super().sample(batch, launched, mask)
        told = LogprobResults(np.zeros(len(r.sampled) + len(r.tokens), np.float32),
                              *(np.zeros((len(r.sampled) + len(r.tokens), 0)),)*3)
        output = ForwardOutput(np.full(len(batch.sampled), -1), np.zeros(len(batch.sampled), bool), None,
                               told)
        def work():
            self._sample(launched, output.next_tokens, output.finite, mask)
            hashes = [*launched.hashes[batch.sampled[r.sampled]], *self.kv.hash[batch.out_loc[r.tokens]]]
            told.logprobs[:] = [toy_logprob(h, t)
                                for h, t in zip(hashes, [*output.next_tokens[r.sampled], *r.targets])]
        self.stream.submit(work)
        launched.done = output.copy_done = self.stream.record()
        return output

@settings(max_examples=80)
@given(st.data())
def test_nothing_is_told_twice(data):
    """Random prompts that share beginnings, random settings, aborts, lost numbers and a lagging engine;
    everything is told once and right"""
    draw = data.draw
    page_size, overlap, rng = (draw(st.integers(1, 5)), draw(st.booleans()),
                               random.Random(draw(st.integers(0, 2**30))))
    num_pages = -(-36 // page_size) + draw(st.integers(0, 6))
    table, stream = TableManager(draw(st.integers(1, 5)), 36, page_size, dummy_page=num_pages), ManualStream()
    cache = CacheManager(num_pages, table,
                         make_prefix_cache(draw(st.sampled_from(['radix', 'none'])), page_size))
    budget = draw(st.integers(1, 30))
    config = EngineConfig(page_size=page_size, num_pages=num_pages, overlap=overlap, admission='optimistic',
                          schedule_conservativeness=.05,
                          mixed_chunk=draw(st.booleans()), max_prefill_tokens=budget,
                          chunked_prefill_size=draw(st.integers(1, budget)))
    s = Scheduler(TalkingToy(table.page_table, table.token_pool, page_size, num_pages, VOCAB, stream), cache,
                  VOCAB, float, config, {5})
    asked, told, ends, n, faulty = {}, {}, {}, draw(st.integers(1, 8)), draw(st.booleans())
    while len(asked) < n or s.has_work:
        if len(asked) < n and rng.random() < .4:
            rid, prompt = (str(len(asked)),
                           ([1, 2, 3, 4]*4)[:rng.randint(0, 16)] + rng.choices([1, 2], k=rng.randint(1, 4)))
            start = rng.choice([None, rng.randrange(len(prompt))])
            prompt_logprobs = rng.choice([None, 0, 0])
            max_tokens = rng.randint(0, 12)
            params = SamplingParams(max_tokens=max_tokens, min_tokens=rng.choice([0, max_tokens // 2]),
                                    temperature=0, logprobs=rng.choice([None, 0]),
                                    prompt_logprobs=prompt_logprobs,
                                    logprob_start_len=start if prompt_logprobs == 0 else None)
            s.add(rid, prompt, params)
            asked[rid], told[rid] = (prompt, params), ([], [])
        if s.alive and rng.random() < .03: s.abort(rng.choice(list(s.alive)))
        if s.alive and faulty and rng.random() < .1: s.engine.nan_rids.add(rng.choice(list(s.alive)))
        if rng.random() < .3: stream.run_next()
        for o in s.step() if s.has_work else ():
            assert o.rid not in ends
            told[o.rid][0].extend(o.token_ids)
            told[o.rid][1].extend(o.logprobs or [])
            if o.finish_reason: ends[o.rid] = o
    s.self_check()
    for rid, (prompt, params) in asked.items():
        tokens, logs = told[rid]
        # the toy says its end token when it likes, but nothing ends before `min_tokens`
        right = expected_output(prompt, params.max_tokens, VOCAB)
        end = next((i for i, t in enumerate(right) if t == 5 and i >= params.min_tokens), len(right))
        right = right[:end + 1]
        ids = [*prompt, *tokens]
        hashes = prefix_hashes(ids)
        def at(p):
            return Logprob(ids[p], float(np.float32(toy_logprob(hashes[p - 1], ids[p]))) if p else None, [])
        cut = ends[rid].finish_reason in ('abort', 'error')
        assert tokens == right[:len(tokens)] and (cut or len(tokens) == len(right))
        assert ends[rid].error is None or faulty and 'no finite logits' in ends[rid].error, ends[rid].error
        assert logs == ([at(p) for p in range(len(prompt), len(ids))] if params.logprobs == 0 else [])
        if params.prompt_logprobs is None:
            assert ends[rid].prompt_logprobs is None
            continue
        known = ends[rid].prompt_logprobs
        assert known == [at(p) for p in range(len(prompt))][params.logprob_start_len or 0:][:len(known)]
        assert cut or len(known) == len(prompt) - (params.logprob_start_len or 0)

# ---- over HTTP

@pytest.fixture(scope='module')
def client():
    import openai
    with serve_http(port=0, num_pages=256, max_seq_len=256, device='cpu') as server:
        with openai.OpenAI(base_url=server.url + '/v1', api_key='x', max_retries=0) as client: yield client

def test_chat_logprobs(client):
    asked = dict(model=client.models.list().data[0].id,
                 messages=[{'role': 'user', 'content': 'What is a page?'}], temperature=0, max_tokens=12,
                 logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked).choices[0]
    content = whole.logprobs.content
    assert len(content) >= 2 and ''.join(o.token for o in content).startswith(whole.message.content)
    assert all(o.top_logprobs[0].token == o.token and o.logprob == o.top_logprobs[0].logprob <= 0
               and len(o.top_logprobs) == 2 for o in content)
    pieces = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    assert [o for p in pieces if p.logprobs for o in p.logprobs.content] == content
    assert (client.chat.completions.create(**asked
        | dict(top_logprobs=None, logprobs=False)).choices[0].logprobs is None)

def test_completion_logprobs(client):
    asked = dict(model=client.models.list().data[0].id, prompt='The page', temperature=0, max_tokens=12,
                 logprobs=3)
    whole = client.completions.create(**asked).choices[0]
    columns = whole.logprobs
    assert ''.join(columns.tokens).startswith(whole.text) and {len(o) for o in columns.top_logprobs} == {3}
    assert all(whole.text[i:].startswith(t) for i, t in zip(columns.text_offset, columns.tokens)
               if i + len(t) <= len(whole.text))
    pieces = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True)]
    assert ([t for p in pieces if p for t in p.tokens] == columns.tokens
            and [i for p in pieces if p for i in p.text_offset] == columns.text_offset)
    scored = client.completions.create(**asked
        | dict(extra_body=dict(prompt_logprobs=1))).choices[0].model_extra['prompt_logprobs']
    assert (scored['token_logprobs'][0] is None and all(o < 0 for o in scored['token_logprobs'][1:])
            and 'page' in ''.join(scored['tokens']))

def test_wishes_over_http(client):
    import openai
    model = client.models.list().data[0].id
    def say(**params):
        return client.completions.create(model=model, prompt='The page', temperature=0, max_tokens=12,
                                         **params)
    with LLM() as llm:
        for params in (dict(presence_penalty=1.5), dict(frequency_penalty=-1.), dict(logit_bias={'5': 100}),
                     dict(extra_body=dict(repetition_penalty=1.5, min_tokens=10))):
            ours = {k: v for k, v in {**params, **params.get('extra_body', {})}.items() if k != 'extra_body'}
            if 'logit_bias' in ours: ours['logit_bias'] = {5: 100}
            assert say(**params).choices[0].text == llm.generate('The page',
                SamplingParams(temperature=0, max_tokens=12, **ours))[0].text, params
    for params, message in [(dict(logit_bias={'x': 1}), 'logit_bias must be a map'),
            (dict(presence_penalty=3), 'presence_penalty must be a finite number from -2 to 2'),
                          (dict(logprobs=21), 'logprobs must be a whole number from 0 to 20'),
                          (dict(logit_bias={'99999': 1}), 'outside the vocabulary')]:
        with pytest.raises(openai.BadRequestError, match=message): say(**params)
