"""A GPU that computes nothing, and FlashInfer on it: its own Python layer runs on torch's fake tensors, and
its compiled modules are stubs that check device, dtype, shape and strides; so are our kernels in Triton. It
shows, on any machine, which calls would be refused, what is copied or planned while a graph is captured, and
how many kernels and copies a step launches. It proves no numbers, no races and no speed.

    PYTHONPATH=.:tests:.flashinfer python tests/fake_gpu.py [qwen3 … greedy random recorded …]   a line of
    JSON for each

A name is a configuration, a count of what a step launches, or a step of `gpu_check`.

It changes torch for the whole process, so tests start it as a process of its own.
"""
import contextlib, gc, json, os, sys, tempfile, traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ['FLASHINFER_CUDA_ARCH_LIST'] = '9.0a'

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device('cuda', 0)
fake = FakeTensorMode(allow_non_fake_inputs=True)

@dataclass
class Device:
    "What happens on the device."
    counts: Counter = field(default_factory=Counter)    # Copies, plans, replays, modules of FlashInfer
    kernels: Counter = field(default_factory=Counter)   # of FlashInfer, by name
    capturing: bool = False                             # Whether a graph is being captured
    streams: list = field(default_factory=lambda: [Stream(None)])   # The current one is the last
    broken: str = ''                                # A module of FlashInfer that does not compile
    # By the module of a trial: what of `strange_kernels` runs in its place
    accidents: dict[str, str] = field(default_factory=dict)
    # Whether the host may read numbers, all 0; `gpu_check` does
    may_wait: bool = False
    # By workspace: by which wrapper's pinned memory it was planned last
    plans: 'dict[int, Held]' = field(default_factory=dict)
    # By list of pages: by which pointers it was written last
    lists: 'dict[int, Held]' = field(default_factory=dict)
    graph: 'Graph | None' = None                    # That is being captured

    def launch(self, name: str) -> None:
        "A kernel of FlashInfer; those that are captured are counted apart"
        self.kernels[f'captured {name}' if self.capturing else name] += 1

    def read(self, held: 'dict[int, Held]', memory, owner) -> None:
        """A kernel reads a plan or a list of pages, which must be its own; a graph that is captured needs it
        at each replay, too"""
        now = held.get(id(memory))
        if now is None: return    # not shared
        if now.owner is not owner:
            raise RuntimeError('a kernel would read the plan, or the pages, of another batch')
        if self.graph and now not in self.graph.writes: self.graph.reads.append((held, now))

    def write(self, held: 'dict[int, Held]', memory, owner) -> None:
        held[id(memory)] = now = Held(memory, owner)
        if self.graph: self.graph.writes.append(now)

    def copies_to_device(self) -> None:
        if self.capturing: raise RuntimeError('a copy to the device while a graph is captured')
        self.counts['copies'] += 1

@dataclass(frozen=True, eq=False)
class Held:
    "Whose a memory is that several batches take in turn; kept, so that no other object gets its address."
    memory: object
    owner: object

# ---- streams, events, graphs -------------------------------------------------------------------------------

class Stream:
    def __init__(self, device=None): self.device = GPU
    def wait_stream(self, other): pass
    def synchronize(self): pass

class Event:
    def record(self, stream=None): pass
    def query(self): return True
    def synchronize(self): pass

class Graph:
    "Remembers whose plans and lists its kernels read, and which lists they write first."
    def __init__(self): self.reads, self.writes = [], []
    def pool(self): return 0, 1
    def replay(self):
        for held, then in self.reads:
            if held[id(then.memory)].owner is not then.owner:
                raise RuntimeError('a graph would read the plan, or the pages, of another batch')
        for now in self.writes: device.lists[id(now.memory)] = now
        device.counts['replays'] += 1

@contextlib.contextmanager
def on_stream(stream):
    device.streams.append(stream)
    try: yield
    finally: device.streams.pop()

@contextlib.contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode='global'):
    assert stream is device.streams[-1] is not device.streams[0], (
        'a graph is captured on the current stream, and not on the default one')
    device.capturing, device.graph = True, graph
    try: yield
    finally: device.capturing, device.graph = False, None

device = Device()
H100 = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name='a GPU that computes nothing',
                       total_memory=80 << 30)
CUDA = dict(   # what this project, FlashInfer and torch ask of `torch.cuda`
    is_available=lambda: True, is_initialized=lambda: True, _lazy_init=lambda: None, device_count=lambda: 1,
    current_device=lambda: 0, get_device_capability=lambda *_: (9, 0), get_device_properties=lambda *_: H100,
    get_device_name=lambda *_: H100.name, mem_get_info=lambda *_: (70 << 30, 80 << 30),
    empty_cache=lambda: None, synchronize=lambda *_: None, device=lambda *_: contextlib.nullcontext(),
    current_stream=lambda *_: device.streams[-1], Stream=Stream, Event=Event, stream=on_stream,
    CUDAGraph=Graph, graph=capture)

# ---- tensors: those on the host are real, those on the device are fake -------------------------------------

def on_gpu(x) -> bool: return isinstance(x, FakeTensor) and x.device.type == 'cuda'

def named_device(args, kwargs) -> str | None:
    "The type of the device that a call asks for"
    names = [o for o in (kwargs.get('device'), *args) if isinstance(o, (str, torch.device))]
    try: return torch.device(names[0]).type if names else None
    except RuntimeError: return None    # a string that names no device

def send(x: torch.Tensor) -> torch.Tensor:
    "A tensor of the host, as the device gets it"
    device.copies_to_device()
    with fake: return torch.empty(x.shape, dtype=x.dtype, device=GPU)

def basic_index(x: torch.Tensor, index) -> tuple[torch.Tensor, list]:
    "Take slices and numbers; what is left is a tensor or nothing for each dimension"
    index = index if isinstance(index, tuple) else (index,)
    wide = slice(None)
    if Ellipsis in [o for o in index if not isinstance(o, torch.Tensor)]:
        at = next(i for i, o in enumerate(index) if o is Ellipsis)
        n = x.dim() - sum(o is not None and o is not Ellipsis for o in index)
        index = index[:at] + (wide,) * n + index[at + 1:]
    tensors, dim = [], 0
    for o in index:
        if isinstance(o, (int, np.integer)): x = x.select(dim, int(o))
        elif o is None or isinstance(o, slice):
            if o is None: x = x.unsqueeze(dim)
            elif o != wide: x = torch.ops.aten.slice(x, dim, o.start, o.stop, o.step or 1)
            tensors.append(None)
            dim += 1
        else:
            if not on_gpu(o): raise RuntimeError(f'an index on the host into a tensor of the device: {o!r}')
            tensors.append(o)
            dim += 1
    return x, tensors if any(o is not None for o in tensors) else []

class FakeGpu(TorchFunctionMode):
    "Sends calls to the fake device, or to real memory of the host."
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, '__name__', '')
        x = args[0] if args else None
        if name == 'pin_memory': return x
        if name == 'to' or name in ('cpu', 'cuda'): return self.move(func, name, x, args, kwargs)
        if name == 'copy_': return self.copy(func, x, args[1], kwargs)
        # torch asks the GPU which kernel
        if name == 'scaled_dot_product_attention' and on_gpu(x): return torch.empty_like(x)
        if name == 'data_ptr' and on_gpu(x): return id(x) & ~511
        if name in ('item', 'tolist', 'numpy', '__bool__', '__float__', 'nonzero') and on_gpu(x):
            if device.may_wait: return 0. if name != '__bool__' else False
            raise RuntimeError(f'{name}: the host would wait for the device')
        if name == '__getitem__' and on_gpu(x):
            x, tensors = basic_index(x, args[1])
            return torch.ops.aten.index(x, tensors) if tensors else x
        if name == '__setitem__' and on_gpu(x): return self.write(x, *args[1:])
        if kwargs.pop('pin_memory', False):
            assert named_device((), kwargs) in (None, 'cpu'), 'only memory of the host is pinned'
        if named_device((), kwargs) == 'cuda' and not isinstance(x, torch.Tensor):
            if name in ('tensor', 'as_tensor'):
                return send(func(*args, **{k: v for k, v in kwargs.items() if k != 'device'}))
            with fake: return func(*args, **kwargs | dict(device=GPU))
        return func(*args, **kwargs)

    def move(self, func, name, x, args, kwargs):
        to = name if name in ('cpu', 'cuda') else named_device(args[1:], kwargs)
        if on_gpu(x) and to == 'cpu': raise RuntimeError('a copy to the host: it would wait for the device')
        if to != 'cuda' or on_gpu(x): return func(*args, **kwargs)
        dtypes = [o for o in (*args[1:], *kwargs.values()) if isinstance(o, torch.dtype)]
        return send(x).to(*dtypes) if dtypes else send(x)

    def copy(self, func, x, other, kwargs):
        if on_gpu(x) and not on_gpu(other):
            check(x.shape == other.shape or other.numel() == 1, x.shape, other.shape)
            device.copies_to_device()
            return x
        if on_gpu(other) and not on_gpu(x):
            assert x.shape == other.shape and x.dtype == other.dtype, (x.shape, other.shape, x.dtype,
                other.dtype)
            device.counts['copies to the host'] += 1
            return x.fill_(1)
        return torch.ops.aten.copy_(x, other) if on_gpu(x) else func(x, other, **kwargs)

    def write(self, x, index, value):
        x, tensors = basic_index(x, index)
        if not isinstance(value, torch.Tensor):
            if not tensors: return x.fill_(value)
            with fake: value = torch.full((), value, dtype=x.dtype, device=GPU)
        value = value if on_gpu(value) else send(value)
        return torch.ops.aten.index_put_(x, tensors, value) if tensors else torch.ops.aten.copy_(x, value)

class Kernels(TorchDispatchMode):
    "Counts torch's own kernels on the device."
    def __init__(self):
        super().__init__()
        self.by_name = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, torch.Tensor) or first.device.type != 'cuda': return out
        # `to` may copy
        same = (func.is_view
                and any(isinstance(o, torch.Tensor) and torch._C._is_alias_of(o, first) for o in args))
        if not same and func.__name__.split('.')[0] not in ('empty', 'empty_like', 'new_empty', 'view'):
            self.by_name[str(func)] += 1
        return out

# ---- FlashInfer: its Python, and stubs for what it compiles ------------------------------------------------

def check(ok: bool, *what) -> None:
    if not ok: raise ValueError(f'a kernel would refuse {what}')

def all_on(kind: str, *tensors) -> None:
    for o in tensors: check(o.device.type == kind, o.device, 'instead of', kind)

def ints(kind: str, *tensors) -> None:
    all_on(kind, *tensors)
    for o in tensors: check(o.dtype == torch.int32 and o.is_contiguous(), o.dtype, o.stride())

class Plan(list):
    "What a plan returns for `run`, and by whose pinned memory it was sent."
    def __init__(self, n: int, pinned):
        super().__init__([0] * n)
        self.pinned = pinned

class Module:
    "A compiled module: each function checks its arguments as the one in C++ does."
    def __init__(self, name: str): self.name = name

    def silu_and_mul(self, out, x, pdl):
        all_on('cuda', out, x)
        check(x.is_contiguous() and out.is_contiguous() and x.shape[-1] == 2 * out.shape[-1] and len(x) > 0,
              x.shape, x.stride())
        device.launch('silu_and_mul')

    def rmsnorm(self, out, x, weight, eps, pdl):
        all_on('cuda', out, x, weight)
        check(x.dim() in (2, 3) and x.shape == out.shape and x.shape[-1:] == weight.shape and len(x) > 0,
              x.shape, out.shape, weight.shape)
        check(x.stride(-1) == out.stride(-1) == 1 and x.dtype == out.dtype == weight.dtype, x.stride(),
              x.dtype, weight.dtype)
        device.launch('rmsnorm')

    def fused_add_rmsnorm(self, x, residual, weight, eps, pdl):
        all_on('cuda', x, residual, weight)
        check(x.dim() == 2 and x.shape == residual.shape and x.shape[-1:] == weight.shape and len(x) > 0,
              x.shape, residual.shape)
        check(x.stride(-1) == residual.stride(-1) == 1 and x.dtype == residual.dtype == weight.dtype,
              x.stride(), residual.stride())
        device.launch('fused_add_rmsnorm')

    def apply_rope_pos_ids_cos_sin_cache(self, q, k, q_rope, k_rope, table, rows, interleave):
        all_on('cuda', q, k, q_rope, k_rope, table, rows)
        check(q.dim() == k.dim() == 3 and len(q) == len(k) == len(rows)
              and q.shape[2] == k.shape[2] == table.shape[1], q.shape, table.shape)
        check(table.dtype == torch.float32 and table.is_contiguous()
              and rows.dtype in (torch.int32, torch.int64), table.dtype, rows.dtype)
        check(not interleave and q.stride(-1) == k.stride(-1) == 1 and q.shape[2] in (64, 128, 256),
              q.stride())
        device.launch('rope')

    def plan(self, floats, workspace, pinned, *rest):
        if device.capturing: raise RuntimeError('a plan while a graph is captured')
        all_on('cuda', floats, workspace)
        all_on('cpu', pinned)
        check(len(workspace) == len(pinned)
              and floats.dtype == workspace.dtype == pinned.dtype == torch.uint8, len(workspace), len(pinned))
        device.counts['plans'] += 1    # which makes a copy of its own
        device.write(device.plans, workspace, pinned)
        if self.name.startswith('batch_attention'):
            qo, indptr, lens, n, heads, kv_heads, dim, causal = rest
            ints('cpu', qo, indptr, lens)
            check(len(qo) == len(indptr) == n + 1 == len(lens) + 1 and heads % kv_heads == 0, n, heads,
                  kv_heads)
            return Plan(10, pinned)
        if self.name.startswith('batch_decode'):
            indptr, n, heads, kv_heads, page_size, graph, window_left, cap, dim, dim_v, *dtypes = rest
            ints('cpu', indptr)
            check(len(indptr) == n + 1 and heads // kv_heads in (1, 2, 3, 4, 8) and isinstance(graph, bool)
                  and dim == dim_v, n, heads, kv_heads)
            return Plan(10, pinned)
        (qo, indptr, lens, total, n, heads, kv_heads, page_size, graph, dim, dim_v, causal, window_left,
         *split) = rest
        ints('cpu', qo, indptr, lens)
        check(len(qo) == len(indptr) == n + 1 == len(lens) + 1 and total == qo[-1] and heads % kv_heads == 0,
              n, total, qo[-1])
        check(not any(o for o in split if o != -1), split)    # Hopper's has fewer of them
        return Plan(15, pinned)

    def attend(self, floats, workspace, info, q, k, v, out, *index):
        all_on('cuda', floats, workspace, q, k, v, out)
        device.read(device.plans, workspace, info.pinned)
        ints('cuda', *index)
        check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and k.shape == v.shape
              and q.shape == out.shape, q.stride(), k.stride(), v.stride())

    def run(self, floats, workspace, info, q, k, v, indptr, indices, last, out, *rest):
        if self.name.startswith('batch_attention'):    # the list of pages, then where it writes
            self.attend(floats, workspace, info, q, k, v, indices, indptr)
            return device.launch('batch_attention')
        self.attend(floats, workspace, info, q, k, v, out, indptr, indices, last)
        check(len(q) == len(last) == len(indptr) - 1 and k.stride() == v.stride(), q.shape, last.shape)
        device.read(device.lists, indices, indptr)
        device.launch('decode')

    def paged_run(self, floats, workspace, info, q, k, v, qo, indptr, indices, last, out, *rest):
        self.attend(floats, workspace, info, q, k, v, out, qo, indptr, indices, last)
        check(len(qo) == len(indptr) == len(last) + 1 and k.stride() == v.stride(), qo.shape, last.shape)
        device.read(device.lists, indices, indptr)
        device.launch('paged')

    def ragged_run(self, floats, workspace, info, q, k, v, qo, indptr, out, *rest):
        self.attend(floats, workspace, info, q, k, v, out, qo, indptr)
        check(len(qo) == len(indptr) and len(q) == len(k), qo.shape, q.shape, k.shape)
        device.launch('ragged')

def build_and_load(spec, *ignored) -> Module:
    if device.broken and spec.name.startswith(device.broken):
        raise RuntimeError(f'Ninja build failed. Ninja output:\nnvcc -c {spec.name}.cu\n{spec.name}.cu:7: '
                           'fatal error: cublasLt.h: No such file')
    device.counts[f'module {spec.name}'] += 1
    return Module(spec.name)

def compare_shapes(pairs) -> float:
    "In place of `largest_error`, since there are no numbers"
    for got, right in pairs:
        check(got.shape == right.shape and got.dtype == right.dtype, got.shape, right.shape, got.dtype,
              right.dtype)
    return 0.

# ---- Triton: its kernels are launched, and compute nothing -------------------------------------------------

@dataclass
class Launch:
    "A kernel; where it writes and reads must be on the device."
    run: Callable

    def __call__(self, *args): raise RuntimeError(f'{self.run.__name__} runs on the device alone')

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **constants):
            all_on('cuda', *[o for o in args if isinstance(o, torch.Tensor)])
            names = self.run.__code__.co_varnames[:self.run.__code__.co_argcount]
            check(len(args) + len(constants) == len(names) and set(constants) == set(names[len(args):]),
                  names, constants)
            check(all(0 < o < 2**16 for o in grid[1:]) and 0 < grid[0] < 2**31, grid)
            if self.run.__name__ == '_pages': device.write(device.lists, args[0], args[5])
            device.launch(self.run.__name__.strip('_'))
        return launch

def fake_triton():
    return (SimpleNamespace(jit=lambda run=None, **marks: Launch(run) if run else Launch),
            SimpleNamespace(constexpr=int))

def all_alike(record, synchronize):
    "In place of a stopwatch: candidates are recorded, and take equally long"
    def seconds(work):
        record(lambda: [work()])
        return 1.
    return seconds

def try_uncounted(tried, where, known):
    "In place of a child, which would not see the fake device; what a trial launches is not counted"
    from minisgl_lit.kernels.trials import Trial, run_apart, try_here
    for trial in tried:
        accident = device.accidents.get(trial.function.split(':')[0].split('.')[-1])
        if accident:
            yield from run_apart([Trial(f'strange_kernels:{accident}')], torch.device('cpu'), {}, limit=2)
            continue
        kernels = device.kernels.copy()
        outcome = try_here(trial, where)
        device.kernels = kernels
        yield outcome

# ---- the engine on it --------------------------------------------------------------------------------------

SHAPE = dict(
    architectures=['Qwen3ForCausalLM'], model_type='qwen3', vocab_size=151936, hidden_size=1024,
    intermediate_size=3072, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
    tie_word_embeddings=True, torch_dtype='bfloat16', hidden_act='silu', attention_bias=False,
    eos_token_id=151645)

@dataclass
class Case:
    "A model, an engine, and what it is asked."
    shape: dict = field(default_factory=dict)       # Over `SHAPE`
    settings: dict = field(default_factory=dict)    # Of `EngineConfig`
    params: list[dict] = field(default_factory=lambda: [dict(temperature=0)])   # Sampling parameters, in turn
    prompts: list[list[int]] | None = None          # Token ids; `None`: four or more, of any length
    adapters: str = ''                              # Their names, a letter each
    broken: str = ''                                # A module that does not compile
    accidents: dict[str, str] = field(default_factory=dict)   # See `Device`
    says: list[str] = field(default_factory=list)   # What the lines on the log then begin with

EXPERTS = dict(architectures=['Qwen3MoeForCausalLM'], model_type='qwen3_moe', num_experts=16,
               num_experts_per_tok=4, moe_intermediate_size=768, norm_topk_prob=True)

SAMPLED = [dict(temperature=.7), dict(temperature=.7, top_k=5), dict(temperature=1., top_p=.9),
           dict(temperature=0, presence_penalty=.5),
           dict(temperature=.5, min_p=.1, logprobs=3), dict(temperature=0, prompt_logprobs=2),
           dict(logit_bias={3: 5.}, temperature=1.)]
CASES = dict(
    qwen3=Case(), prefix=Case(prompts=[list(range(40))] * 5, settings=dict(max_prefill_tokens=24)),
    sampled=Case(params=SAMPLED), no_edits=Case(params=SAMPLED[:3]),
    mixed=Case(settings=dict(mixed_chunk=True, max_prefill_tokens=64)),
    tensor_cores=Case(dict(num_key_value_heads=4)), named=Case(settings=dict(attention='fa3,tensor_cores')),
    llama=Case(dict(architectures=['LlamaForCausalLM'], model_type='llama')),
    group5=Case(dict(num_attention_heads=10, num_key_value_heads=2)),
    qwen3moe=Case(EXPERTS), moe_fp8=Case(EXPERTS, settings=dict(quantization='fp8')),
    kv_fp8=Case(settings=dict(kv_dtype='fp8')), weights_fp8=Case(settings=dict(quantization='fp8')),
    window=Case(dict(architectures=['MistralForCausalLM'], model_type='mistral', sliding_window=64)),
    page1=Case(settings=dict(page_size=1, num_pages=8000)),
    tuned=Case(adapters='ab', params=[dict(temperature=0, lora='a'), dict(temperature=0),
                                      dict(temperature=.7, lora='b')]),
    tuned_fp8=Case(adapters='a', params=[dict(temperature=0, lora='a'), dict(temperature=0)],
                   settings=dict(quantization='fp8')),
    accidents=Case(accidents=dict(sampling='crashes', page_list='hangs'), params=SAMPLED[:3],
                   says=['In plain torch: list of pages. Triton: it was not done after',
                         'In plain torch: sampling. Triton: its process ended by SIGABRT']),
    no_norm=Case(broken='norm', says=['In plain torch: rmsnorm, fused_add_rmsnorm.']),
    no_rope=Case(settings=dict(attention='torch'), broken='rope',
                 says=['In plain torch: apply_rope_with_cos_sin_cache_inplace.']),
    no_prefill=Case(settings=dict(attention='auto'), broken='batch_prefill',
                    says=['Attention in plain torch: its kernels for prefill fail:']))

@contextlib.contextmanager
def engine(case: Case, known: dict | None = None):
    """A runtime on the fake device, with what it has said; FlashInfer's modules are built anew. Kernels are
    tried, but for those that are `known`, which grow by them"""
    from minisgl_lit.config import EngineConfig
    from minisgl_lit.core import host
    from minisgl_lit.kernels import library as kernels, trials
    from minisgl_lit.core.attention.library import load_library
    from minisgl_lit.runtime import build
    import flashinfer
    from minisgl_lit.kernels.gpu_operations import store_kernel
    from minisgl_lit.kernels.page_list import page_lister
    from minisgl_lit.kernels.sampling import can_sample
    from random_adapters import write_adapter
    for o in (kernels.small_kernels, load_library, trials._findings, host.warn_once, page_lister, can_sample,
              store_kernel):
        o.cache_clear()
    found = trials.findings(GPU)
    found.known, found.file, found.run = {} if known is None else known, None, try_uncounted
    for o in (flashinfer.norm.get_norm_module, flashinfer.rope.get_rope_module,
              flashinfer.prefill.get_batch_prefill_module,
              flashinfer.decode.get_batch_decode_module, flashinfer.activation.get_act_and_mul_module):
        o.cache_clear()
    # what was imported: engines collect garbage, and would look through all of it
    if not gc.get_freeze_count(): gc.freeze()
    device.broken, device.accidents, said = case.broken, case.accidents, []
    device.counts.clear()
    device.kernels.clear()
    given = dict(device='cuda', dummy_weights=True, attention='flashinfer', max_running_req=4,
                 max_seq_len=512, num_pages=2000)
    with (tempfile.TemporaryDirectory() as folder,
          patch.object(host, 'print', lambda *o, **_: said.append(*o), create=True),
          patch.object(trials, 'largest_error', compare_shapes)):
        (Path(folder)/'config.json').write_text(json.dumps(SHAPE | case.shape))
        for i, name in enumerate(case.adapters): write_adapter(Path(folder)/name, Path(folder), i)
        lora = {name: f'{folder}/{name}' for name in case.adapters} or None
        runtime = build(EngineConfig.of(folder, **given | dict(lora=lora) | case.settings))
        try: yield runtime, said
        finally: runtime.close()

def run(case: Case) -> dict:
    "Build, capture, generate; what was counted"
    from minisgl_lit.text.sampling_params import SamplingParams
    rng = np.random.default_rng(0)
    prompts = (case.prompts
        or [rng.integers(0, 1000, rng.integers(1, 100)).tolist() for _ in range(max(4, len(case.params)))])
    with engine(case) as (runtime, said):
        s, told = runtime.scheduler, Counter()
        for i, prompt in enumerate(prompts):
            s.add(str(i), prompt,
                  SamplingParams(max_tokens=6, ignore_eos=True, **case.params[i % len(case.params)]))
        while s.has_work:
            for o in s.step():
                if o.error: raise RuntimeError(o.error)
                told[o.rid] += len(o.token_ids)
        runtime.scheduler.self_check()
        said = [o for o in said if 'has to compile' not in o and not o.startswith('Attention, measured')]
        assert (said == [o for o in said if o.startswith(tuple(case.says))]
                and len(said) == len(case.says)), said
        return dict(requests=len(told), tokens=sum(told.values()),
                    captured=len(getattr(runtime.engine, 'steps', SimpleNamespace(sizes=[])).sizes),
                    **device.counts, **device.kernels)

TEMPERATURES = dict(greedy=0., random=.6)
TRIED: dict = {}   # by engines whose launches are counted: the same kernels need no second trial
LAYERS = dict(layer=Case(), kv_fp8_layer=Case(settings=dict(kv_dtype='fp8')), experts_layer=Case(EXPERTS),
              fp8_layer=Case(settings=dict(quantization='fp8')),
              experts_fp8_layer=Case(EXPERTS, settings=dict(quantization='fp8')))

def step_counts(temperature: float, steps: int = 16) -> dict:
    """What one decode step of four requests launches outside its graph, on average; how many they are does
    not matter"""
    from minisgl_lit.text.sampling_params import SamplingParams
    with engine(Case(), TRIED) as (runtime, _):
        s = runtime.scheduler
        for i in range(4):
            s.add(str(i), list(range(1, 30)),
                  SamplingParams(max_tokens=400, temperature=temperature, ignore_eos=True))
        while s.stats()['waiting'] or s.stats()['steps'] < 8: s.step()
        device.counts.clear()
        device.kernels.clear()
        with Kernels() as seen:
            for _ in range(steps): s.step()
        kernels = device.kernels + seen.by_name
        def each(counts): return {k: round(v / steps, 2) for k, v in counts.items()}
        return each(device.counts) | dict(kernels=round(kernels.total() / steps, 2), by_name=each(kernels))

def layer_counts(case: Case) -> dict:
    "What one layer launches in a decode step"
    from minisgl_lit.core.engine.cuda_graph import padded
    with engine(case, TRIED) as (runtime, _):
        model, step = runtime.engine.model, runtime.engine.steps.captured[4]
        attention = runtime.engine.steps.attention
        attention.update(step.metadata, padded(runtime.engine.steps.dummy, runtime.engine.steps.dummy, 4))
        attention.list_pages(step.metadata)
        attend, slots = attention.attend_batch(step.metadata)
        x, more = (torch.zeros(4, 1024, dtype=torch.bfloat16, device='cuda') for _ in range(2))
        with torch.inference_mode():
            angles = model.angles(step.metadata.block.positions)
            device.kernels.clear()
            with Kernels() as seen: model.config.layer.forward(model, 0, x, more, (angles, attend, slots))
        kernels = device.kernels + seen.by_name
        return dict(kernels=kernels.total(), by_name=dict(kernels))

class AtOnce:
    "In place of a pool of threads, which would not see the fake device"
    def __init__(self, *ignored): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def submit(self, work, *args):
        done = Future()
        done.set_result(work(*args))
        return done

@contextlib.contextmanager
def server_on_the_cpu(start: Callable, config):
    "In place of a server on the GPU: the same one where there is none, of a model as small as it can be"
    small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
                 head_dim=16)
    (Path(config.model)/'config.json').write_text(json.dumps(SHAPE | small))
    with start(replace(config, device='cpu', attention='auto', max_running_req=4, num_pages=200)) as url:
        yield url

def check_step(name: str) -> dict:
    """All figures of a step of `gpu_check`, of a small model and few requests; they mean nothing, but every
    line has run"""
    import gpu_check
    from minisgl_lit.kernels import trials
    from minisgl_lit.tools import load_generator, roofline
    def make_llm(path, graphs, make=gpu_check.make_llm, **settings):
        return make(path, graphs, **settings | dict(max_running_req=4, num_pages=2000))
    def measured(model, dtype, where):
        return roofline.Roofline(roofline.ModelCosts.of(model, dtype), 1e12, 1e14)
    def once(work, where, seconds=0):
        work()
        return 1e-3
    def apart(function, *words, **variables): return getattr(gpu_check, function)(*words)
    def spans(work, n):
        return [(10 * i, 10 * i + 9, 'kernel') for i in range(n) if not work()] or [(0, 1, 'kernel')]
    device.broken = ''
    def is_compiled(module):
        return (name != 'late' or module.startswith('batch') and 'e4m3' not in module
                and not module.endswith('sm90') and 'attention' not in module)
    changes = [(gpu_check, dict(make_llm=make_llm, QWEN3_06B=SHAPE, ThreadPoolExecutor=AtOnce,
        ProcessPoolExecutor=AtOnce, apart=apart, kernel_spans=spans, is_compiled=is_compiled,
                                PROMPTS=(8, 300), PROMPT_TOKENS=600, CALLERS=(2, 3), SERVE_SECONDS=.5,
                                CLIENTS=2, ASKED=dict(input_len=20, output_len=4))),
               (trials, dict(largest_error=compare_shapes)),
               (load_generator, dict(own_server=partial(server_on_the_cpu, load_generator.own_server))),
               (roofline, dict(best_time=once, measure_roofline=measured,
                               workloads=dict(bench256=roofline.WorkloadShape(6, (10, 40), (3, 9)))))]
    with contextlib.ExitStack() as stack:
        for module, names in changes: stack.enter_context(patch.multiple(module, **names))
        stack.enter_context(patch.object(device, 'may_wait', True))
        return {k: v for part in gpu_check.STEPS[name](gpu_check.parse([])) for k, v in part.items()}

def main(names: list[str]) -> None:
    torch._C._ensureCUDADeviceGuardSet()
    from flashinfer.jit.core import JitSpec
    from minisgl_lit.kernels import library
    changes = dict(find_triton=fake_triton, find_spec=lambda name: True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(library, **changes))
        from minisgl_lit.kernels import kernel_trials  # only now, since its kernels look for Triton
        stack.enter_context(patch.multiple(kernel_trials, stopwatch=all_alike, find_spec=lambda name: True))
        for name, o in CUDA.items(): stack.enter_context(patch.object(torch.cuda, name, o))
        stack.enter_context(patch.object(torch.Tensor, 'record_stream', lambda *_: None))
        stack.enter_context(patch.object(JitSpec, 'build_and_load', build_and_load))
        stack.enter_context(FakeGpu())
        for name in names or [*CASES, *TEMPERATURES, *LAYERS]:
            try:
                if name in LAYERS: told = layer_counts(LAYERS[name])
                else:
                    told = (run(CASES[name]) if name in CASES else step_counts(TEMPERATURES[name])
                            if name in TEMPERATURES else dict(figures=check_step(name)))
                print(json.dumps(dict(name=name, ok=True, **told)), flush=True)
            except Exception as e:
                at = [f'{Path(o.filename).name}:{o.lineno} {o.line}'
                      for o in traceback.extract_tb(e.__traceback__)]
                print(json.dumps(dict(name=name, ok=False, error=f'{type(e).__name__}: {e}'[:500],
                                      at=at[-8:])), flush=True)

if __name__ == '__main__': main(sys.argv[1:])
