"""Proves and times the GPU engine: each step runs in a process of its own, within what is left of the time; a
step that fails is recorded and the others go on. Each step is a generator of figures, and what it has told
before it fails or is stopped is kept. A line of JSON is printed at the end of each step, and all of them are
written to one file; `tests/gpu_check` starts it.

FlashInfer's modules, compiled ahead, may lie in `.gpu/` as flashinfer-VERSION-smARCH-aot.tgz; they are
unpacked into the FlashInfer that is imported if version and architecture are the same. What is not among
them, and that most steps can do without, is compiled by the last step."""
import argparse, fnmatch, json, os, platform, re, shutil
import signal, subprocess, sys, tarfile, tempfile, time, traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path

VERSION, ROOT = 3, Path(__file__).parents[1]

# ---- the pure parts: what is asked, what is told -----------------------------------------------------------

@dataclass
class Step:
    "What came of one step."
    name: str
    ok: bool = False
    seconds: float = 0.
    error: str | None = None    # why it failed, in one line
    figures: dict = field(default_factory=dict)

# seconds; in the order in which they run: what others need, then what is most worth knowing, and what has to
# be compiled comes last
LIMITS = dict(
    machine=12, modules=12, recorded=12, prefill=25, bench256=58, profile=16, sampling=14, attend=18, fp8=16,
    serve=66, first_start=42, kernels=18, low=12, experts=12, adapters=14, parity=21, equality=19, tests=17,
    cells=6, sanitizer=6, late=4)

def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser('tests/gpu_check', description=__doc__)
    parser.add_argument('steps', nargs='*', help=f'which of {", ".join(LIMITS)} (default: all)')
    parser.add_argument('--out', type=Path, default=Path('gpu_check.json'),
                        help='the JSON to write (default: gpu_check.json)')
    parser.add_argument('--seconds', type=float, default=420, help='for all together (default: 420)')
    parser.add_argument('--wide', action='store_true',
                        help='all GPU tests, not only those of the shape that is timed')
    # run this step in this process, and write its figures
    parser.add_argument('--only', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [o for o in args.steps if o not in LIMITS]:
        parser.error(f'steps must be {", ".join(LIMITS)}, not {unknown[0]!r}')
    if args.seconds <= 0: parser.error(f'--seconds must be above 0, not {args.seconds:g}')
    args.steps = args.steps or list(LIMITS)
    return args

def shares(names: list[str], left: float) -> float:
    """Seconds that the first of these steps may take: what the others, with their limits, do not need; its
    part if that is too little"""
    limit, rest = LIMITS[names[0]], sum(LIMITS[o] for o in names[1:])
    return max(left - rest if left >= limit + rest else left * limit / (limit + rest), 0)

def busy(spans: Iterable[tuple[float, float]]) -> float:
    "How long at least one of these spans lasts"
    total, end = 0., float('-inf')
    for a, b in sorted(spans):
        total += max(b - max(a, end), 0)
        end = max(end, b)
    return total

def fitting_archives(folder: Path, version: str, arch: str) -> list[Path]:
    """Archives of compiled modules for this FlashInfer, '0.6.13', and this architecture, '90'; 90a is 90 with
    its own instructions"""
    found = [(o, re.fullmatch(r'flashinfer-(.+)-sm(\d+)[a-z]?-aot\.tgz', o.name))
             for o in sorted(folder.glob('*.tgz'))]
    return [o for o, m in found if m and m.groups() == (version, arch)]

def module_state(pattern: str, aot: Iterable[str], kept: Iterable[str]) -> str:
    "How a module will come: 'aot', 'kept' from an earlier compilation, or 'compiled' now"
    return 'aot' if fnmatch.filter(aot, pattern) else 'kept' if fnmatch.filter(kept, pattern) else 'compiled'

def report(steps: list[Step], seconds: float) -> dict:
    "The JSON"
    return dict(version=VERSION, ok=bool(steps) and all(o.ok for o in steps), seconds=round(seconds, 1),
                host=f'{platform.system()} {platform.machine()}',
                steps={o.name: {k: v for k, v in asdict(o).items() if k != 'name'} for o in steps})

def check_report(told: dict) -> None:
    "Raise `ValueError` at the first thing that is not as `report` writes it"
    kinds = dict(version=int, ok=bool, seconds=(int, float), host=str, steps=dict)
    for name, kind in kinds.items():
        if not isinstance(told.get(name), kind):
            raise ValueError(f'{name} must be {kind}, not {told.get(name)!r}')
    for name, step in told['steps'].items():
        if name not in LIMITS: raise ValueError(f'unknown step {name!r}')
        if set(step) != {f.name for f in fields(Step)} - {'name'}:
            raise ValueError(f'{name} has {sorted(step)}')
        if step['ok'] == bool(step['error']): raise ValueError(f'{name} must have an error or be ok')

def read_figures(text: str) -> dict:
    "What a step has told, in lines of JSON; the last may have been cut off when it was stopped"
    whole = text[:text.rfind('\n') + 1]
    return {k: v for o in whole.splitlines() for k, v in json.loads(o).items()}

def line(o: Step) -> str:
    "The part of a step, as one line of JSON with four digits"
    def short(x):
        return (float(f'{x:.4g}') if isinstance(x, float) else {k: short(v) for k, v in x.items()}
                if isinstance(x, dict) else x)
    return json.dumps({o.name: {k: short(v) for k, v in asdict(o).items() if k != 'name'}})

# ---- models and runtimes -----------------------------------------------------------------------------------

QWEN3_06B = dict(
    architectures=['Qwen3ForCausalLM'], model_type='qwen3', vocab_size=151936, hidden_size=1024,
    intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
    tie_word_embeddings=True, torch_dtype='bfloat16', hidden_act='silu', attention_bias=False,
    eos_token_id=151645)

@contextmanager
def shape_of_qwen3(words: bool = False):
    "A folder with nothing but the shape of Qwen3-0.6B, and a word for each token if there shall be text"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder)/'config.json').write_text(json.dumps(QWEN3_06B))
        if words: write_words(Path(folder)/'tokenizer.json', QWEN3_06B['vocab_size'])
        yield folder

def write_words(path: Path, n: int) -> None:
    "A tokenizer of so many words, each a token that is decoded as bytes"
    from tokenizers import Tokenizer, decoders, models
    told = Tokenizer(models.BPE({f'Ġ{i:x}': i for i in range(n)}, []))
    told.decoder = decoders.ByteLevel()
    told.save(str(path))

# as the field's reference run needs it
SERVED = dict(dummy_weights=True, max_running_req=256, max_seq_len=2560, page_size=16)

def make_llm(path, graphs: bool, **settings):
    "An `LLM` on the GPU with FlashInfer, with recorded decode steps or without"
    from minisgl_lit.llm import LLM
    return LLM(str(path), **dict(device='cuda', attention=compiled_attention(),
                                 cuda_graph_max_bs='auto' if graphs else 0) | settings)

def runtime_of(llm): return llm.runtime if hasattr(llm, 'runtime') else llm._driver.runtime

def give_back() -> None:
    "The next engine shall find the memory that this one had"
    import gc
    import torch
    gc.collect()
    torch.cuda.empty_cache()

def timed(scheduler) -> dict:
    "Count a scheduler's steps from now on, the seconds they take, and how many of these wait for the device"
    from minisgl_lit.core.device import CudaEvent
    told, step, wait = dict(steps=0, seconds=0., waited=0.), scheduler.step, CudaEvent.synchronize
    def counted_step():
        began = time.perf_counter()
        try: return step()
        finally:
            told['steps'] += 1
            told['seconds'] += time.perf_counter() - began
    def counted_wait(event):
        began = time.perf_counter()
        try: wait(event)
        finally: told['waited'] += time.perf_counter() - began
    scheduler.step, CudaEvent.synchronize = counted_step, counted_wait
    return told

# ---- the steps: each gives its figures as they come, or raises ---------------------------------------------

Figures = Iterator[dict]

def arch() -> str:
    import torch
    return '{}{}'.format(*torch.cuda.get_device_capability())

def flashinfer_folder() -> Path:
    "Where the FlashInfer that would be imported lies"
    from minisgl_lit.core.attention.library import set_environment
    set_environment()
    import flashinfer
    return Path(flashinfer.__file__).parent

def machine(args) -> Figures:
    "What there is; compiled modules that were taken along are unpacked"
    import torch
    import transformers
    from minisgl_lit.tools.doctor import examine
    yield dict(gpu=torch.cuda.get_device_name(), arch=f'sm_{arch()}', torch=torch.__version__,
               cuda=torch.version.cuda, transformers=transformers.__version__,
               python=platform.python_version(), cores=os.cpu_count(),
               memory_gib=torch.cuda.mem_get_info()[1] / 2**30, free_gib=torch.cuda.mem_get_info()[0] / 2**30)
    folder = flashinfer_folder()
    import flashinfer
    archives = fitting_archives(ROOT/'.gpu', flashinfer.__version__, arch())
    for path in archives:
        with tarfile.open(path) as archive: archive.extractall(folder/'data'/'aot', filter='data')
    yield dict(flashinfer=flashinfer.__version__, unpacked=[o.name for o in archives])
    # no folders of this machine
    yield dict(doctor={o.name: re.sub(r'(?<!\S)/\S*/', '', o.found) if o.found else None for o in examine()})

SHAPES = [(16, 8, 128)]   # query heads, key and value heads, head_dim: what is timed

def module_of(kernel: str, stored: str = 'bf16') -> str:
    """What FlashInfer compiles for a kernel of attention, of the shape that is timed, over a cache of that
    kind: a pattern of one name"""
    if kernel == 'batch_attention': return f'batch_attention_*dtype_kv_{stored}_*head_dim_qk_128_*'
    kind = 'decode' if kernel == 'cuda_cores' else 'prefill'
    # False or True
    return (f'batch_{kind}_*dtype_q_bf16_dtype_kv_{stored}_*head_dim_qk_128_*'
            + ('_sm90' if kernel == 'fa3' else 'e'))

def is_compiled(module: str) -> bool:
    "Whether FlashInfer need not compile it any more"
    from minisgl_lit.kernels.trials import compiled_modules
    flashinfer_folder()
    return bool(fnmatch.filter(compiled_modules(), module))

def compiled_attention() -> str:
    """FlashInfer, by the kernels that are the quickest; but one that most GPUs do without is compiled for no
    step but the last"""
    return 'flashinfer' if arch() != '90' or is_compiled(module_of('fa3')) else 'fa2,flashinfer'

def all_trials() -> dict:
    """Every kernel of FlashInfer once: the small ones, and attention for the shape that is timed, by all
    kernels that this card may have"""
    from functools import partial
    from types import SimpleNamespace
    import torch
    from minisgl_lit.kernels.attention_choice import attention_trial
    from minisgl_lit.core.attention.flashinfer import KERNELS
    from minisgl_lit.kernels.library import small_trials
    from minisgl_lit.kernels.kv_formats import FP8
    def attention(kind: str, kernel: str, stored: torch.dtype = torch.bfloat16):
        return attention_trial(kind, kernel, torch.bfloat16, SHAPES[0], (None,), stored)
    told, methods = small_trials(), [o for o in KERNELS['prefill'] if o != 'fa3' or arch() == '90']
    for prefill in methods: told[f'prefill_{prefill}'] = attention('prefill', prefill)
    for decode in KERNELS['decode']:
        told[f'decode_{decode}'] = attention('decode', decode)
        told[f'decode_fp8_{decode}'] = attention('decode', decode, FP8)
    return {name: SimpleNamespace(module=o.compiles, run=partial(o.run, torch.device('cuda', 0)))
            for name, o in told.items()}

def is_late(name: str, trial) -> bool:
    "Whether a kernel is left to the last step: the others do without, and it has to be compiled"
    return name.startswith(('prefill_fa3', 'decode_fp8')) and not is_compiled(trial.module)

def triton_trials() -> dict:
    "Our kernels in Triton, once, against their definitions: their errors"
    from functools import partial
    import torch
    from minisgl_lit.adapters.low_rank_triton import adapters_trial
    from minisgl_lit.kernels.fp8 import FP8_TRIAL
    from minisgl_lit.kernels.grouped_matmul import experts_trial
    from minisgl_lit.kernels.page_list import PAGES_TRIAL
    from minisgl_lit.kernels.sampling import SAMPLING_TRIAL
    from minisgl_lit.kernels.gpu_operations import heads_trial
    told = dict(pages=PAGES_TRIAL, heads=heads_trial(False), heads_fp8=heads_trial(True),
                sampling=SAMPLING_TRIAL, fp8=FP8_TRIAL, adapters=adapters_trial(torch.bfloat16),
                experts=experts_trial(torch.bfloat16, False), experts_fp8=experts_trial(torch.bfloat16, True))
    return {name: partial(o.run, torch.device('cuda', 0)) for name, o in told.items()}

def heads_us(n: int, times: int = 20) -> dict:
    "Microseconds of QK norm, RoPE and KV store in a graph, step by step and in one kernel"
    import torch
    from minisgl_lit.core.engine.cuda_graph import CudaCapture
    from minisgl_lit.kernels.fused_heads import norm_rope_store
    from minisgl_lit.kernels.gpu_operations import gpu_operations, stored_heads
    from minisgl_lit.core.models.operations import Operations
    from minisgl_lit.tools.roofline import best_time
    pool, table, batch = decoding_setup(16, n, 64)
    b, ops = batch([63] * n, [64] * n), gpu_operations(torch.device('cuda'), torch.bfloat16)
    slots = pool.slots(0, torch.from_numpy(b.out_loc).cuda())
    x, norms = (torch.randn(n, 1024, device='cuda').bfloat16(),
                tuple(torch.ones(2, 128, device='cuda').bfloat16()))
    weight, angles = (torch.randn(32 * 128, 1024, device='cuda').bfloat16() * .03,
                      ops.rope_angles(torch.arange(n, device='cuda'), torch.rand(64, device='cuda'), x.dtype))
    told = {}
    for name, kernel in dict(matmul_alone='none', steps=None, fused=norm_rope_store).items():
        def work():
            for _ in range(times):
                if kernel == 'none': out = torch.nn.functional.linear(x, weight)
                elif kernel: out = stored_heads(kernel, x, weight, None, norms, 1e-6, angles, slots)[0]
                else: out = Operations.qkv_heads(ops, x, weight, None, norms, 1e-6, angles, 8, slots)[0]
            return [out]
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            replay, _ = CudaCapture()(work)
            told[f'heads_{name}_us'] = 1e6 * best_time(replay, 'cuda', .1) / times
    return told

def pages_us(n: int) -> dict:
    """Microseconds of the list of pages in a graph, of a table for 40,960 positions: in torch, and in one
    kernel"""
    import torch
    from minisgl_lit.core.engine.cuda_graph import CudaCapture
    from minisgl_lit.kernels.page_list import list_pages, plain_list
    from minisgl_lit.tools.roofline import best_time
    rows, positions = torch.arange(n, device='cuda'), torch.full((n,), 999, device='cuda')
    table = torch.zeros(n + 1, 2560, dtype=torch.int32, device='cuda')
    indptr, told = torch.arange(n + 1, dtype=torch.int32, device='cuda') * 63, {}
    indices = torch.zeros(table.numel() + 1, dtype=torch.int32, device='cuda')
    for name, kernel in dict(torch=plain_list, kernel=list_pages).items():
        def work(): return [kernel(indices, table, rows, positions, positions, indptr, 16), indices][1:]
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            replay, _ = CudaCapture()(work)
            told[f'pages_{name}_us'] = 1e6 * best_time(replay, 'cuda', .1)
    return told

def load_modules(trials: dict) -> Figures:
    """Load or compile the module of each, all at once; how it came, how long that took, and what the compiler
    said if it failed"""
    from flashinfer.jit import env
    aot, kept = ([o.stem for o in Path(folder).glob('*/*.so')]
                 for folder in (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR))
    first = {o.module: o for o in reversed(trials.values())}    # one trial for each module
    def load(trial) -> dict:
        began, told = time.perf_counter(), dict(how=module_state(trial.module, aot, kept))
        try: trial.run()
        except Exception as e: told['error'] = str(e)[-800:]
        return told | dict(seconds=time.perf_counter() - began)
    with ThreadPoolExecutor(len(first) or 1) as pool:    # each compiles in processes of its own
        waiting = {pool.submit(load, trial): next(k for k, o in trials.items() if o is trial)
                   for trial in first.values()}
        failed = []
        for done in as_completed(waiting):
            told = done.result()
            failed += [waiting[done]] * ('error' in told)
            yield {waiting[done]: told}
    if failed: raise AssertionError(f'these modules cannot be used: {", ".join(failed)}')

def modules(args) -> Figures:
    "FlashInfer's modules: what is there is loaded, what all steps need is compiled"
    yield from load_modules({name: o for name, o in all_trials().items() if not is_late(name, o)})

def late(args) -> Figures:
    """What had to be compiled, and was left to the end: how long it takes, and then the figures that were
    left out of the other steps"""
    names = [name for name, (module, _) in parts().items() if not is_compiled(module)]
    yield dict(parts=names)
    if not names: return
    yield from load_modules({name: o for name, o in all_trials().items() if is_late(name, o)})
    yield from run_parts(names)

def parts() -> dict:
    "What other steps consist of, by name: a module of FlashInfer, and the figures that need it"
    attend = {f'attend_{o}': (module_of(o), partial(attend_part, o))
              for o in ('cuda_cores', 'tensor_cores', 'batch_attention')}
    cache = {f'fp8_{o}': (module_of(o, 'e4m3'), partial(fp8_part, o)) for o in ('cuda_cores', 'tensor_cores')}
    prefill = {f'prefill_{o}': (module_of(o), partial(prefill_part, o)) for o in ('fa2', 'fa3') if o != 'fa3'
               or arch() == '90'}
    return prefill | attend | cache

def run_parts(names: Iterable[str]) -> Figures:
    "Some parts; one that fails keeps no other from its turn"
    failed, all_parts = [], parts()
    for name in names:
        try: yield from all_parts[name][1]()
        except Exception as e:
            failed.append(name)
            traceback.print_exc()
            yield {name: str(e)[:300]}
    if failed: raise AssertionError(f'these parts fail: {", ".join(failed)}')

def parts_of(step: str) -> Figures:
    "The parts of a step; those that need a compiler are left to the last step"
    names = {name: is_compiled(module) for name, (module, _) in parts().items()
             if name.startswith(f'{step}_')}
    if not all(names.values()): yield dict(late=[name for name, now in names.items() if not now])
    yield from run_parts(name for name, now in names.items() if now)

def decoding_setup(page_size: int, n: int, length: int, layers: int = 1):
    "A pool of random keys and values, a table with pages in a random order, and a way to make batches"
    import numpy as np
    import torch
    from minisgl_lit.core.request import Batch, ForwardMode
    from minisgl_lit.core.kv_cache.pool import KVPool
    from minisgl_lit.core.kv_cache.table import TableManager
    pool = KVPool(layers, n * -(-length // page_size), page_size, 8, 128, torch.bfloat16, 'cuda')
    pool.buffer.normal_()
    table = TableManager(n, length, page_size, pool.dummy_page, 'cuda')
    table.write(*np.indices((n, -(-length // page_size))).reshape(2, -1),
                np.random.default_rng(0).permutation(pool.num_pages).astype(np.int32))
    table.flush()
    def batch(cached, lens, mode=ForwardMode.MIXED):
        cached, lens = np.array(cached), np.array(lens)
        rows = np.arange(len(lens))
        owner, at = rows.repeat(lens - cached), np.concatenate([np.arange(*o) for o in zip(cached, lens)])
        return Batch([], mode, 1, rows, cached, lens, owner, at, table.slots(owner, at), rows)
    return pool, table, batch

def random_qkv(batch):
    import torch
    return torch.randn(len(batch.positions), 32, 128, device='cuda').bfloat16().split([16, 8, 8], 1)

def kernels(args) -> Figures:
    """Each kernel once, small, with its error against torch; attention of each kind at length; the host's
    part of a plan"""
    import torch
    from minisgl_lit.kernels.attention_choice import choose_attention
    from minisgl_lit.core.attention.flashinfer import kind_of
    from minisgl_lit.core.attention.torch import TorchAttention
    from minisgl_lit.kernels.trials import TOLERANCE, largest_error
    bad = []
    for name, run in ({k: o.run for k, o in all_trials().items() if not is_late(k, o)}
                      | triton_trials()).items():
        try:
            told = run()
        except Exception as e: told = str(e)[-300:]
        bad += [name] * (not isinstance(told, float) or not told <= TOLERANCE)
        yield {f'{name}_error': told}
    n, length = 256, 1024
    pool, table, batch = decoding_setup(16, n, length)
    ours, reference = (choose_attention(compiled_attention(), pool, table.page_table, num_heads=16),
                       TorchAttention(pool, table.page_table))
    for b in (batch([99, 7, 1023], [100, 8, 1024]), batch([0, 64, 1000], [300, 70, 1024]),
              batch([0, 0], [300, 17])):
        x = random_qkv(b)
        error = largest_error([(ours.forward(*x, 0, ours.prepare(b)),
                                reference.forward(*x, 0, reference.prepare(b)))])
        bad += [kind_of(b)] * (not error <= TOLERANCE)
        yield {f'{kind_of(b)}_long_error': error}
    full = batch([length - 1] * n, [length] * n)
    static = ours.static(full)
    def host_us(f):   # without waiting for the device
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            f()
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2] * 1e6
    yield dict(plan_us=host_us(lambda: ours.prepare(full)),
               update_us=host_us(lambda: ours.update(static, full)))
    yield heads_us(n)
    yield pages_us(n)
    if bad: raise AssertionError(f'these kernels say something else than torch: {", ".join(bad)}')

def recorded(args) -> Figures:
    """A recorded step of the whole model against the same padded rows launched one by one: equal to the bit,
    for 20 batches of growing lengths"""
    import numpy as np
    import torch
    from minisgl_lit.kernels.attention_choice import choose_attention
    from minisgl_lit.core.request import ForwardMode
    from minisgl_lit.core.device import CudaStream
    from minisgl_lit.core.engine.cuda_graph import CudaCapture, CudaGraphs, GraphEngine, padded
    from minisgl_lit.core.engine.engine import Engine
    from minisgl_lit.core.kv_cache.table import dummy_batch
    from minisgl_lit.core.models.checkpoint import read_config
    from minisgl_lit.core.models.decoder import Decoder
    from minisgl_lit.formats.dummy_weights import dummy_weights
    from minisgl_lit.kernels.gpu_operations import gpu_operations
    with shape_of_qwen3() as folder: config = read_config(Path(folder))
    n, size = 48, 64
    pool, table, batch = decoding_setup(16, size, 1024, config.num_layers)
    attention, stream = (choose_attention(compiled_attention(), pool, table.page_table, num_heads=16),
                         CudaStream())
    cuda = torch.device('cuda')
    model = Decoder(config, dummy_weights(config, torch.bfloat16, cuda),
                    operations=gpu_operations(cuda, torch.bfloat16))
    dummy = dummy_batch(table)
    graphs = CudaGraphs(model, attention, table.token_pool, dummy, [size], CudaCapture())
    parts = model, attention, table.token_pool, stream
    began = time.perf_counter()
    replaying, plain = GraphEngine(*parts, graphs), Engine(*parts)
    yield dict(capture_s=time.perf_counter() - began)
    def logits(engine, b):
        launched = engine.forward(b)
        stream.synchronize()
        return launched.logits[:n].float()   # a copy
    errors, unpadded = [], []
    for i in range(20):
        lens = [1 + (k * 7 + i * 50) % 1000 for k in range(n)]
        b = batch([o - 1 for o in lens], lens, ForwardMode.DECODE)
        alike = replace(padded(b, dummy, size), sampled=np.arange(size))
        # as many rows, and fewer, for which kernels add up in another order
        want, other = logits(plain, alike), logits(plain, b)
        got = logits(replaying, b)
        errors.append(float((got - want).abs().max() / want.abs().max()))
        unpadded.append(float((got - other).abs().max() / want.abs().max()))
        torch.cuda.synchronize()
    yield dict(rows=dict(requests=n, replayed=size, one_by_one=len(alike.sampled)), worst_error=max(errors),
               errors=errors, unpadded=[float(f'{o:.2g}') for o in unpadded])
    if not max(errors) == 0:
        raise AssertionError('a recorded step says something else than its rows one by one: '
                             f'{max(errors):.3g} of the largest logit')

def decode_ms(runtime, n: int, context: int = 500, steps: int = 40, names: Sequence[str | None] = (None,),
              **params) -> float:
    """Milliseconds of a decode step of `n` requests, in the steady state; greedy, if no parameters say how to
    sample; of adapters of these names, in turn"""
    import torch
    from minisgl_lit.text.sampling_params import SamplingParams
    s = runtime.scheduler
    for i in range(n):
        s.add(f'd{i}', [i % 1000 + 1] * context,
              SamplingParams(ignore_eos=True, lora=names[i % len(names)], **params or GREEDY))
    def wait() -> int:
        torch.cuda.synchronize()
        return s.stats()['steps']
    while s.stats()['waiting'] or s.stats()['running'] < n: s.step()
    for _ in range(10): s.step()
    before, began = wait(), time.perf_counter()
    for _ in range(steps): s.step()
    done, seconds = wait() - before, time.perf_counter() - began
    runtime.scheduler.abort_all('d')
    while s.has_work: s.step()
    return 1e3 * seconds / done

# tokens: of a prompt, of all that are computed together
PROMPTS, PROMPT_TOKENS = (128, 512, 2048, 8192, 32768), 65536

def prompt_seconds(llm, prompts: list[list[int]]) -> float:
    "Until all of these prompts, of which nothing is in the cache, have a token"
    from minisgl_lit.text.sampling_params import SamplingParams
    runtime_of(llm).scheduler.flush_cache()
    began = time.perf_counter()
    outs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True, **GREEDY))
    if errors := [o.error for o in outs if o.error]: raise AssertionError(errors[0])
    return time.perf_counter() - began

def prefill_part(kernel: str) -> Figures:
    """Prompt tokens a second of the whole model by the length of the prompts, with the share of this GPU's
    limit; and microseconds of a layer's attention"""
    from minisgl_lit.tools.roofline import WorkloadShape, measure_roofline
    with shape_of_qwen3() as folder:
        with make_llm(folder, False,
                      **SERVED | dict(attention=f'{kernel},cuda_cores', max_seq_len=PROMPTS[-1] + 8)) as llm:
            runtime = runtime_of(llm)
            limits = measure_roofline(runtime.model_config, runtime.engine.model.head.dtype,
                                      runtime.engine.device)
            for length in PROMPTS:
                n = max(PROMPT_TOKENS // length, 1)
                prompts = WorkloadShape(n, (length, length), (1, 1)).draw(runtime.model_config.vocab_size,
                    seed=length).prompts
                best = min(prompt_seconds(llm, prompts), prompt_seconds(llm, prompts))
                yield {f'{kernel}_{length}': dict(tokens_per_s=n * length / best,
                    share=limits.prefill([length] * n).seconds / best)}
        del llm, runtime
        give_back()
    works = prefill_works(kernel)   # each of which is timed before the next one is prepared
    yield {f'{kernel}_layer': {f'{name}_us': recorded_us(work)
                               for name, work in zip(('fresh', 'cached'), works)}}

def prefill(args) -> Figures:
    "Prompts: tokens a second of the whole model by their length, by FlashInfer's kernels"
    yield from parts_of('prefill')

GREEDY = dict(temperature=0.)
# the last as Qwen3's makers advise
KINDS = dict(greedy=GREEDY, random=dict(temperature=.6), qwen3=dict(temperature=.6, top_p=.95, top_k=20))

def compilations(runtime) -> int:
    "Kernels of ours that were compiled since the engine has started"
    return runtime.scheduler.counts.get('compilations', 0)

def bench_run(llm, counts: dict, work, params: dict) -> dict:
    """A workload, once: tokens a second, what the host does and waits for in a step, and kernels that were
    compiled meanwhile"""
    from minisgl_lit.text.sampling_params import SamplingParams
    compiled = compilations(runtime_of(llm))
    llm.generate(work.prompts[:8], SamplingParams(max_tokens=4, ignore_eos=True, **params))   # warm
    runtime_of(llm).scheduler.flush_cache()
    before, began = dict(counts), time.perf_counter()
    outs = llm.generate(work.prompts,
                        [SamplingParams(max_tokens=n, ignore_eos=True, **params) for n in work.output_lens])
    seconds = time.perf_counter() - began
    if errors := [o.error for o in outs if o.error]: raise AssertionError(errors[0])
    n, steps, waited = (sum(len(o.token_ids) for o in outs), counts['steps'] - before['steps'],
                        counts['waited'] - before['waited'])
    host = counts['seconds'] - before['seconds'] - waited
    return dict(tokens_per_s=n / seconds, seconds=seconds, steps=steps, host_ms_per_step=1e3 * host / steps,
                waited_ms_per_step=1e3 * waited / steps,
                output_tokens=n, cached_tokens=sum(o.cached_tokens for o in outs),
                compilations=compilations(runtime_of(llm)) - compiled)

def bench256(args) -> Figures:
    """The field's reference run: greedy, at T = 0.6, and as Qwen3's makers advise; greedy without overlap,
    too. The share of this GPU's limit, and milliseconds of a decode step by batch size"""
    from minisgl_lit.tools.roofline import lower_bound, measure_roofline, workloads
    late = 0
    with shape_of_qwen3() as folder:
        for overlap in (True, False):
            began, name = time.perf_counter(), 'overlap' if overlap else 'normal'
            with make_llm(folder, True, **SERVED, overlap=overlap) as llm:
                runtime = runtime_of(llm)
                yield {f'{name}_start_s': time.perf_counter() - began, 'memory': str(runtime.memory),
                       'recordings': len(runtime.engine.steps.sizes)}
                work, told = workloads['bench256'].draw(runtime.model_config.vocab_size, seed=0), {}
                counts, sizes = (timed(runtime.scheduler),
                                 [o for o in (256, 128, 32, 1) if o <= runtime.config.max_running_req])
                for kind in KINDS if overlap else ['greedy']:
                    told[kind] = bench_run(llm, counts, work, KINDS[kind])
                    yield {f'{name}_{kind}': told[kind]}
                    yield {f'{name}_{kind}_step_ms': {str(n): decode_ms(runtime, n, **KINDS[kind])
                        for n in sizes}}
                if overlap:
                    limits = measure_roofline(runtime.model_config, runtime.engine.model.head.dtype,
                                              runtime.engine.device)
                    whole, n = (sum(o.seconds for o in lower_bound(limits, work, 256)),
                                told['greedy']['output_tokens'])
                    yield dict(input_tokens=sum(map(len, work.prompts)), output_tokens=n,
                               limit_tokens_per_s=n / whole,
                               share_of_limit=told['greedy']['tokens_per_s'] * whole / n,
                               memory_read_gb_s=limits.bandwidth / 1e9, product_tflop_s=limits.peak_flops
                               / 1e12, limit_one_request_ms=1e3 * limits.decode([500]).seconds)
                late += compilations(runtime)
            del llm, runtime
            give_back()
    if late: raise AssertionError(f'{late} kernels were compiled after the start, while requests waited')

def kernel_spans(work: Callable[[], object], n: int) -> list[tuple[float, float, str]]:
    "When each kernel and copy of `n` calls began and ended on the device, in microseconds, and its name"
    import torch
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(n): work()
        torch.cuda.synchronize()
    return [(o.time_range.start, o.time_range.end, o.name)
            for o in seen.events() if o.device_type == torch.autograd.DeviceType.CUDA]

def longest(spans: Iterable[tuple[float, float, str]], n: int) -> dict:
    "Microseconds of the fifteen kernels that take longest, in each of `n` calls"
    by_name: Counter[str] = Counter()
    for a, b, name in spans: by_name[name[:120]] += (b - a) / n
    return {name: round(us, 1) for name, us in by_name.most_common(15)}

def profile(args) -> Figures:
    "Steady decode of one request and of 256: how busy the GPU is, and the kernels that take longest"
    from minisgl_lit.text.sampling_params import SamplingParams
    with shape_of_qwen3() as folder:
        with make_llm(folder, True, **SERVED, overlap=True) as llm:
            runtime, n = runtime_of(llm), 30
            s = runtime.scheduler
            for requests in (1, runtime.config.max_running_req):
                for i in range(requests):
                    s.add(f'p{i}', [i % 1000 + 1] * 500,
                          SamplingParams(max_tokens=1000, ignore_eos=True, **GREEDY))
                while s.stats()['waiting'] or s.stats()['running'] < requests: s.step()
                for _ in range(20): s.step()
                spans = kernel_spans(s.step, n)
                if not spans: raise AssertionError('the profiler saw no kernel')
                span = max(o[1] for o in spans) - min(o[0] for o in spans)
                yield {f'n{requests}': dict(busy_share=busy(o[:2] for o in spans) / span,
                                            step_ms=span / n / 1e3, kernels_per_step=len(spans) / n)}
                yield {f'n{requests}_longest_us': longest(spans, n)}
                runtime.scheduler.abort_all('p')
                while s.has_work: s.step()

def host_parts(step: Callable[[], object], n: int) -> dict:
    """Microseconds of a call of `step` by function, without what it calls: all together, and the fifteen
    longest"""
    import cProfile, pstats
    seen = cProfile.Profile()
    for _ in range(n): seen.runcall(step)
    spent = {f'{Path(file).stem}:{name}': 1e6 * own / n
             for (file, _, name), (_, _, own, _, _) in pstats.Stats(seen).stats.items()}
    return (dict(all=sum(spent.values())) | {o: round(spent[o], 1)
                                             for o in sorted(spent, key=spent.get)[:-16:-1]})

def low(args) -> Figures:
    """Few requests, where the host shows: decode steps a second with overlap and without, the recording
    alone, and the host's parts of a step of one request"""
    import torch
    from minisgl_lit.text.sampling_params import SamplingParams
    from minisgl_lit.tools.roofline import best_time
    with shape_of_qwen3() as folder:
        for overlap in (True, False):
            name = 'overlap' if overlap else 'normal'
            with make_llm(folder, True, dummy_weights=True, overlap=overlap, max_running_req=16,
                          max_seq_len=2560, page_size=16) as llm:
                runtime = runtime_of(llm)
                for n in (1, 2, 4, 8, 16):
                    if n > runtime.config.max_running_req: continue
                    seconds = decode_ms(runtime, n) / 1e3
                    told = {f'{name}_steps_per_s': 1 / seconds}
                    if overlap:   # the kernels of the last step once more, over and over
                        with torch.cuda.stream(runtime.engine.stream.stream):
                            alone = best_time(runtime.engine.steps.captured[n].replay, 'cuda', .1)
                        told |= dict(recording_ms=1e3 * alone, share_of_recording=alone / seconds)
                    yield {f'{name}_{n}': told}
                s = runtime.scheduler
                s.add('p', [1] * 500, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))
                for _ in range(20): s.step()
                yield {f'{name}_host_us': host_parts(s.step, 100)}
            del llm, runtime, s
            give_back()

def batch_attention(pool, table, n: int, length: int):
    """Attention of a layer by FlashInfer's `BatchAttention`, which no engine of ours uses: it plans a batch
    that decodes, and returns what runs it"""
    import torch
    import flashinfer
    wrapper, page_size = flashinfer.BatchAttention('NHD', 'cuda'), pool.page_size
    pages, lens, pointers = (-(-length // page_size), torch.full((n,), length, dtype=torch.int32),
                             torch.arange(n + 1, dtype=torch.int32))
    wrapper.plan(pointers, pointers * pages, table.page_table[:n].flatten(), lens, 16, 8, 128, 128, page_size,
                 causal=True)
    q = torch.randn(n, 16, 128, device='cuda').bfloat16()
    k, v = (o.unflatten(0, (-1, page_size)) for o in (pool.k(0), pool.v(0)))
    return lambda: wrapper.run(q, (k, v), logits_soft_cap=0.)[0]

def prefill_works(kernel: str):
    """Attention of a layer to eight prompts of 1,024 tokens: as they come, and as second halves; each is
    prepared when it is asked for, and the one before has ended then"""
    import torch
    from minisgl_lit.kernels.attention_choice import Bench, Served, works
    served = Served(torch.device('cuda', 0), torch.bfloat16, SHAPES[0], (None,), 16, 256, 8192, 2560)
    return works(Bench(served), 'prefill', kernel)

def recorded_us(work: Callable[[], object], before: Callable[[], object] = lambda: None,
                times: int = 10) -> float:
    "Microseconds of some work, recorded ten times in a row behind something else"
    import torch
    from minisgl_lit.core.engine.cuda_graph import CudaCapture
    from minisgl_lit.tools.roofline import best_time
    def all_of_it():
        before()
        return [work() for _ in range(times)]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        replay, _ = CudaCapture()(all_of_it)
        return 1e6 * best_time(replay, 'cuda', .1) / times

def attend_us(pool, table, batch, kernel: str, n: int, length: int) -> dict:
    """Microseconds of attention in a layer that decodes: `attend_us` as it is, `us` with what belongs to it
    in a step: new keys and values are stored, in the format of the cache, and a tenth of the list of pages is
    made"""
    import torch
    from minisgl_lit.kernels.attention_choice import choose_attention
    if kernel == 'batch_attention':
        return dict(attend_us=recorded_us(batch_attention(pool, table, n, length)))
    ours, b = (choose_attention(f'fa2,{kernel}', pool, table.page_table, num_heads=16, dtype=torch.bfloat16),
               batch([length - 1] * n, [length] * n))
    qkv, m = random_qkv(b), ours.static(b)
    ours.list_pages(m)
    return dict(attend_us=recorded_us(lambda: ours.attend(*qkv, 0, m)),
                us=recorded_us(lambda: ours.forward(*qkv, 0, m), lambda: ours.list_pages(m)))

def attend_part(kernel: str) -> Figures:
    "Decoding 1, 32, 128 and 256 requests of 1,024 tokens by a kernel, with pages of 16 tokens and of 64"
    from minisgl_lit.tools.roofline import memory_bandwidth
    bandwidth, length = memory_bandwidth(2**30, 'cuda'), 1024
    for page_size in (16, 64):
        pool, table, batch = decoding_setup(page_size, 256, length)
        for n in (1, 32, 128, 256):
            told, n_bytes = attend_us(pool, table, batch, kernel, n, length), 2 * n * length * 8 * 128 * 2
            yield {f'n{n}_page{page_size}_{kernel}': told
                   | dict(attend_share=1e6 * n_bytes / told['attend_us'] / bandwidth)}

def attend(args) -> Figures:
    """A layer's attention in decoding, recorded: microseconds, and attention's share of the memory's
    bandwidth, by requests, page size and kernel; `BatchAttention` beside ours"""
    yield from parts_of('attend')

def sampling(args) -> Figures:
    """Microseconds of each stage after the layers, for 256 requests and the vocabulary of Qwen3; of what the
    engine runs each kernel, too"""
    import numpy as np
    import torch
    from minisgl_lit.core.request import SamplingArrays
    from minisgl_lit.core.engine.sampler import (inverse_cdf, plan_sampling, sample, top_k_threshold,
        top_p_threshold)
    from minisgl_lit.kernels.gpu_operations import gpu_operations
    from minisgl_lit.tools.roofline import best_time
    n, vocab = 256, QWEN3_06B['vocab_size']
    hidden, head = (torch.randn(n, 1024, device='cuda').bfloat16(),
                    torch.randn(vocab, 1024, device='cuda').bfloat16() * .03)
    logits = torch.nn.functional.linear(hidden, head).float()
    probs, u = torch.softmax(logits, -1), torch.rand(n, 1, device='cuda', dtype=torch.float64)
    k, p, at = torch.full((n, 1), 50., device='cuda'), torch.full((n, 1), .9, device='cuda'), np.arange(n)
    def arrays(**given):
        made = SamplingArrays.empty(n)
        for name, value in given.items(): made[name][:] = value
        return plan_sampling(made, at)
    stages = dict(
        matmul=lambda: torch.nn.functional.linear(hidden, head),
        float32=lambda: torch.nn.functional.linear(hidden, head).float(), maximum=lambda: logits.max(-1),
        softmax=lambda: torch.softmax(logits / .6, -1), inverse_cdf=lambda: inverse_cdf(probs, u),
        top_k=lambda: top_k_threshold(probs, k, p, 50), top_p=lambda: top_p_threshold(probs, p),
        greedy=lambda: sample(logits, None), random=lambda: sample(logits, arrays(temperature=.6)),
        random_top_k=lambda: sample(logits, arrays(temperature=.6, top_k=50)),
        random_top_p=lambda: sample(logits, arrays(temperature=.6, top_p=.9)),
        random_min_p=lambda: sample(logits, arrays(temperature=.6, min_p=.05)))
    halves = logits.bfloat16()    # as the engine samples; the others are in float32, in torch
    given = dict(random={}, random_top_k=dict(top_k=50), random_top_p=dict(top_p=.9),
                 random_min_p=dict(min_p=.05), qwen3=KINDS['qwen3'])
    settings = dict(greedy=None) | {name: arrays(**dict(temperature=.6) | o) for name, o in given.items()}
    for name, o in settings.items():
        stages[f'{name}_16_bits'] = partial(sample, halves, o,
                                            ops=gpu_operations(halves.device, halves.dtype))
    with torch.inference_mode():
        for name, work in stages.items():
            yield {f'{name}_us': 1e6 * best_time(work, 'cuda', .1)}
            if name.endswith('_16_bits'): yield {f'{name}_kernels_us': longest(kernel_spans(work, 10), 10)}

EXPERTS = dict(n_experts=128, k=8, width=768, hidden=2048)   # a layer of Qwen3-30B-A3B

def experts(args) -> Figures:
    """Routed experts of a layer, recorded: in two kernels, with weights of 16 bits and of 8, and expert by
    expert, if the host knew how many tokens each has"""
    import torch
    from minisgl_lit.core.engine.cuda_graph import CudaCapture
    from minisgl_lit.kernels.fp8 import plain_to_fp8
    from minisgl_lit.kernels.grouped_matmul import expert_mlps
    from minisgl_lit.kernels.gpu_operations import gpu_operations
    from minisgl_lit.tools.roofline import best_time, memory_bandwidth
    n_experts, k, width, hidden = EXPERTS.values()
    ops = gpu_operations(torch.device('cuda'), torch.bfloat16)
    def some(*shape): return torch.randn(*shape, device='cuda').bfloat16() * .03
    gate_up, down, bandwidth = (some(n_experts, 2 * width, hidden), some(n_experts, hidden, width),
                                memory_bandwidth(2**30, 'cuda'))
    rounded = [[o.view(*weight.shape[:2], *o.shape[1:]) for o in plain_to_fp8(weight.flatten(0, 1))]
               for weight in (gate_up, down)]
    codes, scales = zip(*rounded)
    for n in (1, 16, 64, 256, 2048):
        x, in_use = some(n, hidden), min(n * k, n_experts)
        chosen, shares = ((torch.arange(n * k, device='cuda') % n_experts).view(n, k),
                          torch.full((n, k), 1 / k, device='cuda').bfloat16())
        rows = x[:max(1, n * k // in_use)]
        ways = dict(at_once=lambda: [expert_mlps(x, chosen, shares, gate_up, down)],
                    at_once_fp8=lambda: [expert_mlps(x, chosen, shares, *codes, *scales)],
                    one_by_one=lambda: [ops.gated_mlp(rows, gate_up[e], down[e]) for e in range(in_use)])
        told = {}
        for name, work in ways.items():
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                replay, _ = CudaCapture()(work)
                told[f'{name}_us'] = 1e6 * best_time(replay, 'cuda', .1)
        yield {f'n{n}': told
               | dict(share=1e6 * in_use * 3 * width * hidden * 2 / bandwidth / told['at_once_us'])}

def fp8_part(kernel: str) -> Figures:
    "A layer of decoding 256 requests of 1,024 tokens over a cache of 8 bits, and over one of 16"
    from minisgl_lit.core.kv_cache.pool import KVPool
    from minisgl_lit.kernels.kv_formats import FP8
    n, length = 256, 1024
    pool, table, batch = decoding_setup(16, n, length)
    narrow = KVPool(1, pool.num_pages, 16, 8, 128, FP8, 'cuda')
    narrow.buffer.copy_(pool.buffer)
    for name, o in dict(kv_bf16=pool, kv_fp8=narrow).items():
        yield {f'{name}_{kernel}': attend_us(o, table, batch, kernel, n, length)}

def fp8(args) -> Figures:
    """8-bit floating point, recorded: a matmul with the rounding of its input beside one of 16 bits; a layer
    of decoding over such a cache, with what rounds and without"""
    import torch
    from minisgl_lit.kernels.fp8 import Fp8Weight, can_multiply_fp8, to_fp8
    can = can_multiply_fp8(torch.device('cuda', 0))
    yield dict(multiplies=can)
    if not can and torch.cuda.get_device_capability() >= (8, 9):
        raise RuntimeError('a card that multiplies fp8 is not used so; see the log')
    w = torch.randn(6144, 4096, device='cuda').bfloat16() * .03
    weight = Fp8Weight.of(w)
    for n in (1, 16, 256, 4096):
        x = torch.randn(n, 4096, device='cuda').bfloat16()
        ways = dict(bf16=lambda: torch.nn.functional.linear(x, w), fp8=lambda: weight.multiply(x),
                    rounding=lambda: to_fp8(x)[0])
        yield {f'n{n}': {f'{name}_us': recorded_us(work, times=1) for name, work in ways.items()}}
    yield from parts_of('fp8')

# how many callers, for how long, and how many processes they are
CALLERS, SERVE_SECONDS, CLIENTS = (64, 256), 20., 4
ASKED = dict(input_len=512, output_len=256)           # tokens of each request
LOAD = .9                                             # of what the engine alone computes

def own_rate(llm, n: int) -> float:
    "Output tokens a second of such requests without HTTP, all there at once"
    from minisgl_lit.text.sampling_params import SamplingParams
    from minisgl_lit.tools.roofline import WorkloadShape
    asked = WorkloadShape(n, (ASKED['input_len'],) * 2, (ASKED['output_len'],) * 2)
    times = []
    for seed in range(2):
        work, began = asked.draw(runtime_of(llm).model_config.vocab_size, seed), time.perf_counter()
        llm.generate(work.prompts, SamplingParams(max_tokens=ASKED['output_len'], ignore_eos=True, **GREEDY))
        times.append(time.perf_counter() - began)
    return n * ASKED['output_len'] / min(times)

def ask(load, url: str) -> list:
    "Send a load, and return the records of all requests"
    from minisgl_lit.tools.load_generator import first_model, run_interruptible, run_load
    return run_interruptible(run_load(load, url, first_model(url))).records

def steady_rate(records: list, seconds: float) -> float:
    """Output tokens a second while requests come, without the first quarter of that time, in which there are
    ever more at once"""
    began = min(o.due for o in records)
    def share(times: Sequence[float]) -> float:
        return sum(.25 * seconds <= o - began < seconds for o in times) / max(len(times), 1)
    return sum(o.tokens * share(o.event_times) for o in records if not o.error) / (.75 * seconds)

def serve(args) -> Figures:
    """Callers over HTTP, who ask at random moments whether they have been answered or not, for nine tenths of
    what the engine alone computes: time to the first token and between tokens, and output as a share of the
    engine's own"""
    from multiprocessing import get_context
    from minisgl_lit.tools.load_generator import LoadConfig, LoadResult, figures, own_server
    with shape_of_qwen3(words=True) as folder:
        with make_llm(folder, True, **SERVED) as llm: own = {n: own_rate(llm, n) for n in CALLERS}
        del llm
        give_back()
        yield dict(own_tokens_per_s={str(n): o for n, o in own.items()})
        config = LoadConfig(model=folder, device='cuda', attention=compiled_attention(), **SERVED, **ASKED)
        with own_server(config) as url, ProcessPoolExecutor(CLIENTS, get_context('spawn')) as pool:
            for n, alone in own.items():
                rate = LOAD * alone / ASKED['output_len'] / CLIENTS   # of each process
                loads = [LoadConfig(url=url, seed=i, rate=rate, requests=max(round(rate * SERVE_SECONDS), 1),
                                    **ASKED) for i in range(CLIENTS)]
                records = [o for done in [pool.submit(ask, load, url) for load in loads]
                           for o in done.result()]
                told = {name: value
                        for name, value, _ in figures(LoadResult(loads[0], records, SERVE_SECONDS, 0))}
                wanted = {f'{key}_{p}_ms': told[f'{name} p{p}']
                          for key, name in dict(first_token='first_token', between='gap').items()
                          for p in (50, 99) if f'{name} p{p}' in told}
                rate = steady_rate(records, SERVE_SECONDS)
                yield {f'callers_{n}': wanted | dict(answers=told['answers'], errors=told['errors'],
                    asked_share=LOAD, tokens_per_s=rate, share_of_own=rate / alone)}
                if told['errors']: raise AssertionError(next(o.error for o in records if o.error))

def start_once(folder: str) -> dict:
    "Seconds of a start in this process, and of its first answers: greedy, sampled, and sampled once more"
    began = time.perf_counter()
    from minisgl_lit.text.sampling_params import SamplingParams
    import torch
    torch.cuda.init()
    told = dict(imports_s=time.perf_counter() - began)
    def lap(name: str) -> None:
        nonlocal began
        told[f'{name}_s'], began = time.perf_counter() - began, time.perf_counter()
    began = time.perf_counter()
    with make_llm(folder, True, **SERVED) as llm:
        lap('engine')
        for name, kind in dict(greedy='greedy', sampled='qwen3', sampled_again='qwen3').items():
            llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=4, ignore_eos=True, **KINDS[kind]))
            lap(name)
        told['compilations'] = compilations(runtime_of(llm))
    return told

def apart(name: str, *words: str, **variables: str) -> dict:
    "What a function of this module returns in a process of its own, with these environment variables"
    source = f'import json, sys, gpu_check; print(json.dumps(gpu_check.{name}(*sys.argv[1:])))'
    done = subprocess.run([sys.executable, '-X', 'faulthandler', '-c', source, *words], cwd=ROOT,
                          env=os.environ | variables, capture_output=True, text=True)
    if done.returncode: raise AssertionError(what_failed(done.stdout + done.stderr))
    return json.loads(done.stdout.splitlines()[-1])

def first_start(args) -> Figures:
    """A start in a new process: with nothing kept of an earlier one but FlashInfer's modules; with Triton's
    kernels kept; and with what was found out about kernels, too"""
    with shape_of_qwen3() as folder, tempfile.TemporaryDirectory() as kept:
        triton = dict(TRITON_CACHE_DIR=f'{kept}/triton')
        for name, cache in dict(nothing_kept='a', compiled='b', all_kept='b').items():
            began = time.perf_counter()
            told = apart('start_once', folder, XDG_CACHE_HOME=f'{kept}/{cache}', **triton)
            yield {name: told | dict(all_s=time.perf_counter() - began)}

def small_checkpoint(folder: str, dtype: str):
    from reference import make_checkpoint
    make_checkpoint('Qwen3', Path(folder), dtype=dtype, head_dim=128, hidden_size=256,
                    max_position_embeddings=256)

def adapters(args) -> Figures:
    """A decode step of sixteen requests: of no adapter, of one, and of eight that take turns, rank 16 on all
    projections"""
    from random_adapters import write_adapter
    with shape_of_qwen3() as folder:
        names = [f'adapter-{i}' for i in range(8)]
        for i, name in enumerate(names):
            write_adapter(Path(folder)/name, Path(folder), i, rank=16, size=.01)
        with make_llm(folder, True, dummy_weights=True, max_running_req=16, max_seq_len=2560, page_size=16,
                      lora={name: f'{folder}/{name}' for name in names}, max_loras=8) as llm:
            runtime, told = runtime_of(llm), {}
            n = runtime.config.max_running_req
            for kinds, some in dict(none=[None], one=names[:1], eight=names).items():
                told[f'{kinds}_ms'] = decode_ms(runtime, n, names=some)
            yield told | {f'{o}_ratio': told[f'{o}_ms'] / told['none_ms'] for o in ('one', 'eight')}
        del llm, runtime
        give_back()

def merged(model: Path, deltas: dict, folder: Path) -> Path:
    "The checkpoint with what an adapter changes added to its weights"
    from safetensors.torch import load_file, save_file
    shutil.copytree(model, folder)
    tensors = load_file(folder/'model.safetensors')
    for module, delta in deltas.items(): tensors[f'{module}.weight'] += delta
    save_file(tensors, folder/'model.safetensors', metadata=dict(format='pt'))
    return folder

def adapter_tokens(model: Path, folder: Path) -> dict:
    """float32: requests of two adapters and of none in one call have the tokens that transformers gives with
    merged weights"""
    from minisgl_lit.llm import LLM
    from random_adapters import write_adapter
    from reference import MAX_NEW, Comparison, generate, prompts
    places, asked, comparison = {None: model}, prompts()[:4], Comparison()
    for i, name in enumerate('ab'):
        places[name] = merged(model, write_adapter(folder/name, model, i), folder/f'merged-{name}')
    names = [name for name in places for _ in asked]
    with LLM(str(model), device='cuda', dtype='float32', attention='torch', page_size=4, num_pages=400,
             lora={name: str(folder/name) for name in 'ab'}) as llm:
        outs = llm.generate(asked * len(places), lora=names, max_tokens=MAX_NEW, temperature=0)
    for prompt, name, out in zip(asked * len(places), names, outs):
        right = generate(places[name], prompt)
        comparison.check(places[name], prompt, out.token_ids, right, f'adapter={name}')
    comparison.done()
    return dict(adapter_tokens=comparison.tokens, adapter_near_ties=comparison.excused)

def parity(args) -> Figures:
    """float32 with the reference attention: the tokens of transformers, of adapters as merged into the
    weights. bfloat16 with FlashInfer and graphs: as near to float32 as transformers is"""
    import torch
    from minisgl_lit.text.sampling_params import SamplingParams
    from minisgl_lit.llm import LLM
    from reference import MAX_NEW, Comparison, generate, load, prompts
    told, greedy = {}, SamplingParams(max_tokens=MAX_NEW, temperature=0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        small_checkpoint(folder, 'float32')
        right, comparison = [generate(Path(folder), o) for o in prompts()], Comparison()
        for overlap in (False, True):
            with LLM(folder, device='cuda', dtype='float32', attention='torch', overlap=overlap, page_size=4,
                     num_pages=400, max_prefill_tokens=24) as llm:
                for _ in range(2):
                    for prompt, out, o in zip(prompts(), llm.generate(prompts(), greedy), right):
                        comparison.check(Path(folder), prompt, out.token_ids, o, f'overlap={overlap}')
        comparison.done()
        told |= dict(float32_tokens=comparison.tokens, float32_near_ties=comparison.excused)
        with tempfile.TemporaryDirectory() as other: told |= adapter_tokens(Path(folder), Path(other))
        with make_llm(folder, graphs=True, dtype='bfloat16', page_size=16, num_pages=200,
                      max_running_req=8) as llm:
            ours = [o.token_ids for o in llm.generate(prompts(), greedy)]
        theirs = load(Path(folder), torch.bfloat16)
        def same(answer):
            return sum(a == b for got, want in zip(answer, right)
                       for a, b in zip(got, want)) / sum(map(len, right))
        with torch.inference_mode():
            reference = [theirs.generate(torch.tensor([o]),
                attention_mask=torch.ones(1, len(o), dtype=torch.long), max_new_tokens=MAX_NEW,
                                         do_sample=False, pad_token_id=0)[0, len(o):].tolist()
                         for o in prompts()]
        told |= dict(bfloat16_same=same(ours), transformers_bfloat16_same=same(reference))
    yield told
    if told['bfloat16_same'] < told['transformers_bfloat16_same'] - .15:
        raise AssertionError(f'bfloat16 answers are further from float32 than those of transformers: {told}')

def equality(args) -> Figures:
    """Graphs on and off, overlap on and off, bfloat16, every third request of an adapter: the same answers,
    but for near ties"""
    from minisgl_lit.text.sampling_params import SamplingParams
    from random_adapters import write_adapter
    from reference import prompts
    answers = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as adapter:
        small_checkpoint(folder, 'bfloat16')
        write_adapter(Path(adapter), Path(folder), 0)
        for graphs in (False, True):
            for overlap in (False, True):
                with make_llm(folder, graphs, overlap=overlap, page_size=16, num_pages=200,
                              max_running_req=8, lora={'a': adapter}) as llm:
                    asked = prompts() * 2
                    outs = llm.generate(asked, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
                                        lora=[None if i % 3 else 'a' for i in range(len(asked))])
                if errors := [o.error for o in outs if o.error]: raise AssertionError(errors[0])
                answers[graphs, overlap] = [o.token_ids for o in outs]
    def same(a, b): return sum(x == y for x, y in zip(a, b)) / len(a)
    base = answers[False, False]
    told = {f'same_graphs_{g}_overlap_{o}': same(base, answers[g, o])
            for g, o in answers if (g, o) != (False, False)}
    yield told
    if min(told.values()) < .9: raise AssertionError(f'answers differ: {told}')

TINY = ("""
import sys; sys.path[:0] = ['tests', '.']
import tempfile, gpu_check
from minisgl_lit.text.sampling_params import SamplingParams
with tempfile.TemporaryDirectory() as folder:
    gpu_check.small_checkpoint(folder, 'bfloat16')
    with gpu_check.make_llm(folder, True, page_size=16, num_pages=20, max_running_req=2, max_seq_len=64) as llm: print(len(llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))))
""")   # noqa: E501

def sanitizer(args) -> Figures:
    "memcheck over a tiny run"
    tool = shutil.which('compute-sanitizer') or shutil.which('/usr/local/cuda/bin/compute-sanitizer')
    if not tool:
        yield dict(skipped='compute-sanitizer is not installed')
        return
    done = subprocess.run([tool, '--tool', 'memcheck', '--error-exitcode', '9', '--launch-timeout', '60',
                           sys.executable, '-c', TINY], cwd=ROOT,
                          capture_output=True, text=True)
    tail = (done.stdout + done.stderr)[-1500:]
    if done.returncode: raise AssertionError(f'compute-sanitizer ended with {done.returncode}: {tail}')
    yield dict(summary=next((o for o in tail.splitlines() if 'ERROR SUMMARY' in o), tail[-200:]).strip('= '))

def tests(args) -> Figures:
    "The GPU tests of the project; of the kernels' shapes those that are timed above, unless all are wanted"
    chosen = ('on_a_gpu or takes_what' if args.wide
              else 'on_a_gpu and not (64-100 or 256-33 or float16) or takes_what')
    files = ['tests/test_flashinfer.py', 'tests/test_graph.py', 'tests/test_streams.py']
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *files, '-k',
                           chosen], cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise AssertionError(done.stdout[-1500:] + done.stderr[-500:])
    yield dict(pytest=done.stdout.strip().splitlines()[-1])

CELL_CHAPTERS = ['core/06_device', 'core/25_attention.torch', 'core/38_engine.engine',
                 'core/39_engine.cuda_graph']
# has shapes that FlashInfer would have to compile for minutes
WIDE_CHAPTERS = ['core/27_attention.flashinfer']

def script_of(notebook: dict) -> str:
    """The code cells of a chapter as one program, those for a GPU included; slow ones and those that are
    never run left out"""
    sources = [''.join(o['source']) for o in notebook['cells'] if o['cell_type'] == 'code']
    def marks(source): return re.findall(r'^#\| *([\w-]+:? *\w*)', source, re.M)
    return '\n\n'.join(o for o in sources if not {'slow', 'eval: false'} & set(marks(o)))

NO_IPYTHON = ("import sys, types; m = types.ModuleType('IPython.display'); m.HTML = m.SVG = m.display = "
              "lambda *a, **k: None; " \
    "sys.modules.setdefault('IPython', types.ModuleType('IPython')); "
    "sys.modules.setdefault('IPython.display', m)\n")

def run_cells(name: str) -> str:
    "Run a chapter as a program; 'ok', or how it ended"
    source = script_of(json.loads((ROOT/'nbs'/f'{name}.ipynb').read_text(encoding='utf-8')))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)/'chapter.py'
        path.write_text(NO_IPYTHON + source, encoding='utf-8')
        done = subprocess.run([sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True)
    return 'ok' if done.returncode == 0 else (done.stdout + done.stderr)[-600:]

def cells(args) -> Figures:
    """The chapters that have cells for a GPU, four at a time; with `--wide` the one whose cell compiles for
    minutes, too"""
    with ThreadPoolExecutor(4) as pool:
        waiting = {pool.submit(run_cells, name): name for name in CELL_CHAPTERS + WIDE_CHAPTERS * args.wide}
        told = {}
        for done in as_completed(waiting):
            told[waiting[done]] = done.result()
            yield {waiting[done]: done.result()}
    if bad := [k for k, v in told.items() if v != 'ok']:
        raise AssertionError(f'these chapters fail: {", ".join(bad)}')

STEPS: dict[str, Callable[[argparse.Namespace], Figures]] = {o.__name__: o for o in (
    machine, modules, recorded, prefill, bench256, profile, sampling, attend, fp8, serve, first_start,
    kernels, low, experts, adapters, parity, equality, tests, cells, sanitizer, late)}

# ---- running them ------------------------------------------------------------------------------------------

NOISE = re.compile(r'[E\s]*(frame #\d+:|Exception raised from |terminate called |what\(\): |Extension '
                   r'modules: |For debugging consider |Compile with `TORCH|CUDA kernel errors might|[~^]+$)')

def what_failed(log: str) -> str:
    """What an error has left behind, in one line: the first line that names CUDA, then the traceback in
    Python; what C++ adds to it says nothing"""
    lines = [o.rstrip() for o in log.splitlines() if o.strip()]
    cuda = next((o.strip() for words in ('CUDA error', 'CUDA') for o in lines if words in o), '')[:300]
    lines = [o for o in lines if not NOISE.match(o)]
    # Python was ended from outside, and tells where it was
    end = next((i for i, o in enumerate(lines) if o.startswith('Fatal Python error')), len(lines))
    raised = [i for i, o in enumerate(lines[:end]) if o.startswith('Traceback (')
              and not lines[i - 1].startswith('Exception ignored')]
    if raised:
        lines = lines[raised[-1] + 1:end]
        calls = [*takewhile(lambda o: o.startswith(' '), lines)]
        message = lines[len(calls):]
        lines = calls[-10:] + (message if len(message) < 9 else [*message[:2], '…', *message[-6:]])
    elif end < len(lines):
        lines = [*dropwhile(lambda o: not o.startswith('Current thread'), lines)][:12] or lines[end:][:12]
    told = ' | '.join(o[:300] for o in lines[-19:])[-1800:].strip(' |')
    return told if cuda in told else f'{cuda} | {told}'

def run_apart(name: str, seconds: float, args: argparse.Namespace) -> Step:
    "One step in a process group of its own, which is ended when its time is over"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder)/'figures.json', Path(folder)/'log'
        command = ([sys.executable, '-X', 'faulthandler', __file__, '--only', name, '--out',
                    str(out)] + ['--wide'] * args.wide)
        out.touch()
        def step(error: str | None) -> Step:
            return Step(name, error is None, time.perf_counter() - began, error,
                        read_figures(out.read_text()))
        with log.open('w') as told:
            child = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT,
                                     start_new_session=True)
            try: child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGABRT)    # it says where it is
                with suppress(subprocess.TimeoutExpired): child.wait(2)
                with suppress(ProcessLookupError): os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return step(f'not done after {seconds:.0f} s: {what_failed(log.read_text(errors="replace"))}')
        if child.returncode:
            return step(what_failed(log.read_text(errors='replace')) or f'ended with {child.returncode}')
        return step(None)

def run_all(args: argparse.Namespace,
            run: Callable[[str, float, argparse.Namespace], Step] = run_apart) -> dict:
    "All steps; the JSON is written anew after each, so that an interrupted run has told what it knew"
    began, done = time.perf_counter(), []
    for i, name in enumerate(args.steps):
        left = args.seconds - (time.perf_counter() - began)
        seconds = shares(args.steps[i:], left)
        done.append(run(name, seconds, args) if seconds > 1 else Step(name, error='no time was left'))
        print(line(done[-1]), flush=True)
        told = report(done, time.perf_counter() - began)
        args.out.write_text(json.dumps(told, indent=1))
    return told

def main(argv: list[str]) -> int:
    args = parse(argv)
    try: import torch
    except ImportError as e:
        print(f'gpu_check: needs torch, which cannot be imported: {e}', file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print('gpu_check: this machine has no GPU that torch can use, so there is nothing to check.',
              file=sys.stderr)
        return 2
    if args.only:
        with args.out.open('w') as told:
            try:
                for figures in STEPS[args.only](args): print(json.dumps(figures), file=told, flush=True)
                return 0
            except Exception:
                traceback.print_exc()
                sys.stdout.flush()
                # before destructors meet the same error, abort the process, and say so at length
                os._exit(1)
    told = run_all(args)
    check_report(told)
    return 0 if told['ok'] else 1

if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
