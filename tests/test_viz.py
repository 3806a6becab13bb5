"Recordings of random lives are true, their pictures well formed, and the film works without a kernel."
import itertools, re, subprocess, sys
from collections import Counter
from xml.etree import ElementTree

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import FinishReason, ForwardMode
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import InlineStream
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.tools.svg import (
    FREE, LOCKED, TREE, Branch, End, Recording, StepRecord, draw_pages, draw_timeline, draw_tree,
    engine_share, evicted, owner_blocks, player)
from minisgl_lit.core.scheduler.scheduler import Observer
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine
from minisgl_lit.tools.widgets import Recorder, View

SETTINGS = st.fixed_dictionaries(dict(
    page_size=st.integers(1, 4), num_pages=st.integers(6, 20),
    cache=st.sampled_from(['radix', 'radix', 'none']), overlap=st.booleans(),
    admission=st.sampled_from(['reserve', 'optimistic']), chunked_prefill_size=st.integers(2, 20),
    mixed_chunk=st.booleans()))
LIVES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(0, 6), st.integers(0, 5)),
                 min_size=1, max_size=8)

def server(page_size=2, num_pages=12, cache='radix', overlap=False, **more):
    "A scheduler of the toy engine; its clock ticks whenever it is read"
    table = TableManager(3, 24, page_size, dummy_page=num_pages)
    engine = ToyEngine(table.page_table, table.token_pool, page_size, num_pages, vocab_size=9,
                       stream=(ManualStream if overlap else InlineStream)())
    clock = map(float, itertools.count()).__next__
    return Scheduler(engine, CacheManager(num_pages, table, make_prefix_cache(cache, page_size)), 9, clock,
                     EngineConfig(overlap=overlap, seed=0, **more), eos_token_ids={8})

def live(s, lives, look=lambda: None):
    """Requests: length, where they part from the others, longest answer, steps until the next comes; the last
    is aborted. All replies"""
    told = []
    for i, (n, part, m, steps) in enumerate(lives):
        try:
            s.add(str(i), [1]*max(n - part, 0) + [2 + i % 5]*min(part, n),
                  SamplingParams(max_tokens=m, temperature=0))
        except ValueError: continue   # could never be served with so few pages
        for _ in range(steps):
            if s.has_work: told += s.step()
            look()
    s.abort(str(len(lives) - 1))
    while s.has_work: told += s.step()
    return [(o.rid, o.token_ids, o.finish_reason) for o in told]

@settings(max_examples=60, deadline=None)
@given(SETTINGS, LIVES)
def test_a_recording_is_true(config, lives):
    s, plain = server(**config), server(**config)
    recorder = Recorder(s)
    with recorder as run: told = live(s, lives, recorder.snapshot)
    assert told == live(plain, lives)              # to be watched changes nothing
    assert s.stats() == plain.stats()
    for i, step in enumerate(run.steps):
        # every page has an owner, and the ledger would not name two
        assert step.owners.min() >= 0
        had, pages = run.pages(i), step.stats['pages']
        free, tree, locked = (had.pop(run.names[k], 0) for k in (FREE, TREE, LOCKED))
        assert (dict(total=len(step.owners), free=free, evictable=tree, protected=locked,
                     held=sum(had.values())) == pages)
        assert (sorted(np.concatenate([[], *(o.pages for o in step.tree)]))
                == np.flatnonzero(np.isin(step.owners, (TREE, LOCKED))).tolist())
        assert all(len(o.tokens) == len(o.pages) * config['page_size'] for o in step.tree)
    assert sum(len(o.pages) for i in range(len(run.steps)) for o in evicted(run, i)) <= s.cache.evicted_pages
    assert [o.number for o in run.steps if o.mode] == list(range(1, s.launched + 1))
    assert Counter(o.rid for o in run.ends) == Counter(rid for rid, _, reason in told if reason)
    assert sum(o.made for o in run.ends) == sum(len(ids) for _, ids, _ in told)
    work = sorted((a, b) for o in run.steps for _, a, b in o.work)
    # the host does one thing at a time
    assert all(a < b for a, b in work) and all(b <= c for (_, b), (c, _) in itertools.pairwise(work))
    assert all(Counter(what for what, *_ in o.work) == dict(call=2, look=1, wait=1, process=1)
               for o in run.steps if o.mode)
    assert 0 <= engine_share(run) < 1

def parse(film):
    "The elements of a film; HTML does not close `input`, XML does"
    return ElementTree.fromstring(re.sub(r'(<input [^>]*)>', r'\1/>', film))

def shown_at(film):
    "For each step, kinds and numbers of what belongs to it; and the steps that are marked"
    marked, found = set(), {}
    for o in parse(film).iter():
        for i in map(int, o.get('data-step', '').split()):
            found.setdefault(i, Counter())[o.tag] += 1
            if 'now' in o.get('class', '').split(): marked.add((o.tag, i))
    return found, marked

@settings(max_examples=25, deadline=None)
@given(SETTINGS, LIVES)
def test_a_film_has_every_step_once(config, lives):
    s = server(**config)
    with Recorder(s) as run: live(s, lives)
    found, marked = shown_at(player(run))
    assert sorted(found) == list(range(len(run.steps)))
    for i, step in enumerate(run.steps):
        # words and tree; map, and if there is a batch the timeline
        assert found[i] == dict(div=2, rect=1 + (step.mode is not None))
    last = len(run.steps) - 1
    assert {o for o in marked if o[0] == 'rect'} == {('rect', last)} and ('div', last) in marked

@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=20), st.booleans())
def test_whatever_is_said_gives_a_picture(said, rid, locked):
    "Texts of models and names of requests are anybody's"
    tree = [Branch(0, np.arange(40), np.arange(20), int(locked), 3),
            Branch(1, np.arange(2), np.array([20]), 0, 0)]
    stats = dict(waiting=0, pages=dict(total=22, free=0, evictable=1, protected=20, held=1))
    steps = [StepRecord(1, mode, {rid: 3}, [('call', k, k + .5), ('wait', k + .5, k + .7)],
                        np.array([LOCKED]*20 + [TREE, 4]), tree, stats)
             for k, mode in enumerate([ForwardMode.PREFILL, ForwardMode.MIXED])]
    run = Recording(lambda ids: said, steps=steps, ends=[End(1, rid, FinishReason.STOP, 3, 0, 1)])
    run.names.append(rid)
    run.steps.append(StepRecord(2, owners=steps[0].owners, tree=tree[:1], stats=stats))
    for svg in (draw_timeline(run), draw_pages(run), *(draw_tree(run, i) for i in range(3))):
        assert ElementTree.fromstring(svg).tag == 'svg'
    assert len(parse(player(Recording(lambda ids: said)))) == 0

@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n),
    min_size=1, max_size=6)))
def test_owner_blocks_cover_everything_once(rows):
    codes = np.array(rows)
    painted, times = np.full(codes.shape, -1), np.zeros(codes.shape, dtype=int)
    for code, across, down in owner_blocks(codes):
        painted[np.ix_(across, down)] = code
        times[np.ix_(across, down)] += 1
    assert painted.tolist() == codes.tolist() and times.min() == times.max() == 1

def test_a_large_tree_and_many_pages_stay_small():
    tree = [Branch(0, np.arange(2), np.array([k]), 0, 0) for k in range(1000)]
    run = Recording(str, steps=[StepRecord(1, owners=np.arange(1000) % 7, tree=tree)])
    run.names += ['a', 'b', 'c']
    assert 'and 960 nodes more' in draw_tree(run, 0)
    assert f'{int((run.steps[0].owners != FREE).sum()) - 96} more pages are not shown' in draw_pages(run)
    assert len(draw_tree(run, 0)) < 30_000 and len(draw_pages(run)) < 60_000

def test_whoever_came_meanwhile_keeps_the_place():
    s = server()
    engine, recorder = s.engine, Recorder(s)
    recorder.detach()   # nothing to end
    recorder.attach()
    s.observer = other = Observer()
    recorder.detach()
    assert (s.observer, s.engine) == (other, engine)

@pytest.mark.parametrize('overlap', [False, True])
def test_failures_pass_through(overlap):
    s = server(overlap=overlap)
    with Recorder(s) as run:
        s.engine.engine.fail_at = 2
        assert [r for *_, r in live(s, [(3, 0, 4, 9), (3, 0, 2, 0)]) if r] == ['error', 'abort']
        assert s.engine.steps == {}
        live(s, [(3, 0, 2, 9), (1, 0, 1, 0)])
    assert run.ends[0].reason == 'error' and run.steps[-1].stats['pages']['held'] == 0

def test_a_view_draws_in_time(monkeypatch):
    "Each drawing takes a second here, so that the next may not come before five more"
    now = [0.]
    monkeypatch.setattr('minisgl_lit.tools.widgets.time.perf_counter', lambda: now[0])
    drawn = []
    def slow(*_):
        now[0] += 1
        drawn.append(now[0])
        return f'film {len(drawn)}'
    monkeypatch.setattr('minisgl_lit.tools.widgets.player', slow)
    s = server()
    recorder = Recorder(s).attach()
    view = View(recorder)
    s.add('a', [1, 2], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    for _ in range(8):
        s.step()
        now[0] += 2
    assert drawn == [1, 8, 15] and view.value == 'film 3'
    s.step()          # the last token: nobody is left
    assert len(drawn) == 4
    view.close()
    recorder.snapshot()
    assert (len(drawn), view.value) == (4, '')

@pytest.mark.parametrize('name', ['ipywidgets', 'matplotlib'])
def test_a_missing_extra_is_one_sentence(name):
    code = f"import sys; sys.modules['{name}'] = None; import minisgl_lit.tools.widgets"
    told = subprocess.run([sys.executable, '-c', code], capture_output=True,
                          text=True).stderr.strip().splitlines()
    assert told[-1] == ("ImportError: minisgl_lit.tools.widgets draws with ipywidgets and matplotlib, and "
                        "one of them is missing: "
                        "pip install ipywidgets matplotlib")
