# %%
#| default_exp weekend.sampling

# %% [markdown]
# # An answer without neighbours
# > Tokens are drawn by numbers that depend on a request's seed and on positions alone, so an answer is the same in any company.
#
# So far the likeliest token wins, always. Callers want variety, and want it to be repeatable: the same seed, the same answer. But their requests share each step with others. *May a neighbour change my answer?* We draw tokens in the obvious way, see that it may, and find numbers that belong to a request alone.
#
# After this chapter you can say what temperature and top-p do to three tokens, draw from probabilities with one number, and make a random answer repeatable on a server where nothing else is.

# %%
#| export
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl_lit.weekend.batch import Batch

# %%
#| hide
import matplotlib.pyplot as plt
from fastcore.test import test_eq
from minisgl_lit.engine import sampler   # only to compare with
from minisgl_lit.weekend.batch import Engine, PendingReq, Req, TorchAttention
from minisgl_lit.weekend.decode import Scheduler
from minisgl_lit.weekend.model import Decoder, attention, generate
from minisgl_lit.weekend.pages import KVPool, TableManager
from minisgl_lit.weekend.prefill import PrefillManager
from minisgl_lit.weekend.radix import CacheManager
from minisgl_lit.testing.weekend_table import QUESTION, Step, fixed_requests, folder, measure, print_table, prompt_of, tokenizer
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
# ## One generator for the batch
# Scores become probabilities by `softmax`, and `torch.multinomial` draws from them. The engine takes any function that chooses tokens. Ours keeps one random generator, with a seed.

# %%
class OneGenerator:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits, batch):
        probs = (logits / 2).softmax(-1)   # more even than the model's own
        return torch.multinomial(probs, 1, generator=self.generator)[:, 0]


# %% [markdown]
# The machine around it is that of the last chapters (folded): four rows, 60 pages, a budget of 64 tokens.

# %%
#| code-fold: true
model = Decoder(folder)

def build(choose, n_rows=4, num_pages=60, budget=64, kind=Scheduler):
    config = model.config
    pool = KVPool(num_pages, 8, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    table = TableManager(n_rows, 480, page_size=8)
    cache = CacheManager(num_pages, table)
    engine = Engine(model, table, TorchAttention(pool, table), choose)
    return kind(engine, table, cache, PrefillManager(cache, budget), config.eos_token_id)

def served(s, requests):
    answers = {pending.rid: [] for pending in requests}
    for pending in requests: s.add(pending)
    while s.has_work:
        for output in s.step(): answers[output.rid].append(output.token)
    return answers


# %% [markdown]
# **Predict 1.** One request asks alone, with seed 7. Then it asks again, with the same seed, while a second caller asks something else. How far do the two answers agree?

# %%
mine = PendingReq('mine', prompt_of(QUESTION), max_tokens=16)
neighbour = PendingReq('neighbour', prompt_of('What is a page?'), max_tokens=16)
for requests in ([mine], [mine, neighbour]):
    answer = served(build(OneGenerator(seed=7)), requests)['mine']
    print(tokenizer.decode(answer))


# %% [markdown]
# **Answer 1.** As long as the neighbour has drawn nothing, which is for one token. From then on each draw of the neighbour takes numbers that would have been ours. An answer that depends on the company cannot be repeated: a caller who reports a bad one reports the traffic of that second.
#
# A generator for each request? It would have to be kept for as long as the request lives, asked by a loop over all rows, and moved back if a token is computed a second time. Look at what we want instead: *this* token's number, whatever was drawn before. So it should be a *function*: of the request's seed, and of the token's position. Generators without memory are called *counter-based* (Salmon et al., 2011); Philox, which draws on most GPUs, is one.
#
# ## A number for a position
# The smallest such function: add both, and let the sum be a seed.

# %%
def added(seed, position):
    return float(torch.rand(1, generator=torch.Generator().manual_seed(seed + position)))

for seed in (5, 6): print(seed, [round(added(seed, position), 2) for position in range(40, 46)])


# %% [markdown]
# Each number looks random. But seed 6 has those of seed 5, one place earlier: two callers with neighbouring seeds draw from one list. It must make a difference which of the two has grown by one. So the seed is scattered first, then the position is added, and the sum is scattered again.
#
# To scatter: a multiplication by a large odd number moves the low bits of a 64-bit number upwards (what gets too large is cut off), and `^` with the upper half brings them down again. Three rounds of that mix all bits. The first line is there for the 0, which would stay 0.

# %%
#| export
def scatter_bits(
    x: np.ndarray,   # uint64
) -> np.ndarray:     # the same
    "Send near numbers far apart; different ones stay different"
    x = x + np.uint64(0x9E3779B97F4A7C15)
    for _ in range(3): x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


# %%
near = np.arange(4, dtype=np.uint64)
far = scatter_bits(near)
changed = [int(a ^ b).bit_count() for a, b in zip(far, far[1:])]
[f'{int(o):016x}' for o in far], changed


# %% [markdown]
# From one number to the next about half of the 64 bits change, as it should be: a bit that is random is another one half of the time. The upper 53 bits become a fraction; more do not fit into a float64.

# %%
#| export
def uniform(
    seeds: np.ndarray,       # int64, [n]
    positions: np.ndarray,   # of the tokens to draw, [n]
) -> np.ndarray:             # float64, [n]
    "A number from 0 to 1, below 1, for each token, from its seed and position alone"
    key = scatter_bits(scatter_bits(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return (key >> np.uint64(11)) * 2.**-53


# %%
for seed in (5, 6): print(seed, uniform(np.full(6, seed), np.arange(40, 46)).round(2))

# %% [markdown]
# Are they spread evenly? A hundred seeds, a hundred positions each, counted by tenths:

# %%
seeds, positions = np.divmod(np.arange(10_000), 100)
u = uniform(seeds, positions)
np.histogram(u, bins=10, range=(0, 1))[0]

# %%
#| code-fold: true
fig, axes = plt.subplots(1, 2, figsize=(5, 2.5), sharey=True)
grid = u.reshape(100, 100)    # [seed, position]
axes[0].plot(grid[:, :-1].ravel()[::7], grid[:, 1:].ravel()[::7], '.', ms=1)
axes[0].set(xlabel='a number', ylabel='its neighbour', title='next position')
axes[1].plot(grid[:-1].ravel()[::7], grid[1:].ravel()[::7], '.', ms=1)
axes[1].set(xlabel='a number', title='next seed')
plt.show()

# %% [markdown]
# A thousand each, more or less. And the number for the next position, or for the next seed, can be anything: no lines, no holes.

# %%
#| checks
rng = np.random.default_rng(0)
seeds, positions = rng.integers(-2**63, 2**63, 1000), rng.integers(0, 10**6, 1000)
test_eq(uniform(seeds, positions).tolist(), sampler.uniform(seeds, positions).tolist())
assert uniform(seeds, positions).min() >= 0 and uniform(seeds, positions).max() < 1
assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < .04
assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < .04
test_eq(len(set(u.tolist())), 10_000)

# %% [markdown]
# ## What a request may wish
# Three things. The *temperature* divides the scores before they become probabilities. Of three tokens with scores 2, 1 and 0:

# %%
for temperature in (.5, 1, 2):
    probs = (torch.tensor([2., 1., 0.]) / temperature).softmax(-1)
    print(f'temperature {temperature}:', [round(p, 2) for p in probs.tolist()])


# %% [markdown]
# Low temperatures favour the likeliest, high ones make all alike, and 0 would be a division by zero: we read it as *greedy*. *top-p* says how much of the probability to keep, and the *seed* we know.

# %%
#| export
class Sampling(NamedTuple):
    "How one request wants its tokens to be chosen."
    temperature: float = 1.   # 0: always the likeliest
    top_p: float = 1.         # draw from the likeliest tokens that hold this share; 1: from all
    seed: int = 0


# %% [markdown]
# ## Without the tail
# Of 1,536 tokens most are nonsense at any place. Each by itself is unlikely, but there are many, and one in the middle of an answer spoils what follows. How many tokens are sensible depends on the place. Two beginnings, and how many of the likeliest tokens hold nine tenths of the probability:

# %%
def next_probs(text):
    ids = torch.tensor(tokenizer.encode(text).ids)
    hidden = model.forward(ids, torch.arange(len(ids)), lambda layer, q, k, v: attention(q, k, v))
    return model.logits(hidden[-1:]).softmax(-1)   # [1, vocab_size]

for text in ('The radix', 'A'):
    ordered = next_probs(text).sort(descending=True).values
    print(f'{text!r}: {int((ordered.cumsum(-1) < .9).sum()) + 1} tokens hold 90 %')


# %% [markdown]
# A fixed number of tokens would be too many for the one and too few for the other. So fix the *share*: keep the likeliest tokens that together hold `p`, and draw from these. That is *nucleus sampling*, or *top-p* (Holtzman et al., 2020). In order of probability, a token stays if those before it do not hold `p` yet.

# %%
#| export
def keep_top_p(
    probs: Tensor,   # [n, vocab_size]
    p: Tensor,       # [n, 1]
) -> Tensor:         # [n, vocab_size], not scaled to a sum of 1
    "Only the likeliest tokens that together hold the share `p`; the others get 0"
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs).scatter(-1, ids, ordered.where(before < p, 0))


# %%
probs = torch.tensor([[.15, .5, .05, .3]])
for p in (.4, .7, .9):
    kept = keep_top_p(probs, torch.tensor([[p]]))
    print(f'p = {p}:', [round(o, 2) for o in kept[0].tolist()])


# %% [markdown]
# In order: 0.5, 0.3, 0.15, 0.05. Take the second line, p = 0.7. Before the second token stands 0.5, which is less, so it stays; before the third stands 0.8, so it goes. Two stay, and hold a little more than was asked for. And the first one always stays, however small `p` is, as nothing stands before it.

# %%
#| checks
def stay(p): return (keep_top_p(probs, torch.tensor([[p]])) > 0)[0].tolist()
test_eq(stay(.7), [False, True, False, True])
test_eq(stay(.1), [False, True, False, False])
test_eq(stay(.9), [True, True, False, True])
test_eq(stay(1.), [True] * 4)


# %% [markdown]
# ## Where the number falls
# From probabilities and a number to a token: lay them end to end, as pieces of a line, and see on which piece the number falls. A piece twice as long is met twice as often. If the tail was cut off the line is shorter than 1, so the number is taken as a share of its length.

# %%
#| export
def fall_on(
    probs: Tensor,   # of any sum, [n, vocab_size]
    u: Tensor,       # from 0 to 1, below 1, float64, [n, 1]
) -> Tensor:         # token ids, [n]
    "Lay the probabilities end to end: on which of them does `u` fall?"
    ends = probs.double().cumsum(-1)
    return torch.searchsorted(ends, u * ends[:, -1:], right=True)[:, 0]


# %%
#| code-fold: true
u = torch.tensor([[.68]], dtype=torch.float64)
cut = keep_top_p(probs, torch.tensor([[.7]]))
rows = []
for label, each in ('all', probs), ('top-p 0.7', cut):
    token = int(fall_on(each, u)[0])
    boxes = [Box(i, i, 'strong' if i == token else 'normal', p)
             for i, p in enumerate(each[0].tolist()) if p]
    rows.append(Row(label, boxes, f'token {token}'))
draw_rows('u = 0.68 of the whole line, and of the line without its tail', rows, scale=270)

# %% [markdown]
# Of the whole line, 0.68 falls on token 2, which is the least likely: such things happen. Without the tail that token is gone, and the number falls on token 3. Where two pieces meet, the later one is taken (`right=True`). So a piece of length zero is never met, not even by a 0:

# %%
line = torch.tensor([[0., .5, .5]]).expand(4, 3)
fall_on(line, torch.tensor([[0.], [.49], [.5], [.99]], dtype=torch.float64))

# %% [markdown]
# Now 10,000 seeds draw from four tokens. They come out as often as they should:

# %%
us = torch.from_numpy(uniform(np.arange(10_000), np.full(10_000, 40)))[:, None]
for each in probs, cut:
    print(fall_on(each.expand(10_000, 4), us).bincount(minlength=4).tolist())

# %%
#| checks
test_eq(fall_on(line, torch.tensor([[0.], [.49], [.5], [.99]], dtype=torch.float64)).tolist(), [1, 1, 2, 2])
drawn = fall_on(probs.expand(10_000, 4), us).bincount(minlength=4) / 10_000
assert torch.allclose(drawn, probs[0], atol=.015)
many = torch.cat([next_probs(text) for text in ('A', 'The radix', 'A page is', 'What')])
for p in (.3, .9, 1.):
    p = torch.full((4, 1), p)
    at = torch.from_numpy(uniform(np.arange(4), np.arange(4)))[:, None]
    theirs = sampler.inverse_cdf(many.where(many >= sampler.top_p_threshold(many, p), 0), at)
    test_eq(fall_on(keep_top_p(many, p), at).tolist(), theirs.tolist())


# %% [markdown]
# ## A batch with all kinds
# The batch knows what each sampled request wishes (`sampling`; `None` is greedy). Greedy rows take the likeliest. For the others, their wishes become columns, one row for each, and everything is computed for all of them at once. The position that counts is that of the token to be drawn: `device_len`, as there are so many tokens before it.

# %%
#| export
def sample(
    logits: Tensor,   # of the sampled requests, [n_sampled, vocab_size]
    batch: Batch,
) -> Tensor:          # [n_sampled]
    "The next tokens, as each request wants them"
    tokens = logits.argmax(-1)
    chosen = [i for i, wanted in enumerate(batch.sampling) if wanted and wanted.temperature]
    if not chosen: return tokens
    wanted = [batch.sampling[i] for i in chosen]
    seeds = np.array([o.seed for o in wanted], dtype=np.int64)
    positions = np.array([batch.device_lens[batch.sampled[i]] for i in chosen])
    temperature = torch.tensor([[o.temperature] for o in wanted], device=logits.device)
    p = torch.tensor([[o.top_p] for o in wanted], device=logits.device)
    probs = keep_top_p((logits[chosen].float() / temperature).softmax(-1), p)
    u = torch.from_numpy(uniform(seeds, positions)).to(logits.device)
    tokens[chosen] = fall_on(probs, u[:, None])
    return tokens


# %% [markdown]
# Five requests with the same three scores: greedy, three seeds, and a temperature so low that it is greedy again.

# %%
wishes = [None, Sampling(2, 1, seed=1), Sampling(2, 1, seed=2), Sampling(2, 1, seed=3), Sampling(.01)]
table = TableManager(5, 8, page_size=8)
reqs = [Req(PendingReq(str(i), [0] * 4, 1, wish), i, 0, 4) for i, wish in enumerate(wishes)]
sample(torch.tensor([[2., 1., 0.]]).expand(5, 3), Batch(reqs, table))

# %%
#| checks
scores = torch.tensor([[2., 1., 0.]]).expand(5, 3)
tokens = sample(scores, Batch(reqs, table)).tolist()
backwards = sample(scores, Batch(reqs[::-1], table)).tolist()
test_eq(backwards, tokens[::-1])
test_eq(sample(scores[:1], Batch(reqs[2:3], table)).tolist(), tokens[2:3])
test_eq(sample(scores[:1], Batch([Req(PendingReq('0', [0], 1, Sampling(0)), 0, 0, 1)], table)).tolist(), [0])

# %% [markdown]
# ## May a neighbour change my answer?
# **Predict 2.** One request with seed 7, four times: alone; among the six others of the table, some of them greedy, some not; with a budget of five tokens, so that its prompt comes in chunks; and once more on an engine that has its prompt in the cache. How many different answers?

# %%
mine = PendingReq('mine', prompt_of(QUESTION), 16, Sampling(2., .9, seed=7))
others = [PendingReq(name, ids, 8, Sampling(2., .9, seed=i) if i % 2 else None)
          for i, (name, ids, _) in enumerate(fixed_requests()[1:])]

again = build(sample)
answers = dict(
    alone=served(again, [mine]), beside=served(build(sample, 7, 150), [*others[:3], mine, *others[3:]]),
    chunks=served(build(sample, budget=5), [mine]), cached=served(again, [mine]))
for how, answer in answers.items(): print(f'{how:7}', tokenizer.decode(answer['mine']))

# %%
#| checks
test_eq(len({tuple(answer['mine']) for answer in answers.values()}), 1)
for name, prompt, _ in fixed_requests()[1::2]:
    assert is_greedy(model, prompt, answers['beside'][name], 8)


# %% [markdown]
# **Answer 2.** One. The scores themselves are not equal to the last bit: seven rows, or a chunk of five, are added up in another order than a prompt alone. If a number fell within such a hair of the place where two tokens meet, the answers would part there. That is rare in float32, and less so in the short floats of a GPU. But no neighbour can change the *number*, and that is all that was random.
#
# ## The price
# The requests of the table are greedy, so its row says whether the new function costs anything when it is not needed. Below it stands the same set with a temperature of 1, a top-p of 0.9, and a seed for each.

# %%
#| code-fold: true
class Counted(Scheduler):
    def launch(self, batch):
        taken = self.cache.num_pages - self.cache.available_size
        self.counts = dict(computed=len(batch.positions), slots=taken * self.table.page_size)
        return super().launch(batch)

log = []
def steps(wish=lambda i: None):
    s = build(sample, num_pages=40, kind=Counted)
    log.clear()
    for i, (name, prompt, most) in enumerate(fixed_requests()):
        s.add(PendingReq(name, prompt, most, wish(i)))
    while s.has_work:
        log.append(Step([output[:2] for output in s.step()], **s.counts))
        yield log[-1]


# %%
#| volatile
drawn = measure(steps(lambda i: Sampling(1., .9, seed=i)))
print(f'drawn: {drawn.steps} steps, {drawn.tokens_s:.0f} tokens/s, longest {drawn.longest_ms:.0f} ms')

# %%
#| volatile
print_table('7 sampling', measure(steps()))

# %%
#| checks
requests = {name: (prompt, most) for name, prompt, most in fixed_requests()}
said = {name: [] for name in requests}
for step in log:
    for name, token in step.made: said[name].append(token)
for name, (prompt, most) in requests.items(): assert is_greedy(model, prompt, said[name], most)
test_eq(said['document'], generate(model, *requests['document']))

# %% [markdown]
# The row is that of the chapter before, up to noise: for a greedy batch, `sample` takes the likeliest and returns. Drawing makes each step a little longer, by a `softmax`, a sort of all probabilities, and their sum. With 1,536 tokens that is small beside the model; with the 150,000 of a large one, the sort is the dear part. (The drawn answers are other answers, so their number of steps may differ.)
#
# Everything now waits for everything: the engine for the scheduler, and the scheduler for the engine. [The next chapter](08_overlap.ipynb) lets both work at the same time.
#
# **Exercise 1.** Let the number depend on the place in the batch: in `sample`, take `chosen` for the positions (`make try NB=weekend/07_sampling EX=1`). Which checks notice, and what happens to an answer that is alone?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -    positions = np.array([batch.device_lens[batch.sampled[i]] for i in chosen])
# +    positions = np.array(chosen)
# ```
#
# Fails: `test_eq(backwards, tokens[::-1])`, `test_eq(len({tuple(answer['mine']) for answer in answers.values()}), 1)`.
#
# Among others the place changes with every request that comes or goes, and the answer with it. Alone, the place is always 0, so all tokens are drawn with one number: if it is small, always the first in the vocabulary's order that is not cut off.
#
# </details>
#
# **Exercise 2.** Keep no more than `p`: in `keep_top_p`, let a token stay only if it fits into the share completely (`make try NB=weekend/07_sampling EX=2`). What is drawn where the first token alone holds more than `p`?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -    return torch.zeros_like(probs).scatter(-1, ids, ordered.where(before < p, 0))
# +    return torch.zeros_like(probs).scatter(-1, ids, ordered.where(before + ordered <= p, 0))
# ```
#
# Fails: `test_eq(stay(.7), [False, True, False, True])`.
#
# Nothing stays, the line has the length 0, and every number falls behind its end: a token id that does not exist.
#
# </details>
#
# **What we left out.** [The real sampler](../40_engine.sampler.ipynb) has top-k, min-p, penalties and logprobs, and finds the nucleus without sorting. [A kernel](../14c_kernels.sampling.ipynb) does it in one launch on a GPU. [A grammar](../45_engine.grammar.ipynb) forbids tokens before they are drawn.
