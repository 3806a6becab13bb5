# %%
#| default_exp weekend.pages

# %% [markdown]
# # Pages for what has been computed
# > Keys and values are computed once and kept, in pages of equal size; a page table says which pages a request has, in order.
#
# Each token of an answer computes the whole text before it, although nothing of it has changed. *Where do we keep what has been computed?* We keep keys and values in the simplest way, find that half of the memory is empty and yet no request fits, and then cut the memory into pages.
#
# After this chapter you can say what a KV cache holds, tell prefill from decode, find the slot of any token of a request, and say what a page table is for.

# %%
#| export
import torch
from torch import Tensor

# %%
#| hide
import time
from fastcore.test import test_eq
from minisgl_lit.weekend.model import Decoder, attention, generate
from minisgl_lit.testing.weekend_table import QUESTION, Step, fixed_requests, folder, measure, print_table, prompt_of, tokenizer
from minisgl_lit.tools.drawing import Box, Row, draw_rows
torch.set_num_threads(1); torch.set_grad_enabled(False);

# %% [markdown]
# ## Compute once, keep two vectors
# What does a new token need from the old ones? Only one function looks at them: `attention`, and it wants their keys and values. Queries serve the token that asks, and nobody after it. So keep keys and values, in every layer: that is the *KV cache*. The decoder need not change for it. We give it another `attend`, which writes what is new and reads all.
#
# The simplest cache is one tensor for each request, with room for the longest text that we allow.

# %%
model = Decoder(folder)
config = model.config
LONGEST = 1024

class Room:
    "Keys and values of one request, in all layers"
    def __init__(self):
        shape = config.num_hidden_layers, LONGEST, config.num_key_value_heads, config.head_dim
        self.k, self.v, self.length = torch.zeros(shape), torch.zeros(shape), 0


# %%
def step(room, ids):
    "Compute new tokens of a request; the likeliest next one"
    start, end = room.length, room.length + len(ids)
    def attend(layer, q, k, v):
        room.k[layer, start:end] = k
        room.v[layer, start:end] = v
        return attention(q, room.k[layer, :end], room.v[layer, :end])
    hidden = model.forward(torch.tensor(ids), torch.arange(start, end), attend)
    room.length = end
    return int(model.logits(hidden[-1:]).argmax())


# %% [markdown]
# The first step computes the prompt, all of it at once, and makes the first token of the answer: *prefill*. Each later step computes the one token that was made last, and makes the next: *decode*.
#
# **Predict 1.** Chapter 1 sent some 29,000 tokens through the model to make 200. How many are it now? And by what factor does the time fall: by the same?

# %%
#| volatile
def answer(prompt, n):
    "An answer, and the seconds that it took"
    began, room, made = time.perf_counter(), Room(), []
    for _ in range(n): made.append(step(room, made[-1:] or prompt))
    return made, time.perf_counter() - began

prompt = prompt_of(QUESTION)
kept, seconds = answer(prompt, 200)
began = time.perf_counter()
for n in range(0, 200, 20):   # every twentieth token, computed as in chapter 1
    ids = torch.tensor(prompt + kept[:n])
    model.forward(ids, torch.arange(len(ids)), lambda layer, q, k, v: attention(q, k, v))
whole = 20 * (time.perf_counter() - began)
print(f'{len(prompt) + 199} tokens, {seconds:.2f} s; the whole text each time: {whole:.2f} s')

# %%
#| checks
test_eq(answer(prompt, 40)[0][:27], generate(model, prompt, 40)[:27])

# %% [markdown]
# **Answer 1.** Each token is computed once: the prompt's, and all of the answer but the last, a hundredth of what it was. The time falls less. A call of the model has a price of its own, however few tokens are in it: all weights are read, and Python calls some hundred functions. On a GPU that price is nearly all there is. Remember it; the next chapter shares it.
#
# What is kept is not small. Two vectors, in every layer, for every head of keys:

# %%
per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
print(f'{per_token:,} bytes a token here; {2 * 32 * 8 * 128 * 2:,} in a model of 8 billion weights')


# %% [markdown]
# Four kilobytes for a token here, and more than a hundred for a model of common size: ten thousand tokens are over a gigabyte. On a GPU this memory is what there is least of, and it decides how many requests can run.
#
# ## Rooms stand empty
# So how well does `Room` use it? Nobody knows how long an answer becomes, so each room is made for the longest. Memory for three rooms; one request has 900 tokens, one has 60.

# %%
def use(lengths, n_rooms=3):
    "How many slots are used, of those that are taken"
    taken = len(lengths) * LONGEST
    return f'{sum(lengths)} of {taken} slots used, {n_rooms - len(lengths)} rooms left'

print(use([900, 60]))
print(use([900, 60, 40]))


# %%
#| code-fold: true
def rooms(lengths):
    def boxes(n, name): return [Box(name, 'abc'.index(name), 'strong', n), Box('empty', None, 'dashed', LONGEST - n)]
    return draw_rows('Three rooms of 1,024 slots', [Row(name, boxes(n, name)) for name, n in zip('abc', lengths)])

rooms([900, 60, 40])


# %% [markdown]
# With two requests half of the memory is empty, with the third one two thirds, and then no more fits: a fourth request of forty tokens is turned away, while two thousand slots lie idle. Smaller rooms would turn away the long text. And rooms that are moved and joined when one gets too small? That copies gigabytes while requests wait.
#
# Operating systems had this problem with programs. Their answer: a program need not lie in one piece. Memory is cut into *pages* of equal size, any free page is as good as any other, and a table says which page comes where. *PagedAttention* (Kwon et al., 2023, vLLM) does the same for keys and values.
#
# ## The pool
# Memory for keys and values is one tensor for all requests. A place for one token is a *slot*; `page_size` slots in a row are a page. Whoever stores says into which slots: `out_loc`, one for each token.

# %%
#| export
class KVPool:
    "Keys and values of all requests, in all layers: `num_pages` pages of `page_size` slots."
    def __init__(
        self,
        num_pages: int,
        page_size: int,     # slots in a page; a slot holds one token
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = 'cpu',
    ):
        self.num_pages, self.page_size = num_pages, page_size
        shape = n_layers, num_pages * page_size, n_kv_heads, head_dim
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def store(self, layer: int, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
        "Keep new tokens, each in its slot: `k` and `v` are [n_tokens, n_kv_heads, head_dim]"
        self.k[layer, out_loc] = k
        self.v[layer, out_loc] = v


# %%
tiny = KVPool(num_pages=3, page_size=2, n_layers=1, n_kv_heads=1, head_dim=1)
tiny.store(0, torch.tensor([4, 5, 0]), torch.tensor([1., 2., 3.]).view(3, 1, 1), torch.zeros(3, 1, 1))
tiny.k[0].flatten()


# %% [markdown]
# Three tokens of one request: the first two fill page 2, the third begins page 0. In the tensor they stand in the wrong order, and that does no harm as long as somebody knows the right one.
#
# ## The table
# The *page table* knows. It has a *row* for each running request, and in it the numbers of its pages, first to last. A row is allocated when a request starts, and freed when it has ended. Beside the pages lie the request's tokens, in `token_pool`: the engine reads its inputs there, and will write what it makes. (On a GPU both tables are on the device. Why the tokens have to be there, too, chapter 8 shows.)

# %%
#| export
class TableManager:
    "A row for each running request: its pages in order, and its tokens."
    def __init__(
        self,
        max_running_req: int,   # rows
        max_seq_len: int,       # longest prompt and answer together, in tokens
        page_size: int,
        device: str = 'cpu',
    ):
        self.page_size = page_size
        shape = max_running_req, -(-max_seq_len // page_size)   # rounded up
        self.page_table = torch.zeros(shape, dtype=torch.long, device=device)
        self.token_pool = torch.zeros(max_running_req, max_seq_len, dtype=torch.long, device=device)
        self.free_rows = list(reversed(range(max_running_req)))

    @property
    def available_size(self) -> int:
        "Rows that are free"
        return len(self.free_rows)

    def allocate(self) -> int:
        "A free row; there must be one"
        return self.free_rows.pop()

    def free(self, row: int) -> None:
        "It has ended"
        self.free_rows.append(row)

    def slots(self, rows: Tensor | int, positions: Tensor) -> Tensor:
        "Slots of tokens by their rows and positions: page × `page_size` + place in the page"
        pages = self.page_table[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size


# %% [markdown]
# By hand: pages of four slots, and a request with the pages 2, 7 and 5. Where are its tokens 0, 3, 4 and 9?

# %%
table = TableManager(max_running_req=2, max_seq_len=12, page_size=4)
row = table.allocate()
table.page_table[row] = torch.tensor([2, 7, 5])
table.slots(row, torch.tensor([0, 3, 4, 9])).tolist()

# %% [markdown]
# Token 3 is the last of page 2, token 4 the first of page 7. No loop, and no question how the pages lie.

# %%
#| checks
test_eq(table.slots(row, torch.tensor([0, 3, 4, 9])).tolist(), [8, 11, 28, 21])
test_eq((row, table.available_size), (0, 1))
test_eq([table.allocate(), table.available_size], [1, 0])
table.free(row)
test_eq(table.allocate(), 0)
test_eq(TableManager(1, 13, 4).page_table.shape, (1, 4))   # the last page is half full
both = table.slots(torch.tensor([0, 1]), torch.tensor([4, 4]))
test_eq(both.tolist(), [28, 0])


# %% [markdown]
# ## The same answer, in any pages
# Now an answer over pages. `serve_paged` is given a list of free pages and takes the next one when a request begins it. `attend` stores into the new slots, and reads all slots so far, in the order of the text.

# %%
def paged_step(pool, table, row, ids, start):
    "Compute tokens of the request in this row, from position `start` on; the likeliest next one"
    end = start + len(ids)
    out_loc, past = (table.slots(row, torch.arange(a, end)) for a in (start, 0))
    def attend(layer, q, k, v):
        pool.store(layer, out_loc, k, v)
        return attention(q, pool.k[layer, past], pool.v[layer, past])
    hidden = model.forward(torch.tensor(ids), torch.arange(start, end), attend)
    return int(model.logits(hidden[-1:]).argmax())


# %%
def pages_for(n, size): return -(-n // size)

def serve_paged(pool, table, free, prompt, n):
    "Tokens of an answer, one by one"
    row, length, ids = table.allocate(), 0, prompt
    for _ in range(n):
        for column in range(pages_for(length, 8), pages_for(length + len(ids), 8)):
            table.page_table[row, column] = free.pop()
        token = paged_step(pool, table, row, ids, length)
        length, ids = length + len(ids), [token]
        yield token
        if token == config.eos_token_id: break
    free.extend(table.page_table[row, :pages_for(length, 8)].tolist())
    table.free(row)


# %% [markdown]
# The free pages are shuffled, so that neighbours in the text lie anywhere in memory.

# %%
def memory(num_pages, page_size=8):
    "A pool, a table with four rows, and free pages in no order"
    pool = KVPool(num_pages, page_size, config.num_hidden_layers, config.num_key_value_heads,
                  config.head_dim)
    mixed = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    return pool, TableManager(4, LONGEST, page_size), mixed

pool, table, free = memory(40)
made = list(serve_paged(pool, table, free, prompt, 40))
print(tokenizer.decode(made))
print(table.page_table[0, :10].tolist(), len(free))

# %%
#| checks
test_eq(made, generate(model, prompt, 40))
test_eq(sorted(free), list(range(40)))      # all of them came back


# %% [markdown]
# The same answer, from pages all over the pool; and all forty are free again. (The row still shows the old numbers. A length says how much of a row counts, so nothing is wiped.)

# %%
#| code-fold: true
def drawn(lengths, page_size, num_pages):
    mixed = memory(num_pages)[2]
    owner, at = {}, 0
    for name, n in zip('abc', lengths):
        for i in range(pages_for(n, page_size)):
            owner[mixed[at]] = name, min(n - i * page_size, page_size)
            at += 1
    def box(page):
        if page not in owner: return Box('', None, 'dashed')
        name, filled = owner[page]
        return Box(name if filled == page_size else f'{name}{filled}', 'abc'.index(name), 'strong' if filled == page_size else 'normal')
    return draw_rows('30 pages of 8 slots: a has 90 tokens, b has 60, c has 12; a figure: slots of a page that is not full',
                     [Row(f'page {i} …', [box(page) for page in range(i, i + 10)]) for i in range(0, num_pages, 10)])

drawn([90, 60, 12], 8, 30)

# %% [markdown]
# Only the last page of a request may have empty slots, fewer than a page. What is free is free for every request, of any length.
#
# ## How large is a page?
# **Predict 2.** The seven requests of the weekend's table, each with its longest answer. How many slots stay empty in pages of 1, 8, 16, 64 and 256? And what speaks against the smallest?

# %%
lengths = [len(prompt) + most - 1 for _, prompt, most in fixed_requests()]
for size in (1, 8, 16, 64, 256):
    pages = [pages_for(n, size) for n in lengths]
    print(f'{size:3}: {sum(pages):4} pages, {sum(pages) * size - sum(lengths):5} of '
          f'{sum(pages) * size:5} slots empty')


# %% [markdown]
# **Answer 2.** About half a page for each request, so a few per cent with pages of 16, and more than half with 256. Pages of one slot waste nothing, but there are many: the table grows, and every list that is made of it. Kernels read a page as one piece, and a piece of one token is a poor one. Real engines take 1, 16 or 64; we take 8, since our texts are short.
#
# ## The table
# The seven requests, still one after the other.

# %%
#| code-fold: true
def one_by_one():
    pool, table, free = memory(60)
    for name, prompt, most in fixed_requests():
        n, answer = len(prompt), serve_paged(pool, table, free, prompt, most)
        while True:
            taken = 60 - len(free)
            token = next(answer, None)
            if token is None: break
            yield Step([(name, token)], computed=n, slots=8 * max(60 - len(free), taken))
            n = 1


# %%
#| volatile
print_table('2 pages', measure(one_by_one()))

# %%
#| checks
found = {}
for o in one_by_one():
    for name, token in o.made: found.setdefault(name, []).append(token)
for name, prompt, most in fixed_requests()[:2]: test_eq(found[name], generate(model, prompt, most))

# %% [markdown]
# `computed` has fallen to the tokens that there are, and `tokens/s` has risen, by less, as predicted. The steps are as many as before: each makes one token. `slots` shows what one request has reserved at most, the document. The callers still wait for each other, and `first` says how long. [The next chapter](03_batch.ipynb) puts them into one call.
#
# **Exercise 1.** Let the engine forget the order: in `slots`, leave out the place in the page (`make try NB=weekend/02_pages EX=1`). Which tokens share a slot then?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -        return pages * self.page_size + positions % self.page_size
# +        return pages * self.page_size
# ```
#
# Fails: `test_eq(table.slots(row, torch.tensor([0, 3, 4, 9])).tolist(), [8, 11, 28, 21])`, `test_eq(made, generate(model, prompt, 40))`, `for name, prompt, most in fixed_requests()[:2]: test_eq(found[name], generate(model, prompt, most))`.
#
# All tokens of a page write to its first slot, so the last one wins, and every token of the page is read as that one.
#
# </details>
#
# **Exercise 2.** Give the pages back too early: in `serve_paged`, extend `free` by all pages but those of the first row entry (`make try NB=weekend/02_pages EX=2`). Who notices?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -    free.extend(table.page_table[row, :pages_for(length, 8)].tolist())
# +    free.extend(table.page_table[row, 1:pages_for(length, 8)].tolist())
# ```
#
# Fails: `test_eq(sorted(free), list(range(40)))      # all of them came back`.
#
# No answer is wrong. One page is lost with each request, and after some hours a server turns everybody away although nothing runs. So engines count: free pages and those of requests must add up to all, at every moment.
#
# </details>
#
# **What we left out.** A copy of the table on the host, so that the scheduler need not ask the device ([the page table](../11_kv_cache.table.ipynb)), pages of padding ([the pool](../10_kv_cache.pool.ipynb)), keys and values in fewer bits, and an experiment with [the size of a page](../72_page_size.ipynb).
