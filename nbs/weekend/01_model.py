# %%
#| default_exp weekend.model

# %% [markdown]
# # A model that answers
# > The whole model in a hundred lines: tokens become vectors, vectors read from those before them, and the last one says which token is next.
#
# An engine serves a model. *What does a model do with a text, and what does its next token cost?* This chapter builds one from its file of weights, checks it against `transformers`, and lets it answer. Then it counts, and finds that nobody can afford it.
#
# After this chapter you can follow a token through a transformer, say what attention reads, and say why an answer of *n* tokens costs far more than *n* times one.

# %%
#| export
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from fastcore.basics import patch
from safetensors.torch import load_file
from torch import Tensor

# %%
#| hide
import time
import matplotlib.pyplot as plt
from fastcore.test import test_eq, test_close
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar; disable_progress_bar()
from minisgl_lit.testing.weekend_table import Step, QUESTION, fixed_requests, folder, measure, print_table, prompt_of, tokenizer
from minisgl_lit.tools.drawing import Box, Row, draw_rows
torch.set_num_threads(1); torch.set_grad_enabled(False);

# %% [markdown]
# ## A text is a list of numbers
# A *tokenizer* cuts a text into *tokens*, pieces with a number each. The model sees the numbers only. Ours knows 1,536 of them; it comes with this package, a small Qwen3 that has learned to talk about serving engines. `folder` is where its files are.

# %%
ids = tokenizer.encode('A radix cache keeps pages.').ids
[(token, tokenizer.decode([token])) for token in ids]

# %% [markdown]
# The files say how large the model is, and hold its weights: some dozen matrices, each with a name.

# %%
config = SimpleNamespace(**json.loads((folder / 'config.json').read_text()))
config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim

# %%
weights = load_file(folder / 'model.safetensors')
{name: list(o.shape) for name, o in weights.items() if 'layers' not in name or '.0.' in name}


# %% [markdown]
# So a model is a dictionary of matrices, and a way to multiply by them. How much is that, and where does most of it stand?

# %%
def part(name): return name.split('.')[3] if 'layers' in name else name.split('.')[1]

sizes = {}
for name, matrix in weights.items(): sizes[part(name)] = sizes.get(part(name), 0) + matrix.numel()
sum(sizes.values()), {name: f'{n / sum(sizes.values()):.1%}' for name, n in sizes.items()}


# %% [markdown]
# Some three million numbers. The models that people serve have a thousand times as many, up to a million times, and not one idea more than what follows: they are wider (`hidden_size`), have more layers, and know more tokens. Whatever we find out about this one we find out about them, only that there it costs money.
#
# Each token begins as a *vector*, the row of `embed_tokens` with its number. Every *layer* adds something to it. At the end the vector is compared with all rows of the same matrix: the more alike, the higher the score, called *logit*, of that token as the next one.
#
# A layer has two halves. In the first a token reads from those before it: *attention*. In the second it is on its own: an *MLP*. We need four small functions.
#
# ## Vectors of one length
# Sums grow. Before each half, a vector is scaled so that the mean of its squares is 1, and then each entry by a learned weight: *RMS norm*. (`eps` keeps a zero vector from a division by zero.)

# %%
#| export
def rms_norm(
    x: Tensor,        # [..., size]
    weight: Tensor,   # [size]
    eps: float = 1e-6,
) -> Tensor:          # [..., size]
    "Scale each vector so that its mean square is 1, then each of its entries"
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# %%
rms_norm(torch.tensor([[3., 4.], [300., 400.]]), torch.tensor([1., 10.]))


# %% [markdown]
# Two vectors in one direction become the same one.
#
# ## Where a token stands
# Attention compares vectors by their dot product, and that does not know which of them came first. *Rotary embedding* (Su et al., 2021) tells it: the entries of a vector are taken in pairs, each pair is a point in a plane, and it is rotated by an angle that grows with the token's position. The first pairs turn fast, the last ones hardly at all.

# %%
#| export
def rotary(
    x: Tensor,           # [n_tokens, n_heads, head_dim]
    positions: Tensor,   # [n_tokens]
    theta: float,        # the last pair turns about this much more slowly than the first
) -> Tensor:             # like `x`
    "Rotate each pair of entries by an angle that grows with the position"
    half = x.shape[-1] // 2
    speed = theta ** -(torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * speed
    first, second = x.split(half, dim=-1)
    a = first * angle.cos() - second * angle.sin()
    b = second * angle.cos() + first * angle.sin()
    return torch.cat([a, b], dim=-1).to(x.dtype)


# %% [markdown]
# **Predict 1.** A query at position 7 meets a key at position 5, and then the same two meet at 107 and 105. Does their dot product change?

# %%
q, k = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 8)[:, None]
def product(i, j):
    turned = [rotary(x, torch.tensor([at]), 1e4) for x, at in ((q, i), (k, j))]
    return round(float((turned[0] * turned[1]).sum()), 2)

{pair: product(*pair) for pair in ((7, 5), (107, 105), (7, 4))}


# %% [markdown]
# **Answer 1.** No: both have turned by the same angle more, so only their distance counts. A distance of three gives another product.
#
# ## Attention
# Each token makes three vectors: a *query* (what it looks for), a *key* (what it can be found by) and a *value* (what it has to say). The dot product of a query with each key, brought to shares that sum to 1 by `softmax`, says how much of each value it reads.
#
# Two things more. A token may only look back, at itself and at those before it: later ones are masked with −∞. And a layer looks back in several ways at once, its *heads*. Here two heads of queries share one head of keys and values (*grouped-query attention*), which halves what has to be kept of a token.

# %%
#| export
def attention(
    q: Tensor,   # of the last `n_new` tokens, [n_new, n_heads, head_dim]
    k: Tensor,   # of all tokens, [n_all, n_kv_heads, head_dim]
    v: Tensor,   # the same
) -> Tensor:     # [n_new, n_heads * head_dim]
    "What each new token reads from itself and from all before it"
    n_new, _, head_dim = q.shape
    n_all, n_kv_heads, _ = k.shape
    q = q.view(n_new, n_kv_heads, -1, head_dim)   # the queries that share a head of keys
    scores = torch.einsum('qhgd,khd->hgqk', q, k) / math.sqrt(head_dim)
    later = torch.ones(n_new, n_all, dtype=torch.bool, device=q.device).triu(n_all - n_new + 1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum('hgqk,khd->qhgd', shares, v).reshape(n_new, -1)


# %% [markdown]
# An example to check by head: one head, keys that are all alike. Then each token reads the mean of the values up to its own.

# %%
values = torch.tensor([8., 4., 0.]).view(3, 1, 1)
attention(torch.ones(3, 1, 1), torch.ones(3, 1, 1), values).flatten()

# %% [markdown]
# The queries may be fewer than the keys: `q` holds the *last* tokens. Nothing needs that yet; the next chapter will live on it.

# %%
attention(torch.ones(1, 1, 1), torch.ones(3, 1, 1), values).flatten()

# %% [markdown]
# ## The decoder
# It loads the weights, and multiplies by them. What attention reads is not its business: it is given a function, `attend`, which gets a layer's number with the queries, keys and values of the tokens at hand. The whole text, a cache, pages of a cache, a GPU's kernel: in ten chapters we exchange `attend` four times, and never touch the model again.

# %%
#| export
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]   # layer, q, k, v → what is read

class Decoder:
    "A Qwen3: from tokens to vectors, and from vectors to the scores of the next tokens."
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str = 'cpu'):
        self.config = SimpleNamespace(**json.loads((folder / 'config.json').read_text()))
        tensors = load_file(folder / 'model.safetensors')
        self.weights = {name: o.to(device, dtype) for name, o in tensors.items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        "Multiply by the matrix of that name"
        return x @ self.weights[f'{name}.weight'].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        "The RMS norm of that name"
        return rms_norm(x, self.weights[f'{name}.weight'], self.config.rms_norm_eps)

    def logits(self, x: Tensor) -> Tensor:
        "How well each token would come next: [n, hidden_size] → [n, vocab_size]"
        return self.linear(x, 'model.embed_tokens')


# %% [markdown]
# The first half of a layer: norm, then queries, keys and values in their heads. Queries and keys get a norm of their own and are rotated; what `attend` has read goes through one more matrix.

# %%
#| export
@patch
def heads(self: Decoder, x: Tensor, layer: str, name: str) -> Tensor:
    "Queries, keys or values: [n_tokens, hidden_size] → [n_tokens, n_heads, head_dim]"
    x = self.linear(x, f'{layer}.self_attn.{name}_proj')
    return x.view(len(x), -1, self.config.head_dim)

@patch
def look_back(self: Decoder, x: Tensor, i: int, positions: Tensor, attend: Attend) -> Tensor:
    "What tokens read from those before them, in layer `i`"
    layer, theta = f'model.layers.{i}', self.config.rope_parameters['rope_theta']
    x = self.norm(x, f'{layer}.input_layernorm')
    q, k, v = (self.heads(x, layer, name) for name in 'qkv')
    q = rotary(self.norm(q, f'{layer}.self_attn.q_norm'), positions, theta)
    k = rotary(self.norm(k, f'{layer}.self_attn.k_norm'), positions, theta)
    return self.linear(attend(i, q, k, v), f'{layer}.self_attn.o_proj')


# %% [markdown]
# The second half: the *gated MLP*. One matrix says what to add, another how much of it lets through.

# %%
#| export
@patch
def think(self: Decoder, x: Tensor, i: int) -> Tensor:
    "What each token makes of it by itself, in layer `i`"
    mlp = f'model.layers.{i}.mlp'
    x = self.norm(x, f'model.layers.{i}.post_attention_layernorm')
    gate = torch.nn.functional.silu(self.linear(x, f'{mlp}.gate_proj'))
    return self.linear(gate * self.linear(x, f'{mlp}.up_proj'), f'{mlp}.down_proj')

@patch
def forward(self: Decoder, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    "Through all layers: [n_tokens] → [n_tokens, hidden_size]"
    x = self.weights['model.embed_tokens.weight'][ids]
    for i in range(self.config.num_hidden_layers):
        x = x + self.look_back(x, i, positions, attend)
        x = x + self.think(x, i)
    return self.norm(x, 'model.norm')


# %% [markdown]
# That is all of it. With the whole text at hand, `attend` is plain attention. A chat is a text, too: a few marks say who speaks, and `prompt_of` writes them around a question. Which tokens does the model expect as the first of the answer?

# %%
#| volatile
model = Decoder(folder)

def whole_text(layer, q, k, v): return attention(q, k, v)

prompt = torch.tensor(prompt_of(QUESTION))
scores = model.logits(model.forward(prompt, torch.arange(len(prompt)), whole_text))[-1]
[(tokenizer.decode([int(o)]), round(float(scores[o]), 1)) for o in scores.topk(3).indices]

# %% [markdown]
# And is it right? `transformers` computes the same scores, up to the rounding of float32.

# %%
#| checks
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ours = model.logits(model.forward(prompt, torch.arange(len(prompt)), whole_text))
assert torch.allclose(ours, theirs(prompt[None]).logits[0], atol=1e-3)
test_eq(ours.shape, (len(prompt), config.vocab_size))

# %% [markdown]
# Each half of a layer *adds* something to a token's vector and takes nothing away. So we can ask after each layer what the answer would be if it were the last one: the same comparison with all tokens, on the way.

# %%
x, positions = model.weights['model.embed_tokens.weight'][prompt], torch.arange(len(prompt))
for i in range(config.num_hidden_layers):
    x = x + model.look_back(x, i, positions, whole_text)
    x = x + model.think(x, i)
    best = model.logits(model.norm(x[-1:], 'model.norm'))[0].topk(3).indices.tolist()
    print(f'after layer {i}:', [tokenizer.decode([token]) for token in best])

# %% [markdown]
# The last token of the prompt is a line break behind the word `assistant`. Layer by layer its vector turns from what it is into what comes next. Nothing in it stands for the question; all that it knows of it, it has read from the tokens before.
#
# Here is one head at work. A row is a token, and a box is a token that it sees: the darker, the more of its value is read.

# %%
#| code-fold: true
kept = {}
def watched(layer, q, k, v):
    kept[layer] = q, k
    return attention(q, k, v)

words = tokenizer.encode('A page holds eight slots').ids
model.forward(torch.tensor(words), torch.arange(len(words)), watched)
q, k = (x[:, 0] for x in kept[3])
later = torch.ones(len(words), len(words), dtype=torch.bool).triu(1)
shares = (q @ k.T / math.sqrt(config.head_dim)).masked_fill(later, -torch.inf).softmax(-1)
percent = [[round(100 * float(o)) for o in row] for row in shares]
def look(n): return 'strong' if n > 40 else 'normal' if n > 15 else 'faint'
draw_rows('What one head of the last layer reads, in percent', [
    Row(tokenizer.decode([token]), [Box(n, 0, look(n)) for n in row[:i + 1]])
    for i, (token, row) in enumerate(zip(words, percent))])

# %% [markdown]
# ## What does not change
# One property of all this will carry the whole weekend. **Predict 2.** We compute the first ten tokens of a text by themselves, and once more as the beginning of the whole text. Which of their vectors differ in the end?

# %%
#| volatile
alone = model.forward(prompt[:10], torch.arange(10), whole_text)
within = model.forward(prompt, torch.arange(len(prompt)), whole_text)[:10]
float((alone - within).abs().max())

# %%
#| checks
assert torch.allclose(alone, within, atol=1e-4)


# %% [markdown]
# **Answer 2.** None, but for rounding. A token reads from those before it, and these do the same, in every layer; what comes later reaches none of them. *A token's vectors are final as soon as it has been computed once*, its keys and values among them. Keep that in mind when we look at the bill.
#
# ## An answer
# Score, take the best, append it, and again: *greedy* decoding. The answer ends with the token that says so (*end of sequence*, EOS), or when it is long enough.

# %%
#| export
def generate(
    model: Decoder,
    prompt: list[int],   # token ids
    max_tokens: int,     # of the answer
) -> list[int]:          # token ids of the answer
    "The likeliest next token, again and again: all of the text goes through the model each time"
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)),
                               lambda layer, q, k, v: attention(q, k, v))
        ids.append(int(model.logits(hidden[-1:]).argmax()))
        if ids[-1] == model.config.eos_token_id: break
    return ids[len(prompt):]


# %%
answer = generate(model, prompt_of(QUESTION), 40)
tokenizer.decode(answer)

# %%
#| checks
asked = torch.tensor([prompt_of(QUESTION)])
made = theirs.generate(asked, max_new_tokens=40, do_sample=False)[0, asked.shape[1]:]
test_eq(answer, made.tolist())
test_eq(answer[-1], config.eos_token_id)

# %% [markdown]
# ## What it costs
# **Predict 3.** The prompt has some fifty tokens, and we let the answer run on for 200. How much longer does its last token take than its first? And how many tokens go through the model in all?

# %%
#| volatile
ids, seconds, computed = prompt_of(QUESTION), [], 0
for _ in range(200):
    began = time.perf_counter()
    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), whole_text)
    ids.append(int(model.logits(hidden[-1:]).argmax()))
    seconds.append(time.perf_counter() - began)
    computed += len(ids) - 1
print(f'first {1e3 * min(seconds[:20]):.1f} ms, last {1e3 * min(seconds[-20:]):.1f} ms; '
      f'{computed:,} tokens for 200')

# %%
#| code-fold: true
#| volatile
plt.figure(figsize=(5, 2.4))
plt.plot([1e3 * s for s in seconds], '.', ms=3)
plt.xlabel('token of the answer'); plt.ylabel('ms'); plt.ylim(0)
plt.title('Each token computes all before it')
plt.show()


# %% [markdown]
# **Answer 3.** The text is five times as long in the end, and so is its time, or a little more: attention alone grows with the square. Some 30,000 tokens went through the model to make 200. *One token costs as much as the whole text before it.* Yet almost all of that was computed in the step before, and came out the same: no token sees a later one, so nothing that follows can change what was computed of it.
#
# ## The table
# Seven requests, which all chapters serve from now on: six questions, and a long text with a short answer. So far they can only wait for each other.

# %%
#| code-fold: true
def one_by_one():
    for name, prompt, most in fixed_requests():
        ids = list(prompt)
        while len(ids) < len(prompt) + most and ids[-1] != config.eos_token_id:
            ids += generate(model, ids, 1)
            yield Step([(name, ids[-1])], computed=len(ids) - 1)


# %%
#| volatile
print_table('1 the whole text', measure(one_by_one()))

# %% [markdown]
# `steps` are calls of the model, `computed` the tokens that went through it. `first` is how long a caller waits for a first token, on average, and `longest` the longest step. `slots` will say how much memory is set aside for what we remember: nothing yet. [The next chapter](02_pages.ipynb) remembers.
#
# **Exercise 1.** Let tokens see later ones: in the cell that defines `attention`, replace the mask by one that hides nothing (`make try NB=weekend/01_model EX=1`). Which check notices first, and would the answers look wrong to you?
#
# <details><summary>Solution 1</summary>
#
# ```diff
# -    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
# +    shares = scores.softmax(-1)
# ```
#
# Fails: `assert torch.allclose(ours, theirs(prompt[None]).logits[0], atol=1e-3)`.
#
# The scores of every token but the last layer's last one change: what a token knows now depends on what follows, and the model has never been trained for that. The mean of the example comes out as 4 in every row.
#
# </details>
#
# **Exercise 2.** Forget where tokens stand: in `look_back`, give `rotary` the same position for all of them (`make try NB=weekend/01_model EX=2`). Does the answer survive?
#
# <details><summary>Solution 2</summary>
#
# ```diff
# -    k = rotary(self.norm(k, f'{layer}.self_attn.k_norm'), positions, theta)
# +    k = rotary(self.norm(k, f'{layer}.self_attn.k_norm'), positions * 0, theta)
# ```
#
# Fails: `assert torch.allclose(ours, theirs(prompt[None]).logits[0], atol=1e-3)`.
#
# Queries still turn and keys do not, so a query takes every key for the first token of the text. What was near looks as far away as the beginning.
#
# </details>
#
# **What we left out.** Other families of models, weights in fewer bits and kernels that are faster than plain torch: [the decoder of the real engine](../34_models.decoder.ipynb) has them, and reads like this one.
