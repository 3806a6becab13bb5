"""`ToyEngine` (chapter 03): what is right passes in every interleaving, and what is wrong is always
caught."""
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from minisgl_lit.core.request import Batch, ForwardMode, Lengths, PendingReq, Req
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import WorkerStream
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.testing.toy_engine import ToyEngine, ToyError, expected_output, segments

VOCAB, MAX_LEN = 20, 16

class Host:
    "Gives out rows and pages in the simplest way, and never takes any back."
    def __init__(self, page_size, n_reqs, stream=None):
        self.size, self.n_cols, self.step = page_size, -(-MAX_LEN // page_size), 0
        self.num_pages = n_reqs*self.n_cols
        self.pages = np.full((n_reqs + 1, self.n_cols), self.num_pages, dtype=np.int32)
        self.tokens, self.lengths = np.zeros((n_reqs + 1, MAX_LEN), dtype=np.int32), Lengths(n_reqs + 1)
        self.engine = ToyEngine(self.pages, self.tokens, page_size, self.num_pages, VOCAB, stream)

    def add(self, row, prompt, prefix_of=None):
        "A request in that row; it may borrow the full pages that it shares with an earlier one"
        p, cached = PendingReq(f"r{row}", np.array(prompt), SamplingParams(), MAX_LEN), 0
        self.pages[row] = np.arange(self.n_cols) + row*self.n_cols
        if prefix_of is not None:
            other = prefix_of.pending.input_ids[:self.lengths.cached_len[prefix_of.table_idx]]
            while (cached + self.size < len(prompt)
                   and list(other[:cached + self.size]) == list(prompt[:cached + self.size])):
                self.pages[row, cached // self.size] = self.pages[prefix_of.table_idx, cached // self.size]
                cached += self.size
        self.tokens[row, :len(prompt)] = prompt
        self.lengths.cached_len[row], self.lengths.device_len[row] = cached, cached
        return Req(p, row, None, self.lengths)

    def batch(self, plan, n_padding=0):
        "`plan`: (request, how many tokens) pairs; padding goes to the dummy row"
        self.step += 1
        reqs = [o for o, _ in plan]
        dummy = len(self.pages) - 1
        rows = np.array([o.table_idx for o in reqs] + [dummy]*n_padding)
        start = np.array([o.cached_len for o in reqs] + [0]*n_padding)
        end = start + np.array([n for _, n in plan] + [1]*n_padding)
        who, within = segments(end - start)
        r, p = rows[who], start[who] + within
        sampled = [i for i, o in enumerate(reqs) if end[i] >= o.pending.input_len]
        return Batch(reqs, ForwardMode.MIXED, self.step, rows, start, end, r, p, self.engine.kv.slots(r, p),
                     np.array(sampled, dtype=int))

    def launch(self, batch):
        out = self.engine.sample(batch, self.engine.forward(batch))
        for o, end in zip(batch.reqs, batch.device_lens): self.lengths.cached_len[o.table_idx] = end
        return batch, out

def receive(batch, out):
    out.copy_done.synchronize()
    assert out.finite.all()
    for i, t in zip(batch.sampled, out.next_tokens): batch.reqs[i].pending.append(int(t))

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4)

@given(prompts, st.sampled_from([1, 2, 3, 16]), st.data())
def test_right_is_right(prompts, page_size, data):
    """Any split into steps, any borrowing, padding, any interleaving of host and stream: the tokens of each
    alone"""
    h = Host(page_size, len(prompts), ManualStream())
    waiting, everyone, running, flying, n_run = (list(enumerate(prompts)), [], [], [],
        data.draw(st.integers(0, 3), "pieces of work a step"))
    while waiting or running or flying:
        if waiting and (not running or data.draw(st.booleans(), "admit")):
            running.append(h.add(*waiting.pop(0), prefix_of=data.draw(st.sampled_from([None, *everyone]))))
            everyone.append(running[-1])
        plan = []
        for o in running:
            left = o.pending.input_len - o.cached_len
            plan.append((o, data.draw(st.integers(1, left), "chunk") if left > 0 else 1))
        if plan: flying.append(h.launch(h.batch(plan, n_padding=data.draw(st.integers(0, 2)))))
        running = [o for o in running if o.cached_len < MAX_LEN - 1]
        for _ in range(n_run): h.engine.stream.run_next()
        while len(flying) > (1 if running or waiting else 0): receive(*flying.pop(0))
    for o, prompt in zip(everyone, prompts):   # all ran until their rows were full
        assert o.pending.output_ids.tolist() == expected_output(prompt, MAX_LEN - len(prompt), VOCAB)

@given(prompts, st.sampled_from([1, 2, 3, 16]))
def test_tokens_are_those_of_each_alone(prompts, page_size):
    h = Host(page_size, len(prompts), WorkerStream())
    reqs = [h.add(i, o) for i, o in enumerate(prompts)]
    flying = [h.launch(h.batch([(o, o.pending.input_len) for o in reqs]))]
    for _ in range(5):
        flying.append(h.launch(h.batch([(o, 1) for o in reqs])))
        receive(*flying.pop(0))
    receive(*flying.pop())
    h.engine.stream.close()
    for o, prompt in zip(reqs, prompts):
        assert o.pending.output_ids.tolist() == expected_output(prompt, 6, VOCAB)

def started(page_size=2):
    "Two requests that have come some way, and what they would do next"
    h = Host(page_size, 3)
    reqs = [h.add(0, [1, 2, 0, 1, 2]), h.add(1, [2, 2])]
    receive(*h.launch(h.batch([(reqs[0], 5), (reqs[1], 2)])))
    return h, h.batch([(reqs[0], 1), (reqs[1], 1), (h.add(2, [0, 1, 1]), 3)], n_padding=1)

def run(h, batch): h.engine.sample(batch, h.engine.forward(batch)).copy_done.synchronize()

def test_started_is_right(): run(*started())

@pytest.mark.parametrize("name", ["rows", "cached_lens", "device_lens", "token_rows", "positions", "out_loc"])
@pytest.mark.parametrize("by", [-1, 1, 2])
def test_each_entry_of_a_batch_counts(name, by):
    for i in range(len(getattr(started()[1], name))):
        h, batch = started()
        getattr(batch, name)[i] += by
        with pytest.raises((ToyError, IndexError, ValueError)): run(h, batch)

def test_each_page_and_token_that_is_read_counts():
    h, batch = started()
    for row, n in zip(batch.rows[:3], batch.device_lens[:3]):
        for col in range(-(-n // 2)):
            for page in set(range(h.num_pages + 1)) - {h.pages[row, col]}:
                h, batch = started()
                h.pages[row, col] = page
                with pytest.raises(ToyError): run(h, batch)
        for at in range(n):
            h, batch = started()
            h.tokens[row, at] = (h.tokens[row, at] + 1) % VOCAB
            with pytest.raises(ToyError): run(h, batch)

@pytest.mark.parametrize("name",
    ["rows", "cached_lens", "device_lens", "token_rows", "positions", "out_loc", "sampled", "reqs"])
@pytest.mark.parametrize("n_run", [0, 1])
def test_a_batch_may_not_change_after_the_launch(name, n_run):
    h, batch = started()
    stream = h.engine.stream = ManualStream()
    out = h.engine.sample(batch, h.engine.forward(batch))
    for _ in range(n_run): stream.run_next()
    batch.reqs.reverse() if name == "reqs" else getattr(batch, name).__iadd__(1)
    with pytest.raises(ToyError, match=f"{name} changed after the launch"): out.copy_done.synchronize()

@pytest.mark.parametrize("name", ["token_rows", "positions", "out_loc"])
def test_a_batch_names_each_token_once(name):
    h, batch = started()
    with pytest.raises(ToyError, match=f"{name} has 5 entries for 6 tokens"):
        run(h, replace(batch, **{name: getattr(batch, name)[:-1]}))

def test_after_reset_nothing_flies():
    h, batch = started()
    h.engine.stream, batch.reqs[0].pending.rid = ManualStream(), "before"
    h.engine.forward(batch)   # the host fails before it asks for a sample
    h.engine.reset()
    batch.reqs[0].pending.rid = "after"
    run(h, batch)

def test_delay():
    h, batch = started()
    h.engine.delay, start = .02, time.perf_counter()
    run(h, batch)
    assert time.perf_counter() - start >= .02

def test_padding_stays_on_the_dummy_page():
    h, batch = started()
    run(h, batch)
    h, batch = started()
    h.pages[-1, 0] = 5   # the dummy row points at a page that somebody may own
    bad = replace(batch, out_loc=h.engine.kv.slots(batch.token_rows, batch.positions))
    with pytest.raises(ToyError, match="padding: slot 10 is not on the dummy page"): run(h, bad)

def test_lost_numbers_reach_whoever_borrows_them_and_nobody_else():
    h = Host(2, 3)
    a = h.add(0, [1, 2, 0, 1, 2])
    h.engine.nan_rids.add("r0")
    assert h.launch(h.batch([(a, 5)]))[1].finite.tolist() == [False]
    h.engine.nan_rids.clear()
    b, c = h.add(1, [1, 2, 0, 2], prefix_of=a), h.add(2, [1, 2, 0, 2])
    assert b.cached_len == 2
    out = h.launch(h.batch([(b, 2), (c, 4)]))[1]
    assert (out.finite.tolist() == [False, True]
            and out.next_tokens[1] == expected_output([1, 2, 0, 2], 1, VOCAB)[0])
