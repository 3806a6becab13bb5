"""Checkpoints: what loading costs in memory, any cut into files, and one sentence for each thing that can be
wrong."""
import json, os, subprocess, sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import warm
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from minisgl_lit.kernels import gpu_operations
from minisgl_lit.kernels.experts import SideBySide
from minisgl_lit.kernels.grouped_matmul import expert_mlps
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.llm import LLM
from minisgl_lit.core.models.checkpoint import families, read_config
from minisgl_lit.core.models.decoder import Decoder, ModelConfig, weight_shapes
from minisgl_lit.core.models.moe import MoeMlp
from minisgl_lit.core.models.operations import Operations
from minisgl_lit.formats.quantization import Fp8Projections
from minisgl_lit.core.models.weights import (
    keep, list_files, load_weights, tensor_placements, read_batches, read_headers)
from reference import make_checkpoint

MIB = 2**20

def write_hole(path: Path, config: ModelConfig) -> int:
    "A checkpoint of zeros in bfloat16 that takes no room on disk; how many bytes it would take"
    header, offset = {}, 0
    for name, o in tensor_placements(config).items():
        end = offset + 2 * torch.Size(o.shape).numel()
        header[name], offset = dict(dtype='BF16', shape=o.shape, data_offsets=[offset, end]), end
    text = json.dumps(header).encode()
    with open(path/'model.safetensors', 'wb') as f:
        f.write(len(text).to_bytes(8, 'little') + text)
        f.truncate(8 + len(text) + offset)
    return offset

RAW = dict(architectures=['LlamaForCausalLM'], vocab_size=16_000, hidden_size=1024, intermediate_size=4096,
           num_hidden_layers=6,
           num_attention_heads=8, num_key_value_heads=4, dtype='bfloat16')
MEASURE = '''
import sys, torch
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.weights import load_weights
def status(key): return next(int(o.split()[1]) * 1024 for o in open('/proc/self/status') if o.startswith(key))
config = read_config(sys.argv[1])
torch.ones(9, dtype=torch.bfloat16).aminmax()
with open('/proc/self/clear_refs', 'w') as f: f.write('5')   # forget the highest memory so far
before = status('VmRSS')
weights = load_weights(sys.argv[1], config, torch.bfloat16)
print(status('VmHWM') - before, sum(o.nbytes for o in weights.values()))
'''

@pytest.mark.skipif(not os.path.exists('/proc/self/clear_refs'), reason='reads memory from Linux')
def test_loading_takes_the_weights_and_a_batch(tmp_path):
    "Peak memory of a process, the mapped file included"
    (tmp_path/'config.json').write_text(json.dumps(RAW))
    size = write_hole(tmp_path, read_config(tmp_path))
    run = subprocess.run([sys.executable, '-c', MEASURE, str(tmp_path)], capture_output=True, text=True,
                         check=True)
    peak, weights = map(int, run.stdout.split())
    print(f'weights {weights / MIB:.0f} MiB, highest memory while loading {peak / MIB:.0f} MiB')
    assert weights == size > 200*MIB and weights <= peak < weights + 100*MIB

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A small checkpoint with every kind of tensor, its config and its weights"
    path = tmp_path_factory.mktemp('whole')
    make_checkpoint('Qwen2Moe', path, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
                    decoder_sparse_step=2,
                    shared_expert_intermediate_size=12, num_hidden_layers=2, head_dim=None)
    config = read_config(path)
    return path, config, load_weights(path, config, torch.float32)

@settings(max_examples=5)
@given(data=st.data())
def test_any_cut_into_files_gives_the_same_weights(whole, data, tmp_path_factory):
    path, config, weights = whole
    tensors, cut = {}, tmp_path_factory.mktemp('cut')
    for file in list_files(path): tensors |= load_file(file)
    where = {name: data.draw(st.integers(1, 4), label=name) for name in tensors}
    for i in set(where.values()):
        save_file({name: o for name, o in tensors.items() if where[name] == i}, cut/f'{i}.safetensors')
    index = dict(weight_map={name: f'{i}.safetensors' for name, i in where.items()})
    (cut/'model.safetensors.index.json').write_text(json.dumps(index))
    again = load_weights(cut, config, torch.float32)
    assert again.keys() == weights.keys() and all(torch.equal(again[o], weights[o]) for o in weights)
    found, most = read_headers(list_files(cut)), data.draw(st.integers(1, 20_000))
    with pytest.MonkeyPatch.context() as patch:   # rows of a tensor, one after the other
        patch.setattr('minisgl_lit.core.models.weights.MAPPED_BYTES', most)
        again = load_weights(cut, config, torch.float32)
    assert all(torch.equal(again[o], weights[o]) for o in weights)
    for names in read_batches(found, most):
        assert len({found[o].file for o in names}) == 1
        assert len(names) == 1 or sum(4 * torch.Size(found[o].shape).numel() for o in names) <= most
    assert [o for names in read_batches(found, most) for o in names] == [*found]

@pytest.mark.parametrize('compression', [None, Fp8Projections()], ids=['16 bits', 'fp8'])
def test_experts_lie_side_by_side(whole, compression):
    """As on a GPU: every layer's experts are one tensor, too, with the same numbers; and all at once they
    compute what they do one by one"""
    path, config, weights = whole
    pack, put = compression.pack if compression else keep, SideBySide(weight_shapes(config))
    beside = load_weights(path, config, torch.float32,
                          finish=lambda name, weight: put(name, pack(name, weight)))
    weights = {name: pack(name, weight.clone()) for name, weight in weights.items()}
    def plain(o): return o if isinstance(o, torch.Tensor) else o.unpack()
    assert (beside.keys() == weights.keys()
            and all(torch.equal(plain(o), plain(weights[name])) for name, o in beside.items()))
    table = gpu_operations.TritonOperations(torch.device('cpu'), torch.float32)
    with patch.object(gpu_operations, 'experts_kernel', return_value=expert_mlps):
        model, apart = Decoder(config, beside, operations=table), Decoder(config, weights, operations=table)
    layers = [i for i in range(config.num_layers) if isinstance(config.mlp(i), MoeMlp)]
    assert layers
    for i in layers:
        for o in 'gate_up_proj', 'down_proj':
            joined, one = model.layers[i][o], model.layers[i][f'mlp.experts.1.{o}.weight']
            joined, one = ((o if compression is None else o.data) for o in (joined, one))
            assert joined[1].data_ptr() == one.data_ptr()
        assert 'down_proj' not in apart.layers[i]
        x = torch.randn(9, config.hidden_size)
        want = apart.mlps[i].forward(x, apart.layers[i], Operations())
        with patch.object(gpu_operations, 'experts_kernel', return_value=expert_mlps) as asked:
            got = model.mlps[i].forward(x, model.layers[i], table)
        assert asked.call_args.args[2] == bool(compression) and torch.allclose(got, want, atol=1e-5)

ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.text(max_size=5),
                     st.lists(st.integers(0, 3), max_size=3),
                     st.just({}), st.sampled_from(['yarn', 'linear', 'llama3', 'dynamic', 'sliding_attention',
                         'bfloat16', *families]))
NAMES = ['architectures', 'hidden_size', 'num_attention_heads', 'num_key_value_heads', 'head_dim',
         'intermediate_size', 'num_hidden_layers', 'vocab_size',
         'max_position_embeddings', 'rms_norm_eps', 'rope_theta', 'rope_scaling', 'rope_parameters',
         'tie_word_embeddings', 'attention_bias', 'mlp_bias', 'sliding_window', 'use_sliding_window',
         'max_window_layers', 'layer_types', 'hidden_act', 'dtype', 'torch_dtype', 'eos_token_id',
         'num_experts', 'num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob',
         'decoder_sparse_step', 'mlp_only_layers', 'shared_expert_intermediate_size',
         'quantization_config', 'partial_rotary_factor', 'original_max_position_embeddings']
ROPE_NAMES = ['rope_type', 'type', 'factor', 'rope_theta', 'original_max_position_embeddings',
              'low_freq_factor', 'high_freq_factor', 'beta_fast',
              'attention_factor', 'truncate']
ROPE = st.fixed_dictionaries({}, optional={o: ANYTHING for o in ROPE_NAMES})
ADVICE = ['temperature', 'top_p', 'top_k', 'min_p', 'eos_token_id', 'do_sample']
SOUND = (RAW | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                    shared_expert_intermediate_size=8, n_routed_experts=4, sliding_window=5,
                    use_sliding_window=True, num_hidden_layers=3))

@settings(max_examples=400)
@given(family=st.sampled_from([*families]),
       changed=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3),
       rope=st.none() | ROPE, advice=st.dictionaries(st.sampled_from(ADVICE), ANYTHING, max_size=2))
def test_whatever_a_config_says_it_is_read_or_refused_in_one_sentence(tmp_path_factory, family, changed, rope,
        advice):
    path = tmp_path_factory.getbasetemp()/'any'
    path.mkdir(exist_ok=True)
    raw = SOUND | dict(architectures=[family]) | ({} if rope is None else dict(rope_scaling=rope)) | changed
    (path/'config.json').write_text(json.dumps(raw))
    (path/'generation_config.json').write_text(json.dumps(advice))
    try: config = read_config(path)
    except ValueError as e:
        assert ('\n' not in str(e)
                and any(o in str(e) for o in ['architecture', *NAMES, *ROPE_NAMES, *ADVICE])), str(e)
    else:
        assert len(config.windows) in (0, config.num_layers) and len(config.mlps) in (0, config.num_layers)
        if config.num_layers < 100:
            assert all(isinstance(n, int) and n > 0 for shape in weight_shapes(config).values()
                       for n in shape)

def test_reading_says_what_it_must(tmp_path):
    "A sound file of each family is read, so that the test above does not only see refusals"
    for family in families:
        sees = family.endswith('ForConditionalGeneration')   # and has a language model inside
        kind, inside = (('gemma3_text', 'Gemma3ForCausalLM') if family.startswith('Gemma')
                        else ('qwen3', 'Qwen3ForCausalLM'))
        raw = dict(text_config=SOUND | dict(model_type=kind)) if sees else SOUND
        (tmp_path/'config.json').write_text(json.dumps(raw | dict(architectures=[family])))
        assert read_config(tmp_path).architecture == (inside if sees else family)

@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp('sound')
    make_checkpoint('Qwen3', path, tie_word_embeddings=False)
    return path

def broken(sound: Path, path: Path, change) -> Path:
    "The same checkpoint in one file, with a flaw"
    raw, tensors = json.loads((sound/'config.json').read_text()), {}
    for file in list_files(sound): tensors |= load_file(file)
    change(raw, tensors)
    (path/'config.json').write_text(json.dumps(raw))
    save_file(tensors, path/'model.safetensors')
    return path

def lose(name): return lambda raw, tensors: tensors.pop(name)
def put(name, value): return lambda raw, tensors: tensors.update({name: value})
def say(**fields): return lambda raw, tensors: raw.update(fields)
NORM, DOWN = 'model.norm.weight', 'model.layers.1.mlp.down_proj.weight'
FLAWS = {
    'missing': (lose(DOWN), f'lacks tensors: {DOWN}'),
    'extra': (put('more', torch.ones(3)), 'does not account for: more'),
    'misshapen': (put(DOWN, torch.ones(48, 7)), f'tensor {DOWN} of the checkpoint has shape [48, 7]; '
                                                'config.json asks for [48, 80]'),
    'nan': (put(NORM, torch.full((48,), torch.nan)),
            f'tensor {NORM} of the checkpoint holds NaN or infinity'),
    'infinite': (put(NORM, torch.full((48,), torch.inf)), f'tensor {NORM} of the checkpoint holds NaN'),
    'integers': (put(NORM, torch.ones(48, dtype=torch.int32)),
                 f'tensor {NORM} of the checkpoint is stored as I32'),
    'architecture': (say(architectures=['OPTForCausalLM']),
                     "architecture 'OPTForCausalLM' of config.json is not served; known are Llama"),
    'rope': (say(rope_parameters=dict(rope_type='longrope')), "rope_type='longrope'"),
    'size': (say(hidden_size='48'), "hidden_size='48' of config.json must be a whole number"),
    'dtype': (say(dtype='float8'), "dtype='float8' of config.json is not served; known are float32, "
                                   "bfloat16, float16"),
}

@pytest.mark.parametrize('flaw', FLAWS)
def test_each_flaw_is_one_sentence(flaw, sound, tmp_path):
    change, words = FLAWS[flaw]
    path = broken(sound, tmp_path, change)
    with pytest.raises(ValueError) as e: LLM(path, device='cpu', num_pages=20)
    assert words in str(e.value) and '\n' not in str(e.value)

def test_a_corrupt_shard_is_named(sound, tmp_path):
    for file in sound.iterdir(): (tmp_path/file.name).write_bytes(file.read_bytes())
    shard = list_files(tmp_path)[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f'{shard.name} is damaged or incomplete'):
        LLM(tmp_path, device='cpu', num_pages=20)
    shard.unlink()
    with pytest.raises(ValueError, match=f'incomplete: {shard.name}, named in its index, is missing'):
        LLM(tmp_path, device='cpu', num_pages=20)

def test_wrong_wishes(sound):
    with pytest.raises(ValueError, match="dtype must be 'auto', 'float32', 'bfloat16' or 'float16', not "
                                         "'float8'"):
        LLM(sound, dtype='float8')
    with pytest.raises(ValueError, match='max_seq_len must be at most 128, for which this model was made, '
                                         'not 129'):
        LLM(sound, device='cpu', max_seq_len=129)
    with LLM(sound, device='cpu', num_pages=20) as llm:
        with pytest.raises(RequestError, match='128'): llm.generate([1] * 128)
        with pytest.raises(RequestError, match='128'): llm.generate([1] * 100, SamplingParams(max_tokens=29))

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_every_dtype_answers(sound, dtype):
    with LLM(sound, device='cpu', dtype=dtype, num_pages=20) as llm:
        outs = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        assert [o.finish_reason for o in outs] == ['length'] and len(outs[0].token_ids) == 5

def test_the_command_line_says_it_in_one_line(sound, tmp_path):
    path = broken(sound, tmp_path, FLAWS['nan'][0])
    run = warm.run([sys.executable, '-m', 'minisgl_lit', 'generate', 'hi', '--model', str(path),
                          '--device', 'cpu'], capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == '' and 'Traceback' not in run.stderr
    assert run.stderr.strip().splitlines()[-1].endswith(FLAWS['nan'][1])
