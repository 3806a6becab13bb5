"""Every kernel under the address and undefined-behaviour sanitizers.

A driver in C replays a plan that Python has written to a file. Each tensor lies in memory of exactly its
size, so that a byte read or written beside it ends the driver; and the results are those of the kernels as
they are compiled for use.
"""
import os, platform, shutil, struct, subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl_lit.adapters.low_rank import MOST_ADAPTERS, MOST_RANK, low_rank_c
from minisgl_lit.kernels.cpu_attention import NO_WINDOW, CpuAttention, stored_as
from minisgl_lit.kernels.cpu_attention import tasks_c
from minisgl_lit.kernels.recorded_steps import tokens_c
from minisgl_lit.kernels.compiler import LEVELS, find_compiler, flags, run_compiler
from minisgl_lit.kernels.linear import MOST_ROWS, linear_c
from minisgl_lit.kernels.codes import quantize
from minisgl_lit.kernels.code_panels import panel_order
from minisgl_lit.kernels.quantized import bytes_c
from minisgl_lit.kernels.plan import entries, load_kernels, parameters, team_c
from minisgl_lit.kernels.compiler import exp_c
from minisgl_lit.kernels.cpu_operations import layers_c
from test_attention_cpu import make as make_world

# an address into a table: what the driver has lies elsewhere
place_c = team_c + 'void note_place(void **to, void *x, team *t) { if (!t->id) *to = x; }\n'
# all kernels in one text: each begins with those before it, which may stand there once
ALL_C = (tasks_c + layers_c.removeprefix(linear_c).replace(exp_c, '').replace(bytes_c, '')
         + tokens_c.removeprefix(team_c) + low_rank_c.removeprefix(linear_c) + place_c.removeprefix(team_c))
NAMES = [*parameters(ALL_C)]
DRIVER_C = ALL_C + entries(ALL_C) + r"""
#include <stdio.h>
static void need(int ok, const char *what) { if (!ok) { fprintf(stderr, "driver: %s\n", what); exit(2); } }
static i64 next(FILE *in) { i64 x; need(fread(&x, 8, 1, in) == 1, "the plan ends early"); return x; }
int main(int argc, char **argv) {
    const entry known[] = { """ + ', '.join(f'{name}_entry' for name in NAMES) + r""" };
    if (argc < 4) { printf("%d %d\n", PANEL, W); return 0; }
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    need(in && out, "a file cannot be opened");
    i64 n = next(in), *sizes = malloc(n * 8);
    char **buffers = malloc(n * sizeof *buffers);
    for (i64 i = 0; i < n; i++) {
        sizes[i] = next(in), buffers[i] = sizes[i] ? malloc(sizes[i]) : NULL;      // as torch does
        need(!sizes[i] || fread(buffers[i], 1, sizes[i], in) == sizes[i], "a tensor ends early");
    }
    i64 words = next(in), *plan = malloc(words * 8);
    for (i64 i = 0; i < words;) {
        plan[i] = (i64)known[next(in)];
        i64 args = plan[i + 1] = next(in);
        for (i64 j = 0; j < args; j++) {      // of which buffer, or none: a number
            i64 buffer = next(in), value = next(in);
            plan[i + 2 + j] = buffer < 0 ? value : (i64)buffers[buffer] + value;
        }
        i += 2 + args;
    }
    run(plan, words, atoi(argv[3]), NULL);
    for (i64 i = 0; i < n; i++) {
        need(!sizes[i] || fwrite(buffers[i], 1, sizes[i], out) == sizes[i], "a result cannot be written");
        free(buffers[i]);
    }
    free(buffers), free(sizes), free(plan);
    return fclose(in) || fclose(out);
}
"""
SANITIZE = ['-g', '-O1', '-fsanitize=address,undefined', '-fno-sanitize-recover=all',
            '-fno-omit-frame-pointer']

def macros(*more: str) -> str:
    "What the compiler says about the processor it compiles for"
    build, _ = flags(platform.system(), platform.machine())
    return run_compiler([*find_compiler(), *build, *more, '-dM', '-E', '-x', 'c', os.devnull])

def compile_driver(source: str, folder: Path, *more: str) -> Path:
    "A program with sanitizers"
    build = [o for o in flags(platform.system(), platform.machine())[0] if o not in ('-O3', '-fPIC')]
    text, program = folder/'driver.c', folder/'driver'
    text.write_text(source)
    run_compiler([*find_compiler(), *build, *SANITIZE, *more, str(text), '-o', str(program), '-lm'])
    return program

def drive(program: Path, *args: object, under: str = '') -> str:
    "Run it, `under` another program if one is named; what it printed"
    env = (os.environ | dict(OMP_WAIT_POLICY='passive', UBSAN_OPTIONS='print_stacktrace=1',
                             ASAN_OPTIONS='detect_stack_use_after_return=1'))
    done = subprocess.run([*filter(None, [under]), program, *map(str, args)], capture_output=True, text=True,
                          env=env, timeout=600)
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout

def memory(storage: torch.UntypedStorage) -> np.ndarray:
    "Its bytes, shared"
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

class Calls:
    "Kernels to call, and the tensors that they are called with"
    def __init__(self, panel: int):
        self.panel, self.ops, self.results, self.g = panel, [], [], torch.Generator().manual_seed(0)

    def some(self, *shape, bf16=False, scale=1.):
        "Random numbers"
        return (torch.randn(shape, generator=self.g) * scale).to(torch.bfloat16 if bf16 else torch.float32)

    def call(self, name, *args, out=()):
        self.ops.append((name, args))
        self.results += [(f'{name} {len(self.ops)}', o) for o in out]

    def packed(self, n_out, n_in, bf16):
        "A weight, padded to panels and packed"
        weight = self.some(n_out, n_in, bf16=bf16, scale=n_in**-.5)
        data = torch.cat([weight, weight.new_zeros(-n_out % self.panel, n_in)])
        self.call('pack', data, len(data), n_in * data.itemsize // 4)
        return data

    def shared(self, rows, n_in, group, whole):
        "Scratch memory of `grouped_linear`, not a byte too much"
        return torch.zeros(rows * (((n_in if whole else 4 * n_in) + 8 * n_in // group + 127) // 64 * 64),
                           dtype=torch.uint8)

    def storages(self):
        "The memory of all tensors, each once"
        tensors = [o for _, args in self.ops for o in args if isinstance(o, torch.Tensor)]
        return list({o.untyped_storage()._cdata: o.untyped_storage() for o in tensors}.values())

    def run_here(self):
        "By the kernels as they are compiled for use"
        libs = [load_kernels(o) for o in (layers_c, tasks_c, tokens_c, low_rank_c, place_c)]
        for name, args in self.ops: next(getattr(o, name) for o in libs if hasattr(o, name))(*args)

    def run_there(self, program, folder, threads, under):
        "By the driver; results come back into the tensors"
        storages = self.storages()
        index = {o._cdata: i for i, o in enumerate(storages)}
        sent, params, words = [struct.pack('q', len(storages))], parameters(ALL_C), []
        for o in storages: sent += [struct.pack('q', o.nbytes()), memory(o).tobytes()]
        for name, args in self.ops:
            words += [NAMES.index(name), len(args)]
            for value, param in zip(args, params[name], strict=True):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    words += [index[storage._cdata], value.data_ptr() - storage.data_ptr()]
                elif 'float' in param.passed: words += [-1, struct.unpack('i', struct.pack('f', value))[0]]
                else: words += [-1, int(value or 0)]
        size = sum(2 + len(args) for _, args in self.ops)
        (folder/'in').write_bytes(b''.join([*sent, struct.pack('q', size),
                                            np.array(words, dtype=np.int64).tobytes()]))
        drive(program, folder/'in', folder/'out', threads, under=under)
        data, at = (folder/'out').read_bytes(), 0
        for o in storages:
            end = at + o.nbytes()
            memory(o)[:] = np.frombuffer(data[at:end], dtype=np.uint8)
            at = end
        assert at == len(data)

def add_matmuls(c: Calls, rows: int, bf16: bool) -> None:
    """Sizes that fill neither panels nor registers; more rows than are computed at once, and more inputs than
    fit a block"""
    for n_out, n_in, bias in ((1, 2, False), (70, 26 if bf16 else 13, True), (129, 34, False),
                              (3, 1030, True)):
        w, b = c.packed(n_out, n_in, bf16), c.some(n_out, bf16=bf16) if bias else None
        x, y = c.some(rows, n_in, bf16=bf16), c.some(rows, n_out, bf16=bf16)
        c.call('linear', y, x, w, b, rows, n_out, n_in, bf16, out=[y])
        ids, taken = (torch.randint(0, n_out, (rows,), generator=c.g, dtype=torch.int32),
                      c.some(rows, n_in, bf16=bf16))
        c.call('packed_rows', taken, w, ids, rows, n_in * w.itemsize // 4, out=[taken])
    for hidden, n, bias in ((6, 10, True), (22, 522, False)):   # 522: more than a piece of a row
        some, weights = min(rows, 256), [c.packed(2 * n, hidden, bf16), c.packed(hidden, n, bf16)]
        biases = [c.some(o, bf16=bf16) if bias else None for o in (2 * n, hidden)]
        wide, narrow = c.some(some, 2 * n, bf16=bf16), c.some(some, n, bf16=bf16)
        c.call('gate', narrow, wide, some, n, bias, bf16, out=[narrow])   # GELU or SiLU
        x, y = (c.some(rows, hidden, bf16=bf16) for _ in range(2))
        c.call('gated_mlp', y, x, weights[0], None, biases[0], weights[1], None, biases[1], wide, narrow,
               None, rows, hidden, n, rows % 2, bf16, out=[y])

def forms(*parts: tuple[int, ...]) -> torch.Tensor:
    "The form of a weight with these parts"
    return torch.tensor([*parts, [0] * len(parts[0])])

def add_quantized(c: Calls, rows: int, bf16: bool) -> None:
    "Both products, with and without minima; numbers stored in each way, codes of each width"
    for n_out, n_in, group, bits, minima, scale in ((1, 64, 32, 4, False, 1), (70, 192, 64, 8, True, 1.01),
            (129, 24, 8, 4, True, 1), (7, 64, 16, 6, True, 0), (70, 128, 32, 5, False, 0)):
        q = quantize(c.some(n_out, n_in), 4 if bits < 8 else 8, group, minima)
        q = replace(q, bits=bits, scales=q.scales * scale)
        if not scale:   # multiples, by blocks of two groups
            steps = c.some(n_out, n_in // group // 2, 1 + minima).half()
            numbers = [o.float().repeat_interleave(2, 1) * 7 for o in steps.unbind(-1)]
            q = replace(q, scales=numbers[0], minima=numbers[1] if minima else None, steps=steps)
        parts = [q, quantize(c.some(5, n_in), 8 if bits < 8 else 4, 8)]   # a second one, of another form
        packed, kinds = zip(*(panel_order(o, c.panel) for o in parts))
        data, all_out = torch.cat([o.flatten() for o in packed]), n_out + 5
        ids = torch.randint(0, all_out, (rows,), generator=c.g, dtype=torch.int32)
        for whole in (False, True):
            x, y, b = (c.some(rows, n_in, bf16=bf16), c.some(rows, all_out, bf16=bf16),
                       c.some(all_out, bf16=bf16) if minima else None)
            form = forms(*((len(o), data.nbytes, o.bits, o.group, *kind, whole, 0 if o.steps is None else 2)
                           for o, data, kind in zip(parts, packed, kinds)))
            shared = c.shared(rows, n_in, 8, whole)
            c.call('grouped_linear', y, x, data, form, b, shared, rows, all_out, n_in, bf16, out=[y])
            taken = c.some(rows, n_in, bf16=bf16)
            c.call('grouped_rows', taken, data, form, ids, rows, n_in, bf16, out=[taken])
    hidden, n, some, group = 24, 40, min(rows, 256), 8
    for whole in (False, True):
        weights = [panel_order(quantize(c.some(*shape), 4, group), c.panel)[0]
                   for shape in ((2 * n, hidden), (hidden, n))]
        up, down = (forms((n_out, w.nbytes, 4, group, 1, 0, whole, 0))
                    for n_out, w in zip((2 * n, hidden), weights))
        shared = c.shared(some, n, group, whole)
        (x, y), wide, narrow = ((c.some(rows, hidden, bf16=bf16) for _ in range(2)),
                                c.some(some, 2 * n, bf16=bf16), c.some(some, n, bf16=bf16))
        c.call('gated_mlp', y, x, weights[0], up, None, weights[1], down, None, wide, narrow, shared, rows,
               hidden, n, whole, bf16, out=[y])

def add_layers(c: Calls, rows: int, bf16: bool) -> None:
    "What stands between matmuls; the rows of some inputs lie further apart than they are long"
    table = c.some(9, 13, bf16=bf16)
    ids, y = torch.randint(0, 9, (rows,), generator=c.g, dtype=torch.int32), c.some(rows, 13, bf16=bf16)
    c.call('take_rows', y, table, ids, rows, table[0].nbytes, out=[y])
    for heads, n in ((1, 1), (3, 10), (1, 77)):
        x, w, y = (c.some(rows, heads + 1, n, bf16=bf16)[:, 1:], c.some(n, bf16=bf16),
                   c.some(rows, heads, n, bf16=bf16))
        c.call('rms_norm', y, x, w, rows, heads, x.stride(0), n, 1e-6, bf16, out=[y])
        x, more = c.some(rows, n, bf16=bf16), c.some(rows, n, bf16=bf16)
        c.call('add_norm', x, more, w, rows, n, 1e-6, bf16, out=[x, more])
    for heads, dim in ((1, 2), (3, 10), (2, 64)):
        x, y, angles = (c.some(rows, heads + 2, dim, bf16=bf16)[:, :heads],
                        c.some(rows, heads, dim, bf16=bf16), c.some(rows, dim, bf16=bf16))
        c.call('apply_rope', y, x, angles, rows, heads, x.stride(0), dim, bf16, out=[y])
    for n_in, n_q, n_kv, dim, more in ((14, 3, 1, 10, True), (26, 4, 2, 16, False)):
        heads = n_q + 2 * n_kv
        w, b = c.packed(heads * dim, n_in, bf16), c.some(heads * dim, bf16=bf16) if more else None
        norms = [c.some(dim, bf16=bf16) if more else None for _ in 'qk']
        qkv, x, angles = (c.some(rows, heads, dim, bf16=bf16), c.some(rows, n_in, bf16=bf16),
                          c.some(rows, dim, bf16=bf16))
        c.call('qkv_heads', qkv, x, w, None, b, None, *norms, angles, rows, n_in, n_q, n_kv, dim, 1e-6, bf16,
               out=[qkv])

def add_adapters(c: Calls, rows: int, bf16: bool) -> None:
    """Parts that fill no panel, one part and two, the least rank and the largest; rows of adapters that take
    turns, of none, and of one that leaves a part as it is"""
    for n_in, parts, ranks in ((2, [(0, 1)], [4]), (30, [(1, 150), (155, 70)], [8, 4, 20]),
                               (134, [(3, 64)], [128])):
        table = torch.zeros(MOST_ADAPTERS, len(parts), 5, dtype=torch.int64)
        for number, rank in enumerate(ranks, 1):
            for (first, n), entry in zip(parts[:1 if rank == 8 else 2], table[number]):
                entry[2:] = torch.tensor([rank, first, n])
                for i, o in enumerate((c.some(rank, n_in, bf16=bf16), c.packed(n, rank, bf16))):
                    c.call('note_place', entry[i:], o)
        n_out = parts[-1][0] + parts[-1][1] + 1
        ids = torch.randint(0, len(ranks) + 1, (rows,), generator=c.g, dtype=torch.int32)
        x, y = c.some(rows, n_in, bf16=bf16), c.some(rows, n_out, bf16=bf16)
        h = torch.zeros(min(rows, MOST_ROWS), len(parts) * MOST_RANK)
        c.call('add_changes', y, x, ids, table, h, rows, len(parts), n_in, n_out, bf16, out=[y])

def add_attention(c: Calls, bf16: bool) -> None:
    """Decode steps, chunks of prompts, both; windows; heads of odd sizes; requests with nothing cached and
    with several blocks; padding"""
    dtype = torch.bfloat16 if bf16 else torch.float32
    worlds = [([0], [1]), ([36, 63, 64, 200, 0], [1, 1, 1, 1, 1]), ([0, 5, 130, 0, 64], [70, 1, 17, 7, 300]),
              ([3, 64], [5, 1])]
    shapes = [(1, 1, 1), (3, 2, 20), (1, 7, 64), (2, 4, 80), (2, 1, 7)]
    for i, (kv_heads, family, dim) in enumerate(shapes * 2):
        cached, extend = worlds[i % 4]
        window = (None, 9, 70)[i % 3]
        pool, table, batch, (q, k, v), _ = make_world(cached, extend, (1, 4, 16)[i % 3], kv_heads, family,
            dim, dtype, window, i % 2 * 2, i, rounded=i >= len(shapes))
        m = CpuAttention(pool, table.page_table).prepare(batch)
        loc, tasks, merges, counts = (o.clone() for o in (m.out_loc, m.tasks, m.merges, m.counts))
        n, rows, lens = len(batch.rows), *map(torch.from_numpy, (batch.rows.copy(), batch.device_lens.copy()))
        cut = [torch.zeros(o, dtype=torch.int64) for o in ((n + 8, 8), (n, 3), 3)]
        c.call('decode_tasks', *cut, rows, torch.arange(n), lens, n, 8, 64, out=cut)
        out, parts = (torch.zeros_like(q, memory_format=torch.contiguous_format),
                      torch.zeros(int(merges[:, 2].sum()), q.shape[1], dim + 2))
        keys, values = pool.k(1).clone(), pool.v(1).clone()   # each in memory of its own
        cap, sinks = (0., None) if i % 2 else (5., c.some(q.shape[1], bf16=bf16))
        c.call('attend', out, q, k, v, keys, values, loc, table.page_table, table.page_table.stride(0),
               pool.page_size,
               len(q), q.shape[1], kv_heads, dim, q.stride(0), k.stride(0), v.stride(0), window or NO_WINDOW,
               cap, sinks, tasks, parts, merges, counts, bf16, stored_as.index(keys.dtype),
               out=[out[:sum(extend)]])
    c.call('attend', out, q, k, v, keys, values, loc, table.page_table, table.page_table.stride(0),
           pool.page_size,
           0, q.shape[1], kv_heads, dim, q.stride(0), k.stride(0), v.stride(0), NO_WINDOW, 0., None, tasks,
           parts, merges, torch.zeros_like(counts), bf16, stored_as.index(keys.dtype))

def calls(panel: int) -> Calls:
    "Every kernel, with sizes that fit nothing"
    c = Calls(panel)
    for bf16 in (False, True):
        for rows in (0, 1, 5, 7, 17):
            add_matmuls(c, rows, bf16), add_layers(c, rows, bf16), add_quantized(c, rows, bf16)
            add_adapters(c, rows, bf16)
        add_matmuls(c, 259, bf16), add_quantized(c, 259, bf16), add_adapters(c, 259, bf16)
        add_attention(c, bf16)
    for rows in (0, 1, 5, 7, 17):
        for n in (1, 5, 33, 199):
            x, ids, finite = (c.some(rows, n), torch.zeros(rows, dtype=torch.int64),
                              torch.zeros(rows, dtype=torch.bool))
            if rows > 5: x[0, n // 2], x[1], x[2, -1], x[3] = torch.nan, -torch.inf, torch.inf, 1.
            c.call('largest', ids, finite, x, rows, n, out=[ids, finite])
        pool, ids = torch.arange(9 * 7, dtype=torch.int32).view(9, 7), torch.zeros(rows, dtype=torch.int32)
        places = torch.randperm(9, generator=c.g)[:rows % 9]
        lens, next_ids = torch.arange(1, len(places) + 1).clamp(max=7), torch.arange(100, 100 + len(places))
        c.call('read_tokens', ids, pool, 7, places, lens, len(places), out=[ids])
        c.call('write_tokens', pool, 7, places, lens, next_ids, len(places), out=[pool])
        x, y = c.some(rows, 13, bf16=True), c.some(rows, 13)
        c.call('widen', y, x, rows, 13, out=[y])
        for bf16 in (False, True):
            x, more = c.some(rows, 13, bf16=bf16), c.some(rows, 13, bf16=bf16)
            c.call('scale', x, .7, rows, 13, bf16, out=[x])
            c.call('add', x, more, rows, 13, bf16, out=[x])
    assert {name for name, _ in c.ops} == {*NAMES}
    return c

def test_all_kernels_are_in_one_text():
    "Each kernel stands in it once, so that the driver has all that chapters compile"
    assert sorted(NAMES) == sorted({*parameters(layers_c), *parameters(tasks_c), *parameters(tokens_c),
                                    *parameters(low_rank_c), *parameters(place_c)})
    assert ALL_C.count(team_c) == ALL_C.count(linear_c) == ALL_C.count(exp_c) == ALL_C.count(bytes_c) == 1

def test_every_call_has_all_its_arguments():
    "The tests below run with `--long` alone; what became of a kernel since is noticed here"
    wanted = {name: len(o) for name, o in parameters(ALL_C).items()}
    assert [(name, len(args)) for name, args in calls(16).ops if len(args) != wanted[name]] == []

@pytest.fixture(scope='module')
def sanitizers(tmp_path_factory):
    "Skips if there are none"
    folder = tmp_path_factory.mktemp('trivial')
    try: drive(compile_driver('int main(void) { return 0; }', folder))
    except (RuntimeError, AssertionError) as e: pytest.skip(f'no compiler with sanitizers: {e}'[:300])

def agree(program: Path, folder: Path, under: str = '') -> str:
    "The kernels of the driver agree with those compiled for use; in how many calls"
    panel, width = map(int, drive(program, under=under).split())
    load_kernels(layers_c).lib.panel(size := torch.zeros(1, dtype=torch.int64))
    ours = calls(int(size))
    ours.run_here()
    for threads in (1, 2, 3):
        theirs = calls(panel)
        theirs.run_there(program, folder, threads, under)
        for (name, a), (_, b) in zip(ours.results, theirs.results, strict=True):
            eps = .03 if a.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(b, a, rtol=eps, atol=eps, equal_nan=True, msg=lambda m: f'{name}: {m}')
    return f'{len(ours.ops)} calls with registers of {width} floats'

@pytest.mark.long
@pytest.mark.parametrize('more', [[], ['-mno-amx-bf16'], ['-mno-avx512f'], ['-mno-avx']],
                         ids=['native', 'no AMX', 'AVX2', 'SSE'])
def test_kernels_keep_to_their_memory(more, sanitizers, tmp_path, record_property):
    about = macros() if more else ''
    if more == ['-mno-amx-bf16'] and '__AMX_BF16__' not in about:
        pytest.skip('this processor has no AMX to leave out')
    if more == ['-mno-avx512f'] and '__AVX512F__' not in about:
        pytest.skip('this processor has no AVX-512 to leave out')
    if more == ['-mno-avx'] and '__AVX__' not in about: pytest.skip('this processor has no AVX to leave out')
    record_property('kernels under sanitizers', agree(compile_driver(DRIVER_C, tmp_path, *more), tmp_path))

@pytest.mark.long
@pytest.mark.parametrize('level', LEVELS['aarch64'], ids=lambda o: o.name)
def test_kernels_on_arm64(level, tmp_path, record_property):
    """Cross-compiled, with the flags of a wheel, and run by an emulator: the results are those of this
    processor"""
    cc, emulator = (shutil.which('aarch64-linux-gnu-gcc'),
                    shutil.which('qemu-aarch64') or shutil.which('qemu-aarch64-static'))
    if not (cc and emulator):
        pytest.skip('no aarch64-linux-gnu-gcc or no qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)')
    (tmp_path/'driver.c').write_text(DRIVER_C)
    build, _ = flags('Linux', 'aarch64', level.target)
    run_compiler([cc, *build, '-static', str(tmp_path/'driver.c'), '-o', str(tmp_path/'driver'), '-lm'])
    record_property('kernels on arm64', agree(tmp_path/'driver', tmp_path, under=emulator))

@pytest.mark.long
def test_the_driver_notices(sanitizers, tmp_path):
    "A kernel that writes one number too many, and one that shifts too far, end it"
    for fault, said in (('y[n] = 1;', 'heap-buffer-overflow'), ('y[0] = 1 << (n + 40);', 'shift exponent')):
        source = team_c + f'void wrong(float *y, i64 n, team *t) {{ {fault} }}\n'
        source += (entries(source) + 'int main() { float *y = malloc(12); i64 plan[] = { (i64)wrong_entry, '
                                     '2, (i64)y, 3 }; run(plan, 4, 1, NULL); free(y); return 0; }')
        program = compile_driver(source, tmp_path)
        with pytest.raises(AssertionError, match=said): drive(program)
