# %%
#| default_exp weekend.decode

# %% [markdown]
# # A batch that is decided anew
# > Before every step the scheduler decides what runs next: a request starts as soon as a row and its pages are free, and leaves with its last token.
#
# An engine computes whatever batch it is given. Requests come when they like, and their answers differ in length. *When may the next request start?* We let a fixed group wait for its slowest, see who pays, and then build the scheduler: it takes requests in, decides, launches, and hands out tokens.
#
# After this chapter you can say what continuous batching is, follow one request through all parts of a scheduler, and tell why its requests never run out of pages.

# %%
#| export
from typing import NamedTuple, Protocol

from fastcore.basics import patch
from torch import Tensor

from minisgl_lit.weekend.batch import Batch, Engine, PendingReq, Req
from minisgl_lit.weekend.pages import TableManager

# %%
#| hide
import torch
from fastcore.test import test_eq
from minisgl_lit.weekend.batch import TorchAttention
from minisgl_lit.weekend.model import Decoder, attention, generate
from minisgl_lit.weekend.pages import KVPool
from minisgl_lit.testing.weekend_table import Step, fixed_requests, folder, measure, print_table, tokenizer
from minisgl_lit.tools.drawing import Box, Row, draw_rows, slides
torch.set_num_threads(1); torch.set_grad_enabled(False);

def is_greedy(model, prompt, answer, most):
    "Whether `generate` would say it: each token the likeliest after those before it, up to EOS or `most`"
    ids = torch.tensor(prompt + answer[:-1])
    hidden = model.forward(ids, torch.arange(len(ids)), lambda layer, q, k, v: attention(q, k, v))
    likeliest = model.logits(hidden[len(prompt) - 1:]).argmax(-1).tolist()
    ends = [token == model.config.eos_token_id for token in answer]
    return answer == likeliest and not any(ends[:-1]) and (ends[-1] or len(answer) == most)


# %% [markdown]
# ## A group waits for its slowest
# The simplest rule: as many requests as the table has rows start together, and when the last of them has ended, the next group starts. That is *static batching*. No model is needed to see what it does. Two rows, five requests: `a` wants three tokens, `b` twelve, and the others ask one step later.

# %%
wanted = dict(a=3, b=12, c=2, d=4, e=5)   # tokens of each answer

def static(wanted, n_rows):
    "For each step, which request each row works for; '': none"
    waiting, steps = list(wanted), []
    while waiting:
        group, waiting = waiting[:n_rows], waiting[n_rows:]
        for i in range(max(wanted[name] for name in group)):
            busy = [name if i < wanted[name] else '' for name in group]
            steps.append(busy + [''] * (n_rows - len(group)))
    return steps


# %%
waits_for_all = static(wanted, 2)
idle = sum(busy.count('') for busy in waits_for_all)
print(len(waits_for_all), 'steps;', idle, 'times a row idles')


# %%
#| code-fold: true
def by_row(title, steps):
    def box(name):
        look = 'strong' if name.isupper() else 'normal'
        return Box(name, 'abcde'.index(name.lower()), look) if name else Box('', None, 'dashed')
    return draw_rows(title, [Row(f'row {i}', [box(name) for name in row])
                             for i, row in enumerate(zip(*steps))])

by_row('Static batching: steps from left to right', waits_for_all)


# %% [markdown]
# `a` has ended after three steps, and its row idles for nine more. `c` wants two tokens and has been there almost from the beginning. It gets its first one in step 13, because `b`, with which it has nothing to do, asked for a long answer. How long an answer becomes is not known beforehand, so no clever choice of groups helps.
#
# But what holds a group together? Between two steps we are back in Python, with a list of requests. The next call of the engine may get another list. So *decide anew before every step*: Orca (Yu et al., 2022) called it *iteration-level scheduling*; today it is *continuous batching*. An ended request gives its row back, and the next one starts in it.
#
# ## Requests that decode
# A request's first step computes its prompt and makes a first token: *prefill*. Each later step computes one token and makes the next: *decode*. The second kind needs no thought: whatever runs goes on. Those requests stand in `running`, in the order in which they came.
#
# After each launch the batch goes through `filter_reqs`. A prefilled request joins. A request leaves when its last token is *on its way*: the step that makes it is launched, and there is nothing left to compute for it. For that only lengths must be known.

# %%
#| export
def pages_of(n_tokens: int, page_size: int) -> int:
    "Pages that so many tokens fill or begin"
    return -(-n_tokens // page_size)

class DecodeManager:
    "Requests that make one token a step, in the order in which they came."
    def __init__(self, page_size: int):
        self.page_size = page_size
        self.running: dict[str, Req] = {}   # by rid

    def filter_reqs(self, reqs: list[Req]) -> None:
        "Take in what was launched; drop those whose last token is on its way"
        self.running.update((req.rid, req) for req in reqs)
        self.running = {rid: req for rid, req in self.running.items() if req.can_decode}


# %% [markdown]
# By hand: two prompts of five tokens are prefilled. `x` may answer with three tokens, `y` with one.

# %%
x = Req(PendingReq('x', [7] * 5, max_tokens=3), row=0, cached_len=0, device_len=5)
y = Req(PendingReq('y', [7] * 5, max_tokens=1), row=1, cached_len=0, device_len=5)
decode = DecodeManager(page_size=4)
for req in (x, y): req.advance()   # a step was launched
decode.filter_reqs([x, y])
[(rid, req.cached_len, req.remain_len) for rid, req in decode.running.items()]


# %% [markdown]
# `y` never joins: its one token is made by the prefill. `x` has five tokens cached, its sixth is on its way, and it may make two more.
#
# ## Pages for the rest
# Every few steps a running request begins a new page. If a new request has taken the last one meanwhile, the running one cannot go on, and it cannot step aside either: it holds pages itself. So before another request is admitted, we have to know what all that run *may still need*. An answer may end early, but it cannot get longer than its limit, and that limit is what we count with.

# %%
#| export
@patch(as_prop=True)
def inflight_pages(self: DecodeManager) -> int:
    "Pages that these requests may still need; the last token of an answer needs no slot"
    return sum(pages_of(req.max_device_len - 1, self.page_size)
               - pages_of(req.cached_len, self.page_size) for req in self.running.values())


# %%
z = Req(PendingReq('z', [7] * 5, max_tokens=9), row=1, cached_len=5, device_len=6)
alone = decode.inflight_pages
decode.filter_reqs([z])
alone, decode.inflight_pages

# %% [markdown]
# `x` becomes eight tokens long at most. The eighth is an answer's end and never goes through the model, so seven slots do: two pages of four, and `x` has both. `z` may grow to fourteen tokens, thirteen slots, four pages, of which it has two. So two pages are spoken for, though they are still free. *As long as the free pages are never fewer than `inflight_pages`, each running request reaches its end.* Every prefill rule must keep that promise. The price: an answer that stops early has kept pages from others which it never used.

# %%
#| checks
test_eq((alone, decode.inflight_pages), (0, 2))
test_eq([*decode.running], ['x', 'z'])
test_eq([pages_of(n, 4) for n in (0, 1, 4, 5)], [0, 1, 1, 2])
longer = DecodeManager(page_size=4)
longer.filter_reqs([Req(PendingReq('w', [7] * 5, max_tokens=5), 0, cached_len=5, device_len=6)])
test_eq(longer.inflight_pages, 1)   # nine slots


# %% [markdown]
# ## Two helpers that we shall exchange
# The scheduler has two questions that it does not answer itself. *Which pages are free?* asks the cache: a simple free list today, a radix tree in the next chapter. *Which prompts may start?* asks the prefill manager, which gets its own chapter, too. What the scheduler needs of either is written down as a *protocol*: names and types without a body. Whatever has them will do.

# %%
#| export
class Cache(Protocol):
    "Gives out pages, and takes them back."
    def allocate(self, n: int) -> list[int]: ...
    def cache_unfinished(self, req: Req) -> None: ...   # a part of its prompt was launched
    def cache_finished(self, req: Req) -> None: ...     # its row and its pages come back

class Prefill(Protocol):
    "Which requests wait, and which of them may start."
    waiting: dict[str, PendingReq]   # by rid
    def add(self, pending: PendingReq) -> None: ...
    def remove(self, rid: str) -> PendingReq | None: ...
    def schedule(self, reserved_pages: int) -> list[Req]: ...


# %% [markdown]
# The simplest cache: a list of free pages. It remembers nothing of an ended request, and only what the scheduler calls is there.

# %%
class FreePages:
    def __init__(self, num_pages, table):
        self.free, self.table = list(range(num_pages)), table

    def allocate(self, n): return [self.free.pop(0) for _ in range(n)]

    def cache_unfinished(self, req): pass   # it keeps its pages

    def cache_finished(self, req):
        n = pages_of(req.cached_len, self.table.page_size)
        self.free += self.table.page_table[req.row, :n].tolist()
        self.table.free(req.row)


# %% [markdown]
# And the simplest prefill: first come, first served. A prompt starts, as a whole, if a row is free and all pages that it may *ever* need: free now, and not reserved for others. The first that does not fit ends the loop, so no request is overtaken.

# %%
class WholePrompts:
    def __init__(self, cache, table):
        self.cache, self.table = cache, table
        self.waiting = {}

    def add(self, pending): self.waiting[pending.rid] = pending

    def remove(self, rid): return self.waiting.pop(rid, None)

    def schedule(self, reserved_pages):
        reqs, left = [], len(self.cache.free) - reserved_pages
        for pending in list(self.waiting.values()):
            longest = len(pending.input_ids) + pending.max_tokens - 1
            left -= pages_of(longest, self.table.page_size)
            if left < 0 or not self.table.available_size: break
            reqs.append(self.start(self.waiting.pop(pending.rid)))
        return reqs

    def start(self, pending):
        row, n = self.table.allocate(), len(pending.input_ids)
        self.table.token_pool[row, :n] = torch.tensor(pending.input_ids)
        return Req(pending, row, cached_len=0, device_len=n)


# %% [markdown]
# ## What the scheduler knows
# Callers leave requests, and take *outputs*: a token, or an end with its reason. The scheduler decides and keeps the books. It never touches a key, a value or a score: computing is the engine's.

# %%
#| export
class Output(NamedTuple):
    rid: str
    token: int | None
    finish_reason: str | None = None   # 'stop', 'length' or 'abort'; None: more will come

class Scheduler:
    "Decides what runs next, and what its tokens mean."
    def __init__(self, engine: Engine, table: TableManager, cache: Cache, prefill: Prefill,
                 eos_token_id: int | None = None):
        self.engine, self.table, self.cache, self.prefill = engine, table, cache, prefill
        self.decode = DecodeManager(table.page_size)
        self.eos_token_id = eos_token_id
        self.alive: dict[str, Req] = {}     # that have a row, by rid
        self.to_cache: list[Req] = []       # launched with a part of their prompt
        self.to_release: list[Req] = []     # ended
        self.launched = self.completed = 0  # numbers of the newest batches
        self.outputs: list[Output] = []     # for the callers

    def add(self, pending: PendingReq) -> None:
        self.prefill.add(pending)

    @property
    def has_work(self) -> bool:
        return bool(self.alive or self.prefill.waiting or self.outputs)


# %% [markdown]
# A function puts all parts together. Our first one has two rows and eight pages of four slots.

# %%
model = Decoder(folder)
EOS = model.config.eos_token_id

def build(n_rows, num_pages, page_size, kind=Scheduler, eos=None):
    config = model.config
    pool = KVPool(num_pages, page_size, config.num_hidden_layers,
                  config.num_key_value_heads, config.head_dim)
    table = TableManager(n_rows, 480, page_size)
    cache = FreePages(num_pages, table)
    engine = Engine(model, table, TorchAttention(pool, table))
    return kind(engine, table, cache, WholePrompts(cache, table), eos)


# %%
s = build(n_rows=2, num_pages=8, page_size=4)
ids = tokenizer.encode('The scheduler decides').ids
s.add(PendingReq('x', ids, max_tokens=3))
len(ids), s.has_work, [*s.prefill.waiting]


# %% [markdown]
# ## One step, part by part
# We walk one step by hand, and write each part when we need it. First, prefill says which requests start. These have a row, and their tokens stand in it. But where will their keys and values go? A page is given when a request's next step begins it, not sooner, from all tokens cached so far to all after the step.

# %%
#| export
@patch
def add_pages(self: Scheduler, reqs: list[Req]) -> None:
    "Each request gets the pages that its next step begins"
    size = self.table.page_size
    places = [(req.row, column) for req in reqs for column in
              range(pages_of(req.cached_len, size), pages_of(req.device_len, size))]
    for (row, column), page in zip(places, self.cache.allocate(len(places))):
        self.table.page_table[row, column] = page


# %%
reqs = s.prefill.schedule(reserved_pages=0)
s.add_pages(reqs)
s.table.page_table[reqs[0].row, :3].tolist(), s.cache.free


# %% [markdown]
# Five tokens begin two pages, 0 and 1. (The third column is an old zero: the length says what counts.)
#
# Next, the batch is launched. When that is done, the scheduler counts it as computed, *before* it has looked at a single token: lengths advance, and `filter_reqs` decides what decodes next. `to_cache` keeps the requests that have just computed a part of their prompt; our cache makes nothing of them.

# %%
#| export
@patch
def launch(self: Scheduler, batch: Batch) -> Tensor:
    tokens = self.engine.forward_batch(batch)   # [n_sampled]
    self.launched = batch.number
    self.to_cache = [req for req in batch.reqs if req.rid not in self.decode.running]
    for req in batch.reqs:
        req.advance()
        req.launched = batch.number
        self.alive[req.rid] = req
    self.decode.filter_reqs(batch.reqs)
    return tokens


# %%
batch = Batch(reqs, s.table, number=1)
tokens = s.launch(batch)
x = s.alive['x']
x.cached_len, x.device_len, x.output_ids, [*s.decode.running], tokens.shape


# %% [markdown]
# The prompt is cached, the token behind it is counted, and the answer is still empty. Now the tokens are looked at. An answer ends in three ways: it has its full length, the model says EOS, or the caller leaves. All three need the same: the request is marked, no step takes it any more, and it waits to give back what it has.

# %%
#| export
@patch
def finish(self: Scheduler, req: Req, reason: str, token: int | None = None) -> None:
    req.ended = True
    self.decode.running.pop(req.rid, None)
    del self.alive[req.rid]
    self.to_release.append(req)
    self.outputs.append(Output(req.rid, token, reason))

@patch
def process(self: Scheduler, batch: Batch, tokens: Tensor) -> None:
    "What the new tokens mean"
    self.completed = batch.number
    for req, token in zip(batch.sampled_reqs, tokens.tolist()):
        if req.ended: continue      # a token too many
        req.tokens.append(token)
        if len(req.tokens) == req.max_device_len: self.finish(req, 'length', token)
        elif token == self.eos_token_id: self.finish(req, 'stop', token)
        else: self.outputs.append(Output(req.rid, token))


# %%
s.process(batch, tokens)
s.outputs, tokenizer.decode(x.output_ids)


# %% [markdown]
# A first token has come. The caller may leave at any moment. If the request still waits, it is only struck off the queue; if it has a row, it ends like any other.

# %%
#| export
@patch
def abort(self: Scheduler, rid: str) -> None:
    "The caller has gone"
    if self.prefill.remove(rid): self.outputs.append(Output(rid, None, 'abort'))
    if rid in self.alive: self.finish(self.alive[rid], 'abort')


# %%
s.add(PendingReq('late', ids, max_tokens=3))
for rid in ('x', 'late'): s.abort(rid)
s.outputs[1:], s.to_release == [x], s.cache.free

# %%
#| checks
test_eq((x.ended, [*s.alive], [*s.decode.running], s.to_cache), (True, [], [], [x]))
test_eq((x.launched, s.launched, s.completed), (1, 1, 1))
s.process(batch, tokens)   # of an ended request no token counts
test_eq((len(s.outputs), len(x.output_ids)), (3, 1))


# %% [markdown]
# Both are gone for their callers, but the pages of `x` are not back yet. They come back at one moment only: at the beginning of a decision, *before* the next batch is made, so that the very next step can use them. A request may be released when the last batch that it was in is completed. In our loop each batch is completed before the next decision, so `launched <= completed` is always true; chapter 8, which launches ahead, needs the question.

# %%
#| export
@patch
def run_deferred(self: Scheduler) -> None:
    "What earlier steps have left to do with pages and rows"
    while self.to_cache: self.cache.cache_unfinished(self.to_cache.pop(0))
    while self.to_release and self.to_release[0].launched <= self.completed:
        self.cache.cache_finished(self.to_release.pop(0))


# %%
s.run_deferred()
s.cache.free, s.table.available_size


# %% [markdown]
# ## The decision
# All parts are there, and the decision itself is short. Should a prompt that may start do so, or should the running answers go on first? If it waited, rows would stay empty, and its caller would see nothing. So prefill goes first, and a step without a prompt that may start is a decode step for all that runs.

# %%
#| export
@patch
def schedule_next_batch(self: Scheduler) -> Batch | None:
    "The next batch, with its pages"
    self.run_deferred()
    reqs = self.prefill.schedule(self.decode.inflight_pages) or [*self.decode.running.values()]
    if not reqs: return None
    self.add_pages(reqs)
    return Batch(reqs, self.table, self.launched + 1)


# %% [markdown]
# The loop has no more than this to do: decide, launch, process. A `step` is one turn of it, and hands out what has come.

# %%
#| export
@patch
def normal_loop(self: Scheduler) -> None:
    if batch := self.schedule_next_batch():
        self.process(batch, self.launch(batch))

@patch
def step(self: Scheduler) -> list[Output]:
    self.normal_loop()
    outputs, self.outputs = self.outputs, []
    return outputs


# %%
s.outputs.clear()
s.add(PendingReq('y', ids, max_tokens=3))
while s.has_work: print(s.step())


# %% [markdown]
# These are the rules, and the real scheduler of this book can be told to follow the same ones. A test runs the two in lockstep and compares every batch.
#
# * **Give back, then decide**: rows and pages of ended requests are free for the next batch.
# * **Prefill before decode**, and a batch is *one or the other*.
# * **First come, first served**: the first request that cannot start keeps all behind it waiting.
# * **Reserve to the end**: a request starts only if it and all running ones can become as long as they may.
#
# ## The five again
# **Predict 1.** The same five requests, the same two rows. Static batching took 21 steps. The longest answer alone needs 12. How many will it be now, and in which step does `c` get its token? (`Watched` remembers each batch; `serve` lets `c`, `d` and `e` ask one step later.)

# %%
class Watched(Scheduler):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.log = []

    def launch(self, batch):
        self.log.append(batch)
        return super().launch(batch)

def serve(s, first, late=()):
    answers = {pending.rid: [] for pending in [*first, *late]}
    for pending in first: s.add(pending)
    while s.has_work:
        for output in s.step(): answers[output.rid].append(output.token)
        if s.launched == 1:
            for pending in late: s.add(pending)
    return answers


# %%
texts = ['The scheduler decides', 'A page holds', 'A slot is', 'The radix tree', 'A lock']
five = [PendingReq(name, tokenizer.encode(text).ids, wanted[name])
        for name, text in zip(wanted, texts)]
s = build(n_rows=2, num_pages=8, page_size=4, kind=Watched)
answers = serve(s, five[:2], five[2:])
first_of_c = min(batch.number for batch in s.log for req in batch.reqs if req.rid == 'c')
len(s.log), first_of_c


# %%
#| code-fold: true
def as_steps(log, n_rows):
    for batch in log:
        names = {req.row: req.rid if start else req.rid.upper()
                 for req, start in zip(batch.reqs, batch.cached_lens)}
        yield [names.get(row, '') for row in range(n_rows)]

by_row('Continuous batching: steps from left to right', as_steps(s.log, 2))

# %% [markdown]
# **Answer 1.** Fifteen, and `c` has its first token in step 4 and not in 13. The row that `a` leaves is used at once, and again. Why not twelve, which `b` needs by itself? Look at the gaps in its row. (A dark box with a capital is a prompt.) In steps 4, 6 and 10 only a prompt was computed, since a batch is one or the other, and `b` stood still. Here that is a blink. How long it may get, with a long prompt, chapter 6 will ask.
#
# And are the answers still the same? Each request alone on an empty engine must say the same as among others.

# %%
#| checks
for pending in five:
    test_eq(serve(build(1, 8, 4), [pending])[pending.rid], answers[pending.rid])
    test_eq(len(answers[pending.rid]), wanted[pending.rid])
test_eq((len(waits_for_all), len(s.log)), (21, 15))
# with five pages, `b` has to wait until `a` has ended, and nothing runs out of pages
test_eq(serve(build(2, 5, 4), five[:2], five[2:]), answers)

# %% [markdown]
# Nothing is left behind, either: all pages and rows are free again, once the last ended request has been released.

# %%
s.run_deferred()
sorted(s.cache.free), sorted(s.table.free_rows), s.has_work


# %% [markdown]
# Watch the same run with its pages: the rows of the page table, and the free list, in each step. A dark page is written in this step. The free list begins with the pages that will be given next.

# %%
#| code-fold: true
class Filmed(Watched):
    def launch(self, batch):
        tokens, starts = super().launch(batch), dict(zip(batch.reqs, batch.cached_lens))
        rows = [Row(f'row {i}', []) for i in range(len(self.table.page_table))]
        for req in self.alive.values():
            pages = self.table.page_table[req.row, :pages_of(req.cached_len, 4)].tolist()
            written = starts.get(req, req.cached_len) // 4
            boxes = [Box(page, 'abcde'.index(req.rid), 'strong' if i >= written else 'normal')
                     for i, page in enumerate(pages)]
            rows[req.row] = Row(f'row {req.row}', boxes, f'{req.rid}: {req.cached_len} tokens')
        free = Row('free', [Box(page, None, 'faint') for page in self.cache.free])
        kind = 'decode' if batch.cached_lens[0] else 'prefill'
        film.append(draw_rows(f'step {batch.number}: {kind}', [*rows, free], scale=28))
        return tokens

film = []
filmed = build(n_rows=2, num_pages=8, page_size=4, kind=Filmed)
assert serve(filmed, five[:2], five[2:]) == answers
slides('Rows and pages while five requests are served', film)


# %% [markdown]
# ## The table
# Now the seven requests of the weekend, with four rows and 60 pages of eight slots. All ask at once, so four start and three wait. For a comparison we exchange a helper: with `Groups`, prompts start only when all rows are free, and our scheduler batches statically.

# %%
class Groups(WholePrompts):
    def schedule(self, reserved_pages):
        nothing_runs = self.table.available_size == len(self.table.page_table)
        return super().schedule(reserved_pages) if nothing_runs else []


# %%
#| code-fold: true
class Counted(Scheduler):
    def launch(self, batch):
        taken = self.engine.attention.pool.num_pages - len(self.cache.free)
        self.counts = dict(computed=len(batch.positions), slots=taken * self.table.page_size)
        return super().launch(batch)

def steps(prefill=WholePrompts):
    s = build(n_rows=4, num_pages=60, page_size=8, kind=Counted, eos=EOS)
    s.prefill = prefill(s.cache, s.table)
    for name, prompt, most in fixed_requests(): s.add(PendingReq(name, prompt, most))
    while s.has_work: yield Step([output[:2] for output in s.step()], **s.counts)


# %% [markdown]
# **Predict 2.** Six of the seven answers have up to 24 tokens, and the document's, which stands fourth, has four at most. From groups to continuous batching, what becomes of the number of steps, and of the steps in which the seven have their first tokens?

# %%
for prefill in Groups, WholePrompts:
    log, first = list(steps(prefill)), {}
    for i, step in enumerate(log):
        for name, _ in step.made: first.setdefault(name, i + 1)
    print(f'{prefill.__name__:13}{len(log)} steps; first tokens in', *first.values())

# %%
#| checks
answers = {name: [] for name, *_ in fixed_requests()}
for step in log:
    for name, token in step.made: answers[name].append(token)
for name, prompt, most in fixed_requests(): assert is_greedy(model, prompt, answers[name], most)
test_eq(answers['document'], generate(model, *fixed_requests()[3][1:]))

# %% [markdown]
# **Answer 2.** More steps, not fewer: a prediction that looked safe. Answers of nearly one length leave few gaps to fill: in the first group only the document's row idles for long, and later that of an answer which has ended early. And each prompt that starts by itself costs a step in which the others stand still. But the request that got the document's row began after a few steps, and not after the whole group. Continuous batching promises that *no request waits for another one's end without need*. How much is won depends on how unlike the answers are, and real ones are very unlike. The answers are still those of `generate` (folded).

# %%
#| volatile
print_table('4 continuous batching', measure(steps()))

# %% [markdown]
# Each token is still computed once, so `computed` is what the prompts and answers have. `first` is what the decision before every step is for: against groups it falls, as the steps above show. `slots` counts pages that are not in the free list: those that have been begun, of running requests only. `longest` is the step that computes four prompts at once, the document among them; nothing bounds it yet.
#
# [The next chapter](05_radix.ipynb) looks at what is computed: all seven prompts begin alike.
#
# **Exercise 1.** Let the running answers go first: in `schedule_next_batch`, ask for requests that decode, and for prompts only if there are none (`make try NB=weekend/04_decode EX=1`). What has become of continuous batching?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -    reqs = self.prefill.schedule(self.decode.inflight_pages) or [*self.decode.running.values()]
# +    reqs = [*self.decode.running.values()] or self.prefill.schedule(self.decode.inflight_pages)
# ```
#
# Fails: `test_eq((len(waits_for_all), len(s.log)), (21, 15))`.
#
# Static batching is back, with its 21 steps: while anything decodes, no prompt starts, so a group forms and runs to the end of its longest answer. The answers are the same. One `or` decides between the two.
#
# </details>
#
# **Exercise 2.** Give the pages back after the decision: in `schedule_next_batch`, move `run_deferred` behind the line that chooses (`make try NB=weekend/04_decode EX=2`). Is anything wrong with the answers?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -    self.run_deferred()
# -    reqs = self.prefill.schedule(self.decode.inflight_pages) or [*self.decode.running.values()]
# +    reqs = self.prefill.schedule(self.decode.inflight_pages) or [*self.decode.running.values()]
# +    self.run_deferred()
# ```
#
# Fails: `test_eq((len(waits_for_all), len(s.log)), (21, 15))`.
#
# No, but each free row is seen one step late: `c` begins in step 5, and all five need 17 steps. On a busy server each request that ends would cost one idle row for one step.
#
# </details>
#
# **What we left out.** Requests that lose their pages and come back ([under pressure](../28_pressure.ipynb)), stop strings and timeouts ([how a request ends](../23_scheduler.lifecycle.ipynb)), other orders than that of arrival ([policies](../20_scheduler.policy.ipynb)), and a decode batch that does not become a list of objects each time ([the real decode manager](../22_scheduler.decode.ipynb)). [The real scheduler](../25_scheduler.scheduler.ipynb) has the same loop.
