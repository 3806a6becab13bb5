"""Random arrivals, aborts, failures and interleavings on the toy engine: no page, token or request is lost,
in either loop."""
import os, shutil, tempfile
from collections import Counter
from copy import copy
from dataclasses import fields
from statistics import median
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, seed, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                 run_state_machine_as_test)
import numpy as np
import pytest

from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.config import admissions, evictions, policies
from minisgl_lit.core.request import Caller, ForwardMode, PendingReq
from minisgl_lit.core.sampling_params import QueueFull
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.testing.manual_stream import ManualStream
from minisgl_lit.distributed.handoff import Handoffs
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.distributed.page_file import PageFile
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.distributed.tier import Tier
from minisgl_lit.rules.fairness import Fair
from minisgl_lit.speculation import draft_model
from minisgl_lit.speculation.draft_model import DraftModel
from minisgl_lit.speculation.drafts import StepCosts
from minisgl_lit.core.scheduler.prefill import PrefillAdder
from minisgl_lit.core.scheduler.scheduler import Observer, Scheduler
from minisgl_lit.text.thinking import AnswerAfterThinking, is_allowed
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output, prefix_hashes, toy_states

VOCAB, MAX_SEQ_LEN = 13, 40
EOS = {5, 6}
CALLERS = [Caller(), Caller('a'), Caller('a', 'x'), Caller('a', 'y'), Caller('b', weight=3.)]
SYSTEM = [1, 2, 3, 4, 1, 2, 3, 4, 1, 1, 2, 2]    # prompts begin with a piece of it, so that they share pages

SETTINGS = dict(    # drawn anew for each life, by the names of the config
    page_size=st.integers(1, 16), num_pages=st.integers(0, 12), max_running_req=st.integers(1, 5),
    max_prefill_tokens=st.integers(1, 30),
    chunked_prefill_size=st.integers(1, 6) | st.integers(1, 30),
    cache=st.sampled_from(['radix', 'radix', 'none']), overlap=st.booleans(),
    # a few pages
    kv_disk_path=st.sampled_from([None, 'disk']), kv_disk_gib=st.sampled_from([5e-6, 2e-5]),
    kv_host_gib=st.sampled_from([None, None, 2e-7, 1e-6]),
    kv_handoff_path=st.sampled_from([None, 'handoffs']), eviction=st.sampled_from(evictions.names),
    policy=st.sampled_from(policies.names), max_queued_req=st.integers(4, 20),
    admission=st.sampled_from(admissions.names), schedule_conservativeness=st.sampled_from([.05, 1.]),
    mixed_chunk=st.booleans(), schedule_low_priority_values_first=st.booleans(),
    max_prefill_streak=st.none() | st.integers(1, 3), preempt_threshold=st.integers(0, 3),
    priority_aging=st.none() | st.integers(1, 9), queue_timeout=st.sampled_from([None, None, 40.]),
    run_timeout=st.sampled_from([None, None, 60.]), seed=st.just(0))
# lives with a second tier
BELOW = (SETTINGS | dict(page_size=st.integers(1, 4), max_prefill_tokens=st.integers(8, 30),
                         chunked_prefill_size=st.integers(4, 30),
                        cache=st.just('radix'), kv_disk_path=st.just('disk'),
                        kv_host_gib=st.sampled_from([None, 2e-7, 1e-6]), kv_handoff_path=st.none()))
# lives with other engines
HANDED = SETTINGS | dict(page_size=st.integers(1, 4), kv_handoff_path=st.just('handoffs'))
ELSEWHERE = dict(   # settings that the scheduler does not see
    model='parity', reasoning_parser='reasoning', device='parity', dtype='parity', attention='parity',
    memory_ratio='engine', max_seq_len='fixed: rows of 40 tokens',
    max_recv_per_step='workers', threads='engine', dummy_weights='weights', tp='parallel',
    cuda_graph_max_bs='graph', kv_dtype='attention', quantization='quantized', quantization_group='quantized',
    quantization_compute='quantized', additional_properties='grammar', control_tokens_in_messages='tokenizer',
    plugins='plugins', lora='adapters', max_loras='adapters',
    speculation='start: a guesser that is wrong now and then')

def test_every_setting_is_drawn():
    assert {f.name for f in fields(EngineConfig)} == {*SETTINGS, *ELSEWHERE}

class InThrees:
    "A form: five tokens, which leave 0, 1, 2, 0, 1 when divided by three"
    def __init__(self, pending): self.n = 0
    def mask(self, out): out[:] = sum(1 << t for t in range(self.n % 3, VOCAB, 3))
    def accept(self, token):
        assert token % 3 == self.n % 3, 'not what the mask has said'
        self.n += 1
        return self.n == 5
    def fork(self): return copy(self)

def in_threes(prompt: list[int], n: int, stop, first=0) -> list[int]:
    "The answer of that form, or the rest of it"
    tokens = list(prompt)
    for i in range(first, min(first + n, 5)):
        token = expected_output(tokens, 1, VOCAB)[0]
        tokens.append(next(t % VOCAB for t in range(token, token + VOCAB) if t % VOCAB % 3 == i % 3))
        if tokens[-1] in stop: break
    return tokens[len(prompt):]

class Thoughts:
    "Tokens from 1 on to the next 2; an odd prompt has had its 1, an even one leaves that to the model"
    opening, in_answer = [1], False
    def __init__(self, pending): self.n_tokens, self.active, self.over = 0, bool(pending.input_len % 2), False
    @property
    def ending(self): return [2] if self.active else []
    def push(self, token):
        before, first = self.active, not (self.active or self.over)
        if before: self.active, self.over = token != 2, token == 2
        elif first: self.active, self.over = token == 1, token != 1
        self.n_tokens += before and self.active

def with_thoughts(prompt, params, stop):
    """The answer to a prompt whose thinking is told from it, as the model alone would give it under the same
    masks"""
    pending, mask = PendingReq('', np.array(prompt), params, MAX_SEQ_LEN), np.zeros(1, dtype=np.int32)
    thoughts, tokens = Thoughts(pending), list(prompt)
    rules = AnswerAfterThinking(thoughts, InThrees(pending) if params.regex else None,
                                params.max_thinking_tokens, stop)
    for _ in range(params.max_tokens):
        rules.mask(mask)
        token = expected_output(tokens, 1, VOCAB)[0]
        tokens.append(next(t % VOCAB for t in range(token, token + VOCAB) if is_allowed(mask, t % VOCAB)))
        if rules.accept(tokens[-1]) or tokens[-1] in stop: break
    return tokens[len(prompt):], thoughts.n_tokens

class Ledger(CacheManager):
    "Notes duplicates, and prompts that are passed over"
    deduped, passed_over = 0, 0
    # as if the process had ended
    def flush_tree(self): self._push(self.prefix.evict(self.prefix.evictable_size))
    def _insert_prefix(self, *args, **kwargs):
        before = self.releasing.size
        super()._insert_prefix(*args, **kwargs)
        self.deduped += self.releasing.size - before

class SecondTier:
    "Host memory and a disk below the pool, as a config says, on a stream that works when told to"
    memory = '/dev/shm' if os.path.isdir('/dev/shm') else None
    def __init__(self, config, engine, moving, least):
        self.config, self.engine, self.moving, self.least, self.seen = (config, engine, moving, least,
            Counter())
        self.folder, self.now = tempfile.mkdtemp(dir=self.memory), 0.
        self.start()
    def start(self):
        c, self.stream = self.config, ManualStream()
        page_bytes = self.engine.empty_pages(1)[0].nbytes
        self.file = PageFile(self.folder, page_bytes, int(c.kv_disk_gib * 2**30)) if c.kv_disk_path else None
        host = int((c.kv_host_gib or 0) * 2**30) // page_bytes
        self.tier = Tier(self.engine, c.page_size, lambda: bytes(20), self.stream, self.file, host,
                         self.moving, self.least, self.idle, lambda: self.now)
    def idle(self):
        work = self.stream, self.engine.stream
        any(o.run_next() for o in work if isinstance(o, ManualStream))
    def restart(self):
        self.seen.update(self.tier.counts, restarts=len(self.tier._slots) > 0)
        self.kill()
        self.start()
        return self.tier
    def kill(self):
        "What was on its way is lost"
        if self.file: self.file.close()
    def damage(self, which, in_page):
        "A bit of a page on the disk, or of its record, if there is any"
        slots = sorted(self.tier._slots._slot_of.values())
        if not slots: return
        slot, size = slots[which % len(slots)], self.file.page_bytes
        at = self.file._slots_at + slot*size + which % size if in_page else 4096 + 48*slot + which % 48
        if byte := os.pread(self.file._fd, 1, at): os.pwrite(self.file._fd, bytes([byte[0] ^ 1]), at)
    def end(self):
        self.restart()
        self.kill()
        shutil.rmtree(self.folder)

def make_handoffs(engine, page_size, moving):
    "A folder through which the server sends prompts to itself, on a stream that works when told to"
    stream, folder = ManualStream(), tempfile.mkdtemp(dir=SecondTier.memory)
    return Handoffs(engine, page_size, lambda: bytes(20), stream, folder, moving,
                    lambda: stream.run_next() or engine.stream.run_next())

class Notes(Observer):
    "Notes hits and chunks; at most one prompt is in chunks, and goes first, with as much as is allowed"
    hit, beside, chunked = False, False, None
    def __init__(self, config): self.config, self.seen = config, set()
    def launched(self, batch):
        self.hit |= any(o.pending.cached_tokens for o in batch.reqs)
        if batch.mode is ForwardMode.DECODE: return
        cut = [o.pending for o, end in zip(batch.reqs, batch.device_lens) if end < o.pending.n_tokens]
        assert len(cut) <= 1, 'two prompts in chunks'
        budget, chunk, first = self.config.max_prefill_tokens, self.config.chunked_prefill_size, batch.reqs[0]
        if batch.mode is ForwardMode.PREFILL:
            assert len(batch.positions) <= (budget if len(batch.reqs) > 1 else chunk)
        self.beside |= cut == [first.pending] and any(o.rid not in self.seen for o in batch.reqs[1:])
        self.seen |= {o.rid for o in batch.reqs}
        o = self.chunked
        if o is None or o.req is None or o.finish_reason or o.to_finish or o.kv_invalid: return
        assert first.pending is o, 'others before the chunk'
        n = int(batch.device_lens[0] - batch.cached_lens[0])
        assert (n == min(chunk, o.n_tokens - int(batch.cached_lens[0])) or batch.mode is ForwardMode.MIXED
                and n >= 1)

class Guesser:
    "Guesses what an answer would say without thinking: now right, now wrong, and often too far"
    def __init__(self, far, wrong): self.far, self.wrong, self.seen = far, wrong, Counter()
    def wants(self, reqs): return self.far > 0 and any(self.length(o) for o in reqs)
    def length(self, req): return (7*req.pending.n_tokens + req.pending.input_len) % (self.far + 1)
    def propose(self, reqs):
        assert not any(o.pending.ended or o.pending.n_tokens != o.device_len for o in reqs)
        return [self.guess(o.pending, self.length(o)) for o in reqs]
    def guess(self, pending, n):
        known = pending.input_ids.tolist()
        likely = (in_threes(known, n, (), len(pending.output_ids)) if pending.params.regex
                  else expected_output(known, n, VOCAB))
        return np.array([(o + ((len(known) + i) % self.wrong == 0)) % VOCAB for i, o in enumerate(likely)],
                        dtype=np.int64)
    def learn(self, reqs, proposed, accepted):
        assert all(0 <= b <= a for a, b in zip(proposed, accepted, strict=True))
        self.seen.update(drafted=sum(proposed), accepted=sum(accepted))

class Unlike(ToyEngine):
    "A model that says something else now and then, which it goes on from"
    def __init__(self, wrong, *args):
        super().__init__(*args)
        self.wrong = np.uint64(wrong)
    def _sample(self, launch, tokens, finite, mask):
        super()._sample(launch, tokens, finite, mask)
        batch = launch.batch
        tokens[:] = (tokens + (launch.hashes[batch.sampled] % self.wrong == 0)) % VOCAB
        self.kv.tokens[batch.rows[batch.sampled], batch.device_lens[batch.sampled]] = tokens

class Drafting(Guesser):
    "Guesses what a smaller model says, which has few rows and pages, and may lose its numbers"
    def __init__(self, far, wrong, cache, page_size, rows, pages, at_once):
        super().__init__(far, wrong)
        table = TableManager(rows, MAX_SEQ_LEN, page_size, dummy_page=pages)
        self.engine = Unlike(wrong, table.page_table, table.token_pool, page_size, pages, VOCAB)
        self.cache = CacheManager(pages, table, make_prefix_cache(cache, page_size))
        self.model = DraftModel(self.engine, self.cache, StepCosts((1, 2), (1., 1.)), at_once)
    def propose(self, reqs):
        super().propose(reqs)   # which checks them
        guesses = self.model.guess([o.pending for o in reqs], [*map(self.length, reqs)])
        self.seen.update(model=sum(map(len, guesses)), none=sum(not len(o) for o in guesses))
        self.cache.check_integrity(self.model.reqs.values())
        return guesses
    def end(self):
        "What has ended leaves nothing behind"
        self.model.guess([], [])
        self.cache.check_integrity()
        assert not self.model.reqs and self.cache.table.available_size == self.cache.table.dummy_row
        assert not self.cache.page_counts['held'] + self.cache.page_counts['protected']

def pass_over(adder: PrefillAdder, *args, really=PrefillAdder._pass_over) -> bool:
    "What a `PrefillAdder` does, noted in its `Ledger`"
    passed = really(adder, *args)
    adder.cache.passed_over += passed
    return passed

def serving(seen: Counter, lives: list[int], drawn=SETTINGS):
    "A class of servers that note what has happened to them"

    class Serving(RuleBasedStateMachine):
        "One server; rules are what callers and the engine may do at any moment"

        @initialize(setting=st.fixed_dictionaries(drawn), faulty=st.integers(0, 3).map(lambda n: n == 3),
                    first=st.integers(2, 4),
                    at_least=st.sampled_from([1, 4, 32]), moving=st.sampled_from([1, 3, 40]),
                    least=st.sampled_from([1, 1, 2]), warm=st.sampled_from([False, True, True]),
                    damaged=st.sampled_from([None, 0, 1]), far=st.sampled_from([0, 1, 3, 7]),
                    wrong=st.sampled_from([1, 2, 3, 100]),
                    # rows, pages, tokens read at once, and by how many a step reads as if it decoded
                    draft=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 30),
                                                st.sampled_from([3, 99]), st.sampled_from([0, 4, 64])))
        def start(self, setting, faulty, first, at_least, moving, least, warm, damaged, far, wrong, draft):
            page_size = setting['page_size']
            num_pages = -(-MAX_SEQ_LEN // page_size) + setting['num_pages'] // page_size
            table = TableManager(setting['max_running_req'], MAX_SEQ_LEN, page_size, dummy_page=num_pages)
            self.stream = ManualStream()
            engine = ToyEngine(table.page_table, table.token_pool, page_size, num_pages, VOCAB,
                               stream=self.stream)
            config = EngineConfig(**setting | dict(num_pages=num_pages))
            self.below = (SecondTier(config, engine, moving, least) if config.kv_disk_path
                          or config.kv_host_gib else None)
            sources = (dict(handoffs=make_handoffs(engine, page_size, moving)) if config.kv_handoff_path
                       else {})
            if self.below: sources['tier'] = self.below.tier
            self.ledger = Ledger(num_pages, table,
                                 make_prefix_cache(setting['cache'], page_size, setting['eviction']), sources)
            self.notes, guesser = Notes(config), Guesser(far, wrong)
            if draft:
                *room, draft_model._FEW = draft
                guesser = Drafting(far, wrong, setting['cache'], page_size, *room)
            self.s = Scheduler(engine, self.ledger, VOCAB, self.clock, config, EOS, observer=self.notes,
                               rules=TextRules(None, InThrees, Thoughts), drafter=guesser)
            # tokens worth waiting for, if somebody else computes them
            self.s.prefill.policy.min_shared_tokens = at_least
            self.right, self.told, self.ends, self.pooled, self.aborted, self.n = {}, {}, {}, {}, set(), 0
            self.timed = config.queue_timeout or config.run_timeout
            self.faulty = faulty    # whether this engine may break down
            self.steps, self.marks, self.full, self.displaced = 0, set(), config.max_queued_req, False

            # SYSTEM is below from the start
            if self.below and warm: self.somebody_comes_back(True, 1, damaged)
            self.arrive_together(12 if warm else 6, first)

        def clock(self): return float(self.steps)

        @rule(head=st.integers(0, len(SYSTEM)), tail=st.lists(st.integers(1, 4), max_size=6),
              max_tokens=st.integers(0, 12), ignore_eos=st.booleans(),
              priority=st.sampled_from([0, 0, 0, 2, 5, -1]), extra_key=st.sampled_from([None, None, 'x']),
              form=st.sampled_from([None, None, 'threes']), caller=st.sampled_from(CALLERS),
              thinks=st.sampled_from([None, None, True]), budget=st.none() | st.integers(0, 5),
              handed=st.booleans())
        def arrive(self, head, tail, max_tokens, ignore_eos, priority=0, extra_key=None, form=None,
                   caller=Caller(), thinks=None, budget=None, handed=False):
            prompt, rid = (SYSTEM[:head] + tail) or [7], str(self.n)
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=0,
                                    priority=priority, extra_key=extra_key, regex=form,
                                    separate_reasoning=thinks, max_thinking_tokens=budget if thinks else None)
            full = len(self.s.prefill.waiting) >= self.full
            try: pending = self.s.add(rid, prompt, params, caller)
            except QueueFull:
                assert full
                return
            # perhaps that of another prompt, too
            if handed: pending.handoff = f'{len(prompt)}-{sum(prompt)}'
            self.displaced |= full
            stop = () if ignore_eos else EOS
            if thinks:
                self.right[rid], thought = with_thoughts(prompt, params, stop)
                if thought: self.marks.add('thinking')
            else:
                self.right[rid] = (in_threes(prompt, max_tokens, stop) if form
                                   else expected_output(prompt, max_tokens, VOCAB, stop))
            self.told[rid] = []
            if form: self.marks.add('grammar')
            self.n += 1

        @rule(head=st.integers(0, len(SYSTEM)), tail=st.lists(st.integers(1, 4), max_size=6),
              pooling=st.sampled_from(['last', 'mean']),
              extra_key=st.sampled_from([None, None, 'x']), caller=st.sampled_from(CALLERS))
        def embed(self, head, tail, pooling, extra_key, caller):
            "A text whose states are wanted, and no token"
            n, prompt = self.n, (SYSTEM[:head] + tail) or [7]
            params = SamplingParams(max_tokens=0, temperature=0, pooling=pooling, extra_key=extra_key)
            full = len(self.s.prefill.waiting) >= self.full
            try: self.s.add(str(n), prompt, params, caller)
            except QueueFull: return
            self.displaced |= full
            states = toy_states(prefix_hashes(prompt))
            self.right[str(n)], self.told[str(n)], self.pooled[str(n)] = ([], [],
                states[-1] if pooling == 'last' else states.mean(dtype=float))
            self.n += 1

        @rule(head=st.integers(4, len(SYSTEM)), n=st.integers(2, 4))
        def arrive_together(self, head, n):
            for i in range(n): self.arrive(head, [1, 2][:i % 2], 6 + 2*i, True)

        def flying(self):
            return [rid for rid, o in self.s.alive.items() if o.req
                    and self.s.table.lengths.launched[o.req.table_idx] > self.s.completed]

        @precondition(lambda self: self.s.alive)
        @rule(data=st.data(), at_work=st.booleans())
        def abort(self, data, at_work):
            "Of a request in flight, if there is one; `at_work`: a step brings some there"
            if at_work and not self.flying(): self.step()
            if not self.s.alive: return
            rid = data.draw(st.sampled_from(self.flying() or list(self.s.alive)))
            self.s.abort(rid)
            if rid in self.s.alive: self.marks.add('abort in flight')
            self.aborted.add(rid)

        @rule(how=st.sampled_from(['abort', 'in_place', 'retract']), n=st.integers(1, 3))
        def pause(self, how, n):
            self.s.pause(how)
            if how == 'abort': self.aborted |= set(self.right)
            for _ in range(n): self.step()
            if not self.faulty: self.s.idle_step()
            if how != 'in_place' and not any(o.req for o in self.s.alive.values()): self.s.flush_cache()
            self.s.resume()

        @precondition(lambda self: self.faulty)
        @rule()
        def the_engine_fails(self): self.s.engine.fail_at = self.s.launched + 1

        @precondition(lambda self: self.faulty and self.s.alive)
        @rule(data=st.data())
        def numbers_get_lost(self, data):
            rid = data.draw(st.sampled_from(list(self.s.alive)))
            engines = [self.s.engine, getattr(self.s.drafter, 'engine', self.s.engine)]
            data.draw(st.sampled_from(engines)).nan_rids.add(rid)

        @rule(n=st.integers(1, 3))
        def the_engine_works(self, n):
            for _ in range(n): self.stream.run_next()

        @precondition(lambda self: self.below)
        @rule(n=st.integers(1, 6))
        def the_disk_works(self, n):
            for _ in range(n): self.below.stream.run_next()

        @precondition(lambda self: self.below)
        @rule(n=st.integers(1, 40), written=st.booleans())
        def others_need_the_pages(self, n, written):
            "What the tree has goes down, as far as it may, and perhaps to the disk"
            self.ledger._push(self.ledger.prefix.evict(n, self.ledger.sources['tier'].put))
            for _ in range(2*written):
                self.stream.run_all()
                self.ledger.collect(self.s.completed)
                self.below.stream.run_all()

        @precondition(lambda self: self.below and not self.faulty)
        @rule(written=st.sampled_from([False, True, True]), n=st.integers(1, 3),
              damaged=st.none() | st.integers(0, 5))
        def somebody_comes_back(self, written, n, damaged=None):
            """What is asked ends and goes down; then the same is asked again, perhaps of a disk that was
            damaged meanwhile"""
            self.arrive(len(SYSTEM), [1], 3, True)
            for _ in range(60):
                if self.s.has_work: self.step()
            self.others_need_the_pages(40, written)
            if damaged is not None: self.below.damage(damaged, True)
            for _ in range(n): self.arrive(len(SYSTEM), [1], 3, True)

        @precondition(lambda self: 'handoffs' in self.ledger.sources)
        @rule(n=st.integers(1, 6))
        def the_folder_works(self, n):
            for _ in range(n): self.ledger.sources['handoffs']._stream.run_next()

        @precondition(lambda self: 'handoffs' in self.ledger.sources and not self.faulty)
        @rule(gone=st.booleans(), n=st.integers(1, 2), head=st.integers(4, len(SYSTEM)))
        def a_prompt_is_handed_over(self, gone, n, head):
            """It is computed, its pages are taken by others, and somebody wants its answer; the file may be
            gone by then"""
            self.arrive(head, [2], 0, True, handed=True)
            for _ in range(60):
                if self.s.has_work: self.step()
            self.stream.run_all()
            self.ledger.sources['handoffs']._stream.run_all()
            self.ledger._push(self.ledger.prefix.evict(99))
            for path in self.ledger.sources['handoffs'].folder.iterdir():
                if gone: path.unlink()
            for _ in range(n): self.arrive(head, [2], 3, True, handed=True)

        @precondition(lambda self: self.below and self.below.file)
        @rule(which=st.integers(0, 99), in_page=st.booleans(), n=st.integers(1, 4))
        def the_disk_is_damaged(self, which, in_page, n):
            for i in range(n): self.below.damage(which + i, in_page)

        @precondition(lambda self: self.below)
        @rule(seconds=st.sampled_from([3, 20]))
        def the_disk_is_slow(self, seconds): self.below.now += seconds

        @precondition(lambda self: self.below and not self.s.alive and not self.s.has_work)
        @rule()
        def the_server_starts_again(self):
            self.ledger.flush_tree()
            self.ledger.sources['tier'] = self.below.restart()

        @rule(n=st.integers(1, 12))
        def steps_pass(self, n):
            for _ in range(n): self.step()

        def step(self):
            self.notes.chunked = self.s.prefill.chunked
            for o in self.s.step():
                assert o.rid not in self.ends, 'news after the end'
                self.told[o.rid] += o.token_ids
                if o.finish_reason: self.ends[o.rid] = o
            if self.s.prefill.chunked: self.marks.add('chunk')
            self.steps += 1
            self.check()

        def check(self):
            s = self.s
            self.check_fairness()
            s.cache.check_integrity({o.rid: o
                for o in [*(p.req for p in s.alive.values() if p.req), *s._deferred.to_release]}.values())
            for o in s.decode.schedule(): assert 0 <= o.cached_len < o.device_len <= o.max_device_len
            if s.config.admission == 'reserve' and not s.counts['retracted']:
                assert s.decode.inflight_pages <= s.cache.available_size
            for o in s.alive.values():
                if o.req: assert 0 <= o.req.cached_len <= o.req.device_len <= o.max_len

        def check_fairness(self):
            "Callers pay for what was computed and for nothing else, and nobody is remembered for ever"
            policy = getattr(self.s.prefill.policy, 'inner', self.s.prefill.policy)
            if not isinstance(policy, Fair): return
            self.marks.add('fair')
            fairness = policy.fairness
            for o, cost in fairness._charged.items():
                assert 0 <= cost <= o.input_len - o.cached_tokens + 2*(o.n_tokens - o.input_len)
            assert (len(fairness._charged) <= len(self.s.alive) + self.s.config.max_running_req
                    + self.s.config.max_queued_req + 1)
            assert fairness.users.keys() <= {o.name for o in CALLERS}

        @invariant()
        def everyone_is_told_the_right_tokens(self):
            for rid, told in getattr(self, 'told', {}).items():
                assert told == self.right[rid][:len(told)], (rid, told, self.right[rid])

        def teardown(self):
            if not hasattr(self, 's'): return
            end = self.steps + 3000
            while self.s.has_work:
                self.step()
                assert self.steps < end, ('this never ends', self.s.stats())
            assert self.ends.keys() == self.right.keys()
            for rid, o in self.ends.items():
                if o.finish_reason == 'abort': assert rid in self.aborted
                elif o.error and '_timeout=' in o.error: assert self.timed
                elif o.error and 'displaced' in o.error: assert self.displaced
                elif o.error and 'engine failed' in o.error: assert self.faulty
                # only its own fault
                elif o.error and 'no finite logits' in o.error: assert rid in self.s.engine.nan_rids, rid
                else:
                    assert ((o.finish_reason in ('stop', 'length'), self.told[rid])
                            == (True, self.right[rid])), (rid, o)
                    assert (o.embedding is None) == (rid not in self.pooled)
                    if rid in self.pooled:
                        assert (abs(float(o.embedding[0]) - self.pooled[rid])
                                < .01), (rid, o.embedding, self.pooled[rid])
            self.s.self_check()
            if isinstance(self.s.drafter, Drafting): self.s.drafter.end()
            if self.s.drafter.seen['model'] and self.s.drafter.seen['none']: self.marks.add('drafted')
            if self.below:
                self.below.end()
                self.marks |= {o for o, n in self.below.seen.items() if n}
            if 'handoffs' in self.ledger.sources:
                self.marks |= {o for o, n in self.ledger.sources['handoffs'].counts.items() if n}
                shutil.rmtree(self.ledger.sources['handoffs'].folder)
            lives.append(self.steps)
            self.marks |= {name for name, holds in dict(
                hit=self.notes.hit, eviction=self.ledger.evicted_pages, dedup=self.ledger.deduped,
                retraction=self.s.counts['retracted'], beside=self.notes.beside,
                passed_over=self.ledger.passed_over, accepted=self.s.counts['accepted_tokens'],
                rejected=self.s.counts['drafted_tokens'] > self.s.counts['accepted_tokens']).items() if holds}
            seen.update(self.marks)

    return Serving

SEEN = ('hit', 'eviction', 'chunk', 'beside', 'passed_over', 'abort in flight', 'dedup', 'retraction',
        'grammar', 'thinking', 'accepted', 'rejected', 'drafted')
SEEN_HANDED = 'sent', 'received', 'missed'
SEEN_BELOW = 'from_disk', 'from_host', 'dropped', 'lost', 'restarts'

def run(examples: int, shard: int, tell, steps: int = 40, drawn=SETTINGS, wanted=SEEN) -> None:
    "So many random lives of a server, and what happened in them; more, if something has happened in none"
    seen, lives = Counter(), []
    # minutes, where only the failure counts
    phases = [Phase.generate] + [Phase.shrink]*(os.environ.get('TST_SHRINK') != '0')
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
                   phases=phases, suppress_health_check=list(HealthCheck))
    for more in range(4):
        machine = seed(shard + 100*more)(serving(seen, lives, drawn))
        with patch.object(PrefillAdder, '_pass_over', pass_over), patch.object(draft_model, '_FEW'):
            run_state_machine_as_test(machine, settings=how)
        shares = {o: seen[o] / len(lives) for o in wanted}
        if examples < 60 or min(shares.values()) >= .02: break
    tell('schedules', f'{len(lives)} lives, median {median(lives):.0f} steps; '
         + ', '.join(f'{k} {v:.0%}' for k, v in shares.items()))
    if examples >= 60: assert median(lives) >= 25 and min(shares.values()) >= .02, shares

@pytest.mark.filterwarnings('ignore:policy=')
# the second for those who break the code
@pytest.mark.parametrize('shard', range(2 if 'TST_LIVES' in os.environ else 1))
def test_nothing_is_lost(shard, record_property):
    run(int(os.environ.get('TST_LIVES', 60)), shard, record_property)

def test_nothing_is_lost_below(record_property):
    run(int(os.environ.get('TST_LIVES', 60)), 0, record_property, drawn=BELOW, wanted=SEEN_BELOW)

def test_nothing_is_lost_between_engines(record_property):
    run(int(os.environ.get('TST_LIVES', 60)), 0, record_property, drawn=HANDED, wanted=SEEN_HANDED)

@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('shard', range(1, 5))
def test_nothing_is_lost_between_engines_in_thousands_of_lives(shard, record_property):
    run(1000, shard, record_property, drawn=HANDED, wanted=SEEN_HANDED)

@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('shard', range(1, 5))
def test_nothing_is_lost_below_in_thousands_of_lives(shard, record_property):
    run(1000, shard, record_property, drawn=BELOW, wanted=SEEN_BELOW)

@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings('ignore:policy=')
@pytest.mark.parametrize('shard', range(1, 24))
def test_nothing_is_lost_in_thousands_of_lives(shard, record_property):
    run(2500, shard, record_property, steps=32)

def test_the_last_one_is_told_that_there_is_no_room():
    "Pages have been lost, so even alone it cannot go on; to send it back would help nobody"
    table = TableManager(2, MAX_SEQ_LEN, 1, dummy_page=6)
    cache = CacheManager(6, table, make_prefix_cache('none', 1))
    engine = ToyEngine(table.page_table, table.token_pool, 1, 6, VOCAB)
    s, told = (Scheduler(engine, cache, VOCAB, float,
                         EngineConfig(page_size=1, admission='optimistic', overlap=False)), [])
    s.add('a', [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
    told += s.step()
    cache.allocate(2)   # by nobody
    while s.has_work and len(told) < 9: told += s.step()
    assert 'has no room for this request at 5 tokens' in told[-1].error and s.counts['retracted'] == 0

def test_prefills_in_a_row_are_bounded_while_others_decode():
    class Modes(Observer):
        seen = ''
        def launched(self, batch): self.seen += batch.mode.value[0]
    for bound, modes in ((None, 'ppppppp'), (2, 'pppdppdppd')):
        table = TableManager(2, MAX_SEQ_LEN, 1, dummy_page=30)
        engine = ToyEngine(table.page_table, table.token_pool, 1, 30, VOCAB)
        config = EngineConfig(page_size=1, max_prefill_tokens=1, max_prefill_streak=bound, overlap=False)
        s = Scheduler(engine, CacheManager(30, table, make_prefix_cache('none', 1)), VOCAB, float, config,
                      observer=Modes())
        for prompt in ([1], [2]*6):
            s.add(str(len(prompt)), prompt, SamplingParams(max_tokens=9, ignore_eos=True, temperature=0))
        while s.has_work: s.step()
        assert s.observer.seen.startswith(modes), s.observer.seen

@pytest.mark.parametrize('prompt', [[1], [1]*9])   # it decodes, or is in pieces
def test_who_is_aborted_in_flight_is_not_launched_again(prompt):
    class Launches(Observer):
        def __init__(self): self.rids = []
        def launched(self, batch): self.rids.append({o.rid for o in batch.reqs})
    table = TableManager(2, MAX_SEQ_LEN, 1, dummy_page=40)
    engine = ToyEngine(table.page_table, table.token_pool, 1, 40, VOCAB, stream=ManualStream())
    s = Scheduler(engine, CacheManager(40, table, make_prefix_cache('none', 1)), VOCAB, float,
                  EngineConfig(page_size=1, max_prefill_tokens=2, overlap=True), observer=Launches())
    s.add('a', prompt, SamplingParams(max_tokens=9, ignore_eos=True, temperature=0))
    for _ in range(2): s.step()
    s.abort('a')
    n = len(s.observer.rids)
    while s.has_work: s.step()
    assert n == 2 and s.observer.rids[n:] == []
