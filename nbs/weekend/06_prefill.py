# %%
#| default_exp weekend.prefill

# %% [markdown]
# # Prompts within a budget
# > A step computes only so many tokens of prompts, and a request starts only if its pages will last to its end; no request is overtaken.
#
# Prompts come in all lengths, and so far a prompt is computed in one step, as soon as it is admitted. *How much may one step compute, and which request may start?* We admit too eagerly and lose running answers, let one document stop all others, and then give each step two budgets: tokens and pages.
#
# After this chapter you can say what chunked prefill does and what it does not, admit a request so that it reaches its end, and explain why a queue has a door that closes.

# %%
#| export
import torch
from fastcore.basics import patch

from minisgl_lit.weekend.batch import PendingReq, Req
from minisgl_lit.weekend.decode import pages_of
from minisgl_lit.weekend.radix import CacheManager, Node

# %%
#| hide
import time
from fastcore.test import test_eq
from minisgl_lit.weekend.batch import Batch, Engine, TorchAttention
from minisgl_lit.weekend.decode import Scheduler
from minisgl_lit.weekend.model import Decoder, attention, generate
from minisgl_lit.weekend.pages import KVPool, TableManager
from minisgl_lit.testing.weekend_table import Step, fixed_requests, folder, measure, print_table
from minisgl_lit.tools.drawing import Box, Row, draw_rows
torch.set_num_threads(1); torch.set_grad_enabled(False);

def is_greedy(model, prompt, answer, most):
    "Whether `generate` would say it: each token the likeliest after those before it, up to EOS or `most`"
    ids = torch.tensor(prompt + answer[:-1])
    hidden = model.forward(ids, torch.arange(len(ids)), lambda layer, q, k, v: attention(q, k, v))
    likeliest = model.logits(hidden[len(prompt) - 1:]).argmax(-1).tolist()
    ends = [token == model.config.eos_token_id for token in answer]
    return answer == likeliest and not any(ends[:-1]) and (ends[-1] or len(answer) == most)


# %% [markdown]
# ## Room for a prompt is not enough
# If there is room for a prompt, start it: what else should be asked? `Eager` is a queue with that rule. To keep it short, it does not look for cached prefixes: each request begins at the root of the radix tree.

# %%
class Eager:
    def __init__(self, cache):
        self.cache, self.table = cache, cache.table
        self.waiting = {}

    def add(self, pending): self.waiting[pending.rid] = pending

    def remove(self, rid): return self.waiting.pop(rid, None)

    def schedule(self, reserved_pages):
        reqs, room = [], self.cache.available_size
        for pending in [*self.waiting.values()]:
            room -= pages_of(len(pending.input_ids), self.table.page_size)
            if room < 0 or not self.table.available_size: break
            reqs.append(self.start(self.waiting.pop(pending.rid)))
        return reqs

    def start(self, pending):
        row, n, root = self.table.allocate(), len(pending.input_ids), self.cache.tree.root
        self.table.token_pool[row, :n] = torch.tensor(pending.input_ids)
        self.cache.tree.lock(root)
        return Req(pending, row, cached_len=0, device_len=n, handle=root)


# %% [markdown]
# The rest is what we have: engine, radix cache, scheduler. `Watched` keeps each batch.

# %%
model = Decoder(folder)

class Watched(Scheduler):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.log = []

    def launch(self, batch):
        self.log.append(batch)
        return super().launch(batch)

def build(queue, num_pages=60, page_size=8, eos=model.config.eos_token_id, kind=Watched):
    config = model.config
    pool = KVPool(num_pages, page_size, config.num_hidden_layers,
                  config.num_key_value_heads, config.head_dim)
    table = TableManager(4, 480, page_size)   # four rows
    cache = CacheManager(num_pages, table)
    engine = Engine(model, table, TorchAttention(pool, table))
    return kind(engine, table, cache, queue(cache), eos)


# %% [markdown]
# Three callers with prompts of four tokens, each a page, and answers of twelve. Six pages are there, so each prompt has room.

# %%
s = build(Eager, num_pages=6, page_size=4, eos=None)
for name in 'abc': s.add(PendingReq(name, [ord(name)] * 4, max_tokens=12))
try:
    while s.has_work: s.step()
except (IndexError, ValueError):
    # nothing is free, and nothing can be evicted
    print('tokens so far:', {rid: len(req.output_ids) for rid, req in s.alive.items()})

# %% [markdown]
# In the middle of all three answers the pages are gone. Each request needs a page to go on, each holds two, and none of them can end before it gets one: a deadlock. Had two of them waited, the first would have ended well, and given its pages to the next.
#
# The scheduler knew it: `reserved_pages` says what the running requests may still need, and `Eager` does not read it. *A request may start if the pages last to its end, and to the end of all that run.*
#
# ## One document, and all others wait
# Now pages are plenty. Three callers read their answers, a token a step; after five steps a fourth sends a document. How long is the longest step?

# %%
*readers, document = [PendingReq(name, ids, 12) for name, ids, _ in fixed_requests()[:4]]

def serve(s, first, late=(), after=5):
    answers, seconds = {pending.rid: [] for pending in [*first, *late]}, []
    for pending in first: s.add(pending)
    while s.has_work:
        began = time.perf_counter()
        for output in s.step(): answers[output.rid].append(output.token)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == after:
            for pending in late: s.add(pending)
    s.milliseconds = [1e3 * o for o in seconds]
    return answers


# %%
#| volatile
whole = build(Eager)
answers = serve(whole, readers, [document])
longest, usual = max(whole.milliseconds), sorted(whole.milliseconds)[len(whole.log) // 2]
print(f'the longest step {longest:.0f} ms, the usual one {usual:.0f} ms')

# %%
#| code-fold: true
names = [pending.rid for pending in [*readers, document]]
def by_step(title, log, numbers, budget=None):
    def boxes(batch):
        for req, start, end in zip(batch.reqs, batch.cached_lens, batch.device_lens):
            width, colour = end - start, names.index(req.rid)
            yield Box(width if width > 8 else '', colour, 'normal', width)
    rows = [Row(f'step {i}', [*boxes(log[i - 1])]) for i in numbers]
    return draw_rows(title, rows, marks={'budget': budget} if budget else None)

by_step('Tokens of each step, whole prompts', whole.log, range(1, 10))


# %% [markdown]
# A box is a request, as wide as the tokens that it computes. The readers' own prompts make a large first step. Then they move on in steps too thin to see, until the document comes: one step, and for three callers the text stops. The longer the document, the longer the silence. And a GPU needs memory for every token of a step besides its keys and values.
#
# Nothing forces a prompt to be computed at once. A later token needs the keys and values of those before it, and the pages keep these, whichever step has written them. So a step gets a *budget* of tokens, and a prompt that does not fit is computed in *chunks*: *chunked prefill* (Sarathi-Serve, Agrawal et al., 2024).
#
# ## A chunk
# A step that computes a chunk makes no token, as what follows is in the prompt already. Our `Req` has a flag for that: the engine scores only those that are to be sampled, and without a token a request does not join those that decode.

# %%
#| export
class ChunkedReq(Req):
    "A request whose prompt is not done: this step makes no token of it."
    samples = False


# %% [markdown]
# Ten tokens as four and six, by hand. The second part is a new `Req`: same row, other lengths.

# %%
ids = readers[0].input_ids[:10]
s = build(Eager)
s.table.token_pool[0, :10] = torch.tensor(ids)
pending, made = PendingReq('p', ids, max_tokens=1), []
for kind, start, end in (ChunkedReq, 0, 4), (Req, 4, 10):
    req = kind(pending, 0, start, end)
    s.add_pages([req])
    made += s.engine.forward_batch(Batch([req], s.table)).tolist()
made, generate(model, ids, 1)

# %%
#| checks
test_eq(made, generate(model, ids, 1))
chunk = ChunkedReq(pending, 0, 0, 4)
chunk.advance()
test_eq((chunk.cached_len, chunk.device_len, chunk.can_decode), (4, 4, False))


# %% [markdown]
# ## Two budgets
# One `PrefillAdder` fills one batch. It has so many tokens to spend, and has to leave so many pages to requests that run.

# %%
#| export
class PrefillAdder:
    "Fills one batch with prompts, as long as tokens, rows and pages last."
    def __init__(
        self,
        token_budget: int,     # tokens that this step may compute
        reserved_pages: int,   # that running requests may still need
        cache: CacheManager,
    ):
        self.token_budget, self.reserved_pages = token_budget, reserved_pages
        self.cache, self.table = cache, cache.table

    def pages_left(
        self,
        pending: PendingReq,
        start: int,    # tokens that have their pages
    ) -> int:
        "Pages from `start` to the end of the longest answer, whose last token needs no slot"
        longest = len(pending.input_ids) + pending.max_tokens - 1
        size = self.table.page_size
        return pages_of(longest, size) - pages_of(start, size)


# %% [markdown]
# What a request takes of both: tokens up to the end of its prompt, or of the budget; and all pages that it still needs, for it will get them in later steps, unasked. If the prompt does not end here, it is a `ChunkedReq`. When its turn comes again, a new `Req` goes on where the chunk has ended. It takes over the row, and the handle, which has moved on meanwhile: the full pages of the chunk are in the radix tree.

# %%
#| export
@patch
def take(
    self: PrefillAdder,
    pending: PendingReq,
    row: int,         # of the table
    start: int,       # tokens that are cached
    handle: object,   # what it has locked: a node of the radix tree
) -> Req:
    "As much of a prompt as the budget allows"
    end = min(start + self.token_budget, len(pending.input_ids))
    self.token_budget -= end - start
    self.reserved_pages += self.pages_left(pending, start)
    kind = Req if end == len(pending.input_ids) else ChunkedReq
    return kind(pending, row, start, end, handle)

@patch
def go_on(self: PrefillAdder, req: ChunkedReq) -> Req:
    "The next chunk of a prompt that has begun"
    return self.take(req.pending, req.row, req.cached_len, req.handle)


# %%
def says(req):
    return f'{type(req).__name__} {req.rid}: {req.cached_len} → {req.device_len}'

cache = build(Eager, num_pages=8, page_size=4).cache
adder = PrefillAdder(token_budget=7, reserved_pages=0, cache=cache)
p, q = (PendingReq(name, [ord(name)] * 5, max_tokens=4) for name in 'pq')
chunks = [adder.take(p, 0, 0, cache.tree.root), adder.take(q, 1, 0, cache.tree.root)]
[says(req) for req in chunks], adder.token_budget, adder.reserved_pages

# %% [markdown]
# `p` has all of its prompt, `q` two tokens of five. Each may need eight slots, two pages. In the next step `q` goes on:

# %%
chunks[1].advance()
later = PrefillAdder(token_budget=7, reserved_pages=1, cache=cache)
says(later.go_on(chunks[1])), later.token_budget, later.reserved_pages

# %%
#| checks
test_eq(says(chunks[1]), 'ChunkedReq q: 2 → 2')
test_eq((adder.token_budget, adder.reserved_pages), (0, 4))
test_eq((later.token_budget, later.reserved_pages), (4, 2))
test_eq(later.pages_left(p, 5), 0)

# %% [markdown]
# Three more tokens, and one page more than the one reserved by others: the first of its two pages it has.
#
# ## Lock, then count
# A new request first matches the radix tree. What is cached needs no computing and no new pages, so it needs `pages_left` from the end of the match. Available are free pages and those that can be evicted. Compare the two? Here is a pool of three pages. Two of them are cached, and no request has locked them. A prompt comes that begins with these eight tokens.

# %%
cache = build(Eager, num_pages=3, page_size=4).cache
cache.tree.insert(cache.tree.root, list(range(8)), cache.allocate(2))
pending = PendingReq('p', list(range(9)), max_tokens=8)
node = cache.match(pending.input_ids)
needed = PrefillAdder(100, 0, cache).pages_left(pending, node.end)
unlocked = cache.available_size
cache.tree.lock(node)
needed, unlocked, cache.available_size


# %% [markdown]
# It needs two pages more, and three are available: it fits! But two of these three are the very pages that it has matched. They count as cached *and* as room, and once it is locked only one page is left. Unlocked, its own prefix could even be evicted to make room for its answer. So the match is locked *before* anything is compared, and unlocked again if it does not fit.

# %%
#| export
@patch
def fill_row(self: PrefillAdder, row: int, pending: PendingReq, node: Node) -> None:
    "Write what is known: the prompt, and the pages of its cached part"
    pages = torch.tensor(self.cache.tree.pages(node), dtype=torch.long)
    self.table.page_table[row, :len(pages)] = pages
    self.table.token_pool[row, :len(pending.input_ids)] = torch.tensor(pending.input_ids)

@patch
def try_add(self: PrefillAdder, pending: PendingReq) -> Req | None:
    "Admit a request that can run to its end; `None`: it waits, and so do all behind it"
    if not (self.token_budget and self.table.available_size): return None
    node = self.cache.match(pending.input_ids)
    self.cache.tree.lock(node)
    needed = self.reserved_pages + self.pages_left(pending, node.end)
    if needed > self.cache.available_size:
        self.cache.tree.unlock(node)
        return None
    row = self.table.allocate()
    self.fill_row(row, pending, node)
    return self.take(pending, row, node.end, node)


# %% [markdown]
# The same pool, with the prefix unlocked again. The prompt is refused, and leaves nothing behind. With a shorter answer it is admitted, and computes one token: the match stops before a prompt's last token, whose scores are needed.

# %%
cache.tree.unlock(node)
adder = PrefillAdder(token_budget=100, reserved_pages=0, cache=cache)
print(adder.try_add(pending), cache.available_size, cache.table.available_size)
shorter = PendingReq('p', list(range(9)), max_tokens=4)
print(says(adder.try_add(shorter)), cache.available_size)

# %%
#| checks
test_eq((needed, unlocked), (2, 3))
test_eq(cache.available_size, 1)          # its prefix is locked
test_eq((adder.token_budget, adder.reserved_pages), (99, 1))
test_eq(adder.try_add(PendingReq('r', [40], max_tokens=1)), None)   # that page is reserved
test_eq(cache.table.page_table[0, :2].tolist(), cache.tree.pages(node))
test_eq(PrefillAdder(0, 0, cache).try_add(PendingReq('t', [40], 1)), None)   # no token


# %% [markdown]
# ## The queue
# Requests wait in the order of their arrival. Before all of them comes the one whose prompt has begun: it holds a row and pages, and the sooner it ends the better. Only one prompt can be cut at a time, because a cut means that the budget is used up.
#
# And if the first does not fit, may the second try? It looks like a waste to let it wait. We take the queue that says no, and then watch what it prevents.

# %%
#| export
class PrefillManager:
    "The queue: requests that wait, and the one whose prompt is computed in chunks."
    def __init__(
        self,
        cache: CacheManager,
        max_prefill_tokens: int,   # that a step may compute
    ):
        self.cache, self.max_prefill_tokens = cache, max_prefill_tokens
        self.waiting: dict[str, PendingReq] = {}   # by rid, in the order of their arrival
        self.chunked: ChunkedReq | None = None     # has a row, and its prompt is not done

    def add(self, pending: PendingReq) -> None:
        self.waiting[pending.rid] = pending

    def remove(self, rid: str) -> PendingReq | None:
        "Its caller has gone; the request, if it has no row yet"
        if self.chunked and self.chunked.rid == rid: self.chunked = None
        return self.waiting.pop(rid, None)


# %%
#| export
@patch
def schedule(
    self: PrefillManager,
    reserved_pages: int,   # that running requests may still need
) -> list[Req]:
    "The prompts of one step, in the order of their arrival"
    adder = PrefillAdder(self.max_prefill_tokens, reserved_pages, self.cache)
    reqs = [adder.go_on(self.chunked)] if self.chunked else []
    for pending in self.waiting.values():
        req = adder.try_add(pending)
        if req is None: break
        reqs.append(req)
    for req in reqs: self.waiting.pop(req.rid, None)
    last = reqs[-1] if reqs else None
    self.chunked = last if isinstance(last, ChunkedReq) else None
    return reqs


# %% [markdown]
# The three callers of the beginning, whose answers were lost, now with the real queue:

# %%
def budget(n): return lambda cache: PrefillManager(cache, n)

s = build(budget(64), num_pages=6, page_size=4, eos=None)
three = [PendingReq(name, [ord(name)] * 4, max_tokens=12) for name in 'abc']
{name: len(answer) for name, answer in serve(s, three).items()}, len(s.log)

# %% [markdown]
# All three have their twelve tokens. One after the other, since each may need four pages of six.
#
# And the door? `big` needs nearly all pages. A small request comes before it, and another small one after every second step, for fifty steps. If small ones could pass, the pages would never be free for `big`: it would wait as long as small ones come. So the first that does not fit closes the door for all behind it.

# %%
s = build(budget(64), num_pages=8, page_size=4, eos=None)
s.add(PendingReq('small 0', [1], max_tokens=6))
s.add(PendingReq('big', [2] * 25, max_tokens=4))
for step in range(1, 50):
    s.step()
    if 'big' in s.alive: break
    if step % 2 == 0: s.add(PendingReq(f'small {step}', [1], max_tokens=6))
step, len(s.prefill.waiting)

# %%
#| checks
test_eq(s.log[-1].reqs[0].rid, 'big')


# %% [markdown]
# `big` starts when the one before it has ended. The small ones have waited for it, and no longer than that. *First come, first served* has a price: pages stood free for some steps.
#
# ## The document again
# **Predict 1.** Three readers, and the document after five steps, now with a budget of 64 tokens. How large is the largest step? And how many tokens are computed, at most, between two tokens of one reader?

# %%
def longest_wait(log, rid):
    "Most tokens computed between two steps that a request was in"
    mine = [i for i, batch in enumerate(log) if rid in [req.rid for req in batch.reqs]]
    sizes = [len(batch.positions) for batch in log]
    return max(sum(sizes[i + 1:j]) for i, j in zip(mine, mine[1:]))

chunked = build(budget(64))
assert serve(chunked, readers, [document]) == answers
for s in whole, chunked:
    largest = max(len(batch.positions) for batch in s.log)
    print(f'largest step {largest}, longest wait {longest_wait(s.log, readers[0].rid)} tokens')

# %%
#| code-fold: true
by_step('Tokens of each step, with a budget of 64', chunked.log, range(1, 15), 64)


# %% [markdown]
# **Answer 1.** The largest step is the budget, as it should be. But a reader waits nearly as long as before, for 201 tokens instead of 241. Even these 40 are no merit of the budget: the document shares its beginning with the readers, and the radix tree had kept that. The picture shows why. Prefill goes before decode, so the chunks go through one after the other, and the readers wait for all of them.
#
# So a budget by itself bounds a *step*: the memory that it takes, and the time until the scheduler can take in or drop a request. For the readers it is only the precondition. One more rule makes use of it: after a chunk, a decode step has its turn.

# %%
class TakesTurns(PrefillManager):
    decoded = True   # whether the step before was left to others

    def schedule(self, reserved_pages):
        self.decoded = bool(self.chunked) and not self.decoded
        return [] if self.decoded else super().schedule(reserved_pages)


# %%
turns = build(lambda cache: TakesTurns(cache, 64))
assert serve(turns, readers, [document]) == answers
longest_wait(turns.log, readers[0].rid)

# %%
#| code-fold: true
by_step('The same, and chunks take turns with decode steps', turns.log, range(1, 15), 64)


# %% [markdown]
# Now a reader waits for one chunk at most, and the document is a few steps later. Sarathi-Serve goes further: it puts the readers' tokens into the same batch as the chunk, so that they do not wait at all. The weekend's package keeps the simple rule, prefill first. The real scheduler can do all three, and [an experiment](../28_pressure.ipynb) compares them.

# %% [markdown]
# ## What a budget costs
# Now the seven requests of the weekend, which all come at once, with four rows and only 40 pages, so that admission matters.
#
# **Predict 2.** The budget shrinks from 1,000 tokens to 64 and to 16. What becomes of the number of steps, of the longest step, and of the mean time to a first token?

# %%
#| code-fold: true
class Counted(Scheduler):
    def launch(self, batch):
        taken = self.cache.num_pages - self.cache.available_size
        self.counts = dict(computed=len(batch.positions), slots=taken * self.table.page_size)
        return super().launch(batch)

kept, left = {}, {}
def steps(n):
    s, kept[n] = build(budget(n), num_pages=40, kind=Counted), []
    for name, prompt, most in fixed_requests(): s.add(PendingReq(name, prompt, most))
    while s.has_work:
        kept[n].append(Step([output[:2] for output in s.step()], **s.counts))
        yield kept[n][-1]
    s.run_deferred()
    left[n] = s.cache.available_size, s.table.available_size


# %%
#| volatile
for n in (1000, 64, 16):
    found = measure(steps(n))
    print(f'budget {n:4}: {found.steps:3} steps, longest {found.longest_ms:3.0f} ms, '
          f'first {found.first_s:.2f} s, {found.computed} computed')

# %%
for n, log in kept.items():
    first = {}
    for i, step in enumerate(log):
        for name, _ in step.made: first.setdefault(name, i + 1)
    print(f'budget {n:4}: first tokens in steps', *first.values())

# %% [markdown]
# **Answer 2.** There are more steps, one for each cut. The longest gets shorter, but not shorter than a decode step, so the second cut of the budget brings less than the first. And whatever stands behind a cut comes later, as the second listing says. In seconds that is less than in steps, because here a step's time is mostly that of its tokens. A GPU takes about as long for 16 tokens as for 200; there, a budget that small would cost all callers dearly.
#
# One count was not foreseen: `computed` falls. Two prompts in one batch cannot share, as neither is cached when the batch is made. Whatever comes a step later finds the common beginning in the tree.
#
# Chunks must change no answer. For all three budgets each token is the likeliest after those before it, which is what `generate` takes; and all pages and rows have come back (folded).

# %%
#| checks
requests = {name: (prompt, most) for name, prompt, most in fixed_requests()}
for n, log in kept.items():
    said = {name: [] for name in requests}
    for step in log:
        for name, token in step.made: said[name].append(token)
    for name, (prompt, most) in requests.items(): assert is_greedy(model, prompt, said[name], most)
    test_eq(left[n], (40, 4))
    assert max(step.computed for step in log) <= n
test_eq(said['document'], generate(model, *requests['document']))

s = build(budget(64))   # a caller who leaves in the middle of the prompt
s.add(document)
s.step()
test_eq(s.prefill.chunked.rid, 'document')
s.abort('document')
test_eq((s.prefill.chunked, [output.finish_reason for output in s.step()]), (None, ['abort']))
test_eq((s.cache.available_size, s.table.available_size, s.has_work), (60, 4, False))
s.add(document)         # and one who leaves before it has begun
test_eq((s.prefill.remove('document'), s.prefill.remove('document')), (document, None))

# %%
#| volatile
print_table('6 chunked prefill', measure(steps(64)))

# %% [markdown]
# `longest` is what this chapter is about: no step computes more than 64 tokens of prompts. `steps` grows by the cuts. `computed` falls, as less is computed side by side. `slots` cannot exceed the 320 of these 40 pages; we count those of pages which could not be given to another request, being locked or in use. And `first` is pulled both ways. A first prompt no longer waits until others are computed beside it. But the document, which needs most of the pages, has to wait until an answer has ended; and as it closes the door, the questions behind it wait for it, too.
#
# All tokens so far were the likeliest ones. [The next chapter](07_sampling.ipynb) draws them.
#
# **Exercise 1.** Count first, then lock: in `try_add`, lock the match only after it has been compared (`make try NB=weekend/06_prefill EX=1`). Which request is admitted that should not be?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -    self.cache.tree.lock(node)
# -    needed = self.reserved_pages + self.pages_left(pending, node.end)
# -    if needed > self.cache.available_size:
# -        self.cache.tree.unlock(node)
# -        return None
# +    needed = self.reserved_pages + self.pages_left(pending, node.end)
# +    if needed > self.cache.available_size: return None
# +    self.cache.tree.lock(node)
# ```
#
# Fails: `print(says(adder.try_add(shorter)), cache.available_size)`, `test_eq((adder.token_budget, adder.reserved_pages), (99, 1))`.
#
# The one with the longer answer: it needs two pages, three are called available, and two of these are its own beginning. Once that is locked, one page is left. The answer would run into an empty pool after a few tokens. And the shorter request, which had room, is refused: two pages are reserved for the other.
#
# </details>
#
# **Exercise 2.** Let others pass: in `schedule`, a request that does not fit is skipped, and the next one is tried (`make try NB=weekend/06_prefill EX=2`). When does `big` start?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -        if req is None: break
# +        if req is None: continue
# ```
#
# Fails: `test_eq(s.log[-1].reqs[0].rid, 'big')`.
#
# Not in fifty steps, and never while small ones come: each takes its pages before the last one has given its own back. Among the seven of the table, the document has its first token last of all. The pool is used better, and one caller pays for it. Real queues let some pass, and count how often.
#
# </details>
#
# **What we left out.** [The real prefill manager](../21_scheduler.prefill.ipynb) may let short prompts pass a cut one, a limited number of times. [The scheduler](../25_scheduler.scheduler.ipynb) limits prefill steps in a row and mixes chunks with decode. Admission that reckons with the usual answer instead of the longest one, and takes pages back when it was wrong, is [another experiment](../73_admission.ipynb), and [one more](../70_chunk_size.ipynb) looks for the best size of a chunk.
