"""Checkpoints in the layouts of GPTQ, AWQ, compressed-tensors, FP8 and MXFP4, packed here by their published
layouts, by the package compressed-tensors itself, and by AutoRound, GPTQModel and transformers
(`tests/data/make_packed.py`): the same tokens as `transformers` on the weights that are meant, and
refusals."""
import hashlib, json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_lit import LLM, SamplingParams
from minisgl_lit.config import EngineConfig
from minisgl_lit.assembly import ResolvedConfig
from minisgl_lit.core.host import warn_once
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.weights import load_weights as read_weights, open_checkpoint
from reference import MAX_NEW, generate, load, make_checkpoint, prompts, rope

GROUP = 16   # divides all that a layer takes in
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0)

@pytest.fixture(autouse=True)
def forget_what_was_said():
    "A process says a line once, and several cases wait for the same line"
    warn_once.cache_clear()


def words(codes: torch.Tensor, order=range(8)) -> torch.Tensor:
    "Eight codes of 4 bits to a word, the lowest bits first: [..., 8 * n] to [..., n]"
    eight = codes.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    numbers = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(numbers >= 2**31, numbers - 2**32, numbers).int().contiguous()

def rounded(weight: torch.Tensor, symmetric: bool):
    "Codes, scales, zero points, and the weights that are meant"
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric: high = groups.abs().amax(-1); low = -high
    scales = ((high - low) / 15).half()
    zeros = torch.full(scales.shape, 8) if symmetric else (-low / scales.float()).round().clamp(0, 15).int()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).int()
    return (codes.flatten(1), scales, zeros,
            ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1))

def gptq(weight, more):
    codes, scales, zeros, meant = rounded(weight, more.get('sym', False))
    layer = dict(qweight=words(codes).T, qzeros=words((zeros - 1 & 15).T), scales=scales.T,
                 g_idx=torch.arange(weight.shape[1]).int() // GROUP)
    if more.get('desc_act'):   # the order in which inputs were rounded: their groups are mixed
        order = torch.randperm(weight.shape[1])
        codes, scales, zeros, meant = rounded(weight[:, order], False)
        back = order.argsort()
        layer = dict(qweight=words(codes[:, back]).T, qzeros=words((zeros - 1 & 15).T), scales=scales.T,
                     g_idx=(back // GROUP).int())
        meant = meant[:, back]
    return layer, meant

def awq(weight, more):
    codes, scales, zeros, meant = rounded(weight, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return dict(qweight=words(codes.T, order), qzeros=words(zeros.T, order), scales=scales.T), meant

def compressed(weight, more):
    codes, scales, zeros, meant = rounded(weight, more['symmetric'])
    layer = dict(weight_packed=words(codes), weight_scale=scales, weight_shape=torch.tensor(weight.shape))
    return layer if more['symmetric'] else layer | dict(weight_zero_point=words(zeros.T).T), meant

def int8(weight, more):
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return dict(weight=codes, weight_scale=scales), codes.float() * scales

def fp8(weight, more):
    scale = torch.rand(-(-weight.shape[0] // 32), -(-weight.shape[1] // 32)) * .01 + .01
    wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:weight.shape[0], :weight.shape[1]]
    eight = (weight / wide).to(torch.float8_e4m3fn)
    return dict(weight=eight, weight_scale_inv=scale), eight.float() * wide

def groups(bits, **more):
    return dict(config_groups=dict(group_0=dict(targets=['Linear'], weights=dict(num_bits=bits))), **more)
KINDS = {
    'gptq': (gptq, dict(quant_method='gptq', bits=4, group_size=GROUP, desc_act=False, sym=False)),
    'gptq, symmetric': (gptq, dict(quant_method='gptq', bits=4, group_size=GROUP, sym=True)),
    'gptq, act-order': (gptq, dict(quant_method='gptq', bits=4, group_size=GROUP, desc_act=True)),
    'awq': (awq, dict(quant_method='awq', bits=4, group_size=GROUP, zero_point=True, version='gemm')),
    'compressed-tensors': (compressed,
        dict(quant_method='compressed-tensors', format='pack-quantized', symmetric=True) | groups(4)),
    'compressed-tensors, zero points': (compressed,
        dict(quant_method='compressed-tensors', format='pack-quantized', symmetric=False) | groups(4)),
    'compressed-tensors, int8': (int8,
                                 dict(quant_method='compressed-tensors', format='int-quantized') | groups(8)),
    'fp8': (fp8, dict(quant_method='fp8', weight_block_size=[32, 32]))}

def make(family: str, kind: str, folder: Path) -> tuple[Path, Path]:
    "A quantized checkpoint, and the same with the weights that are meant"
    torch.manual_seed(1)
    plain, packed = folder/'plain', folder/'packed'
    make_checkpoint(family, plain)
    pack, settings = KINDS[kind]
    dense, layers = {}, {}
    for file in plain.glob('*.safetensors'):
        for name, o in load_file(file).items():
            if not name.endswith('_proj.weight'): dense[name] = layers[name] = o
            else:
                parts, dense[name] = pack(o, settings)
                layers |= {f'{name.removesuffix("weight")}{k}': v.contiguous() for k, v in parts.items()}
        file.unlink()
    (plain/'model.safetensors.index.json').unlink()
    packed.mkdir()
    save_file(dense, plain/'model.safetensors', metadata=dict(format='pt'))
    save_file(layers, packed/'model.safetensors', metadata=dict(format='pt'))
    config = json.loads((plain/'config.json').read_text())
    (packed/'config.json').write_text(json.dumps(config | dict(quantization_config=settings)))
    return packed, plain


@pytest.mark.parametrize('family, kind',
    [*((o, 'gptq') for o in ('Llama', 'Qwen2', 'Qwen3')), *(('Qwen3', o) for o in list(KINDS)[1:])])
def test_the_same_tokens_as_transformers(family, kind, tmp_path, capfd):
    "On the weights that are meant, with exact products"
    packed, plain = make(family, kind, tmp_path)
    asked = prompts()
    with LLM(packed, dtype='float32', quantization_compute='exact', num_pages=512, max_running_req=5) as llm:
        got = [o.token_ids for o in llm.generate(asked, GREEDY)]
    assert got == [generate(plain, o) for o in asked]
    assert ('widened to float32' in capfd.readouterr().err) == (kind in ('gptq, act-order', 'fp8'))


THEIRS = {   # arguments of `QuantizationArgs`, and whether weights are widened here
    '4 bits': (dict(num_bits=4, strategy='group', group_size=GROUP), False),
    '4 bits, zero points': (dict(num_bits=4, strategy='group', group_size=GROUP, symmetric=False), False),
    '8 bits': (dict(num_bits=8, strategy='channel'), False),
    '8 bits, zero points': (dict(num_bits=8, strategy='group', group_size=GROUP, symmetric=False), False),
    '8 bits, of inputs too': (dict(num_bits=8, strategy='channel'), False),
    'FP8': (dict(num_bits=8, type='float', strategy='channel'), True),
    'FP8, blocks': (dict(num_bits=8, type='float', strategy='block', block_structure=[16, 16]), True)}

def least_and_most(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    "Of all numbers that share a scale"
    if args.strategy == 'channel': return weight.aminmax(dim=1, keepdim=True)
    if args.strategy == 'group': return weight.unflatten(1, (-1, GROUP)).aminmax(dim=-1)
    blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
    return blocks.amin((1, 3)), blocks.amax((1, 3))

def make_by_others(kind: str, folder: Path) -> tuple[Path, Path]:
    "The same by the package compressed-tensors, which llm-compressor and `transformers` write and read with"
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (QuantizationArgs, QuantizationConfig, QuantizationScheme,
        apply_quantization_config)
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams
    plain, packed = folder/'plain', folder/'packed'
    make_checkpoint('Qwen3', plain)
    model, meant = load(plain), load_weights(plain)
    inputs = QuantizationArgs(num_bits=8, strategy='token', dynamic=True) if 'inputs' in kind else None
    scheme = QuantizationScheme(targets=['Linear'], weights=QuantizationArgs(**THEIRS[kind][0]),
                                input_activations=inputs)
    apply_quantization_config(model,
                              QuantizationConfig(config_groups=dict(group_0=scheme), ignore=['lm_head']))
    for name, module in model.named_modules():
        if not hasattr(module, 'quantization_scheme'): continue
        args, weight = module.quantization_scheme.weights, module.weight.data
        module.weight_scale.data, zeros = calculate_qparams(*least_and_most(weight, args), args)
        if hasattr(module, 'weight_zero_point'): module.weight_zero_point.data = zeros
        meant[f'{name}.weight'] = fake_quantize(weight, module.weight_scale, zeros, args).detach()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(packed)
    compressor.update_config(packed)
    for file in [*plain.glob('*.safetensors*')]: file.unlink()
    save_file({name: o.contiguous() for name, o in meant.items()}, plain/'model.safetensors',
              metadata=dict(format='pt'))
    return packed, plain

def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: o for file in path.glob('*.safetensors') for name, o in load_file(file).items()}

@pytest.mark.parametrize('kind', THEIRS)
def test_what_others_wrote(kind, tmp_path, capfd):
    "The same tokens as `transformers` on the weights that compressed-tensors means"
    packed, plain = make_by_others(kind, tmp_path)
    load.cache_clear()   # that model is compressed now
    with LLM(packed, dtype='float32', quantization_compute='exact', num_pages=512) as llm:
        got = [o.token_ids for o in llm.generate(prompts(), GREEDY)]
    assert got == [generate(plain, o) for o in prompts()]
    assert ('widened to float32' in capfd.readouterr().err) == THEIRS[kind][1]


DATA = Path(__file__).parent/'data'
SUMS = json.loads((DATA/'packed_files.json').read_text())['sha256']

@pytest.mark.parametrize('name', SUMS)
def test_files_that_people_make(name, tmp_path, capfd):
    """The weights of each layer are those that GPTQModel reads (FP8: transformers), and the tokens those of
    `transformers` on them"""
    meant = {}
    for part, o, first in open_checkpoint(DATA/name, read_config(DATA/name)).read():
        assert first == 0, 'small tensors are read whole'
        meant[part] = o if isinstance(o, torch.Tensor) else o.dequantize()
    sums = {part: hashlib.sha256((meant[part].half() + 0.).contiguous().numpy().tobytes()).hexdigest()
            for part in SUMS[name]}
    assert sums == SUMS[name] and len(sums) == 14
    config = json.loads((DATA/name/'config.json').read_text())
    del config['quantization_config']
    (tmp_path/'config.json').write_text(json.dumps(config))
    save_file({part: o.float().contiguous() for part, o in meant.items()}, tmp_path/'model.safetensors',
              metadata=dict(format='pt'))
    asked = prompts(90)
    with LLM(DATA/name, dtype='float32', quantization_compute='exact', num_pages=64) as llm:
        got = [o.token_ids for o in llm.generate(asked, GREEDY)]
    assert got == [generate(tmp_path, o) for o in asked] and len({t for o in got for t in o}) > 10
    assert ('widened to float32' in capfd.readouterr().err) == (name in ('gptq-act-order', 'fp8-blocks'))

def test_act_order_mixes_groups():
    "In the file, too: else it would show nothing"
    stated = load_file(DATA/'gptq-act-order/model.safetensors')['model.layers.0.mlp.down_proj.g_idx']
    assert not torch.equal(stated, stated.sort().values) and stated.bincount().tolist() == [32] * 8


def refused(sentence, **settings):
    with pytest.raises(ValueError, match=sentence): LLM(**settings)

def test_refusals(tmp_path):
    packed, _ = make('Qwen3', 'gptq', tmp_path)
    refused('the weights of this checkpoint are compressed already', model=packed, quantization='int8')
    config = json.loads((packed/'config.json').read_text())
    def change(**more):
        (packed/'config.json').write_text(json.dumps(config
            | dict(quantization_config=config['quantization_config'] | more)))
    change(bits=3)
    refused('bits=3 of quantization_config is not served; known are 4, 8', model=packed)
    change(quant_method='bitsandbytes')
    refused("quant_method='bitsandbytes' of config.json is not served; known are gptq, awq, fp8, "
            "compressed-tensors", model=packed)
    change()
    tensors = load_file(packed/'model.safetensors')
    save_file({k: v for k, v in tensors.items() if not k.endswith('0.self_attn.q_proj.scales')},
              packed/'model.safetensors')
    refused(r'a layer of the checkpoint has only .*\.qweight.*; \'scales\' is missing', model=packed)


def test_what_is_needed_is_known_before(tmp_path):
    "The form of each layer, as it will be read"
    packed, plain = make('Qwen3', 'awq', tmp_path)
    checkpoint, meant = (open_checkpoint(packed, read_config(packed)),
                         open_checkpoint(plain, read_config(plain)))
    assert {k: o.shape for k, o in checkpoint.tensors.items()} == {k: o.shape
        for k, o in meant.tensors.items()}
    for name, tensor, _ in checkpoint.read():
        info = checkpoint.tensors[name]
        if info.groups:
            assert (tensor.bits, tensor.group) == info.groups[:2] and tuple(tensor.codes.shape) == info.shape


def test_float16_would_have_no_kernel(tmp_path):
    "So a quantized checkpoint of float16 computes in bfloat16 on a CPU, if nobody says otherwise"
    packed, plain = make('Qwen3', 'awq', tmp_path)
    config = json.loads((packed/'config.json').read_text())
    (packed/'config.json').write_text(json.dumps(config | dict(dtype='float16')))
    def chosen(**settings): return ResolvedConfig.of(EngineConfig(model=str(packed), **settings)).dtype
    assert (chosen(), chosen(dtype='float16')) == (torch.bfloat16, torch.float16)
    (plain/'config.json').write_text(json.dumps(json.loads((plain/'config.json').read_text())
                                                | dict(dtype='float16')))
    assert ResolvedConfig.of(EngineConfig(model=str(plain))).dtype == torch.float16


@pytest.mark.parametrize('method', ['gptq', 'awq'])
def test_what_changes_nothing_is_left_out(method, tmp_path, capfd):
    """Biases of zeros beside each layer, as usual tools write them, scales of a cache in fp8, a layer behind
    the last: with a line; a bias that does something is refused"""
    packed, _ = make('Llama', method, tmp_path)
    tensors, config = load_file(packed/'model.safetensors'), read_config(packed)
    want = read_weights(packed, config, torch.float32)
    layers = {k.rpartition('.')[0]: v.shape[1] for k, v in tensors.items() if k.endswith('.scales')}
    more = {f'{o}.bias': torch.zeros(n).half() for o, n in layers.items()}
    more |= {'model.layers.0.self_attn.k_scale': torch.ones(1),
             f'model.layers.{config.num_layers}.input_layernorm.weight': torch.ones(1)}
    save_file(tensors | more, packed/'model.safetensors')
    got = read_weights(packed, config, torch.float32)
    assert got.keys() == want.keys() and all(torch.equal(got[o], want[o]) for o in want)
    assert (f'1 tensors of layers behind the last of {config.num_layers} are left out'
            in capfd.readouterr().err)
    name = next(iter(layers)) + '.bias'
    save_file(tensors | {name: more[name] + 1}, packed/'model.safetensors')
    with pytest.raises(ValueError, match=f'config.json does not account for: {name}'):
        read_weights(packed, config, torch.float32)

FP4 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])

def mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    "Experts, [n, inputs, outputs], as blocks and scales, and what these mean"
    groups = weight.mT.unflatten(-1, (-1, 32))
    power = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = (groups[..., None].abs() / 2 ** power[..., None] - FP4).abs().argmin(-1)
    meant = (FP4[codes] * groups.sign() * 2 ** power).flatten(-2).mT
    codes = (codes + 8 * (groups < 0)).to(torch.uint8)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return dict(blocks=blocks, scales=(power[..., 0] + 127).to(torch.uint8)), meant.contiguous()

def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    "The experts of a tiny gpt-oss in 4 bits, and a checkpoint of what these mean"
    plain, packed = folder/'plain', folder/'packed'
    make_checkpoint('GptOss', plain, hidden_size=64, intermediate_size=32, num_local_experts=5,
                    num_experts_per_tok=2, sliding_window=9, bos_token_id=197, pad_token_id=196,
                    **rope('yarn', factor=2., original_max_position_embeddings=256, truncate=False))
    packed.mkdir()
    raw = json.loads((plain/'config.json').read_text())
    raw['quantization_config'] = dict(quant_method='mxfp4', modules_to_not_convert=['lm_head'])
    (packed/'config.json').write_text(json.dumps(raw))
    tensors = dict[str, torch.Tensor]()
    for file in plain.glob('*.safetensors'):
        ours = load_file(file)
        for name, weight in ours.items():
            if name.endswith(('experts.gate_up_proj', 'experts.down_proj')):
                parts, ours[name] = mxfp4(weight)
                tensors |= {f'{name}_{part}': o for part, o in parts.items()}
            else: tensors[name] = weight
        save_file(ours, file, metadata=dict(format='pt'))
    save_file(tensors, packed/'model.safetensors')
    return plain, packed

def test_experts_in_mxfp4(tmp_path, capfd):
    plain, packed = make_mxfp4(tmp_path)
    right = [generate(plain, o) for o in prompts()[:4]]
    with LLM(packed, device='cpu', dtype='float32', num_pages=200) as llm:
        outs = llm.generate(prompts()[:4], GREEDY)
    assert [o.token_ids for o in outs] == right
    assert 'widened to float32' in capfd.readouterr().err
    assert len({tuple(o) for o in right}) > 2
    tensors = load_file(packed/'model.safetensors')
    name = 'model.layers.1.mlp.experts.down_proj_scales'
    blocks = name.replace('scales', 'blocks')
    odd = [{name: tensors[name][:, 1:]}, {name: tensors[name].float()}, {blocks: tensors[blocks].float()},
           {blocks: tensors[blocks].flatten()}, {blocks: tensors[blocks][0], name: tensors[name][0]}]
    for wrong in odd:
        save_file(tensors | {o: w.contiguous() for o, w in wrong.items()}, packed/'model.safetensors')
        with pytest.raises(ValueError, match=r'blocks of \[.* do not fit scales of \['):
            LLM(packed, device='cpu')
    save_file({o: w for o, w in tensors.items() if o != name}, packed/'model.safetensors')
    with pytest.raises(ValueError, match="'scales' is missing"): LLM(packed, device='cpu')
    save_file(tensors | {name: torch.full_like(tensors[name], 255)}, packed/'model.safetensors')
    with pytest.raises(ValueError, match='NaN or infinity'): LLM(packed, device='cpu', num_pages=9)
