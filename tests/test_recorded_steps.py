"""Recorded decode steps on a CPU: the bits of the engine that goes layer by layer, for every family and under
settings that must not matter; random plans of random teams against numpy; and a plan that outlives all that
it was made from."""
import gc, random, weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.core.attention.torch import TorchAttention
from minisgl_lit import LLM
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import ForwardMode
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.kernels import recorded_steps
from minisgl_lit.core.engine.cuda_graph import GraphEngine
from minisgl_lit.core.engine.engine import Engine, Launched
from minisgl_lit.kernels.recorded_steps import RecordedSteps
from minisgl_lit.kernels.plan import Arena, NotRecordable, Plan, PlanRecorder, load_kernels, team_c
from minisgl_lit.core.models.operations import Operations
from minisgl_lit.runtime import build
from reference import FAMILIES, VARIANTS, make_checkpoint, prompts

hidden = load_kernels(team_c) is None
needs_compiler = pytest.mark.skipif(hidden, reason='no compiler')
MODELS = {family: (family, {}) for family in FAMILIES} | VARIANTS
DENSE = [name for name, (family, _) in MODELS.items() if 'Moe' not in family]
EXPERTS = [name for name in MODELS if name not in DENSE]

@pytest.fixture(autouse=True)
def threads():
    "A runtime sets torch's threads for the process; afterwards they are what they were"
    was = torch.get_num_threads()
    yield
    torch.set_num_threads(was)

def combo(i: int) -> dict:
    "Settings that must not matter, and the dtype, so that every two values of any two meet within twelve"
    return dict(dtype=('float32', 'bfloat16')[i % 2], page_size=(1, 4, 16)[i % 3], overlap=bool(i // 3 % 2),
                most=(6, 3)[i // 2 % 2], threads=(1, 1, 1, 3, 1, 2)[i // 6 % 6])

def test_settings_meet():
    seen = [combo(i) for i in range(2 * len(DENSE))]
    for a, b in [(a, b) for a in seen[0] for b in seen[0] if a < b and 'threads' not in (a, b)]:
        assert (len({(o[a], o[b]) for o in seen})
                == len({o[a] for o in seen}) * len({o[b] for o in seen})), (a, b)
    assert {o['threads'] for o in seen} == {1, 2, 3}

def start(path, monkeypatch, most=6, **more):
    "A runtime whose recording is for so many requests at most"
    monkeypatch.setattr(recorded_steps, 'MOST_RECORDED', most)
    usual = dict(device='cpu', dtype='float32', num_pages=400, max_running_req=6, threads=1, cache='radix',
                 page_size=4)
    return build(EngineConfig.of(path, **usual | more))

def bits(x: torch.Tensor) -> torch.Tensor:
    "Its bits: a NaN equals itself, and 0 does not equal -0"
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[x.itemsize])

def watch(runtime) -> SimpleNamespace:
    """Compute each recorded step layer by layer, too, from the same state; how many steps of each size there
    were, and which differed"""
    engine, pool, steps = runtime.engine, runtime.engine.attention.pool, runtime.engine.steps
    seen, inner, can_run = (SimpleNamespace(replayed=Counter(), others=Counter(), apart=[]), steps.run,
                            steps.can_run)
    @torch.inference_mode()
    def run(batch, launched):
        slots = torch.from_numpy(batch.out_loc)
        # what a step does not write is noticed
        pool.buffer[:, :, slots] = torch.nan if pool.buffer.is_floating_point() else -1
        before = pool.buffer.clone()
        steps.logits.fill_(torch.nan)
        inner(batch, launched)
        stored = pool.buffer.clone()
        pool.buffer.copy_(before)
        Engine._forward(engine, batch, other := Launched())
        same = (torch.equal(bits(launched.logits), bits(other.logits))
                and torch.equal(bits(stored), bits(pool.buffer)))
        same &= all(map(torch.equal, launched.largest, Operations().largest(other.logits)))
        if not same or not launched.logits.isfinite().all(): seen.apart.append(batch.device_lens.tolist())
        seen.replayed[len(batch.rows)] += 1
    def watched(batch):
        fits = can_run(batch)
        if batch.mode is ForwardMode.DECODE and not fits: seen.others[len(batch.rows)] += 1
        return fits
    steps.run, steps.can_run = run, watched
    return seen

def serve(runtime, vocab_size=190, params=lambda i: dict(temperature=0)):
    """All prompts at once, with answers of different lengths: tokens and logprobs of each, and how many
    tokens came from the cache"""
    told, cached = {}, 0
    for i, prompt in enumerate(prompts(vocab_size)):
        runtime.scheduler.add(str(i), prompt,
                              SamplingParams(max_tokens=2 + 3 * i, ignore_eos=True, **params(i)))
    while runtime.scheduler.has_work:
        for o in runtime.scheduler.step():
            assert o.error is None, o.error
            told.setdefault(int(o.rid), []).extend([*o.token_ids, *(o.logprobs or [])])
            if o.finish_reason: cached += o.cached_tokens
    runtime.scheduler.self_check()
    return [told[i] for i in range(len(told))], cached

def vocab(name: str) -> int: return min(190, MODELS[name][1].get('vocab_size', 190))

@needs_compiler
@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long] * o.endswith('old spelling'))
                                  for o in DENSE])
def test_replayed_steps_are_those_computed_layer_by_layer(name, tmp_path, monkeypatch):
    """Every bit of logits, keys and values, for every model that can be recorded, and for batches up to and
    beyond the recording's size"""
    make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
    for i in (2 * DENSE.index(name), 2 * DENSE.index(name) + 1):
        settings = combo(i)
        runtime = start(tmp_path, monkeypatch, **settings)
        assert type(runtime.engine) is GraphEngine and type(runtime.engine.steps) is RecordedSteps
        seen = watch(runtime)
        _, cached = serve(runtime, vocab(name))
        runtime.close()
        assert not seen.apart, (settings, seen.apart)
        assert {*seen.replayed} == {*range(1, settings['most'] + 1)}, settings
        assert {*seen.others} == {*range(settings['most'] + 1, 7)}, settings
        assert cached > 30   # the last two prompts share what the others have computed

@pytest.mark.parametrize('name', EXPERTS if not hidden else [*MODELS][:1] + EXPERTS[:1])
def test_what_is_not_recorded_gets_the_other_engine(name, tmp_path, monkeypatch):
    "Experts: torch decides which tokens each gets. Without a compiler: every model"
    make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
    runtime = start(tmp_path, monkeypatch)
    engine = runtime.engine
    assert type(engine) is Engine
    if not hidden:
        with pytest.raises(NotRecordable, match='is computed by torch'):
            RecordedSteps(engine.model, engine.attention, engine.token_pool, 3).capture_all()
    # and a refusal leaves nothing behind
    assert [len(o) for o in serve(runtime)[0]] == [2 + 3 * i for i in range(8)]
    runtime.close()

@needs_compiler
@pytest.mark.parametrize('change', [dict(dtype='float16'), dict(attention='torch')])
def test_no_recorder_without_kernels_for_all(change, tmp_path, monkeypatch):
    make_checkpoint('Qwen3', tmp_path)
    runtime = start(tmp_path, monkeypatch, **change)
    assert type(runtime.engine) is Engine and type(runtime.engine.attention) is TorchAttention
    runtime.close()

@needs_compiler
@pytest.mark.parametrize('overlap', [False, True])
def test_whatever_edits_logits(overlap, tmp_path, monkeypatch):
    """Penalties and biases change a replay's result in place; seeds, logprobs and all: the answers are those
    without a recording"""
    make_checkpoint('Qwen3', tmp_path)
    def params(i):
        edits = (dict(repetition_penalty=1.3, frequency_penalty=.5, logit_bias={5: 4., 7: -100.}) if i % 2
                 else {})
        return edits | dict(temperature=.8 * (i % 3), seed=i, logprobs=2, top_p=.9)
    def answers(recorded):
        runtime = start(tmp_path, monkeypatch, overlap=overlap)
        seen = watch(runtime)
        if not recorded: runtime.engine.steps.can_run = lambda batch: False
        told, _ = serve(runtime, params=params)
        runtime.close()
        assert bool(seen.replayed) == recorded and not seen.apart
        return told
    assert answers(True) == answers(False)

@needs_compiler
def test_engines_in_one_process_do_not_meet(tmp_path, monkeypatch):
    "Two models, each alone, then step by step in turn, then in two threads at once"
    families = ('Qwen3', 'Llama')
    for family in families: make_checkpoint(family, tmp_path/family)
    def both():
        return [start(tmp_path/family, monkeypatch, overlap=family == 'Llama', threads=2)
                for family in families]
    alone = []
    for runtime in both():
        alone.append(serve(runtime)[0])
        runtime.close()
    runtimes, told = both(), [{}, {}]
    for runtime in runtimes:
        for i, prompt in enumerate(prompts()):
            runtime.scheduler.add(str(i), prompt,
                                  SamplingParams(max_tokens=2 + 3 * i, ignore_eos=True, temperature=0))
    while any(o.scheduler.has_work for o in runtimes):
        for runtime, ours in zip(runtimes, told):
            for o in runtime.scheduler.step(): ours.setdefault(int(o.rid), []).extend(o.token_ids)
    assert [[o[i] for i in range(8)] for o in told] == alone
    for runtime in runtimes: runtime.close()
    runtimes = both()
    with ThreadPoolExecutor(2) as pool: assert [o for o, _ in pool.map(serve, runtimes)] == alone
    for runtime in runtimes: runtime.close()

@needs_compiler
@pytest.mark.parametrize('change', [{}, dict(quantization='int4'), dict(kv_dtype='int8', page_size=4)])
def test_no_bit_depends_on_company_or_threads(change):
    "Logprobs of greedy answers, alone and together, where contexts differ and are cut into parts"
    rng, params = random.Random(0), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    texts = [[rng.randrange(5, 500) for _ in range(n)] for n in (3, 61, 64, 200, 513)]
    def told(threads, together):
        here = dict(dtype='bfloat16', device='cpu', num_pages=800, cache='none')
        with LLM(threads=threads, **here | change) as llm:
            outs = llm.generate(texts, params) if together else [llm.generate([o], params)[0] for o in texts]
        return [(o.token_ids, o.logprobs) for o in outs]
    first = told(1, False)
    assert told(1, True) == first == told(2, True)


@needs_compiler
@torch.inference_mode()
def test_a_plan_outlives_all_that_it_was_made_from(tmp_path, monkeypatch):
    """Model, weights, pool and tables are gone; memory is filled with other things; the same step gives the
    same bits"""
    make_checkpoint('Qwen3', tmp_path)
    runtime = start(tmp_path, monkeypatch, dtype='bfloat16')
    serve(runtime)
    steps, gone = runtime.engine.steps, weakref.ref(runtime.engine.model)
    plan, result = steps.plan, steps.logits
    result.fill_(torch.nan)
    plan.replay(1, 1)   # the last step again
    right = result[0].clone()
    runtime.close()
    del runtime, steps
    gc.collect()
    assert gone() is None and right.isfinite().all()
    # 80 MB, of the sizes that were freed
    other = [torch.full((n,), torch.nan) for n in range(1, 40_000, 37)]
    result.fill_(torch.nan)
    plan.replay(1, 1)
    assert torch.equal(result[0], right) and len(other) > 1000

toy_c = team_c + r"""
#include <unistd.h>
typedef uint64_t u64;
static u64 mixed(const u64 *x, i64 n, u64 factor) {
    for (i64 j = 0; j < n; j++) factor = factor * 31 + x[j];
    return factor;
}
static void dawdle(i64 who, i64 microseconds, team *t) {
    if (microseconds && t->id == who % t->size) usleep(microseconds);
}
void shared(u64 *y, const u64 *x, i64 factor, i64 rows, i64 who, i64 wait, team *t) {
    dawdle(who, wait, t);
    for (EACH(r, rows)) y[r] = mixed(x, rows, factor) ^ r;
}
void taken(u64 *y, const u64 *x, i64 factor, i64 rows, i64 who, i64 wait, team *t) {
    dawdle(who, wait, t);
    for (i64 r; (r = take(t)) < rows;) y[r] = mixed(x, rows, factor) ^ r;
}
void twice(u64 *y, u64 *between, const u64 *x, i64 factor, i64 rows, i64 who, i64 wait, team *t) {
    shared(between, x, factor, rows, who, wait, t);
    barrier(t);
    taken(y, between, factor, rows, who + 1, wait, t);
}
void add(u64 *y, i64 more, i64 rows, team *t) { for (EACH(r, rows)) y[r] += more; }
void turned(u64 *y, const u64 *x, i64 rows, team *t) { for (EACH(r, rows)) y[r] = x[(r + 1) % rows] + 1; }
"""
ROWS = 13

def expected(x: np.ndarray, factor: int, rows: int) -> np.ndarray:
    "What `shared` and `taken` make of a buffer"
    for o in x[:rows].tolist(): factor = (factor * 31 + o) % 2**64
    return np.uint64(factor) ^ np.arange(rows, dtype=np.uint64)

def check_plan(ops: list[tuple], size: int, all_rows: list[int], times: int = 1) -> None:
    """Record ops on four buffers, replay them for different numbers of rows, and compare all buffers with
    numpy's"""
    toy, g = load_kernels(toy_c), np.random.default_rng(len(ops))
    numpys = [g.integers(0, 2**63, ROWS).astype(np.uint64) for _ in range(5)]
    tensors = [torch.from_numpy(o.view(np.int64).copy()) for o in numpys]
    with PlanRecorder(Arena()) as recorder:
        for name, x, step, factor, who, wait in ops:
            to = [tensors[(x + step) % 4], tensors[4]][:2 if name == 'twice' else 1]
            getattr(toy, name)(*to, tensors[x], factor, ROWS, who, wait)
    plan = Plan(recorder)
    for _ in range(times):
        for rows in all_rows:
            plan.replay(rows, size)
            for name, x, step, factor, *_ in ops:
                new = expected(numpys[x], factor, rows)
                if name == 'twice':
                    numpys[4][:rows] = new
                    new = expected(new, factor, rows)
                numpys[(x + step) % 4][:rows] = new
            assert all((a.numpy().view(np.uint64) == b).all() for a, b in zip(tensors, numpys))

numbers = st.integers
# 500 µs: longer than a thread spins
toy_ops = st.lists(st.tuples(
    st.sampled_from(['shared', 'taken', 'twice']), numbers(0, 3), numbers(1, 3), numbers(0, 99),
    numbers(0, 4), st.sampled_from([0, 0, 0, 20, 500])), min_size=1, max_size=8)

@needs_compiler
@settings(max_examples=60)
@given(toy_ops, numbers(1, 5), st.lists(numbers(0, ROWS), min_size=1, max_size=4))
def test_plans_of_any_team_give_what_numpy_gives(ops, size, all_rows):
    """Each kernel reads what all threads wrote in the one before it; rows beyond those asked for stay as they
    are"""
    check_plan(ops, size, all_rows)

def random_case(seed: int) -> tuple[list[tuple], int, list[int]]:
    g = random.Random(seed)
    ops = [(g.choice(['shared', 'taken', 'twice']), g.randrange(4), g.randint(1, 3), g.randrange(99),
            g.randrange(5), g.choice([0, 0, 0, 300]))
           for _ in range(g.randint(3, 9))]
    return ops, 1 + seed % 4, [g.randint(0, ROWS) for _ in range(3)]

@needs_compiler
def test_plans_of_several_threads_at_once():
    "Each Python thread has a team of its own, and records while others replay"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: check_plan(*random_case(seed), times=5), range(16)))

@needs_compiler
@pytest.mark.long
def test_many_replays():
    for seed in range(200): check_plan(*random_case(seed), times=20)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: check_plan(*random_case(seed), times=40), range(96)))

@needs_compiler
def test_many_barriers_in_a_row():
    """Three hundred kernels, each of which moves all numbers by one place and adds one, by teams of up to
    five threads"""
    toy, x, y = load_kernels(toy_c), torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)
    with PlanRecorder(Arena()) as recorder:
        for _ in range(150): toy.turned(y, x, ROWS), toy.turned(x, y, ROWS)
    plan, done = Plan(recorder), 0
    for size, times in ((1, 20), (2, 6), (3, 3), (5, 1)):
        for _ in range(times): plan.replay(ROWS, size)
        done += 300 * times
        assert x.tolist() == [(r + done) % ROWS + done for r in range(ROWS)]

@needs_compiler
def test_a_recorder_is_of_its_thread_alone():
    "What another thread calls meanwhile is computed at once"
    toy, x, y = load_kernels(toy_c), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with ThreadPoolExecutor(1) as pool, PlanRecorder(Arena()) as recorder:
        toy.add(x, 1, 3)
        pool.submit(toy.add, y, 2, 3).result()
        assert (len(recorder.ops), x.tolist(), y.tolist()) == (1, [0] * 3, [2] * 3)
    Plan(recorder).replay(2, 1)
    assert (x.tolist(), y.tolist()) == ([1, 1, 0], [2] * 3)

@pytest.mark.parametrize('inference', [False, True])
def test_what_torch_computes_is_refused_and_views_are_not(inference):
    """In inference mode, too, where torch says of functions that may copy, like `contiguous`, only that their
    result may be a view"""
    x = torch.arange(6.).view(2, 3)
    views = dict(t=lambda: x.t(), view=lambda: x.view(-1), chunk=lambda: x.chunk(2), row=lambda: x[1],
                 part=lambda: x[:, 1:],
                 contiguous=lambda: x.contiguous(), float=lambda: x.float(), flatten=lambda: x.flatten(),
                 expand=lambda: x.expand(4, 2, 3), split=lambda: x.split([1, 2], dim=1),
                 empty=lambda: torch.empty(3), new_empty=lambda: x.new_empty(2),
                 like=lambda: torch.empty_like(x))
    computed = dict(contiguous=lambda: x.t().contiguous(), double=lambda: x.double(), int=lambda: x.int(),
                    reshape=lambda: x.t().reshape(-1),
                    flatten=lambda: x.t().flatten(), add=lambda: x + 1, add_=lambda: x.add_(1),
                    foreach=lambda: torch._foreach_add_([x], 1.), clone=lambda: x.clone(),
                    zeros=lambda: torch.zeros(3), index=lambda: x[torch.tensor([0])],
                    item=lambda: x[0, 0].item(), put=lambda: x.__setitem__(0, 1.),
                    linear=lambda: torch.nn.functional.linear(x, x), cat=lambda: torch.cat([x, x]),
                    equal=lambda: torch.equal(x, x), random=lambda: torch.rand(3))
    def refused(f):
        try:
            with PlanRecorder(Arena()): f()
        except NotRecordable: return True
        return False
    with torch.inference_mode(inference):
        assert [name for name, f in views.items() if refused(f)] == []
        assert [name for name, f in computed.items() if not refused(f)] == []
