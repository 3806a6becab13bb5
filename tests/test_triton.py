"""Kernels in Triton against their definitions in torch, for odd shapes, strides, dtypes and seeds. They run
in the reference of Triton, a few examples each; and on Triton's own interpreter, in a process that is told so
before it imports the package (`make test-long`)."""
import importlib.util, os, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_lit.adapters import low_rank_triton
from minisgl_lit.adapters.low_rank import MOST_ADAPTERS, LowRank
from minisgl_lit.adapters.low_rank_triton import RowTiles, TiledWeight
from minisgl_lit.core.engine.sampler import sample_random
from minisgl_lit.kernels import fp8, fused_heads, gpu_operations, grouped_matmul, page_list, sampling
from minisgl_lit.testing.triton_emulator import BlockPointer, Language, TritonKernel
from minisgl_lit.core.kv_cache.pool import KVPool
from minisgl_lit.kernels.kv_formats import FP8
from minisgl_lit.kernels.gpu_operations import store_trial
from minisgl_lit.core.models.operations import Operations, rotate
from minisgl_lit.kernels.trials import TOLERANCE, largest_error

plain = Operations()
largest = plain.largest

interpreted = os.environ.get('TRITON_INTERPRET') == '1'
lacks_package = importlib.util.find_spec('triton') is None
n_examples = int(os.environ.get('TST_TRITON', 8))
# `few`: each has many launches
examples, few = settings(max_examples=n_examples), settings(max_examples=min(n_examples, 8) // 2)

@st.composite
def heads(draw):
    "Sizes of a step: heads that lie in something wider, a cache that is one layer of several"
    return dict(n=draw(st.integers(0, 5)), n_q=draw(st.integers(1, 5)), n_kv=draw(st.integers(1, 3)),
                half=draw(st.sampled_from([1, 2, 3, 8, 24, 40, 64])),
                more=draw(st.integers(0, 7)), page_size=draw(st.sampled_from([1, 3, 16])),
                dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
                normed=draw(st.booleans()), seed=draw(st.integers(0, 99)))

def step(n, n_q, n_kv, half, more, page_size, dtype, normed, seed, stored=None):
    g, dim = torch.Generator().manual_seed(seed), 2 * half
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    pool = KVPool(3, 4 + n, page_size, n_kv, dim, stored or dtype)
    pool.buffer.copy_(some(*pool.buffer.shape))
    wide = some(n, (n_q + 2 * n_kv) * dim + more)
    qkv = wide[:, :(n_q + 2 * n_kv) * dim].view(n, n_q + 2 * n_kv, dim)
    out_loc = torch.randperm((4 + n) * page_size, generator=g)[:n]
    angles = plain.rope_angles(torch.randint(1000, (n,), generator=g), torch.rand(half, generator=g),
                               torch.float32)
    return pool, wide, qkv, (some(dim), some(dim)) if normed else None, angles, out_loc

def by_steps(pool, wide, qkv, norms, angles, out_loc, n_kv):
    "As the layers' definitions compute it"
    q, k, v = qkv.split([qkv.shape[1] - 2 * n_kv, n_kv, n_kv], dim=1)
    if norms: q, k = plain.rms_norm(q, norms[0], 1e-6), plain.rms_norm(k, norms[1], 1e-6)
    q, k = (rotate(o.float(), angles).to(o.dtype) for o in (q, k))
    pool.store_kv(1, k, v, out_loc)
    qkv.copy_(torch.cat([q, k, v], dim=1))

@examples
@given(heads())
def test_heads_are_stored_as_step_by_step(world):
    "Queries and keys where they were, keys and values in their slots, and not a number elsewhere has changed"
    ours, theirs = step(**world), step(**world)
    pool, wide, qkv, norms, angles, out_loc = ours
    fused_heads.norm_rope_store(qkv, norms, 1e-6, angles.cos_sin, pool.k(1), pool.v(1), out_loc)
    by_steps(*theirs, world['n_kv'])
    eps = {torch.float32: 2e-5, torch.bfloat16: .02, torch.float16: .003}[world['dtype']]
    for a, b in (wide, theirs[1]), (pool.buffer, theirs[0].buffer):
        torch.testing.assert_close(a.float(), b.float(), rtol=eps, atol=eps)
    before, others = step(**world), torch.ones(len(pool.k(1)), dtype=torch.bool)
    others[out_loc] = False
    assert (torch.equal(pool.buffer[[0, 2]], before[0].buffer[[0, 2]])
            and torch.equal(pool.buffer[1][:, others], before[0].buffer[1][:, others]))
    width = qkv.shape[1] * qkv.shape[2]
    assert (torch.equal(wide[:, width:], before[1][:, width:])
            and torch.equal(qkv[:, -world['n_kv']:], before[2][:, -world['n_kv']:]))

@examples
@given(heads(), st.sampled_from([1, 300, 1e4]))
def test_a_cache_of_fp8_gets_the_codes_of_what_is_in_place(world, size):
    """To the bit, large and tiny numbers, infinities and NaN, too; queries and keys are those of a cache of
    16 bits, and no other slot has changed"""
    (pool, _, qkv, norms, angles, out_loc), other = step(**world, stored=FP8), step(**world)
    for o in qkv, other[2]:
        o[:, -1:] *= size
        o[:1, -1, :1] = torch.nan
        o[1:2, -1, :1] = -torch.inf
        o[2:3, -1, :1] *= 1e-4 / size
    expected = step(**world, stored=FP8)[0]
    fused_heads.norm_rope_store(qkv, norms, 1e-6, angles.cos_sin, pool.k(1), pool.v(1), out_loc)
    fused_heads.norm_rope_store(other[2], norms, 1e-6, angles.cos_sin, other[0].k(1), other[0].v(1), out_loc)
    assert torch.equal(qkv.nan_to_num(7), other[2].nan_to_num(7))
    expected.store_kv(1, *qkv[:, -2 * world['n_kv']:].split(world['n_kv'], dim=1), out_loc)
    # a NaN's sign says nothing
    def codes(o): return o.buffer.view(torch.uint8).masked_fill(o.buffer.float().isnan(), 127)
    assert torch.equal(codes(pool), codes(expected))

def test_the_trial_of_heads_passes():
    for stored in torch.bfloat16, FP8:
        assert (largest_error(store_trial(fused_heads.norm_rope_store, plain, torch.device('cpu'), stored))
                <= TOLERANCE)

def test_a_norm_is_rounded_before_its_weight():
    "As the reference rounds it: nearly every number has the same bits, not only a close value"
    ours, theirs = (step(5, 5, 3, 64, 0, 16, torch.bfloat16, True, 1) for _ in range(2))
    still = plain.rope_angles(torch.zeros(5), torch.ones(64), torch.float32)   # else rounded once more
    pool, wide, qkv, norms, _, out_loc = ours
    fused_heads.norm_rope_store(qkv, norms, 1e-6, still.cos_sin, pool.k(1), pool.v(1), out_loc)
    by_steps(*theirs[:4], still, out_loc, 3)
    assert (wide == theirs[1]).float().mean() > .99

def test_heads_of_a_slot_may_lie_apart():
    "Strides of a cache are asked for"
    pool, wide, qkv, norms, angles, out_loc = step(3, 2, 2, 8, 0, 4, torch.float32, True, 1)
    close, apart = torch.zeros(2, 28, 2, 16), torch.zeros(2, 28, 4, 16)[:, :, ::2]
    for keys, values in close, apart:
        fused_heads.norm_rope_store(qkv.clone(), norms, 1e-6, angles.cos_sin, keys, values, out_loc)
    assert close.count_nonzero() == 2 * qkv[:, -2:].numel() and torch.equal(close, apart)

def test_no_tokens_launch_nothing(monkeypatch):
    "A GPU refuses a grid of no programs"
    pool, wide, qkv, norms, angles, out_loc = step(0, 2, 2, 8, 0, 4, torch.float32, True, 1)
    monkeypatch.setattr(fused_heads, '_heads', {})
    fused_heads.norm_rope_store(qkv, norms, 1e-6, angles.cos_sin, pool.k(1), pool.v(1), out_loc)

def test_each_kind_of_cache_is_tried_as_it_is(monkeypatch):
    monkeypatch.setattr(gpu_operations, 'gpu_operations', lambda *device_and_dtype: plain)
    monkeypatch.setattr(gpu_operations, 'store_trial', lambda kernel, table, device, stored: stored)
    assert ([gpu_operations._pairs(torch.device('cpu'), fp8_) for fp8_ in (False, True)]
            == [torch.bfloat16, FP8])

@st.composite
def decoding(draw):
    "Requests that decode, in any rows, some of them padding; a table that is a part of something wider"
    n, page_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 16]))
    return dict(lens=draw(st.lists(st.integers(1, 5 * page_size), min_size=n, max_size=n)),
                padding=draw(st.integers(0, 3)), page_size=page_size,
                more=draw(st.integers(0, 3)), block=draw(st.sampled_from([1, 2, 4, 64])),
                seed=draw(st.integers(0, 99)))

@examples
@given(decoding())
def test_pages_are_listed_as_in_torch(world):
    "The list up to its end, and the whole table; what no request has stays as it was"
    lens, size, n = (torch.tensor(world['lens'] + [1] * world['padding']), world['page_size'],
                     len(world['lens']))
    def step():
        g = torch.Generator().manual_seed(world['seed'])
        wide = torch.randint(900, (n + 2, 5 + world['more']), generator=g).int()
        table, rows = (wide[:, :5],
            torch.cat([torch.randperm(n + 1, generator=g)[:n], torch.full((world['padding'],), n + 1)]))
        at, indptr = lens - 1, torch.cat([torch.zeros(1).long(), (-(-lens // size)).cumsum(0)]).int()
        new = torch.randint(900, (len(lens),), generator=g)
        # the dummy page, whose row may be written by several programs
        new[n:] = 7
        return (wide, [torch.full((table.numel() + 99,), -1, dtype=torch.int32), table, rows, at,
                       new * size + at % size, indptr, size])
    (ours, given_), (theirs, same) = step(), step()
    page_list.list_pages(*given_, block=world['block'])
    page_list.plain_list(*same)
    assert torch.equal(ours, theirs) and torch.equal(given_[0][:-1], same[0][:-1])
    assert (given_[0][int(given_[5][-1]):] == -1).all()

@st.composite
def rows(draw):
    n = draw(st.integers(1, 4))
    def each(*values): return [draw(st.sampled_from(values)) for _ in range(n)]
    return dict(vocab=draw(st.sampled_from([1, 2, 5, 63, 64, 65, 300])), more=draw(st.integers(0, 3)),
                chunk=draw(st.sampled_from([16, 64, 128])),
                dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
                spread=draw(st.sampled_from([0, .1, 3, 12])), banned=draw(st.booleans()),
                seed=draw(st.integers(0, 99)), temperature=each(.05, .6, 1., 7.),
                top_k=each(0, 0, 2, 5, 64, 1000), top_p=each(1., 1., .2, .9, .999),
                min_p=each(0., 0., .05, .9), greedy=each(0, 0, 0, 1))

def near(logits, settings, a, b, eps=1e-5):
    """Whether two tokens differ only because a number falls where they meet, or a threshold where a
    probability is"""
    temperature, top_k, top_p, min_p, u = settings[:5]
    probs = torch.softmax(logits.double() / temperature, -1)
    def chosen(p, u, k, least):
        ordered, _ = probs.sort(descending=True)
        kept = ordered[:int(k)] if k else ordered
        before = kept.cumsum(-1) - kept
        cut = kept[before < p * kept.sum()].min() if len(kept) else 0
        left = probs.where((probs >= cut * (1 - 1e-9)) & (probs >= least * probs.max()), 0)
        return int((left.cumsum(-1) <= u * left.sum()).sum().clamp(max=len(probs) - 1))
    around = [chosen(min(p, 1.), v, top_k, m) for p in (top_p - eps, top_p, top_p + eps)
              for v in (u - eps, u, u + eps)
              for m in (min_p - eps, min_p + eps)]
    return {int(a), int(b)} <= set(around)

@examples
@given(rows())
def test_tokens_are_those_of_the_sampler(world):
    "Of `sample_random`, in float32; and exactly those of `plain_tokens`, in whole numbers"
    n, vocab, g = len(world['top_k']), world['vocab'], torch.Generator().manual_seed(world['seed'])
    logits = (torch.randn(n, vocab + world['more'], generator=g)
              * world['spread']).to(world['dtype'])[:, :vocab]
    if world['banned']: logits[:, 1::3] = -torch.inf
    u = torch.rand(n, generator=g).double()
    numbers = [torch.tensor(world[o]).float().double() for o in ('temperature', 'top_k', 'top_p', 'min_p')]
    given_ = torch.stack([*numbers, u, torch.tensor(world['greedy']).double()])
    first, _ = largest(logits)
    got = sampling.sample_tokens(logits, first, given_, True, world['chunk'])
    assert got.tolist() == sampling.plain_tokens(logits, first, given_).tolist()
    top_k, top_p = given_[1], given_[2]
    alone = ((top_p < 1) & (top_k == 0)).nonzero().flatten().numpy()
    width = min(int(top_k.max()), vocab)
    want = sample_random(logits, given_[:5, :, None], width, alone, True)
    want = torch.where(given_[5] > 0, first, want)
    for i in range(n):
        assert got[i] == want[i] or near(logits[i], given_[:, i], got[i], want[i]), (i, got, want)

def test_a_top_p_is_a_share_of_k_tokens_though_more_tie():
    """Of five tokens a top-k of 3 leaves 0.8 of the weight, if its last is one of three that tie; a top-p of
    0.8 of that is 0.64: two tokens"""
    logits = torch.tensor([[.4, .3, .1, .1, .1]]).log().half()
    given_ = torch.tensor([[1., 3, .8, 0, .99, 0]]).double().T.contiguous()
    assert sampling.sample_tokens(logits, largest(logits)[0], given_, True, 16).tolist() == [1]
    assert (sample_random(logits, given_[:5, :, None], 3, torch.empty(0, dtype=torch.int64).numpy(),
                          True).tolist() == [1])

def test_a_number_where_two_chunks_meet():
    """Belongs to the first token of the second one that has a weight, not to the first of all, which is
    forbidden"""
    logits = torch.full((1, 32), -torch.inf).half()
    logits[0, [3, 20]] = 0
    given_ = torch.tensor([[1., 0, 1, 0, .5, 0]]).double().T.contiguous()
    assert sampling.sample_tokens(logits, largest(logits)[0], given_, True, 16).tolist() == [20]

@few
@given(rows(), st.permutations(range(6)))
def test_a_seed_gives_its_token_in_any_company(world, order):
    "Alone, among others, in another order, and in chunks of any size"
    g = torch.Generator().manual_seed(world['seed'])
    logits, u = ((torch.randn(6, world['vocab'], generator=g) * 4).to(world['dtype']),
                 torch.rand(6, generator=g).double())
    def pick(name): return torch.tensor([world[name][i % len(world[name])] for i in range(6)]).double()
    given_ = torch.stack([*map(pick, ('temperature', 'top_k', 'top_p', 'min_p')), u, u * 0])
    def tokens(rows, chunk):
        some = logits[rows]
        return sampling.sample_tokens(some, largest(some)[0], given_[:, rows].contiguous(), True,
                                      chunk).tolist()
    together = tokens(list(range(6)), 64)
    assert tokens(list(order), 16) == [together[i] for i in order]
    assert [tokens([i], 128)[0] for i in range(6)] == together

# its interpreter multiplies the bits of bfloat16, as whole numbers
DOT = [torch.float32, torch.float16] + [torch.bfloat16] * (not interpreted)

@st.composite
def mixtures(draw):
    """Sizes of a layer with routed experts; `alike`: all tokens choose the same ones, so that most experts
    have none"""
    n_experts = draw(st.integers(1, 11))
    return dict(n=draw(st.integers(0, 40)), k=draw(st.integers(1, min(8, n_experts))), n_experts=n_experts,
                hidden=draw(st.sampled_from([1, 3, 16, 65, 130])),
                width=draw(st.sampled_from([1, 5, 16, 66])), dtype=draw(st.sampled_from(DOT)),
                coded=draw(st.booleans()), alike=draw(st.booleans()), padding=draw(st.integers(0, 5)),
                seed=draw(st.integers(0, 99)))

def mixture(n, k, n_experts, hidden, width, dtype, coded, alike, padding, seed):
    """Tokens and their experts, of which the last `padding` are nobody's; weights as `expert_mlps` takes
    them, and what they mean"""
    g = torch.Generator().manual_seed(seed)
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    liked = torch.randn(n + padding, n_experts, generator=g)
    shares, chosen = (liked[:1].expand_as(liked) if alike and n else liked).softmax(-1).topk(k)
    wide = shares.to(dtype).repeat_interleave(2, dim=1)   # neither tokens nor shares lie close together
    weights = meant = some(n_experts, 2 * width, hidden), some(n_experts, hidden, width)
    if coded:
        weights = ([o.to(fp8.FP8) for o in weights] + [2. ** torch.randint(-9, 3, o.shape[:2], generator=g)
            for o in weights])
        meant = [o.to(dtype) * scales[..., None].to(dtype) for o, scales in zip(weights, weights[2:])]
    return (some(n + padding, 2 * hidden)[:, ::2], chosen, wide[:, ::2]), weights, meant

@examples
@given(mixtures())
def test_experts_are_those_of_the_definition(world):
    """For all shapes, strides and dtypes, with experts that no token has chosen; and what padding is, or
    holds, changes no token by more than rounding"""
    (x, chosen, shares), weights, meant = mixture(**world)
    got, want = (grouped_matmul.expert_mlps(x, chosen, shares, *weights),
                 grouped_matmul.plain_experts(x, chosen, shares, *meant))
    eps = {torch.float32: 1e-4, torch.bfloat16: .06, torch.float16: .01}[world["dtype"]]
    def close(a, b):
        return bool(((a.float() - b.float()).abs()
                     <= eps * (1 + b.float().abs().amax(-1, keepdim=True))).all())
    assert got.dtype == want.dtype and got.shape == want.shape and close(got, want)
    n = world["n"]
    alone = grouped_matmul.expert_mlps(x[:n], chosen[:n], shares[:n], *weights)
    poisoned = x.clone()
    poisoned[n:] = torch.nan
    assert (close(got[:n], alone)
            and close(grouped_matmul.expert_mlps(poisoned, chosen, shares, *weights)[:n], alone))

@pytest.mark.parametrize('coded', [False, True])
def test_the_trial_of_experts_passes(coded):
    for dtype in DOT[1:]:
        assert largest_error(grouped_matmul._trial(torch.device("cpu"), dtype, coded)) <= TOLERANCE

def test_experts_of_16_bits_are_tried(monkeypatch):
    "And no others; and codes where the device knows them"
    monkeypatch.setattr(grouped_matmul, 'serves', lambda what, device, trial: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 9 * (device.index == 1)))
    can = grouped_matmul.can_compute_experts.__wrapped__
    assert ([can(torch.device('cuda'), o)
        for o in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == [True, True, False, False])
    assert not can(torch.device('cpu'), torch.bfloat16)
    assert [can(torch.device('cuda', i), torch.bfloat16, True) for i in (0, 1)] == [False, True]

@st.composite
def fine_tunes(draw):
    "Rows of adapters and of none; what each adapter changes of which part, of which rank"
    n_in, sizes = draw(st.sampled_from([1, 16, 70, 130])), draw(st.lists(st.integers(1, 70), min_size=1,
                                                                         max_size=3))
    ranks = draw(st.lists(st.lists(st.sampled_from([0, 1, 4, 16, 33, 128]), min_size=len(sizes),
                                   max_size=len(sizes)), min_size=1, max_size=4))
    rows = draw(st.lists(st.integers(0, len(ranks)), min_size=1, max_size=40))
    return dict(n_in=n_in, sizes=sizes, ranks=ranks, rows=rows, dtype=draw(st.sampled_from(DOT)),
                seed=draw(st.integers(0, 99)))

def tuned(n_in, sizes, ranks, rows, dtype, seed):
    """Rows, a weight as they change it, its output alone, and what is to be added. Outputs of a part lie
    together, and one that no adapter changes lies between two"""
    g = torch.Generator().manual_seed(seed)
    def some(*shape): return torch.randn(*shape, generator=g).to(dtype)
    firsts = np.cumsum([0, *[o + 1 for o in sizes]]).tolist()
    table = torch.zeros(MOST_ADAPTERS, len(sizes), 5, dtype=torch.int64)
    weight = TiledWeight(some(firsts[-1], n_in), RowTiles(64, len(ranks), 'cpu'), table, {})
    x, added = some(len(rows), n_in), torch.zeros(len(rows), firsts[-1])
    for k, of_parts in enumerate(ranks, 1):
        own = torch.tensor(rows) == k
        parts = [LowRank(first, some(r, n_in) / n_in**.5, some(n, r) / r**.5)
                 for first, n, r in zip(firsts, sizes, of_parts) if r]
        weight.put(k, parts)
        for o in parts: added[own, o.first:o.first + len(o.b)] += ((x[own] @ o.a.T) @ o.b.T).float()
    return x, weight, torch.nn.functional.linear(x, weight.base), added

@few
@given(fine_tunes())
def test_adapters_add_what_is_defined(world):
    """For all sizes, ranks and dtypes, alone and in company; and where nothing is to be added, no bit
    changes"""
    x, weight, base, added = tuned(**world)
    ids = np.array(world['rows'])
    weight.at.put(ids)
    got = weight.multiply(x)
    eps = {torch.float32: 1e-4, torch.bfloat16: .03, torch.float16: .004}[world['dtype']]
    right = base.float() + added
    assert ((got.float() - right).abs() <= eps * (1 + right.abs().amax(-1, keepdim=True))).all()
    untouched = np.array([[k == 0] * len(got[0]) for k in ids]) | (added == 0).numpy()
    assert torch.equal(got[untouched], base[untouched])
    if interpreted: return   # numpy multiplies the last rows of a block otherwise
    change = torch.zeros(len(x), len(base[0]), dtype=x.dtype)
    low_rank_triton.add_changes(change, x, weight.at.ids, weight.table, weight.at.most(len(x)))
    for i in range(min(len(x), 5)):
        weight.at.put(ids[i:i + 1])
        alone = torch.zeros_like(change[:1])
        low_rank_triton.add_changes(alone, x[i:i + 1], weight.at.ids, weight.table, weight.at.most(1))
        assert torch.equal(alone[0], change[i]), i

def test_the_trial_of_adapters_passes():
    for dtype in DOT:
        assert largest_error(low_rank_triton._trial(torch.device('cpu'), dtype)) <= TOLERANCE

@examples
@given(st.integers(0, 5), st.sampled_from([1, 3, 16, 48, 100]), st.integers(0, 3),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99))
def test_rows_are_rounded_to_fp8_as_defined(n, width, more, dtype, seed):
    """Rows that lie in something wider, one of zeros; never more than one code away, since a division may
    round otherwise"""
    x = (torch.randn(n, width + more, generator=torch.Generator().manual_seed(seed))
         * 10).to(dtype)[:, :width]
    x[1:2] = 0
    (codes, scales), (right, right_scales) = fp8.to_fp8(x), fp8.plain_to_fp8(x)
    torch.testing.assert_close(scales, right_scales)
    if interpreted: return   # its interpreter cuts numbers off where a GPU rounds, and small ones wrongly
    assert (codes.shape == x.shape
            and ((codes.float() - right.float()).abs() <= right.float().abs() / 8 + 2**-9).all())
    assert ((codes.float() * scales[:, None] - x.float()).abs()
            <= x.float().abs() / 15 + scales[:, None] * 2**-9).all()

class Far(Language):
    """Memory without an end: notes the farthest number of each tensor that is touched, and reads zeros where
    there is no tensor"""
    def __init__(self):
        super().__init__()
        self.reached = {}

    # torch would narrow a block plus one number of 64 bits
    def arange(self, start, end): return super().arange(start, end).long()

    def note(self, pointer, mask):
        at, inside = torch.broadcast_tensors(pointer.offset,
                                             torch.ones((), dtype=torch.bool) if mask is None else mask)
        key, touched = pointer.memory.data_ptr(), at[inside].tolist()
        assert all(o >= 0 for o in touched), 'a number of more than 32 bits has overflowed'
        self.reached[key] = max([self.reached.get(key, 0), *touched])

    def load(self, pointer, mask=None, other=0):
        self.note(pointer, mask)
        there = BlockPointer(pointer.memory, pointer.offset.clamp(max=len(pointer.memory) - 1))
        return super().load(there, mask, other)

    def store(self, pointer, value, mask=None): self.note(pointer, mask)

@pytest.mark.skipif(interpreted, reason='its memory ends')
def test_numbers_of_rows_have_64_bits(monkeypatch):
    "Caches, logits and experts of more than 2**31 numbers; nothing of that size is allocated"
    far, big = Far(), 2**31
    def launch(module, name, grid, *args, **constants):
        monkeypatch.setattr(module, 'tl', far)
        TritonKernel(getattr(module, name).run, far)[grid](*args, **constants)
    def some(*shape, dtype=torch.float32): return torch.ones(*shape, dtype=dtype)
    def reached(x): return far.reached[x.data_ptr()]
    qkv, keys, values, cos_sin, one = some(4), some(4), some(4), some(4), some(2, dtype=torch.int64)
    launch(fused_heads, '_heads', (2, 3), qkv, qkv, qkv, cos_sin, keys, values, one, 1, 1, 2, 1e-6, big, big,
           big, 2, HAS_NORM=False, FP8=False, HALF=1)
    assert reached(qkv) == big + 5 and reached(cos_sin) == reached(keys) == reached(values) == big + 1
    logits, first, given_, keys, sums = (some(8, dtype=torch.bfloat16), some(2, dtype=torch.int64),
        some(6, 2, dtype=torch.float64), some(2, dtype=torch.int32), some(4, dtype=torch.int64))
    for name, grid, to, more in (('_cut', (2,), (keys,), {}), ('_weigh', (2, 2), (sums, keys), {}),
                                 ('_pick', (2,), (first, sums, keys), dict(CHUNKS=2))):
        far.reached.clear()
        sizes = dict(BLOCK=4) if name == '_cut' else dict(CHUNK=4, **more)
        launch(sampling, name, grid, *to, logits, first, given_, 2, 8, big, *([] if name == '_cut' else [2]),
               **sizes)
        assert reached(logits) >= big
    x, codes, scales = some(4), torch.zeros(4).to(fp8.FP8), some(2)
    launch(fp8, '_round_row', (2,), codes, scales, x, 4, big, SMALLEST=1e-30, WIDTH=4)
    assert reached(x) == big + 3
    table, rows = some(4, dtype=torch.int32), some(2, dtype=torch.int64)
    launch(page_list, '_pages', (2, 1), some(4, dtype=torch.int32), table, rows, rows, rows,
           some(3, dtype=torch.int32), 1, big, BLOCK=2)
    assert reached(table) == big + 1
    y, tiles = some(4), torch.tensor([1, 2**20 - 1] + [-1] * 15, dtype=torch.int32)
    b = some(16)
    table = torch.zeros(2, 1, 5, dtype=torch.int64)
    table[1, 0] = torch.tensor([b.data_ptr(), b.data_ptr(), 16, 0, 1])
    launch(low_rank_triton, '_expand', (1, 1), y, some(2048), tiles, table, 2**12, PARTS=1, TOP=128, ROWS=16,
           RANKS=16, COLUMNS=1)
    assert reached(y) == (2**20 - 1) * 2**12
    # both choices are of the second expert
    order, starts, wide = torch.arange(2), torch.tensor([0, 0, 2]), 2**15
    x, out, weights = some(4), some(4), some(4)
    sizes = dict(ROWS=1, COLUMNS=1, DEPTH=wide, EXPERTS=2, FP8=False)
    launch(grouped_matmul, '_gate_up', (2, 1), out, x, weights, weights, order, starts, 2, 1, wide, 2 * wide,
           **sizes)
    assert reached(weights) == (3 * 2 * wide + 1) * wide - 1
    far.reached.clear()
    launch(grouped_matmul, '_down', (2, 1), out, x, weights, weights, order, starts, some(2), 2, wide,
           2 * wide, **sizes)
    assert reached(weights) == (2 * wide + 1) * wide - 1

def test_which_triton_this_is():
    "Else the process for the interpreter would test the reference again"
    assert isinstance(sampling._pick, TritonKernel) != interpreted

def run_long(*command, **env):
    "A process of its own, in which Triton is another"
    done = subprocess.run([sys.executable, *command], cwd=Path(__file__).parents[1], env=os.environ | env,
                          capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout

long = [pytest.mark.long, pytest.mark.skipif(lacks_package, reason='needs the package triton'),
        pytest.mark.skipif(interpreted, reason='this is that process')]
def marked(test):
    for mark in long: test = mark(test)
    return test

@marked
def test_tritons_own_interpreter_agrees():
    run_long('-m', 'pytest', '-q', '-n', '0', '-p', 'no:cacheprovider', __file__, TRITON_INTERPRET='1',
             TST_TRITON='25')

COMPILE = ("""
import torch
torch.cuda.is_available = lambda: True   # so that the modules take the package
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_lit.adapters import low_rank_triton
from minisgl_lit.kernels import fp8, fused_heads, grouped_matmul, page_list, sampling

def build(kernel, types, arch, warps, **constants):
    types = dict(zip(kernel.arg_names, [*types, *['constexpr'] * len(constants)], strict=True))
    values = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    made = compile(ASTSource(kernel, types, values), GPUTarget('cuda', arch, 32), dict(num_warps=warps))
    assert made.asm['cubin'], kernel
    print(kernel.__name__, arch)

for arch in (80, 89, 90):
    build(page_list._pages, ['*i32', '*i32', '*i64', '*i64', '*i64', '*i32', 'i32', 'i32'], arch, 4, BLOCK=1024)
    for x in ('*bf16', '*fp16', '*fp32'):
        sizes = dict(PARTS=3, TOP=128, ROWS=low_rank_triton.ROWS, RANKS=low_rank_triton.RANKS)
        build(low_rank_triton._shrink, [x, x, '*i32', '*i64', 'i32'], arch, 4, **sizes, DEPTH=low_rank_triton.DEPTH)
        build(low_rank_triton._expand, [x, x, '*i32', '*i64', 'i32'], arch, 4, **sizes, COLUMNS=low_rank_triton.COLUMNS)
    for x in ('*bf16', '*fp16'):
        given = [x, '*i64', '*fp64', 'i32', 'i32', 'i32']
        build(sampling._cut, ['*i32', *given], arch, 16, BLOCK=1024)
        build(sampling._weigh, ['*i64', '*i32', *given, 'i32'], arch, 4, CHUNK=1024)
        build(sampling._pick, ['*i64', '*i64', '*i32', *given, 'i32'], arch, 4, CHUNK=1024, CHUNKS=256)
        for normed in (True, False):
            for fp8_ in (True, False):   # older GPUs have no such numbers, and make them all the same
                kept = '*u8' if fp8_ else x
                heads = [x, x, x, '*fp32', kept, kept, '*i64', *['i32'] * 3, 'fp32', *['i32'] * 4]
                build(fused_heads._heads, heads, arch, 1, HAS_NORM=normed, FP8=fp8_, HALF=64)
        for rows in (16, 32, 64):
            for coded in [False] + [True] * (arch >= 89):
                sizes = dict(ROWS=rows, COLUMNS=grouped_matmul.COLUMNS, DEPTH=grouped_matmul.DEPTH, EXPERTS=128, FP8=coded)
                weights = ['*u8', '*fp32'] if coded else [x, x]
                build(grouped_matmul._gate_up, [x, x, *weights, '*i64', '*i64', *['i32'] * 4], arch, 4, **sizes)
                build(grouped_matmul._down, [x, x, *weights, '*i64', '*i64', x, *['i32'] * 3], arch, 4, **sizes)
        if arch >= 89: build(fp8._round_row, ['*fp8e4nv', '*fp32', x, 'i32', 'i32'], arch, 4, SMALLEST=fp8.SMALLEST_SCALE, WIDTH=4096)
""")   # noqa: E501

@marked
def test_each_kernel_compiles_for_gpus():
    "Down to machine code, which needs no GPU; what it computes there is not shown"
    assert len(run_long('-c', COMPILE).splitlines()) == 3 * (2 * (7 + 3 * 2) + 1 + 6) + 2 * 2 * (1 + 3 * 2)

KINDS = ("""
import numpy as np, torch
torch.cuda.is_available = lambda: True   # so that the modules take the package
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from minisgl_lit.adapters import low_rank_triton
from minisgl_lit.core.attention.flashinfer import StepBlock
from minisgl_lit.kernels import fp8, fused_heads, grouped_matmul, page_list, sampling
from minisgl_lit.core.kv_cache.pool import KVPool

kinds, backend = set(), make_backend(GPUTarget('cuda', 90, 32))
class Seen:
    "In place of a kernel: notes what Triton would compile it for, and computes nothing"
    def __init__(self, kernel): self.name, self.bind = kernel.__name__, create_function_from_signature(kernel.signature, kernel.params, backend)
    def __getitem__(self, grid):
        def launch(*args, **options):
            bound, kind, options = self.bind(*args, **options)
            constants = {k: v for k, v in bound.items() if k.isupper()}
            kinds.add((self.name, str(kind), str(constants), str(options)))
        return launch
for module in (fp8, fused_heads, grouped_matmul, low_rank_triton, page_list, sampling):
    for name, kernel in list(vars(module).items()):
        if name in ('_cut', '_weigh', '_pick', '_heads', '_pages', '_gate_up', '_down', '_round_row', '_shrink', '_expand'): setattr(module, name, Seen(kernel))

def sampled(rows, size, vocab):
    block = StepBlock.empty(size, 'cpu')
    logits, likeliest = torch.zeros(rows, vocab).bfloat16(), torch.zeros(size, dtype=torch.int64)[:rows].clone()
    for cut in (True, False): sampling.sample_tokens(logits, likeliest, block.sampling[:, :rows], cut)
    sampling.sample_tokens(logits, likeliest, torch.zeros(6, rows, dtype=torch.float64), True)   # a step that is not recorded

def prompts(n, experts, k=4, hidden=96, width=80):
    pool, half = KVPool(2, 9, 16, 2, 64, torch.bfloat16), torch.bfloat16
    x = torch.zeros(n, 8 * 64, dtype=half).view(n, 8, 64)
    fused_heads.norm_rope_store(x, None, 1e-6, torch.zeros(n, 64), pool.k(1), pool.v(1), torch.zeros(n, dtype=torch.int64))
    fp8.to_fp8(torch.zeros(n, hidden, dtype=half))
    at = low_rank_triton.RowTiles(64, 8, 'cpu')
    at.put(np.arange(n) % 3)
    low_rank_triton.add_changes(torch.zeros(n, width, dtype=half), torch.zeros(n, hidden, dtype=half), at.ids, torch.zeros(256, 1, 5, dtype=torch.int64), at.most(n))
    chosen = torch.zeros(n, k, dtype=torch.int64)
    grouped_matmul.expert_mlps(torch.zeros(n, hidden, dtype=half), chosen, torch.zeros(n, k, dtype=half),
                               torch.zeros(experts, 2 * width, hidden, dtype=half), torch.zeros(experts, hidden, width, dtype=half))

for vocab in (151936, 32001):
    kinds.clear()
    sampled(1, 1, vocab)
    first = len(kinds)
    for size in (1, 2, 3, 4, 7, 8, 16, 24, 250, 256):
        for rows in {1, 2, size // 2 + 1, size}: sampled(min(rows, size), size, vocab)
    assert first == len(kinds) == 3, (vocab, kinds)
kinds.clear()
for i in range(9): prompts(1 << i, 8)    # as `first_batches` does
first = len(kinds)
for n in (1, 3, 5, 7, 9, 12, 15, 17, 31, 33, 48, 100, 129, 255): prompts(n, 8)
assert first == len(kinds) == 1 + 1 + 2 + 2 * 3, kinds
print('no new kinds')
""")   # noqa: E501

@marked
def test_no_size_of_a_batch_brings_a_new_kind_of_a_kernel():
    "What Triton would compile for, as its own binder says: nothing new after the batches of the start"
    assert run_long('-c', KINDS).strip() == 'no new kinds'
