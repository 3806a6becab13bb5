"""Token parity: greedy float32 answers equal those of `transformers`, whatever the settings that must not matter."""
import itertools, random

import pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.core import SamplingParams
from minisgl_lit.engine.build import build
from minisgl_lit.llm import LLM
from reference import FAMILIES, MAX_NEW, Comparison, generate, make_checkpoint, prompts

SETTINGS = dict(page_size=[1, 4, 16], cache=['radix', 'none'], overlap=[False, True], max_prefill_tokens=[16, 4096], num_pages=['plenty', 'barely'])

def product() -> list[dict]:
    "Every combination of settings"
    return [dict(zip(SETTINGS, o)) for o in itertools.product(*SETTINGS.values())]

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
    runtime.control.self_check()
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
        runtime = build(EngineConfig.of(path, **settings | dict(num_pages=pages(settings)), max_running_req=6, device='cpu'))
        for prefix in 'xy':
            told, cached = serve(runtime, prefix)
            for i, prompt in enumerate(prompts()): comparison.check(path, prompt, told[i], right[i], (settings, prefix, i))
        if settings['cache'] == 'radix': assert sum(cached.values()) > 0, settings
        else: assert sum(cached.values()) == 0
        runtime.close()
    comparison.done()

def test_settings_meet_pairwise():
    met = {(a, b) for c in pairwise() for a, b in itertools.permutations(c.items(), 2)}
    assert all(((m, a), (n, b)) in met for m, n in itertools.permutations(SETTINGS, 2) for a in SETTINGS[m] for b in SETTINGS[n])
    assert len(pairwise()) < len(product()) / 3

def test_reference_says_different_things(checkpoint):
    "A reference that always says the same would let everything pass"
    assert len({tuple(o) for o in checkpoint[1]}) > 4 and len({t for o in checkpoint[1] for t in o}) > 20

def test_parity(checkpoint): check_parity(checkpoint, pairwise())

def test_parity_of_the_public_face(checkpoint):
    "`LLM` on a checkpoint that has no tokenizer: token ids in, token ids out"
    (path, right), comparison = checkpoint, Comparison()
    with LLM(path, device='cpu', num_pages=400) as llm:
        for _ in range(2):
            outs = llm.generate(prompts(), SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, reference in zip(prompts(), outs, right): comparison.check(path, prompt, out.token_ids, reference)
        assert sum(o.cached_tokens for o in outs) > 0 and {o.text for o in outs} == {''}
    comparison.done()

@pytest.mark.long
def test_parity_of_every_combination(checkpoint): check_parity(checkpoint, product())
