"""FlashInfer's own Python on a GPU that computes nothing (`fake_gpu.py`, in a process of its own): every
configuration is built, captured and generates, a module that does not compile takes nothing else with it,
what a decode step launches outside its graph may only shrink, and the steps of `gpu_check` run to their
end."""
import importlib.util, json, os, subprocess, sys
from collections import Counter
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
fetched = root/'.flashinfer'
here = importlib.util.find_spec('flashinfer') is not None or (fetched/'flashinfer').exists()
pytestmark = pytest.mark.skipif(not here, reason='needs the package flashinfer: make flashinfer')

def on_fake_gpu(*names):
    "What `fake_gpu.py` says of these, by name"
    path = os.pathsep.join(map(str,
                               [root, root/'tests', fetched, *filter(None, [os.environ.get('PYTHONPATH')])]))
    done = subprocess.run([sys.executable, root/'tests'/'fake_gpu.py', *names], cwd=root, capture_output=True,
                          text=True, timeout=600, env=os.environ | dict(PYTHONPATH=path))
    told = [json.loads(o) for o in done.stdout.splitlines()]
    assert len(told) == len(names) and not done.returncode, done.stderr[-3000:]
    return {o['name']: o for o in told}

WORK = ['qwen3moe', 'kv_fp8', 'no_edits', 'tuned']
# of kinds that the others have, too
MORE = ['qwen3', 'tensor_cores', 'weights_fp8', 'sampled', 'mixed', 'window', 'prefix', 'named',
        'llama', 'group5', 'page1', 'tuned_fp8']
BROKEN = ['accidents']
MORE_BROKEN = ['no_norm', 'no_rope', 'no_prefill']   # the same for other modules

def check_configurations(told, work, broken, long):
    """No call is refused, and nothing is copied or planned while a graph is captured: both would raise. A
    module that does not compile takes nothing else with it."""
    for name in work + broken:
        o = told[name]
        assert o['tokens'] == 6 * o['requests'], (name, o)
    for name in work:
        o, on_tensor_cores = told[name], name in ('tensor_cores', 'named', 'group5')
        plain = name != 'kv_fp8'   # whose keys and values are read from pages by every prompt
        assert (o['captured'] == 3 and o['replays'] > 3 and ('ragged' in o) == plain
                and ('paged' in o) >= (not plain)), o
        assert (('captured paged' in o) == on_tensor_cores
                and ('captured decode' in o) == (not on_tensor_cores)), o
        assert (o['captured heads'] and 'captured rope' not in o and o['captured rmsnorm']
                and o['captured fused_add_rmsnorm'])
        assert (o['captured gate_up'] == o['captured down'] if name == 'qwen3moe'
                else o['captured silu_and_mul'])
        # of four weights, for three sizes
        of_adapters = {k: o.get(f'captured {k}') for k in ('shrink', 'expand')}
        assert {*of_adapters.values()} == ({12} if 'tuned' in name else {None}), of_adapters
        assert ('captured round_row' in o) == (name in ('weights_fp8', 'tuned_fp8'))
        assert o.get('weigh') == o.get('pick')
    # of the steps of each kind that an engine does before it serves; all requests there are greedy
    at_start = told['qwen3moe']['weigh']
    assert told['no_edits']['weigh'] == told['no_edits']['cut'] > at_start + 3
    accidents = told['accidents']
    # a crash and a hang took nothing else along
    assert not {'weigh', 'captured pages'} & set(accidents) and accidents['captured decode']
    if not long: return
    assert told['qwen3']['weigh'] == told['sampled']['weigh'] == at_start   # which has penalties in each step
    norm, rope, prefill = (told[o] for o in MORE_BROKEN)
    # torch's own is captured instead
    assert 'rmsnorm' not in norm and norm['captured heads'] and norm['captured decode']
    assert 'rope' not in rope and rope['rmsnorm'] and rope['silu_and_mul']
    assert 'ragged' not in prefill and prefill['captured decode']

# copies to the device and kernels of a decode step outside its graph, whether it begins a page or not: a
# smaller number is welcome here, a larger one is a bug. A plan of FlashInfer's is one more copy, its own.
MOST = dict(greedy=dict(copies=1, kernels=4), random=dict(copies=1, kernels=7))
LAYER = ['fused_add_rmsnorm', 'aten.linear.default', 'heads', 'decode', 'aten.linear.default',
         'fused_add_rmsnorm', 'aten.linear.default', 'silu_and_mul', 'aten.linear.default']
ROUTER = ['aten.linear.default', 'aten.softmax.int', 'aten.topk.default', 'aten.sum.dim_IntList',
          'aten.div.Tensor', 'aten.to.dtype']
EXPERTS_LAYER = [*LAYER[:6], *ROUTER, 'aten.sort.stable', 'aten.arange.default', 'aten.searchsorted.Tensor',
                 'gate_up', 'down', 'aten.sum.dim_IntList']
LAYERS, MORE_LAYERS = ['layer', 'experts_layer', 'fp8_layer'], ['kv_fp8_layer', 'experts_fp8_layer']
STEPS = ['machine', 'modules', 'recorded', 'prefill', 'bench256', 'profile', 'sampling', 'attend', 'fp8',
         'serve', 'first_start', 'kernels', 'low', 'experts', 'adapters', 'late']
# these take three quarters of the time of all
FOR_A_WHILE = ['profile', 'attend', 'serve', 'low', 'prefill', 'bench256', 'experts', 'adapters',
               'first_start', 'late']

def check_launches(told, long):
    for name in MOST:
        o = told[name]
        assert o['replays'] == o['plans'] == 1 and o['copies to the host'] == 2, o
        for what, most in MOST[name].items():
            assert o[what] <= most, (name, what, o)
            assert o[what] > most - 1, (f'{name} launches fewer {what} now, {o[what]}: lower the number in '
                                        'MOST')
    for name in ['layer'] + ['kv_fp8_layer'] * long:
        assert told[name]['by_name'] == Counter(LAYER) and told[name]['kernels'] == 9, told[name]
    assert told['fp8_layer']['by_name'] == Counter([o.replace('linear', '_scaled_mm') for o in LAYER]
        + ['round_row'] * 4), told['fp8_layer']
    # and nowhere may the host wait: it would raise
    assert told['experts_layer']['by_name'] == Counter(EXPERTS_LAYER), told['experts_layer']
    if not long: return
    attention = [o.replace('linear', '_scaled_mm') for o in LAYER[:6]] + ['round_row'] * 2
    assert (told['experts_fp8_layer']['by_name']
            == Counter([*attention, *EXPERTS_LAYER[6:]])), told['experts_fp8_layer']

def check_steps(figures, long):
    assert (figures['machine']['arch'] == 'sm_90' and figures['machine']['flashinfer']
            and 'torch' in figures['machine']['doctor'])
    assert ({'heads_steps_us', 'heads_fused_us', 'heads_error', 'heads_fp8_error', 'sampling_error'}
            <= set(figures['kernels']))
    late = {'prefill_fa3', 'decode_fp8_cuda_cores', 'decode_fp8_tensor_cores'}
    assert (len(figures['modules']) == 8 and set(figures['modules']) >= late
            and {o['how'] for o in figures['modules'].values()} <= {'aot', 'kept', 'compiled'})
    assert (figures['recorded']['errors'] == [0.] * 20
            and figures['recorded']['rows'] == dict(requests=48, replayed=64, one_by_one=64))
    assert len(figures['sampling']) == 12 + 6 * 2 and 'qwen3_16_bits_kernels_us' in figures['sampling']
    attend = {f'n{n}_page{page}_{kernel}' for n in (1, 32, 128, 256) for page in (16, 64)
              for kernel in ('cuda_cores', 'tensor_cores', 'batch_attention')}
    cache = {f'{kv}_{kernel}' for kv in ('kv_bf16', 'kv_fp8') for kernel in ('cuda_cores', 'tensor_cores')}
    assert (set(figures['fp8']) == {'multiplies', 'n1', 'n16', 'n256', 'n4096'} | cache
            and figures['fp8']['multiplies'])
    for o in cache: assert set(figures['fp8'][o]) == {'attend_us', 'us'}
    if not long: return
    assert ({f'{o}_ms' for o in ('none', 'one', 'eight')} | {'one_ratio', 'eight_ratio'}
            == set(figures['adapters']))
    assert set(figures['profile']) == {'n1', 'n1_longest_us', 'n4', 'n4_longest_us'}
    assert set(figures['attend']) == attend
    assert (set(figures['prefill']) == {f'{kernel}_{what}' for kernel in ('fa2', 'fa3')
        for what in (8, 300, 'layer')} and set(figures['prefill']['fa3_layer']) == {'fresh_us', 'cached_us'})
    kinds = {'overlap_greedy', 'overlap_random', 'overlap_qwen3', 'normal_greedy'}
    assert (kinds | {f'{o}_step_ms' for o in kinds} <= set(figures['bench256'])
            and all(figures['bench256'][o]['compilations'] == 0 for o in kinds))
    for n in (2, 3):
        # a loaded machine sends short answers in one piece: then there is no time between
        o = figures['serve'][f'callers_{n}']
        assert (o['answers'] > 0 == o['errors'] and o['first_token_50_ms'] <= o['first_token_99_ms']
                and o.get('between_50_ms', 0) <= o.get('between_99_ms', 0) and o['share_of_own'] > 0), o
    assert ([*figures['first_start']] == ['nothing_kept', 'compiled', 'all_kept']
            and {'sampled_again_s', 'compilations'} <= set(figures['first_start']['all_kept']))
    parts = ({o for o in set(figures['prefill']) | attend if o.startswith('fa3')
              or o.endswith('batch_attention')} | cache)
    assert set(figures['late']) == {'parts'} | late | parts
    assert set(figures['experts']) == {f'n{n}' for n in (1, 16, 64, 256, 2048)}
    assert (set(figures['low']) == {f'{a}_{b}' for a in ('overlap', 'normal') for b in (1, 2, 4, 'host_us')}
            and 'all' in figures['low']['overlap_host_us'])

def test_configurations_launches_and_steps_of_gpu_check(long):
    """All in one process, which has much to import: every configuration is built, captured and generates;
    what a step launches may only shrink; and the steps of `gpu_check` run to their end. On a real GPU there
    is one run of seven minutes: no line of it may be the first to be wrong"""
    work, broken = (WORK + MORE, BROKEN + MORE_BROKEN) if long else (WORK, BROKEN)
    steps = [o for o in STEPS if long or o not in FOR_A_WHILE]
    layers = LAYERS + MORE_LAYERS * long
    told = on_fake_gpu(*work, *broken, *MOST, *layers, *steps)
    for name, o in told.items(): assert o['ok'], (name, o['error'], o['at'])
    check_configurations(told, work, broken, long)
    check_launches(told, long)
    check_steps({name: told[name]['figures'] for name in steps}, long)
