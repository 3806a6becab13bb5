# %%
#| default_exp weekend.radix

# %% [markdown]
# # A prompt that is half there
# > One tree knows every cached prefix and the pages that hold it: a new request computes only what is new, and the pages that were used longest ago give way.
#
# Prompts begin alike: with the same system prompt, with the turns of a chat so far. When a request ends, its keys and values are still in the pool, and so far we forget them. *Whose keys and values may a new request use?* We try a dictionary, see where it breaks, and build a radix tree with locks and eviction.
#
# After this chapter you can draw the tree after any few requests, say which pages are shared, locked, or next to go, and name the owner of each page at any time.

# %%
#| export
import torch
from fastcore.basics import patch

from minisgl_lit.weekend.batch import Req
from minisgl_lit.weekend.decode import pages_of
from minisgl_lit.weekend.pages import TableManager

# %%
#| hide
from fastcore.test import test_eq
from minisgl_lit.weekend.batch import Batch, Engine, PendingReq, TorchAttention
from minisgl_lit.weekend.decode import Scheduler
from minisgl_lit.weekend.model import Decoder, attention, generate
from minisgl_lit.weekend.pages import KVPool
from minisgl_lit.testing.weekend_table import Step, fixed_requests, folder, measure, print_table, prompt_of
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
# ## The same beginning, sixteen times
# Sixteen callers ask the same guide. Each prompt is the system prompt, one question, and the mark with which the answer begins. We put all of them into one batch, each in pages of its own. (`parts` makes pool, table and engine, as before.)

# %%
words = 'page token lock row slot batch step prompt cache key value seed node leaf tree chunk'
prompts = [prompt_of(f'What is a {word}?') for word in words.split()]

# %%
#| code-fold: true
model = Decoder(folder)

def parts(n_rows, num_pages, page_size):
    config = model.config
    pool = KVPool(num_pages, page_size, config.num_hidden_layers,
                  config.num_key_value_heads, config.head_dim)
    table = TableManager(n_rows, 480, page_size)
    return pool, table, Engine(model, table, TorchAttention(pool, table))


# %%
pool, table, engine = parts(n_rows=16, num_pages=16 * 8, page_size=8)
reqs = []
for i, ids in enumerate(prompts):
    row = table.allocate()
    table.page_table[row, :8] = torch.arange(8) + 8 * i
    table.token_pool[row, :len(ids)] = torch.tensor(ids)
    reqs.append(Req(PendingReq(f'r{i}', ids, 1), row, cached_len=0, device_len=len(ids)))
batch = Batch(reqs, table)
engine.forward_batch(batch)
shared = min(i for i, column in enumerate(zip(*prompts)) if len(set(column)) > 1)
print(f'{len(batch.positions)} tokens computed; all prompts begin with the same {shared}')

# %% [markdown]
# Most of the work was done sixteen times. And what came of it? A token's keys and values depend on the token, on its position, and on the tokens before it; on nothing else. So in the beginnings they must be alike in every row, up to rounding:

# %%
places = table.slots(torch.arange(16)[:, None], torch.arange(shared))   # [16, shared]
keys = pool.k[:, places]             # [n_layers, 16, shared, n_kv_heads, head_dim]
torch.allclose(keys, keys[:, :1], atol=1e-3)

# %%
#| checks
values = pool.v[:, places]
assert torch.allclose(values, values[:, :1], atol=1e-3)
after = pool.k[:, table.slots(torch.arange(16), torch.tensor(shared))]   # the first that differ
assert not torch.allclose(after, after[:, :1], atol=1e-3)

# %% [markdown]
# Fifteen of sixteen copies are useless. That answers the question of this chapter: a request may use the keys and values of *any* other one, as far as both texts are the same from their first token on. This is *prefix caching*. What is left is to find them, and not to lose them.
#
# ## A dictionary
# The simplest memory: from the tokens of a whole prompt to its pages.

# %%
known = {tuple(prompts[0]): [*range(7)]}
sum(tuple(ids) in known for ids in prompts[1:])


# %% [markdown]
# No hit: each question is new, only its beginning is not. So the key must be a beginning: all tokens up to the end of a page, and what it finds is that page.

# %%
def remember(known, ids, pages, size):
    for i, page in enumerate(pages): known[tuple(ids[:(i + 1) * size])] = page

def look_up(known, ids, size):
    found = []
    for end in range(size, len(ids) + 1, size):
        if tuple(ids[:end]) not in known: break
        found.append(known[tuple(ids[:end])])
    return found

known = {}
remember(known, prompts[0], range(len(prompts[0]) // 8), size=8)
look_up(known, prompts[1], size=8)

# %% [markdown]
# That works: the second prompt finds the common pages. Two things are wrong with it. First, count the tokens that stand in keys, for documents of 10, 100 and 1,000 pages:

# %%
for n_pages in (10, 100, 1000):
    known = {}
    remember(known, [*range(n_pages * 8)], range(n_pages), size=8)
    print(f'{n_pages * 8:5} tokens of text, {sum(map(len, known)):9,} in keys')

# %% [markdown]
# Ten times the text, a hundred times the keys: each repeats the one before it. Second, the pool gets full, and something must be thrown away. Say, the oldest entry:

# %%
del known[next(iter(known))]
len(look_up(known, [*range(8000)], size=8)), len(known)


# %% [markdown]
# One page is gone, and with it the 999 behind it: no look-up gets past the gap, and yet their pages are taken. A dictionary does not show what comes after what.
#
# ## A tree
# So say it. If each page stands *below* the page that comes before it, its own tokens are enough to find it: a *trie*. And where pages follow each other without a branch, one *node* can hold the whole run: a *radix tree*. SGLang (*RadixAttention*, Zheng et al., 2023) and Mini-SGLang have one, and so shall we.

# %%
#| export
class Node:
    "A run of full pages; a prefix in the tree is the way from the root to the end of a node."
    def __init__(
        self,
        tokens: list[int],   # of its pages, all of them full
        pages: list[int],    # where their keys and values are
        parent: 'Node | None' = None,   # what comes before; `None`: this is the root
    ):
        self.tokens, self.pages, self.parent = tokens, pages, parent
        self.children: dict[tuple[int, ...], Node] = {}   # by the tokens of their first page
        self.locks = 0       # of requests that read it, or something below it
        self.last_used = 0   # the tree's clock at its last lock or unlock

    @property
    def path(self) -> 'list[Node]':
        "From the root to here"
        return [*(self.parent.path if self.parent else []), self]

    @property
    def end(self) -> int:
        "Tokens from the root to its end"
        return sum(len(node.tokens) for node in self.path)


# %% [markdown]
# In the examples a letter is a token, and a page has two of them. A node stands for a whole prefix, as it knows its parents:

# %%
root = Node([], [])
run = Node([*'abcdef'], [7, 8, 9], root)
tail = Node([*'gh'], [4], run)
tail.end, [node.pages for node in tail.path]


# %% [markdown]
# The tree begins with an empty root. A child's *name* is the tokens of its first page, so one look-up in `children` finds the only child that can match. How far does it match?

# %%
#| export
class RadixTree:
    "Prefixes whose keys and values are in the pool."
    def __init__(self, page_size: int):
        self.page_size = page_size
        self.root = Node([], [])
        self.clock = 0    # counts locks and unlocks

    def name(self, tokens: list[int]) -> tuple[int, ...]:
        "The first page of them"
        return tuple(tokens[:self.page_size])

    def common_pages(self, a: list[int], b: list[int]) -> int:
        "How many full pages `a` and `b` begin with alike"
        size, n_pages = self.page_size, 0
        for start in range(0, min(len(a), len(b)) - size + 1, size):
            if a[start:start + size] != b[start:start + size]: break
            n_pages += 1
        return n_pages

    def pages(self, node: Node) -> list[int]:
        "Of the whole prefix that ends with `node`"
        return [page for each in node.path for page in each.pages]


# %%
tree = RadixTree(page_size=2)
[tree.common_pages([*'abcdef'], [*other]) for other in ('abcdxy', 'abcxef', 'abc', 'xbcdef')]


# %% [markdown]
# The second and third have three letters in common with `abcdef`, but one page only. Why not share the half page? Its request writes its next token into the other half, and a second one would write its own there. *Only full pages are shared:* they are never written again.
#
# ## Where a run divides
# A prompt `abxy` shares one page of the run `abcdef`. Then the run is cut in two, and one half needs a new node. Which one? A request that reads all six tokens holds the old node as its *handle*. If the old node kept the first half, the handle would suddenly stand for two tokens, and each such request would have to be found and told. So the old node keeps the *rest*, and the new one is put above it.

# %%
#| export
@patch
def split(self: RadixTree, node: Node, n_pages: int) -> Node:
    "The first pages get a node of their own, above; `node` keeps the rest, and its readers"
    if n_pages == len(node.pages): return node
    n = n_pages * self.page_size
    head = Node(node.tokens[:n], node.pages[:n_pages], node.parent)
    head.locks, head.last_used = node.locks, node.last_used
    head.parent.children[self.name(head.tokens)] = head
    node.tokens, node.pages, node.parent = node.tokens[n:], node.pages[n_pages:], head
    head.children[self.name(node.tokens)] = node
    return head


# %%
run = Node([*'abcdef'], [7, 8, 9], tree.root)
tree.root.children[tree.name(run.tokens)] = run
before = run.end, tree.pages(run)
head = tree.split(run, n_pages=1)
print(head.tokens, run.tokens)
before, (run.end, tree.pages(run))


# %% [markdown]
# `run` still ends after six tokens, in the same pages. Its readers notice nothing.
#
# ## Match
# *Where does the longest cached prefix of these tokens end?* We go from node to node, as long as a child has the right name. If only a part of it matches, it is split, so that every answer is the end of a node.

# %%
#| export
@patch
def match(self: RadixTree, tokens: list[int], start: Node | None = None) -> Node:
    "Where the longest cached prefix ends; `tokens` are those behind `start`, or all of them"
    node = start or self.root
    while child := node.children.get(self.name(tokens)):
        node = self.split(child, self.common_pages(child.tokens, tokens))
        tokens = tokens[len(node.tokens):]
    return node


# %%
node = tree.match([*'abcdxy'])
node.end, tree.pages(node)


# %% [markdown]
# In the picture each row is a node: its pages are coloured, each with its tokens and its number, and the grey ones before them belong to the nodes above.

# %%
#| code-fold: true
def draw(tree, title):
    size, rows = tree.page_size, []
    def put(node, above):
        texts = [''.join(node.tokens[i * size:(i + 1) * size]) for i in range(len(node.pages))]
        own = [f'{text} {page}' for text, page in zip(texts, node.pages)]
        if node.parent:
            boxes = [Box(o, None, 'faint') for o in above]
            boxes += [Box(o, 0, 'strong' if node.locks else 'normal') for o in own]
            rows.append(Row('', boxes, f'locks {node.locks}, used {node.last_used}'))
        for child in node.children.values(): put(child, above + own)
    put(tree.root, [])
    return draw_rows(title, rows)

draw(tree, 'abcdef, after a match with abxy and one with abcdxy')


# %% [markdown]
# ## Insert
# *What does a request leave to others?* It gives its tokens with its pages. What the tree has already, it keeps as it is; only what is missing becomes a new leaf.

# %%
#| export
@patch
def insert(self: RadixTree, node: Node, tokens: list[int], pages: list[int]) -> Node:
    "Add what is missing behind `node`, and return the new end"
    end = self.match(tokens, node)
    known = end.end - node.end
    if known == len(tokens): return end
    leaf = Node(tokens[known:], pages[known // self.page_size:], end)
    end.children[self.name(leaf.tokens)] = leaf
    return leaf


# %%
end = tree.insert(tree.root, [*'abcdghij'], [3, 4, 5, 6])
tree.insert(tree.root, [*'klmn'], [1, 2])
tree.pages(end)

# %%
#| code-fold: true
draw(tree, 'abcdghij was in pages 3, 4, 5, 6')


# %% [markdown]
# `abcd` was there, in pages 7 and 8. So the tree took pages 5 and 6, and left 3 and 4 alone: they hold a copy of what it has.
#
# ## Locks
# *May this prefix be thrown away?* Not while a request reads it. A request *locks* the node where its prefix ends, and with it everything above, since it reads that as well. So each node counts the requests that read it or something below it, and notes the tree's clock, as the time when it was last in use.

# %%
#| export
@patch
def touch(self: RadixTree, node: Node, locks: int) -> None:
    "Count for the whole path, and note the time"
    self.clock += 1
    for each in node.path:
        each.locks += locks
        each.last_used = self.clock

@patch
def lock(self: RadixTree, node: Node) -> None:
    "Protect a prefix"
    self.touch(node, 1)

@patch
def unlock(self: RadixTree, node: Node) -> None:
    "One reader less"
    self.touch(node, -1)


# %%
other = tree.match([*'abcdef'])
tree.lock(end)
tree.lock(other)
[(''.join(each.tokens), each.locks) for each in end.path]

# %% [markdown]
# Two requests read `abcd` (in two nodes), one `ghij`. Then the first of them ends:

# %%
#| code-fold: true
tree.unlock(end)
draw(tree, 'one of two requests has ended; dark nodes are locked')


# %% [markdown]
# ## Evict
# *Which page goes first, when pages are needed?* Three rules, and the tree shows all of them. It must not be locked. Nothing may stand behind it, or that would be lost like the 999 pages; so it is the last page of a *leaf*. And of such leaves we take the *least recently used* one (LRU): what was asked for lately is likely to be asked for again.

# %%
#| export
@patch
def nodes(self: RadixTree) -> list[Node]:
    "All of them, parents first"
    found = [self.root]
    for node in found: found += node.children.values()   # the list grows while we walk along it
    return found

@patch(as_prop=True)
def evictable_size(self: RadixTree) -> int:
    "Pages that no request has locked"
    return sum(len(node.pages) for node in self.nodes() if not node.locks)


# %%
#| export
@patch
def evict(self: RadixTree, n: int) -> list[int]:
    "Give up `n` pages from the ends of unlocked leaves, least recently used first"
    evicted = []
    while len(evicted) < n:
        leaves = [o for o in self.nodes() if not (o.children or o.locks)]
        leaf = min(leaves, key=lambda node: node.last_used)
        keep = max(len(leaf.pages) - (n - len(evicted)), 0)
        evicted += leaf.pages[keep:]
        if not keep: del leaf.parent.children[self.name(leaf.tokens)]
        leaf.tokens, leaf.pages = leaf.tokens[:keep * self.page_size], leaf.pages[:keep]
    return evicted


# %%
tree.evictable_size, tree.evict(3), tree.evictable_size

# %% [markdown]
# `klmn` was never locked: both its pages go. Then the end of `ghij`, of which `gh` stays. `ef` was used longer ago than `ghij`, but it is locked. And why does `evictable_size` need no look at what is below a node? A lock counts along the whole path, so below an unlocked node nothing is locked, and in the end all of it can go.
#
# What if a request only matches, and does not lock?

# %%
tree.unlock(other)                      # its request has ended, too
mine = tree.pages(tree.match([*'abcdef']))   # a new one matches, and runs without a lock
given = tree.evict(2)                   # another one needs two pages
mine, given

# %% [markdown]
# Page 9 is in both lists. One request reads it as `ef`, the other writes its own tokens there, and an answer is made from the text of a stranger. Nothing crashes. So *match and lock at once, before any page is taken*. The next request finds only `abcd`, and locks it; then there is nothing left to evict.

# %%
tree.lock(tree.match([*'abcdef']))
tree.evictable_size

# %%
#| checks
test_eq(given, [5, 9])            # `gh` was used before `ef`
test_eq(mine, [7, 8, 9])
test_eq([''.join(o.tokens) for o in tree.nodes()], ['', 'ab', 'cd'])
test_eq([o.locks for o in tree.nodes()], [1, 1, 1])
tree.unlock(tree.match([*'abcd']))
test_eq((tree.evictable_size, tree.evict(2), tree.nodes()), (2, [8, 7], [tree.root]))

t = RadixTree(page_size=2)
long = t.insert(t.root, [*'abcdef'], [0, 1, 2])
t.lock(long)
short = t.insert(t.root, [*'abxy'], [3, 4])   # splits what is locked
test_eq((long.end, t.pages(long), t.pages(short)), (6, [0, 1, 2], [0, 4]))
test_eq(t.evictable_size, 1)                  # `xy`: `ab` is locked, too
t.unlock(long)
test_eq([o.locks for o in t.nodes()], [0, 0, 0, 0])
test_eq(t.match([*'abxy'], t.root), short)
test_eq(t.match([*'abx']).end, 2)
t.lock(short)                                 # now `cdef` is the one used longest ago
t.unlock(short)
test_eq((t.evict(1), t.evict(2), t.evict(1)), ([2], [1, 4], [0]))


# %% [markdown]
# ## The three owners of a page
# A page is *free*, or *in the tree*, or *held by one request* that still writes to it. It never has two owners, and never none. The `CacheManager` keeps that true: it has the free list and the tree, and gives out free pages, and if these are too few, evicted ones.
#
# If a whole prompt were cached, there would be nothing to compute, and no scores for the next token. So the last token of a prompt is never matched.

# %%
#| export
class CacheManager:
    "Knows the owner of each page: the free list, the tree or one request."
    def __init__(self, num_pages: int, table: TableManager):
        self.num_pages, self.table, self.page_size = num_pages, table, table.page_size
        self.tree = RadixTree(table.page_size)
        self.free = list(reversed(range(num_pages)))
        self.evicted_pages = 0   # so far

    @property
    def available_size(self) -> int:
        "Pages that can be given out"
        return len(self.free) + self.tree.evictable_size

    def match(self, input_ids: list[int]) -> Node:
        "The cached part of a prompt; its last token is always computed, for its scores"
        return self.tree.match(input_ids[:-1])

    def allocate(self, n: int) -> list[int]:
        "So many pages; what is cached gives way"
        missing = max(n - len(self.free), 0)
        self.free += self.tree.evict(missing)
        self.evicted_pages += missing
        return [self.free.pop() for _ in range(n)]


# %%
cache = CacheManager(num_pages=3, table=TableManager(1, 8, page_size=2))
cache.tree.insert(cache.tree.root, [*'abcd'], cache.allocate(2))
[cache.match([*text]).end for text in ('abcde', 'abcd')], cache.allocate(2), cache.available_size

# %% [markdown]
# Of `abcd` one page is used, not two, as its `d` must be computed. Then two pages are asked for and one is free: the tree gives the other.
#
# ## One copy is kept
# Two requests start together, and neither finds anything. Both compute `abcd`, each in pages of its own.

# %%
table = TableManager(max_running_req=2, max_seq_len=8, page_size=2)
cache = CacheManager(8, table)

def computed(rid, text):
    cache.tree.lock(cache.tree.root)
    req = Req(PendingReq(rid, [*text], max_tokens=3), table.allocate(), 0, len(text),
              handle=cache.tree.root)
    pages = cache.allocate(pages_of(len(text), 2))
    table.page_table[req.row, :len(pages)] = torch.tensor(pages)
    req.advance()
    return req

p, q = computed('p', 'abcde'), computed('q', 'abcdf')
table.page_table[:, :3].tolist(), cache.free


# %% [markdown]
# Now they insert what is full. The first gives its pages to the tree. The second comes with a copy, and the tree keeps what it has. So the second's *row* is pointed at the tree's pages, and its own copies are freed. Its lock moves on to the new end, and the new lock is taken before the old one is given up.

# %%
#| export
@patch
def insert(self: CacheManager, req: Req, n_tokens: int) -> None:
    "The tree takes the full pages of a request's first tokens; its lock moves on"
    first, last = req.handle.end // self.page_size, n_tokens // self.page_size
    own = self.table.page_table[req.row, first:last].tolist()
    tokens = req.tokens[first * self.page_size:last * self.page_size]
    node = self.tree.insert(req.handle, tokens, own)
    self.tree.lock(node)
    self.tree.unlock(req.handle)
    req.handle = node
    kept = self.tree.pages(node)[first:]
    self.table.page_table[req.row, first:last] = torch.tensor(kept, dtype=torch.long)
    self.free += [page for page, other in zip(own, kept) if page != other]

@patch
def cache_unfinished(self: CacheManager, req: Req) -> None:
    "It goes on; others may share what it has computed of its prompt"
    self.insert(req, min(req.cached_len, len(req.tokens)))


# %%
cache.cache_unfinished(p)
cache.cache_unfinished(q)
table.page_table[:, :3].tolist(), cache.free, p.handle is q.handle


# %% [markdown]
# Both rows begin with the same two pages, and two are free again. Each request holds only its last, half-full page.
#
# ## The end of a request
# Its answer is worth keeping, too: the next turn of the chat will contain it. So its full pages go to the tree. Only the last token of an answer was never computed, and has no keys. What is left is freed: pages that are not full, the lock, the row.

# %%
#| export
@patch
def cache_finished(self: CacheManager, req: Req) -> None:
    "It has ended: full pages go to the tree, the rest is free, and so is its row"
    self.insert(req, min(req.cached_len, len(req.tokens) - 1))
    first, last = req.handle.end // self.page_size, pages_of(req.cached_len, self.page_size)
    self.free += self.table.page_table[req.row, first:last].tolist()
    self.tree.unlock(req.handle)
    self.table.free(req.row)


# %%
p.advance()              # a decode step computes `x` …
p.tokens += ['x', 'y']   # … and makes `y`, the end
cache.cache_finished(p)
cache.free, table.free_rows

# %%
#| code-fold: true
draw(cache.tree, 'p has ended, q still reads abcd')

# %%
#| checks
test_eq(table.page_table[1, :3].tolist(), [0, 1, 5])
test_eq(cache.match([*'abcd']).end, 2)   # `d` must be computed
test_eq((q.handle.end, cache.tree.evictable_size, cache.available_size), (4, 1, 5))
q.tokens.append('y')     # its first token is its last
cache.cache_finished(q)
test_eq((sorted(cache.free), cache.available_size), ([3, 4, 5, 6, 7], 8))
test_eq((sorted(table.free_rows), cache.tree.root.locks), ([0, 1], 0))


# %% [markdown]
# ## With the scheduler
# The scheduler already calls `allocate`, `cache_unfinished` and `cache_finished`. Only prefill has to change: a new request matches, locks, and writes the pages that it found into its row; its `cached_len` begins there. (The queue itself is that of the last chapter, folded.)

# %%
#| code-fold: true
class Queue:
    def __init__(self, cache):
        self.cache, self.table = cache, cache.table
        self.waiting = {}

    def add(self, pending): self.waiting[pending.rid] = pending

    def remove(self, rid): return self.waiting.pop(rid, None)


# %%
class Matching(Queue):
    def schedule(self, reserved_pages):
        reqs, size = [], self.table.page_size
        for pending in [*self.waiting.values()]:
            node = self.cache.match(pending.input_ids)
            self.cache.tree.lock(node)
            longest = len(pending.input_ids) + pending.max_tokens - 1
            reserved_pages += pages_of(longest, size) - len(self.cache.tree.pages(node))
            if reserved_pages > self.cache.available_size or not self.table.available_size:
                self.cache.tree.unlock(node)
                break
            reqs.append(self.start(self.waiting.pop(pending.rid), node))
        return reqs

    def start(self, pending, node):
        row, n, pages = self.table.allocate(), len(pending.input_ids), self.cache.tree.pages(node)
        self.table.page_table[row, :len(pages)] = torch.tensor(pages, dtype=torch.long)
        self.table.token_pool[row, :n] = torch.tensor(pending.input_ids)
        return Req(pending, row, cached_len=node.end, device_len=n, handle=node)


# %%
#| code-fold: true
class Watched(Scheduler):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.log = []

    def launch(self, batch):
        self.log.append(batch)
        return super().launch(batch)

def build(n_rows, num_pages, page_size=8, kind=Watched):
    _, table, engine = parts(n_rows, num_pages, page_size)
    cache = CacheManager(num_pages, table)
    return kind(engine, table, cache, Matching(cache), model.config.eos_token_id)


# %% [markdown]
# **Predict 1.** The sixteen again, each with an answer of one token. With one row they come one after the other, with sixteen all at once, and with four in four groups. How many tokens of prompts are computed in each case? And how many pages are in the tree in the end?

# %%
for n_rows in (1, 4, 16):
    s = build(n_rows, num_pages=128)
    for i, ids in enumerate(prompts): s.add(PendingReq(f'r{i}', ids, max_tokens=1))
    while s.has_work: s.step()
    s.run_deferred()
    sizes = [len(batch.positions) for batch in s.log]
    print(f'{n_rows:2} rows: {sum(sizes)} computed, {s.cache.tree.evictable_size} pages;', *sizes[:5])

# %%
#| checks
s = build(1, num_pages=20)
answers = []
for name in 'ab':            # five full pages, and the same again
    s.add(PendingReq(name, prompts[0][:40], max_tokens=1))
    answers.append([])
    while s.has_work: answers[-1] += [output.token for output in s.step()]
first, second = answers
test_eq(first, second)
test_eq([len(batch.positions) for batch in s.log], [40, 8])


# %% [markdown]
# **Answer 1.** One after the other, the first computes all of its prompt, and each later one what follows the full pages of the common beginning. All at once, *nothing* is shared: when the batch is made, none of the prompts is in the tree. With four rows, the first group pays in full and the others do not. The tree has the same number of pages in all three cases: of copies, one was kept. (A new server should get one request before the crowd.)
#
# ## Every page has one owner
# Six of these requests on two rows, and a pool too small to keep everything. After each step we ask for the owner of every page.

# %%
#| code-fold: true
def owners(s):
    "(free pages, those in the tree, those held by requests)"
    size, held = s.table.page_size, {}
    for req in [*s.alive.values(), *s.to_release]:
        first, last = req.handle.end // size, pages_of(req.cached_len, size)
        held |= dict.fromkeys(s.table.page_table[req.row, first:last].tolist(), req.rid)
    in_tree = {page: node for node in s.cache.tree.nodes() for page in node.pages}
    return s.cache.free, in_tree, held

def look_of(page, free, in_tree, held):
    if page in held: return Box(held[page], 1 + int(held[page][1:]) % 7, 'strong')
    if page in in_tree: return Box('tree', 0, 'normal' if in_tree[page].locks else 'faint')
    return Box('', None, 'dashed')

s, film = build(n_rows=2, num_pages=10), []
for i, ids in enumerate(prompts[:6]): s.add(PendingReq(f'r{i}', ids, max_tokens=3))
while s.has_work:
    s.step()
    note = f'evicted {s.cache.evicted_pages}'
    film.append(Row(f'step {s.launched}', [look_of(page, *owners(s)) for page in range(10)], note))
draw_rows('The owner of each page; a pale page of the tree is not locked', film)

# %% [markdown]
# *Free + in the tree + held by requests = all pages*, after every step of every run. It is the first thing to check when an engine answers strangely (folded, with other sizes).

# %%
#| checks
for num_pages, n_rows, most in (8, 2, 3), (14, 3, 7):
    s = build(n_rows, num_pages)
    for i, ids in enumerate(prompts[:9]): s.add(PendingReq(f'r{i}', ids[i % 3:], most))
    while s.has_work:
        s.step()
        free, in_tree, held = owners(s)
        test_eq(sorted([*free, *in_tree, *held]), [*range(num_pages)])
    s.run_deferred()
    test_eq((s.cache.available_size, s.table.available_size), (num_pages, n_rows))
    test_eq({node.locks for node in s.cache.tree.nodes()}, {0})
    assert s.cache.evicted_pages


# %% [markdown]
# ## The table
# The seven requests of the weekend, with four rows and 60 pages, as in the last chapter.
#
# **Predict 2.** All seven prompts have that beginning. How often is it computed?

# %%
#| code-fold: true
class Counted(Scheduler):
    def launch(self, batch):
        taken = self.cache.num_pages - self.cache.available_size
        self.counts = dict(computed=len(batch.positions), slots=taken * self.table.page_size)
        self.hits = [req.rid for req, cached in zip(batch.reqs, batch.cached_lens)
                     if cached and req.rid not in self.alive]
        return super().launch(batch)

log, hits = [], []
def steps():
    s = build(n_rows=4, num_pages=60, kind=Counted)
    log.clear(); hits.clear()
    for name, prompt, most in fixed_requests(): s.add(PendingReq(name, prompt, most))
    while s.has_work:
        log.append(Step([output[:2] for output in s.step()], **s.counts))
        hits.extend(s.hits)
        yield log[-1]


# %%
found = measure(steps())
found.steps, found.computed, hits

# %%
#| checks
answers = {name: [] for name, *_ in fixed_requests()}
for step in log:
    for name, token in step.made: answers[name].append(token)
for name, prompt, most in fixed_requests(): assert is_greedy(model, prompt, answers[name], most)
test_eq(answers['document'], generate(model, *fixed_requests()[3][1:]))
test_eq(hits, [name for name, *_ in fixed_requests()[4:]])

# %% [markdown]
# **Answer 2.** Four times. The first four start in one step and cannot share. The three that come later find it, and their names are listed above; each computes four pages less. That is not much, and it is what seven requests give that all come at once: the next seven would all find it. And memory? The slots in use, in the first steps:

# %%
[step.slots for step in log[:6]]

# %% [markdown]
# In the first step there are four copies of the beginning, in the second step one: `cache_unfinished` has pointed three rows at it, and freed the rest.

# %%
#| volatile
print_table('5 radix cache', measure(steps()))

# %% [markdown]
# `computed` has fallen by the pages that three requests have found. `steps` is the same: a prompt takes a step, long or short. `slots` is the maximum, so it is that of the first step, and little is won; in all later steps it is far less. It counts pages that no other request could get, being neither free nor evictable. What ended requests have left in the tree is not in it, since it gives way.
#
# `longest` is still the first step, in which four prompts are computed, however long. [The next chapter](06_prefill.ipynb) gives it a budget.
#
# **Exercise 1.** Match the whole prompt: in `CacheManager.match`, leave the last token in (`make try NB=weekend/05_radix EX=1`). Most prompts do not even notice. Which do?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -        return self.tree.match(input_ids[:-1])
# +        return self.tree.match(input_ids)
# ```
#
# Fails: `test_eq(cache.match([*'abcd']).end, 2)   # `d` must be computed`, `test_eq(first, second)`.
#
# Those that end with a full page, when they are sent a second time. Nothing is left to compute: alone, such a request stops the engine; beside others, its answer begins with what the scores of *their* last token say. With pages of eight slots one prompt in eight ends so. The tests of a whole afternoon may not meet it.
#
# </details>
#
# **Exercise 2.** Lock only the node where a prefix ends, and not the nodes above: change `touch` (`make try NB=weekend/05_radix EX=2`). Nodes with children are never evicted, so is that not enough?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -    for each in node.path:
# +    for each in [node]:
# ```
#
# Fails: `test_eq([o.locks for o in tree.nodes()], [1, 1, 1])`, `test_eq((sorted(cache.free), cache.available_size), ([3, 4, 5, 6, 7], 8))`.
#
# No page is lost, as a leaf goes before its parents. But `evictable_size` lies: it counts pages above a locked node, which cannot be had, and a request is admitted for which there is no room. And after a split the upper node has inherited locks that are never given back, so its pages stay for ever.
#
# </details>
#
# **What we left out.** [The real radix cache](../12_kv_cache.radix.ipynb) compares runs as arrays, keeps its leaves in a heap instead of walking through all nodes, and separates callers that must not share. [Its manager](../13_kv_cache.manager.ipynb) checks the owners by itself, [other rules of eviction](../11a_kv_cache.eviction.ipynb) weigh more than time, [a second tier](../12c_kv_cache.tier.ipynb) keeps what is evicted in the memory of the host, and [an experiment](../75_prefix_chat.ipynb) measures what all this gives to a chat.
