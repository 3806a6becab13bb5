# %%
#| default_exp weekend.batch

# %% [markdown]
# # Many requests in one call
# > The new tokens of all requests lie in one row behind each other; only attention asks whose they are.
#
# A call of the model has a price of its own, and so far one request pays it for one token. *How do several requests share a call, if their texts differ in length?* We try the rectangle that everyone learns first, count how much of it is nothing, and then lay the tokens in one row.
#
# After this chapter you can say what a scheduler tells an engine, read `positions`, `out_loc` and `last_tokens` of a batch, and say which part of a model cares whose token it computes.

# %%
#| export
from collections.abc import Callable

import torch
from fastcore.basics import patch
from torch import Tensor

from minisgl_lit.weekend.model import Decoder, attention
from minisgl_lit.weekend.pages import KVPool, TableManager

# %%
#| hide
import time
from fastcore.test import test_eq
from minisgl_lit.weekend.model import generate
from minisgl_lit.testing.weekend_table import Step, fixed_requests, folder, measure, print_table, tokenizer
from minisgl_lit.tools.drawing import Box, Row, draw_rows
torch.set_num_threads(1); torch.set_grad_enabled(False);

# %% [markdown]
# ## A rectangle
# In courses a batch is a rectangle: one line for each text, as wide as the longest, the shorter ones filled up with a token that means nothing. That is *padding*. Here are the prompts of the weekend's seven requests.

# %%
prompts = [prompt for _, prompt, _ in fixed_requests()]
longest = max(map(len, prompts))
rectangle = torch.zeros(len(prompts), longest, dtype=torch.long)
for line, prompt in zip(rectangle, prompts): line[:len(prompt)] = torch.tensor(prompt)

real = sum(map(len, prompts))
print(f'{rectangle.numel()} entries, {real} of them tokens: {1 - real / rectangle.numel():.0%} nothing')

# %%
#| code-fold: true
draw_rows('Prompts as a rectangle: what is dashed is computed for nothing', [
    Row(f'{name[:18]}', [Box(len(p), i, 'strong', len(p))] + ([Box('', None, 'dashed', longest - len(p))] if len(p) < longest else []))
    for i, (name, p, _) in enumerate(fixed_requests())])


# %% [markdown]
# One long text, and two thirds of the work is wasted. The longer the longest, the worse it gets. Sorting requests by length would help a little, and hurt those who must wait for others of their size. It even takes care to be right: a padded token must not be looked at, and positions must not count it.
#
# And prefill and decode never fit in one rectangle: one request computes 200 tokens in this step, another one a single token.
#
# ## A row of tokens
# Look at the decoder again. Norms, matrices and the MLP treat each token by itself. They take `[n_tokens, hidden_size]`, and they do not care whether neighbours in that list belong to one text. Rotary embedding wants a position for each token, whatever it is. Only `attend` looks at others.
#
# So lay all *new* tokens of all requests behind each other, without any gap, and let `attend` sort out whose they are. To say which tokens are new, we need to know how far each request has come.
#
# ## How far a request has come
# A request that waits has a name and a prompt. It owns nothing yet.

# %%
#| export
class PendingReq:
    "A request that waits."
    def __init__(
        self,
        rid: str,               # its name
        input_ids: list[int],   # the prompt
        max_tokens: int,        # longest answer
        sampling: object = None,   # how its tokens are chosen; None: always the likeliest
    ):
        self.rid, self.input_ids, self.max_tokens = rid, input_ids, max_tokens
        self.sampling = sampling


# %% [markdown]
# When it starts it gets a row of the table, and becomes a `Req`. Three lengths say where it stands, and never go backwards:
#
# * `cached_len`: so many tokens have keys and values in the pool,
# * `device_len`: so many will have them after its next step,
# * `max_device_len`: so long may prompt and answer become.
#
# What lies between the first two is what the next step computes.

# %%
#| export
class Req:
    "A request that has a row of the table, until it ends."
    samples = True   # whether its next step makes a token

    def __init__(
        self,
        pending: PendingReq,
        row: int,              # of the table
        cached_len: int,       # tokens whose keys and values exist
        device_len: int,       # the same after its next step
        handle: object = None,   # what it has locked in the prefix cache (chapter 5)
    ):
        self.pending, self.rid = pending, pending.rid
        self.row, self.handle = row, handle
        self.cached_len = cached_len
        self.device_len = device_len
        self.tokens = list(pending.input_ids)   # those that the host knows
        self.max_device_len = len(self.tokens) + pending.max_tokens
        self.launched = 0      # number of the last batch that it was in
        self.ended = False


# %%
#| export
@patch(as_prop=True)
def extend_len(self: Req) -> int:
    "Tokens to compute in its next step"
    return self.device_len - self.cached_len

@patch(as_prop=True)
def remain_len(self: Req) -> int:
    "Tokens that may still be made after its next step"
    return self.max_device_len - self.device_len

@patch(as_prop=True)
def can_decode(self: Req) -> bool:
    "Whether a step of one token comes next"
    return self.samples and self.remain_len > 0

@patch(as_prop=True)
def output_ids(self: Req) -> list[int]:
    "The answer so far"
    return self.tokens[len(self.pending.input_ids):]

@patch
def advance(self: Req) -> None:
    "A step was launched: what it computes is cached, and one token more is on its way"
    self.cached_len = self.device_len
    if self.samples: self.device_len += 1


# %% [markdown]
# A prompt of five tokens, and an answer of at most three:

# %%
req = Req(PendingReq('a', [11, 12, 13, 14, 15], max_tokens=3), row=0, cached_len=0, device_len=5)
for _ in range(3):
    print(f'{req.cached_len} → {req.device_len} of {req.max_device_len}: '
          f'computes {req.extend_len}, then {req.remain_len} left')
    req.advance()

# %% [markdown]
# Prefill computes five tokens, each decode step one. After the third step nothing is left: the eighth token is the answer's last, and no one will ever read its keys and values.

# %%
#| checks
test_eq((req.cached_len, req.device_len, req.can_decode), (7, 8, False))
test_eq(req.output_ids, [])
req.tokens.append(16)
test_eq((req.output_ids, req.pending.input_ids), ([16], [11, 12, 13, 14, 15]))


# %% [markdown]
# ## A batch
# A `Batch` is what the scheduler hands to the engine: which requests, and flat arrays with one entry for each token, or each request. It copies the lengths, because the requests move on as soon as it is launched.

# %%
#| export
class Batch:
    "One step for the engine: flat arrays, not changed any more."
    def __init__(self, reqs: list[Req], table: TableManager, number: int = 0):
        self.reqs, self.number = reqs, number
        self.rows = torch.tensor([req.row for req in reqs])
        self.cached_lens = [req.cached_len for req in reqs]
        self.device_lens = [req.device_len for req in reqs]
        lengths = torch.tensor([req.extend_len for req in reqs])
        self.positions = torch.cat([torch.arange(req.cached_len, req.device_len)
                                    for req in reqs])
        self.token_rows = self.rows.repeat_interleave(lengths)
        self.out_loc = table.slots(self.token_rows, self.positions)   # where k and v go
        self.sampled = [i for i, req in enumerate(reqs) if req.samples]
        self.last_tokens = lengths.cumsum(0)[self.sampled] - 1   # whose scores are wanted
        self.sampling = [reqs[i].pending.sampling for i in self.sampled]

    @property
    def sampled_reqs(self) -> list[Req]:
        "The requests that get a token"
        return [self.reqs[i] for i in self.sampled]


# %% [markdown]
# Two requests, by hand, in pages of four slots. `a` is in prefill with five tokens, in the pages 6 and 2. `b` has nine tokens cached and computes its tenth; its pages are 1, 7 and 3.

# %%
table = TableManager(max_running_req=2, max_seq_len=12, page_size=4)
table.page_table[0], table.page_table[1] = torch.tensor([6, 2, 0]), torch.tensor([1, 7, 3])
a = Req(PendingReq('a', [11, 12, 13, 14, 15], max_tokens=3), 0, cached_len=0, device_len=5)
b = Req(PendingReq('b', list(range(20, 29)), max_tokens=3), 1, cached_len=9, device_len=10)
batch = Batch([a, b], table)
for name in ('token_rows', 'positions', 'out_loc', 'last_tokens'):
    print(f'{name:12}', getattr(batch, name).tolist())


# %%
#| code-fold: true
def drawn(batch):
    def boxes(values): return [Box(o, int(row)) for o, row in zip(values, batch.token_rows)]
    names = [batch.reqs[int(row)].rid for row in batch.token_rows]
    chosen = ['score' if i in batch.last_tokens.tolist() else '' for i in range(len(names))]
    return draw_rows('Six tokens of two requests, one column each', [
        Row('request', boxes(names)), Row('position', boxes(batch.positions.tolist())),
        Row('out_loc', boxes(batch.out_loc.tolist())), Row('page', boxes((batch.out_loc // 4).tolist())), Row('last', boxes(chosen))])

drawn(batch)

# %% [markdown]
# Six tokens, six columns. The last of each request is the one whose scores say its next token: columns 4 and 5. Prefill and decode need no names here. A request computes what it has to, and the batch does not ask.

# %%
#| checks
test_eq(batch.token_rows.tolist(), [0, 0, 0, 0, 0, 1])
test_eq(batch.positions.tolist(), [0, 1, 2, 3, 4, 9])
test_eq(batch.out_loc.tolist(), [24, 25, 26, 27, 8, 13])
test_eq((batch.last_tokens.tolist(), batch.sampled), ([4, 5], [0, 1]))
a.samples = False
test_eq((Batch([a, b], table).last_tokens.tolist(), Batch([a, b], table).sampled_reqs), ([5], [b]))
a.samples = True


# %% [markdown]
# ## Attention, request by request
# `attend` gets the queries of all six tokens. It stores all keys and values at once, since `out_loc` says where each goes. Then it takes the queries apart again, and each request reads from its own slots. What all layers share, the slots of each request, is prepared once for a batch.

# %%
#| export
class TorchAttention:
    "Attention over pages, one request after the other."
    def __init__(self, pool: KVPool, table: TableManager):
        self.pool, self.table = pool, table

    def prepare(self, batch: Batch) -> None:
        "What all layers need of a batch"
        self.out_loc = batch.out_loc
        self.slots = [self.table.slots(req.row, torch.arange(end))
                      for req, end in zip(batch.reqs, batch.device_lens)]
        self.extend_lens = [end - start for start, end in
                            zip(batch.cached_lens, batch.device_lens)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        "Store what is new, and read all so far: [n_tokens, n_heads, head_dim] and so on"
        self.pool.store(layer, self.out_loc, k, v)
        keys, values = self.pool.k[layer], self.pool.v[layer]
        parts = q.split(self.extend_lens)
        return torch.cat([attention(part, keys[slots], values[slots])
                          for part, slots in zip(parts, self.slots)])


# %% [markdown]
# This loop is the one place where requests are still computed one by one. A good kernel does it for all of them at once, chapter 9 uses one; it gets the same lists.
#
# ## The engine
# The engine joins the parts, and decides nothing. It reads the batch's tokens from `token_pool`, computes, takes for each sampled request a token from its scores, and writes it to where it will be read in the next step. How a token is chosen is a function that it is given; the likeliest is the simplest choice.

# %%
#| export
Choose = Callable[[Tensor, Batch], Tensor]   # scores [n_sampled, vocab_size] → tokens [n_sampled]

def likeliest(logits: Tensor, batch: Batch) -> Tensor:
    "Greedy: the token with the highest score"
    return logits.argmax(-1)

class Engine:
    "Computes batches, and decides nothing."
    def __init__(
        self,
        model: Decoder,
        table: TableManager,
        attention: TorchAttention,   # or what has its methods
        choose: Choose = likeliest,
    ):
        self.model, self.table = model, table
        self.attention, self.choose = attention, choose


# %%
#| export
@patch
def forward_batch(self: Engine, batch: Batch) -> Tensor:
    "The next token of each sampled request, [n_sampled]; kept in `token_pool`, too"
    ids = self.table.token_pool[batch.token_rows, batch.positions]
    self.attention.prepare(batch)
    hidden = self.model.forward(ids, batch.positions, self.attention.attend)
    tokens = self.choose(self.model.logits(hidden[batch.last_tokens]), batch)
    ends = torch.tensor(batch.device_lens)[batch.sampled]
    self.table.token_pool[batch.rows[batch.sampled], ends] = tokens
    return tokens


# %% [markdown]
# Now the seven prompts in one call. Each request gets a row and pages for all that it may need, and its prompt is written to its row.

# %%
model = Decoder(folder)
config = model.config

def build(num_pages, rows):
    pool = KVPool(num_pages, 8, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    table = TableManager(rows, 480, 8)
    return Engine(model, table, TorchAttention(pool, table)), list(range(num_pages))

def start(engine, free, name, prompt, most):
    table, row = engine.table, engine.table.allocate()
    for column in range(-(-(len(prompt) + most - 1) // 8)): table.page_table[row, column] = free.pop()
    table.token_pool[row, :len(prompt)] = torch.tensor(prompt)
    return Req(PendingReq(name, prompt, most), row, 0, len(prompt))


# %%
engine, free = build(num_pages=120, rows=7)
reqs = [start(engine, free, *o) for o in fixed_requests()]
batch = Batch(reqs, engine.table)
tokens = engine.forward_batch(batch)
len(batch.positions), [tokenizer.decode([token]) for token in tokens.tolist()]

# %%
#| checks
test_eq(tokens.tolist(), [generate(model, prompt, 1)[0] for _, prompt, _ in fixed_requests()])
test_eq(len(batch.positions), real)
ends = [len(prompt) for _, prompt, _ in fixed_requests()]
test_eq(engine.table.token_pool[batch.rows, ends].tolist(), tokens.tolist())


# %% [markdown]
# As many tokens as there are, and the right ones: each request's first token is the one that it gets alone.
#
# ## Together
# The rest of the answers: all requests move on, and one batch after the other decodes them. A request that has its end token leaves the batch. This is *static batching*: the group starts together, and the next group starts when the last of it has ended.
#
# **Predict.** All seven in one group, against one after the other. One after the other they took 139 steps. How many are it now? And do tokens a second rise as much?

# %%
def together(engine, free, requests):
    "Answers of a group: for each step its tokens, and how many were computed"
    reqs = [start(engine, free, *o) for o in requests]
    while reqs:
        batch = Batch(reqs, engine.table)
        tokens = engine.forward_batch(batch).tolist()
        yield [(req.rid, token) for req, token in zip(reqs, tokens)], len(batch.positions)
        for req, token in zip(reqs, tokens):
            req.tokens.append(token)
            req.advance()
        reqs = [req for req, token in zip(reqs, tokens)
                if token != config.eos_token_id and req.cached_len < req.max_device_len - 1]


# %%
answers = {}
steps = list(together(*build(120, 7), fixed_requests()))
for made, _ in steps:
    for name, token in made: answers.setdefault(name, []).append(token)
print(len(steps), 'steps;', tokenizer.decode(answers['What is overlap?']))

# %%
#| checks
for name, prompt, most in fixed_requests(): test_eq(answers[name], generate(model, prompt, most))


# %% [markdown]
# **Answer.** 24 steps, as many as the longest answer has tokens. Each call makes up to seven tokens, so its price is shared. The table below has the time: tokens a second rise, and by less than the steps fall. The weights are read once for all, but on a CPU the arithmetic of seven tokens counts, and attention is computed for each request by itself.
#
# ## The table
# Rows and pages are not endless. From here on we have four rows, so the seven requests come in two groups, and a group keeps its pages until its last answer has ended.

# %%
#| code-fold: true
def in_groups():
    engine, free = build(num_pages=120, rows=4)
    requests = fixed_requests()
    for group in (requests[:4], requests[4:]):
        full = list(free)
        pages = None
        for made, computed in together(engine, free, group):
            pages = pages or len(full) - len(free)
            yield Step(made, computed, slots=8 * pages)
        free[:] = full
        engine.table.free_rows = [3, 2, 1, 0]


# %%
#| volatile
print_table('3 a batch', measure(in_groups()))

# %% [markdown]
# Steps fall to a third, and `tokens/s` rises. `slots` rises, too: the memory of four requests is taken at once. And look at `first`. The second group waits for the first one to end, although rows were idle long before. In its last steps a group computes for one or two requests. [The next chapter](04_decode.ipynb) lets nobody wait for a group.
#
# **Exercise 1.** Take the scores of each request's *first* new token: in `Batch`, change `last_tokens` (`make try NB=weekend/03_batch EX=1`). Which requests still go on well, and why?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -        self.last_tokens = lengths.cumsum(0)[self.sampled] - 1   # whose scores are wanted
# +        self.last_tokens = (lengths.cumsum(0) - lengths)[self.sampled]   # whose scores are wanted
# ```
#
# Fails: `test_eq((batch.last_tokens.tolist(), batch.sampled), ([4, 5], [0, 1]))`, `test_eq(tokens.tolist(), [generate(model, prompt, 1)[0] for _, prompt, _ in fixed_requests()])`, `for name, prompt, most in fixed_requests(): test_eq(answers[name], generate(model, prompt, most))`.
#
# In a decode step a request has one new token, which is first and last, so decode would be right. But the first token of each answer is now what the model expects after the first token of the prompt, and an answer with a wrong beginning goes on from there.
#
# </details>
#
# **Exercise 2.** Let requests read only what is new: in `prepare`, let the slots begin at `cached_lens` (`make try NB=weekend/03_batch EX=2`). The first token of each answer stays right. Why?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -        self.slots = [self.table.slots(req.row, torch.arange(end))
# -                      for req, end in zip(batch.reqs, batch.device_lens)]
# +        self.slots = [self.table.slots(req.row, torch.arange(start, end)) for req, start, end
# +                      in zip(batch.reqs, batch.cached_lens, batch.device_lens)]
# ```
#
# Fails: `for name, prompt, most in fixed_requests(): test_eq(answers[name], generate(model, prompt, most))`.
#
# In prefill everything is new, so nothing is missing. From then on each token sees only itself, and the answer forgets its question.
#
# </details>
#
# **What we left out.** Arrays that are filled for all requests without a loop ([how the real batch is made](../24_scheduler.batch.ipynb)), lengths as arrays by row ([what a request is](../00b_core.request.ipynb)), and penalties, masks and logprobs, which travel with a batch, too.
