"""Token parity: greedy float32 answers equal those of `transformers`, whatever the settings that must not
matter."""
import itertools, random

import pytest
import torch

from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.runtime import build
from minisgl_lit.llm import LLM
from reference import (FAMILIES, MAX_NEW, VARIANTS, Comparison, generate, generate_stepwise, load,
                       make_checkpoint, prompts)

CORE = dict(page_size=[1, 4, 16], cache=['radix', 'none'], overlap=[False, True],
            max_prefill_tokens=[16, 4096], num_pages=['plenty', 'barely'])
MORE = dict(admission=['reserve', 'optimistic'], mixed_chunk=[False, True], policy=['fcfs', 'lpm'],
            attention=['torch', 'native'])
SETTINGS = CORE | MORE

def product(settings: dict = SETTINGS) -> list[dict]:
    "Every combination of settings"
    return [dict(zip(settings, o)) for o in itertools.product(*settings.values())]

def many() -> list[dict]:
    "Every combination of the core settings, each with others by chance"
    rng = random.Random(0)
    return [core | rng.choice(product(MORE)) for core in product(CORE)]

def pairwise() -> list[dict]:
    "Few combinations in which every two values of any two settings meet"
    def pairs(c): return set(itertools.combinations(sorted(c.items(), key=str), 2))
    combos = product()
    random.Random(0).shuffle(combos)
    missing, chosen = set().union(*map(pairs, combos)), []
    while missing:
        chosen.append(max(combos, key=lambda c: len(pairs(c) & missing)))
        missing -= pairs(chosen[-1])
    return chosen

def pages(settings: dict) -> int:
    "Pages for everyone at once, or for the longest request alone and one more"
    longest = max(map(len, prompts())) + MAX_NEW - 1
    return 400 if settings['num_pages'] == 'plenty' else -(-longest // settings['page_size']) + 1

def serve(runtime, prefix: str) -> tuple[dict, dict]:
    "All prompts at once: tokens, and cached tokens, by number of the prompt"
    told, cached = {}, {}
    for i, prompt in enumerate(prompts()):
        runtime.scheduler.add(f'{prefix}{i}', prompt, SamplingParams(max_tokens=MAX_NEW, temperature=0))
    while runtime.scheduler.has_work:
        for o in runtime.scheduler.step():
            told.setdefault(int(o.rid[1:]), []).extend(o.token_ids)
            if o.finish_reason:
                assert o.error is None, o.error
                cached[int(o.rid[1:])] = o.cached_tokens
    runtime.scheduler.self_check()
    return told, cached

@pytest.fixture(scope='module', params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    "A checkpoint on disk and the reference's answers to all prompts"
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    return path, [generate(path, o) for o in prompts()]

def check_parity(checkpoint, combos: list[dict]) -> None:
    "Serve everything twice under each combination; the second time from the cache"
    (path, right), comparison = checkpoint, Comparison()
    for settings in combos:
        runtime = build(EngineConfig.of(path, **settings | dict(num_pages=pages(settings)), max_running_req=6,
                                        device='cpu', schedule_conservativeness=.1))
        for prefix in 'xy':
            told, cached = serve(runtime, prefix)
            for i, prompt in enumerate(prompts()):
                comparison.check(path, prompt, told[i], right[i], (settings, prefix, i))
        if settings['cache'] == 'radix': assert sum(cached.values()) > 0, settings
        else: assert sum(cached.values()) == 0
        runtime.close()
    comparison.done()

def test_settings_meet_pairwise():
    met = {(a, b) for c in pairwise() for a, b in itertools.permutations(c.items(), 2)}
    assert all(((m, a), (n, b)) in met for m, n in itertools.permutations(SETTINGS, 2) for a in SETTINGS[m]
               for b in SETTINGS[n])
    assert len(pairwise()) < len(product()) / 3

def test_reference_says_different_things(checkpoint):
    "A reference that always says the same would let everything pass"
    assert len({tuple(o) for o in checkpoint[1]}) > 4 and len({t for o in checkpoint[1] for t in o}) > 20

@pytest.mark.filterwarnings('ignore:policy=')
def test_parity(checkpoint): check_parity(checkpoint, pairwise())

def test_parity_of_the_public_face(checkpoint):
    "`LLM` on a checkpoint that has no tokenizer: token ids in, token ids out"
    (path, right), comparison = checkpoint, Comparison()
    with LLM(path, device='cpu', num_pages=400) as llm:
        for _ in range(2):
            outs = llm.generate(prompts(), SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, reference in zip(prompts(), outs, right):
                comparison.check(path, prompt, out.token_ids, reference)
        assert sum(o.cached_tokens for o in outs) > 0 and {o.text for o in outs} == {''}
    comparison.done()

# read as another one is, or without what another one has
LIKE_OTHERS = ('old spelling', 'nobody asked for', 'no window', 'constants', 'in some layers', 'in bfloat16',
               'its own scale')

@pytest.mark.parametrize('variant', [pytest.param(o, marks=[pytest.mark.long] * o.endswith(LIKE_OTHERS))
                                     for o in VARIANTS])
def test_parity_of_variants(variant, tmp_path):
    """All that may stand in a `config.json`, through `LLM`: small pages, chunked prompts, and the second time
    from the cache"""
    family, fields = VARIANTS[variant]
    make_checkpoint(family, tmp_path, **fields)
    asked, comparison = prompts(min(190, fields.get('vocab_size', 190))), Comparison()
    reference = generate_stepwise if variant == 'dynamic' else generate
    right = [reference(tmp_path, o) for o in asked]
    assert len({tuple(o) for o in right}) > 4
    with LLM(tmp_path, device='cpu', dtype='float32', page_size=4, num_pages=200,
             max_prefill_tokens=16) as llm:
        for _ in range(2):
            outs = llm.generate(asked, SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, o in zip(asked, outs, right):
                comparison.check(tmp_path, prompt, out.token_ids, o, variant)
    assert sum(o.cached_tokens for o in outs) > 200
    comparison.done()

def test_dynamic_is_that_of_generate_for_prompts_within_the_old_context(tmp_path):
    family, fields = VARIANTS['dynamic']
    make_checkpoint(family, tmp_path, **fields)
    # at 32 transformers forgets to reset
    short, comparison = [o for o in prompts() if len(o) < 32] + [prompts()[0][:31]], Comparison()
    with LLM(tmp_path, device='cpu', page_size=4, num_pages=200) as llm:
        outs = llm.generate(short, SamplingParams(max_tokens=40, temperature=0))
    for prompt, out in zip(short, outs):
        comparison.check(tmp_path, prompt, out.token_ids, generate(tmp_path, prompt, 40))
    assert max(len(p) + len(o.token_ids) for p, o in zip(short, outs)) > 64
    comparison.done()

@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path):
    """Mean KL from the float32 model's next-token distribution, at 200 positions, each computed from a cached
    prefix"""
    make_checkpoint('Qwen3', tmp_path, dtype='bfloat16', max_position_embeddings=256, num_hidden_layers=4,
                    hidden_size=96, initializer_range=.1)
    ids = torch.randint(0, 190, (200,), generator=torch.Generator().manual_seed(2))
    runtime, seen = (build(EngineConfig.of(tmp_path, dtype='bfloat16', page_size=1, num_pages=300,
                                           device='cpu')), [])
    model = runtime.engine.model
    inner = model.logits
    model.logits = lambda *args: seen.append(inner(*args)) or seen[-1]
    for n in range(1, 201):
        runtime.scheduler.add(f'r{n}', ids[:n].tolist(), SamplingParams(max_tokens=1, temperature=0))
        while runtime.scheduler.has_work: runtime.scheduler.step()
    runtime.close()
    exact = load(tmp_path)(ids[None]).logits[0].log_softmax(-1)
    def kl(logits): return float((exact.exp() * (exact - logits.float().log_softmax(-1))).sum(-1).mean())
    ours, theirs = kl(torch.cat(seen)), kl(load(tmp_path, torch.bfloat16)(ids[None]).logits[0])
    print(f'mean KL to float32: ours {ours:.2e}, transformers {theirs:.2e}')
    assert 0 < ours < 1.1 * theirs < .1

@pytest.mark.long
def test_parity_of_every_combination(checkpoint): check_parity(checkpoint, many())
