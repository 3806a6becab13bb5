"""Adapters change no answer but their own: tokens are those of a merged model, alone and in any company, over
any base; cached prefixes are never shared across adapters; names come and go while requests run."""
import asyncio, importlib.util, os, random, re, shutil, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch

from minisgl_lit import LLM, SamplingParams, serve
from minisgl_lit.adapters.low_rank import AdaptedWeight
from minisgl_lit.adapters.pool import AdapterEngine
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.models.operations import linear
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.distributed.tensor_parallel import LeaderEngine
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.runtime import make_adapters
from minisgl_lit.server.lora_protocol import AdapterNames
from random_adapters import write_adapter
from reference import MAX_NEW, load, make_checkpoint, prompts

HOW = dict(temperature=0, max_tokens=MAX_NEW)

class Merged:
    "The answers of `transformers` with the changes of an adapter added to its weights"
    def __init__(self, path, deltas): self.path, self.deltas = path, deltas
    def __enter__(self):
        self.model = load(self.path)
        self._add(1)
        return self
    def __exit__(self, *error): self._add(-1)
    @torch.no_grad()
    def _add(self, sign):
        for module, delta in self.deltas.items():
            weight = self.model.get_submodule(module).weight
            if sign > 0: self.model.__dict__.setdefault('before', {})[module] = weight.clone()
            weight.copy_(weight + delta if sign > 0 else self.model.before[module])
    @torch.inference_mode()
    def answer(self, prompt):
        mask = torch.ones(1, len(prompt), dtype=int)
        out = self.model.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=MAX_NEW,
                                  do_sample=False, pad_token_id=0)
        return out[0, len(prompt):].tolist()

# what an adapter may say beside its tensors; each of another part of the model
KINDS = dict(
    all={}, attention=dict(only='self_attn', rank=1), mlp=dict(only='mlp', rank=16, alpha=4.),
    one=dict(only='k_proj|down_proj', rank=3),
    ranks=dict(ranks=dict(q_proj=2, up_proj=8), alphas=dict(v_proj=1.)),
    root=dict(use_rslora=True, rank=16, alpha=6.), layer=dict(only=r'layers\.1', layers_to_transform=[1]),
    wide=dict(rank=128, size=.05))

@pytest.fixture(scope='module', params=['Qwen3', pytest.param('Llama', marks=pytest.mark.long),
                                        pytest.param('Qwen2', marks=pytest.mark.long)])
def served(request, tmp_path_factory):
    "A checkpoint, eight adapters by name, and the answer of each to a prompt, as a merged model says it"
    path = tmp_path_factory.mktemp(request.param)
    biased = dict(attention_bias=True, mlp_bias=True) if request.param == 'Llama' else {}
    make_checkpoint(request.param, path/'model', **biased)
    paths, asked, right = {}, [], []
    for i, (name, how) in enumerate(KINDS.items()):
        deltas = write_adapter(path/name, path/'model', i, **how)
        paths[name] = str(path/name)
        with Merged(path/'model', deltas) as merged:
            for prompt in (prompts()[0], prompts()[i]):
                asked.append((name, prompt))
                right.append(merged.answer(prompt))
    with Merged(path/'model', {}) as merged:
        for prompt in prompts()[:3]:
            asked.append((None, prompt))
            right.append(merged.answer(prompt))
    return path/'model', paths, asked, right

def test_adapters_say_different_things(served):
    _, _, asked, right = served
    firsts = [str(o) for (_, prompt), o in zip(asked, right) if prompt == prompts()[0]]
    assert len({*firsts}) == 9 and len(firsts) == 10   # one was asked twice

@pytest.mark.parametrize('settings', [
    dict(page_size=1, max_loras=8, max_prefill_tokens=16, speculation='ngram'),
    dict(page_size=16, mixed_chunk=True, max_loras=2, max_running_req=5, policy='lpm', overlap=True),
    dict(attention='torch', cuda_graph_max_bs=0, cache='none'), dict(tp=2, page_size=4, max_loras=3),
    pytest.param(dict(page_size=4, max_prefill_tokens=16, overlap=True), marks=pytest.mark.long),
    pytest.param(dict(speculation='ngram_cache', max_loras=1), marks=pytest.mark.long)], ids=str)
def test_tokens_are_those_of_a_merged_model(served, settings):
    "All in one call, whatever the settings that should not matter; a second time out of the cache"
    path, paths, asked, right = served
    with LLM(path, device='cpu', dtype='float32', num_pages=1400, lora=paths, **settings) as llm:
        for again in (False, True):
            names = [name for name, _ in asked]
            outs = llm.generate([o for _, o in asked], lora=names, progress=False, **HOW)
            assert [o.token_ids for o in outs] == right
            # the first prompt is the same for all; the second time each finds what is its own
            hits = [o.cached_tokens for o in outs]
            if settings.get('cache') != 'none' and again: assert all(hits[i] for i in range(0, 16, 2))
        if settings.get('tp'):   # while it serves, too; a rank forgets what it is told to
            llm.unload_lora('all')
            llm.load_lora('all', paths['mlp'])
            one, = llm.generate([asked[0][1]], lora='all', progress=False, **HOW)
            assert one.token_ids == right[asked.index(('mlp', asked[0][1]))]
        llm.runtime.scheduler.self_check()

def test_alone_and_in_company_the_bits_are_the_same(served):
    "Logprobs, to the last bit: of rows with adapters, and of rows without any"
    path, paths, asked, _ = served
    how = HOW | dict(logprobs=1, ignore_eos=True)
    def told(outs): return [[(o.token, o.logprob) for o in out.logprobs] for out in outs]
    plain = dict(device='cpu', dtype='float32', num_pages=1400, cache='none')
    with LLM(path, **plain, max_loras=8, lora=paths) as llm:
        names = [o for o, _ in asked]
        together = told(llm.generate([o for _, o in asked], lora=names, progress=False, **how))
        for (name, prompt), said in [*zip(asked, together)][1::2]:   # each adapter, and none
            assert told(llm.generate([prompt], lora=name, **how)) == [said], name
    with LLM(path, **plain) as llm:
        bare = [o for o in zip(asked, together) if o[0][0] is None]
        for (_, prompt), said in bare: assert told(llm.generate([prompt], **how)) == [said]

@pytest.mark.skipif(not importlib.util.find_spec('peft'), reason='peft is not installed')
@pytest.mark.parametrize('merge', [False, True])
def test_tokens_are_those_of_peft(served, merge):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    path, paths, asked, right = served
    for name, folder in paths.items():
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model = PeftModel.from_pretrained(base, folder)
        if merge: model = model.merge_and_unload()
        for (own, prompt), said in zip(asked, right):
            if own != name: continue
            mask = torch.ones(1, len(prompt), dtype=int)
            out = model.generate(input_ids=torch.tensor([prompt]), attention_mask=mask, do_sample=False,
                                 max_new_tokens=MAX_NEW, pad_token_id=0)
            assert out[0, len(prompt):].tolist() == said, name

@pytest.fixture(scope='module')
def embedded(tmp_path_factory):
    "Adapters of the embedded model, which has a tokenizer"
    folder = tmp_path_factory.mktemp('embedded')
    for i, name in enumerate('abc'): write_adapter(folder/name, embedded_path(), i)
    return {name: str(folder/name) for name in 'abc'}

@pytest.mark.parametrize('settings', [
    dict(quantization='int8'), dict(quantization='int4', quantization_compute='exact'),
    dict(dtype='bfloat16'),
    pytest.param(dict(quantization='int4'), marks=pytest.mark.long),
    pytest.param(dict(quantization='int8', dtype='bfloat16', threads=2), marks=pytest.mark.long),
    pytest.param(dict(dtype='float16'), marks=pytest.mark.long)], ids=str)
def test_over_other_bases(embedded, settings):
    "Each weight is base and change; and the answers are the same alone and together"
    with LLM(num_pages=500, lora=embedded, **settings) as llm:
        weights = llm.runtime.scheduler.engine.adapted.model.weights
        for name in ('model.layers.1.self_attn.qkv_proj.weight', 'model.layers.0.mlp.gate_up_proj.weight'):
            weight = weights[name]
            assert isinstance(weight, AdaptedWeight)
            x = torch.randn(3, weight.shape[1]).to(llm.runtime.engine.model.norm.dtype)
            weight.at.put(np.array([2, 0, 1]))
            y, base = weight.multiply(x), linear(x, weight.base)
            assert torch.equal(y[1], base[1])
            for i, number in ((0, 2), (2, 1)):
                change = torch.zeros_like(base[i], dtype=torch.float32)
                for o in weight.changes[number]:
                    part = linear(x[i:i + 1] @ o.a.T, o.b)[0]
                    change[o.first:o.first + len(part)] = part.float()
                right = base[i].float() + change
                assert (y[i].float() - right).abs().max() <= .02 * right.abs().max()
                assert change.abs().max() > .1
        names = ['a', None, 'b', 'c', None, 'a', 'b']
        said = ['one two', 'one two', 'one two', 'three', 'four five six', 'seven', 'eight nine']
        how = HOW | dict(ignore_eos=True)
        if settings.get('dtype') == 'float16': return   # torch computes, and promises nothing
        together = llm.generate(said, lora=names, progress=False, **how)
        alone = [llm.generate([o], lora=name, **how)[0].token_ids for o, name in zip(said, names)]
        assert [o.token_ids for o in together] == alone

def test_without_adapters_nothing_is_there(embedded):
    "Until one is loaded, and in batches that have none, the engine of the base computes alone"
    with LLM(num_pages=300) as llm:
        s = llm.runtime.scheduler
        assert s.engine is llm.runtime.engine and s.table.max_adapters == 0
        before = llm.generate(['one two three'], **HOW)[0].token_ids
        llm.load_lora('a', embedded['a'])
        assert isinstance(s.engine, AdapterEngine)
        calls, forward = [], s.engine.adapted.forward
        s.engine.adapted.forward = lambda batch: calls.append(batch) or forward(batch)
        assert llm.generate(['one two three'], **HOW)[0].token_ids == before and not calls
        llm.generate(['one two three'], lora='a', **HOW)
        assert calls and all((o.adapters == 1).all() for o in calls)

def test_tenants_keep_their_namespaces(embedded):
    "`extra_key` tells callers apart within an adapter, too, and a draft model guesses for adapters"
    with LLM(num_pages=500, page_size=4, lora=embedded, speculation='draft:embedded') as llm:
        text, seen = 'once upon a time there was a page of tokens', {}
        for name in ('a', None, 'b'):
            for key in (None, 'k'):
                out, = llm.generate([text], lora=name, extra_key=key, **HOW)
                assert out.cached_tokens == 0, (name, key)
                seen.setdefault(name, set()).add(tuple(out.token_ids))
                assert llm.generate([text], lora=name, extra_key=key, **HOW)[0].cached_tokens > 0
        assert [len(o) for o in seen.values()] == [1, 1, 1]

def test_a_seed_gives_its_token(embedded):
    with LLM(num_pages=300, lora=embedded) as llm:
        how = dict(temperature=1., seed=7, max_tokens=9, ignore_eos=True)
        alone = llm.generate(['one'], lora='b', **how)[0].token_ids
        assert llm.generate(['one']*3, lora=['a', 'b', None], progress=False, **how)[1].token_ids == alone
        chat = llm.chat('Hi', lora='b', temperature=0, max_tokens=5)
        assert chat.token_ids != llm.chat('Hi', temperature=0, max_tokens=5).token_ids
        streamed = [o.token_ids for o in llm.stream('one', lora='b', **how)]
        assert sum(map(list, streamed), []) == alone

# --- random lives

@pytest.mark.parametrize('seed', [0, *(pytest.param(o, marks=pytest.mark.long) for o in range(1, 12))])
def test_random_lives(embedded, seed):
    """Requests, aborts, loads and unloads by chance: every answer is that of the files that its name stood
    for when it came, as far as it got; and never do more than `max_loras` run"""
    rng = random.Random(seed)
    most, pages = rng.choice([1, 2, 3]), rng.choice([24, 60])
    texts = [[*range(40, 40 + n)] for n in (3, 9, 21, 33)]
    how = dict(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(num_pages=400, lora=embedded) as llm:
        right = {(name, len(o)): llm.generate([o], lora=name, **how)[0].token_ids
                 for name in (*embedded, None) for o in texts}
    settings = dict(num_pages=pages, page_size=4, max_running_req=5, max_prefill_tokens=rng.choice([8, 64]),
                    mixed_chunk=rng.random() < .5, overlap=rng.random() < .5, admission='optimistic',
                    schedule_conservativeness=.05, policy=rng.choice(['fcfs', 'lpm', 'lof']), max_loras=most,
                    dtype='float32', max_seq_len=60, eviction=rng.choice(['lru', 'lfu']), seed=0,
                    cuda_graph_max_bs=rng.choice([0, 3, 'auto']))
    with LLM(**settings) as llm:
        core, pool, alive, told, held = llm.runtime.core, llm.runtime.scheduler.adapters, {}, {}, {}
        s, n = core.scheduler, 0
        def look(batch): assert batch.adapters is None or len({*batch.adapters} - {0}) <= most
        for _ in range(160 if seed else 80):
            what = rng.random()
            names = [o for o in held if o not in pool.leaving]
            if what < .08 and len(held) < 4:
                name = rng.choice([o for o in 'vwxyz' if o not in held])
                held[name] = rng.choice([*embedded])
                pool.load(name, embedded[held[name]])
                look_at(s, look)
            elif what < .12 and names: pool.unload(rng.choice(names))
            elif what < .5 and len(alive) < 9:
                name, text, n = rng.choice([*names, None]), rng.choice(texts), n + 1
                s.add(str(n), text, SamplingParams(lora=name, **how))
                alive[str(n)] = right[held.get(name), len(text)]
            elif what < .54 and alive: s.abort(rng.choice([*alive]))
            if s.has_work:
                for o in s.step():
                    said = told.setdefault(o.rid, [])
                    said += o.token_ids
                    assert o.rid not in alive or said == alive[o.rid][:len(said)], (o.rid, said, alive[o.rid])
                    if o.finish_reason:
                        assert o.finish_reason != 'error', o.error
                        if o.finish_reason == 'length': assert said == alive[o.rid]
                        alive.pop(o.rid, None)
            for name in pool.drop_unused(): del held[name]
        while s.has_work:
            for o in s.step():
                told.setdefault(o.rid, []).extend(o.token_ids)
                if o.finish_reason == 'length': assert told[o.rid] == alive[o.rid]
        s.self_check()
        for name in [o for o in held if o not in pool.leaving]: pool.unload(name)
        pool.drop_unused()
        weights = pool.both.weights.values()
        assert not pool.numbers and not any(o.changes or o.table.any() for o in weights)
        assert len(told) > (20 if seed else 10)

def look_at(scheduler, look):
    "See every batch that an engine is given"
    engine = scheduler.engine
    if getattr(engine, 'seen', False): return
    forward, engine.seen = engine.forward, True
    def seen(batch):
        look(batch)
        return forward(batch)
    engine.forward = seen

def test_the_first_that_waits_for_a_place_is_not_overtaken(embedded):
    "One adapter may run, and requests for it keep coming; the other one still gets its turn"
    with LLM(num_pages=400, lora=embedded, max_loras=1, max_running_req=4) as llm:
        s, ended = llm.runtime.scheduler, []
        how = dict(max_tokens=4, temperature=0, ignore_eos=True)
        for i in range(40):
            s.add(f'a{i}', [40, 41], SamplingParams(lora='a', **how))
            if i == 3: s.add('b', [40, 41], SamplingParams(lora='b', **how))
            if i == 4: s.add('none', [40, 41], SamplingParams(**how))
            ended += [o.rid for o in s.step() if o.finish_reason]
        while s.has_work: ended += [o.rid for o in s.step() if o.finish_reason]
        assert ended.index('b') < 10 and ended.index('none') < 10 and len(ended) == 42

# --- several ranks

SENTENCE = 'rank 1 of 2 was killed by signal 9, and without it the model cannot compute'

def test_all_ranks_have_an_adapter_or_none(served, tmp_path, monkeypatch):
    """An adapter of which rank 0 can read the files, and the other rank cannot, leaves both as they were; a
    rank that dies meanwhile is noticed"""
    path, paths, asked, right = served
    prompt, late = asked[0][1], shutil.copytree(paths['mlp'], tmp_path/'late')
    with LLM(path, device='cpu', dtype='float32', num_pages=300, tp=2, lora=dict(all=paths['all'])) as llm:
        def said(name):
            one, = llm.generate([prompt], lora=name, progress=False, **HOW)
            return one.token_ids
        sent = LeaderEngine.send_adapter
        def too_late(self, number, path):
            monkeypatch.undo()
            file = (late/'adapter_model.safetensors').rename(tmp_path/'kept')
            try: sent(self, number, path)
            finally: file.rename(late/'adapter_model.safetensors')
        monkeypatch.setattr(LeaderEngine, 'send_adapter', too_late)
        with pytest.raises(ValueError, match="lora='late': .*is no adapter: it has no adapter_model"):
            llm.load_lora('late', str(late))
        with pytest.raises(ValueError, match="lora='x': .* is no folder"): llm.load_lora('x', '/nowhere')
        with pytest.raises(RequestError, match="no adapter is called 'late'; loaded: all"): said('late')
        assert [said(o) for o in ('all', None)] == [right[asked.index((o, prompt))] for o in ('all', None)]
        llm.load_lora('late', str(late))
        assert [said(o) for o in ('late', 'all')] == [right[asked.index((o, prompt))] for o in ('mlp', 'all')]
        pid = llm.runtime.ranks.processes[0].pid
        os.kill(pid, signal.SIGSTOP)   # it reads for ever
        threading.Timer(.5, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RuntimeError, match=SENTENCE): llm.load_lora('one', paths['one'])
        assert llm.runtime.failure() == SENTENCE
        last, = llm.generate([prompt], lora='all', progress=False, **HOW)
        assert (last.finish_reason, last.error) == ('error', f'the engine failed: {SENTENCE}')

def test_the_command_line_serves_them_on_two_ranks(served):
    "Named at the start, loaded and unloaded while it serves, refused"
    path, paths, asked, right = served
    command = [sys.executable, '-m', 'minisgl_lit', 'serve', '--model', path, '--port', '0', '--tp', '2',
               '--dtype', 'float32', '--num-pages', '300', '--lora', f'all={paths["all"]}', '--device', 'cpu']
    with subprocess.Popen([str(o) for o in command], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            def post(path, **body): return httpx.post(url + path, json=body, timeout=60)
            def said(name):
                sampling = dict(temperature=0, max_new_tokens=MAX_NEW)
                told = post('/generate', input_ids=asked[0][1], lora_path=name, sampling_params=sampling)
                return told.json().get('output_ids', told.text)
            def like(name): return right[asked.index((name, asked[0][1]))]
            assert [said(o) for o in ('all', None)] == [like('all'), like(None)]
            r = post('/v1/load_lora_adapter', lora_name='late', lora_path=paths['mlp'])
            assert [*r.json()['loaded_adapters']] == ['all', 'late'] and said('late') == like('mlp')
            assert [*post('/unload_lora_adapter', lora_name='all').json()['loaded_adapters']] == ['late']
            r = post('/load_lora_adapter', lora_name='bad', lora_path=str(path))
            assert r.status_code == 400 and 'has no adapter_config.json' in r.text
            assert "no adapter is called 'all'" in said('all') and said('late') == like('mlp')
        finally: server.terminate()
    assert server.returncode == 0

# --- several engines

def test_engines_of_a_server_have_the_same_adapters(embedded, tmp_path):
    """Loaded while it serves, by both; one is killed, and has them when it is there again, also those whose
    first files are gone; unloaded, another path under the name; refused by one sentence"""
    gone = shutil.copytree(embedded['a'], tmp_path/'gone')
    settings = dict(num_pages=400, dtype='float32', log_interval=0, replicas=2, restart=True)
    with serve(port=0, lora=dict(a=str(gone)), **settings) as server, ThreadPoolExecutor(12) as pool:
        def post(path, **body): return httpx.post(server.url + path, json=body, timeout=60)
        def ask(i, name):
            sampling = dict(temperature=0, max_new_tokens=6, ignore_eos=True)
            r = post('/generate', text=f'{i} pages', lora_path=name, sampling_params=sampling)
            return r.json()['text'] if r.status_code == 200 else r.text
        def said(name, n=12): return [*pool.map(ask, range(n), [name] * n)]
        def replicas(): return httpx.get(f'{server.url}/get_server_info').json()['per_replica']
        def wait(until):
            end = time.monotonic() + 60
            while not until(): assert time.monotonic() < end; time.sleep(.05)
        def computed(name):
            return [o.get('adapters', {}).get(name, {}).get('computed', 0) for o in replicas()]
        def order(what, **body): return post(f'/v1/{what}_lora_adapter', **body)
        wait(lambda: all(o['joined'] for o in replicas()))
        r = order('load', lora_name='b', lora_path=embedded['b'])
        assert r.json()['loaded_adapters'] == dict(a=str(gone), b=embedded['b'])
        right = {name: said(name) for name in ('a', 'b', None)}
        assert right['a'] != right['b'] != right[None] and all(computed('a')) and all(computed('b'))
        order('unload', lora_name='a')
        shutil.rmtree(gone)
        assert order('load', lora_name='a', lora_path=embedded['a']).status_code == 200
        for path in ('/nowhere', str(embedded_path())):
            r = order('load', lora_name='bad', lora_path=path)
            assert r.status_code == 400 and "lora='bad'" in r.text
        assert 'no adapter is called' in ask(0, 'bad')
        os.kill(killed := server._processes[0].process.pid, signal.SIGKILL)
        wait(lambda: not replicas()[0]['joined'])
        assert said('b') == right['b']   # by the other one, as long as it is alone
        wait(lambda: replicas()[0]['joined'])
        assert server._processes[0].process.pid != killed
        assert [said(o) for o in ('a', 'b', None)] == [right[o] for o in ('a', 'b', None)]
        assert computed('a')[0] and computed('b')[0]
        models = [o['id'] for o in httpx.get(f'{server.url}/v1/models').json()['data']]
        assert models == [server.model, 'b', 'a']
        assert order('unload', lora_name='b').json()['loaded_adapters'] == dict(a=embedded['a'])
        assert {'no adapter' in o for o in said('b')} == {True}
        assert order('load', lora_name='b', lora_path=embedded['a']).status_code == 200
        assert said('b') == right['a']

# --- names that come and go

def test_an_unload_waits_for_its_requests(embedded):
    with LLM(num_pages=300, lora=dict(a=embedded['a'])) as llm:
        running = llm.stream('one two three', lora='a', max_tokens=40, ignore_eos=True, temperature=0)
        said = [next(running)]
        core = llm.runtime.core
        core.adapters.unload(5, 'a')
        with pytest.raises(RequestError, match="adapter 'a' is being unloaded"): llm.generate(['x'], lora='a')
        assert core.adapters.finish() == []
        said += [*running]
        assert sum(len(o.token_ids) for o in said) == 40 and said[-1].finish_reason == 'length'
        core.turn()   # its abort, or its end, is behind it
        assert core.adapters.describe() == {'adapters': {}, 'digests': {}}
        llm.load_lora('a', embedded['b'])
        one, = llm.generate(['one two three'], lora='a', max_tokens=9, temperature=0, ignore_eos=True)
        assert one.cached_tokens == 0 and one.token_ids != sum((list(o.token_ids) for o in said), [])[:9]

@pytest.mark.parametrize('settings, sentence', [
    (dict(lora={'a': '/nowhere'}), "lora='a': '/nowhere' is no folder on the machine of the engine"),
    (dict(lora={'a': str(embedded_path())}), 'has no adapter_config.json'),
    (dict(lora='a'), "lora must be a map from names to texts or None, not 'a'"),
    (dict(max_loras=0), 'max_loras must be a whole number from 1 to 255, not 0')])
def test_a_bad_adapter_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)): LLM(num_pages=50, **settings)

def test_what_cannot_be_together_is_refused(embedded, tmp_path):
    resolved = SimpleNamespace(config=EngineConfig(lora=embedded, tp=2), device=torch.device('cuda'))
    with pytest.raises(ValueError, match="lora='a': adapters on a GPU need tp=1, not 2"):
        make_adapters(resolved, SimpleNamespace(), None, None)
    make_checkpoint('Qwen3', tmp_path/'other')
    with pytest.raises(ValueError, match='has shape'): LLM(tmp_path/'other', num_pages=50, lora=embedded)
    with LLM(num_pages=50) as llm:
        with pytest.raises(RequestError, match="no adapter is called 'a'; loaded: none"):
            llm.generate(['x'], lora='a')
        with pytest.raises(RequestError, match='one for each prompt'): llm.generate(['x', 'y'], lora=['a'])
        with pytest.raises(ValueError, match="'/nowhere' is no folder"): llm.load_lora('a', '/nowhere')
        with pytest.raises(ValueError, match='no adapter is called'): llm.unload_lora('a')

def test_over_http(embedded):
    "An adapter is a model: listed with its parent, loaded, answered by, unloaded"
    with serve(port=0, lora=dict(a=embedded['a']), num_pages=400, dtype='float32', log_interval=0) as server:
        def post(path, **body): return httpx.post(server.url + path, json=body, timeout=60)
        def models(): return httpx.get(f'{server.url}/v1/models').json()['data']
        assert [(o['id'], o.get('parent')) for o in models()] == [(server.model, None), ('a', server.model)]
        chat = dict(messages=[dict(role='user', content='Hi')], temperature=0, max_tokens=8)
        def said(model): return post('/v1/chat/completions', model=model, **chat).json()
        assert said('a')['model'] == 'a'
        texts = {o: said(o)['choices'][0]['message']['content'] for o in (server.model, 'a')}
        r = post('/v1/load_lora_adapter', lora_name='b', lora_path=embedded['b'])
        assert r.status_code == 200 and r.json()['loaded_adapters'] == dict(a=embedded['a'], b=embedded['b'])
        texts['b'] = said('b')['choices'][0]['message']['content']
        assert len({*texts.values()}) == 3
        greedy = dict(temperature=0, max_new_tokens=6, ignore_eos=True)
        how = dict(text=['one', 'one', 'one'], sampling_params=greedy)
        each = [o['text'] for o in post('/generate', lora_path=['a', None, 'b'], **how).json()]
        assert len({*each}) == 3
        assert [o['text'] for o in post('/generate', lora_path='b', **how).json()] == [each[2]]*3
        told = httpx.get(f'{server.url}/metrics').text
        counted = re.findall(r'minisgl:adapter_computed_tokens_total{adapter="(\w+)",.*} (.*)', told)
        assert [o for o, _ in counted] == ['a', 'b'] and min(float(n) for _, n in counted) > 8
        assert 'lora_requests_info{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""}' in told
        line = dict(prompt='one', temperature=0, max_tokens=6, ignore_eos=True)
        assert post('/v1/completions', model='b', **line).json()['choices'][0]['text'] == each[2]
        answer = post('/v1/responses', model='a', input='Hi', temperature=0, max_output_tokens=8)
        assert answer.json()['model'] == 'a'
        for path, body, status, sentence in [
                ('/v1/chat/completions', dict(model='z', **chat), 404, "model 'z' is not served here"),
                ('/generate', dict(text='x', lora_path='z'), 400, "no adapter is called 'z'"),
                ('/load_lora_adapter', dict(lora_name='b', lora_path=embedded['b']), 400, 'one of this name'),
                ('/load_lora_adapter', dict(lora_name='y', lora_path='/nowhere'), 400, 'is no folder'),
                ('/unload_lora_adapter', dict(lora_name='z'), 400, "no adapter is called 'z'")]:
            r = post(path, **body)
            assert r.status_code == status and sentence in r.text, (path, r.text)
        assert post('/unload_lora_adapter', lora_name='b').json()['loaded_adapters'] == dict(a=embedded['a'])
        assert [o['id'] for o in models()] == [server.model, 'a']
        assert said('b')['error']['code'] == 'model_not_found'
        assert said('a')['choices'][0]['message']['content'] == texts['a']

def test_an_engine_that_hangs_does_not_keep_a_list_waiting(monkeypatch):
    "What was known of its adapters is told"
    class Hangs:
        model = 'base'
        async def control(self, command): await asyncio.Event().wait()
    monkeypatch.setattr('minisgl_lit.server.lora_protocol._PATIENCE', .05)
    names = AdapterNames(Hangs(), {'a': '/somewhere'})
    asyncio.run(asyncio.wait_for(names.refresh(), 20))
    assert names.known == {'a': '/somewhere'}
