"""The weekend's engine: in lockstep with the real scheduler, equal to `transformers` and to `LLM` on the
embedded model, and small enough to hold in the head."""
import json, re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from openai import OpenAI
from transformers import AutoModelForCausalLM

import weekend_oracle as oracle
from minisgl_lit import LLM
from minisgl_lit.core.engine import sampler
from minisgl_lit.testing.weekend_table import fixed_requests, folder
from minisgl_lit.weekend.batch import Engine, PendingReq, TorchAttention
from minisgl_lit.weekend.decode import Scheduler
from minisgl_lit.weekend.model import Decoder, generate
from minisgl_lit.weekend.overlap import Device, OverlapScheduler
from minisgl_lit.weekend.pages import KVPool, TableManager
from minisgl_lit.weekend.prefill import PrefillManager
from minisgl_lit.weekend.radix import CacheManager
from minisgl_lit.weekend.sampling import Sampling, fall_on, keep_top_p, sample, uniform
from minisgl_lit.weekend.server import make_server
from nbrun import notebooks, root

MODULES = sorted((root/'minisgl_lit'/'weekend').glob('*.py'))
# lines of code
MOST = dict(model=170, pages=120, batch=130, decode=110, radix=250, prefill=160, sampling=80, overlap=150,
            cuda=180, server=250)

def lines(path):
    return sum(bool(o.strip()) and not o.lstrip().startswith('#')
               for o in path.read_text(encoding='utf-8').splitlines())

# small, and whole on its pages

def test_it_can_be_held_in_the_head():
    assert {o.stem for o in MODULES} == {*MOST, '__init__', '__main__'}
    assert not (long := {o.stem: lines(o) for o in MODULES if lines(o) > MOST.get(o.stem, 30)}), long
    assert sum(len(o.read_text(encoding='utf-8').splitlines()) for o in MODULES) <= 1500

CHAPTERS = [o for o in notebooks() if o.parent.name == 'weekend' and o.stem[2] == '_']

@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_every_line_is_shown_and_the_table_grows(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    code = [(''.join(c['source']), c['outputs']) for c in cells if c['cell_type'] == 'code']
    exported = [s for s, _ in code if re.match(r'#\| *export', s)]
    assert exported and not [s for s in exported if re.search(r'#\| *(hide|code-fold|checks)', s)]
    longest = max(exported, key=lambda s: len(s.splitlines()))
    assert len(longest.splitlines()) <= 42, longest
    table = next(''.join(o['text']) for s, outputs in reversed(code) if 'print_table(' in s
                 for o in outputs if 'text' in o)
    assert re.findall(r'(?m)^(\d+) ', table) == [str(i + 1) for i in range(int(path.stem[:2]))], table
    assert 'The radix cache keeps the pages of finished requests' in table

def test_it_reads_the_files_that_are_published(tmp_path):
    "There `rope_theta` stands at the top of config.json"
    for file in folder.iterdir(): (tmp_path/file.name).symlink_to(file)
    about = json.loads((folder/'config.json').read_text(encoding='utf-8'))
    (tmp_path/'config.json').unlink()
    (tmp_path/'config.json').write_text(json.dumps(about
        | dict(rope_theta=about.pop('rope_parameters')['rope_theta'])))
    assert 'rope_parameters' not in json.loads((tmp_path/'config.json').read_text())
    assert generate(Decoder(tmp_path), [5, 6, 7], 8) == generate(Decoder(folder), [5, 6, 7], 8)

# the oracle

def test_in_lockstep_with_the_real_scheduler(long):
    count = Counter()
    for seed in range(400 if long else 10):
        oracle.life(seed, count)
        if seed % 4 == 0: oracle.answers(seed)
    assert count['with a chunk'] and count['with evictions'] and count['with hits'], count

@pytest.mark.long
def test_most_mutants_are_noticed_by_the_oracle_alone():
    seen, of = oracle.share_noticed()
    assert seen >= .6 * of, (seen, of)

# the embedded model

@pytest.fixture(scope='module')
def model(): return Decoder(folder)

def engine_of(model, page_size=8, num_pages=60, rows=4, budget=64, overlap=False, choose=sample):
    config = model.config
    pool = KVPool(num_pages, page_size, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    table = TableManager(rows, 480, page_size)
    engine, cache = Engine(model, table, TorchAttention(pool, table), choose), CacheManager(num_pages, table)
    queue = PrefillManager(cache, budget)
    if overlap: return OverlapScheduler(Device(engine), table, cache, queue, config.eos_token_id)
    return Scheduler(engine, table, cache, queue, config.eos_token_id)

def served(scheduler, requests):
    "The answers, by name"
    answers = {}
    for name, prompt, most, *sampling in requests: scheduler.add(PendingReq(name, prompt, most, *sampling))
    while scheduler.has_work:
        for output in scheduler.step():
            if output.token is not None: answers.setdefault(output.rid, []).append(output.token)
    scheduler.run_deferred()
    cache = scheduler.cache
    assert len(cache.free) + cache.tree.evictable_size == cache.num_pages and not scheduler.alive
    return answers

@pytest.fixture(scope='module')
def reference(model):
    "What `transformers` answers"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = {name: theirs.generate(torch.tensor([ids]), max_new_tokens=most,
        do_sample=False)[0, len(ids):].tolist() for name, ids, most in fixed_requests()}
    name, ids, most = fixed_requests()[0]
    assert generate(model, ids, most) == made[name]
    return made

@pytest.mark.parametrize('setting', [
    dict(budget=7, overlap=True), dict(page_size=1, num_pages=480), dict(rows=7, num_pages=150),
    *(pytest.param(o, marks=pytest.mark.long)
      for o in (dict(), dict(overlap=True), dict(budget=7), dict(rows=1)))], ids=str)
def test_greedy_tokens_are_those_of_transformers(model, reference, setting):
    scheduler = engine_of(model, **setting)
    assert served(scheduler, fixed_requests()) == reference
    assert served(scheduler, fixed_requests()) == reference   # now with what the first round has cached

def test_a_seeded_answer_has_no_neighbours(model):
    "Alone, among others, in chunks, from the cache, with overlap"
    name, prompt, _ = fixed_requests()[0]
    mine = [(name, prompt, 12, Sampling(1.2, .9, seed=7))]
    others = [(o, ids, 6, Sampling(1., 1., seed=i) if i % 2 else None)
              for i, (o, ids, _) in enumerate(fixed_requests()[1:])]
    alone = served(engine_of(model), mine)[name]
    for setting in (dict(rows=7, num_pages=150), dict(budget=5), dict(overlap=True)):
        scheduler = engine_of(model, **setting)
        for requests in (others[:3] + mine + others[3:], mine):
            assert served(scheduler, requests)[name] == alone, setting

def test_greedy_answers_are_those_of_the_real_engine():
    "The chat of `LLM` and the one of the weekend's server, with all that stands between text and tokens"
    questions = ['What is a radix cache?', 'Ü 🙂?', 'What is overlap?', 'a ' * 300]
    server = make_server(folder)
    Thread(target=server.serve_forever, daemon=True).start()
    client = OpenAI(base_url=f'http://127.0.0.1:{server.server_address[1]}/v1', api_key='none')
    def ours(question):
        answer = client.chat.completions.create(model='', messages=[dict(role='user', content=question)],
                                                max_tokens=48, temperature=0)
        return answer.choices[0].message.content, answer.choices[0].finish_reason
    with ThreadPoolExecutor(4) as pool: said = [*pool.map(ours, questions)]
    server.shutdown()
    server.server_close()
    with LLM('embedded', device='cpu', dtype='float32') as llm:
        theirs = llm.chat([[dict(role='user', content=o)] for o in questions], temperature=0, max_tokens=48)
    assert said == [(o.text, o.finish_reason) for o in theirs]

@given(st.lists(st.tuples(st.integers(-2**63, 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_uniform_is_the_real_one(pairs):
    seeds, positions = np.array(pairs, dtype=np.int64).T
    assert uniform(seeds, positions).tolist() == sampler.uniform(seeds, positions).tolist()

@given(st.integers(0, 2**32 - 1), st.floats(.05, 1), st.integers(2, 40))
@settings(max_examples=30)
def test_tokens_are_drawn_as_by_the_real_sampler(seed, p, n):
    rng = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(4, n, generator=rng)).softmax(-1)
    u = torch.rand(4, 1, generator=rng, dtype=torch.float64)
    p = torch.full((4, 1), p)
    least = sampler.top_p_threshold(probs, p)
    assert (fall_on(keep_top_p(probs, p), u).tolist()
            == sampler.inverse_cdf(probs.where(probs >= least, 0), u).tolist())
