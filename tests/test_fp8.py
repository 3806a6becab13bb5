"""8-bit floating point, for weights and for keys and values: on a CPU, where both are widened, tokens equal
those of `transformers` on the numbers that are left; who is refused; and which kernels a GPU is asked for is
seen by `test_fake_gpu`."""
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_lit.config import EngineConfig
from minisgl_lit.assembly import ResolvedConfig, plan_memory
from minisgl_lit.kernels import fp8
from minisgl_lit.kernels.trials import TOLERANCE, largest_error
from minisgl_lit.kernels.fp8 import Fp8Weight
from minisgl_lit.kernels.kv_formats import FP8, round_to_fp8
from minisgl_lit.formats.quantization import Fp8Projections, weight_bytes
from minisgl_lit.core.models.weights import list_files
from minisgl_lit.runtime import build
from reference import make_checkpoint, generate, prompts
from test_kv_in_8_bits import SETTINGS, expected
from test_parity import serve

def told(path, **more):
    "What our engine says to every prompt"
    runtime = build(EngineConfig(model=str(path), device='cpu', dtype='float32', max_running_req=6, **more))
    try: return serve(runtime, 'a')[0], runtime
    finally: runtime.close()

@pytest.mark.parametrize('name', ['Qwen3', pytest.param('Mistral', marks=pytest.mark.long)])
def test_keys_and_values(name, tmp_path, monkeypatch):
    "A cache of transformers that rounds in the same way"
    monkeypatch.setattr('test_kv_in_8_bits.rounded', lambda o: round_to_fp8(o).to(o.dtype))
    make_checkpoint(name, tmp_path)
    want = {i: expected(tmp_path, prompt) for i, prompt in enumerate(prompts())}
    for more in SETTINGS[:3]:
        got, runtime = told(tmp_path, kv_dtype='fp8', **more)
        assert runtime.engine.attention.pool.buffer.dtype == FP8 and got == want, more

@pytest.mark.parametrize('name', ['Qwen3', 'Qwen3Moe', pytest.param('Qwen2', marks=pytest.mark.long)])
def test_weights(name, tmp_path):
    "A checkpoint whose projections are rounded already, those of experts, too"
    make_checkpoint(name, tmp_path, **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                                           head_dim=None) if 'Moe' in name else {})
    got, runtime = told(tmp_path, quantization='fp8', num_pages=300)
    rounded = {o for o, w in runtime.engine.model.weights.items() if isinstance(w, Fp8Weight)}
    assert (any('qkv_proj' in o for o in rounded)
            and not any('norm' in o or 'embed' in o or 'head' in o or 'mlp.gate.' in o for o in rounded))
    assert (('Moe' in name) == any('.experts.3.down_proj' in o for o in rounded)
            and any('down_proj' in o for o in rounded))
    how = Fp8Projections()
    for file in list_files(tmp_path):
        tensors = load_file(file)
        rounded = {o: Fp8Weight.of(w).unpack() for o, w in tensors.items() if how.of(o, w.shape)}
        save_file(tensors | rounded, file, metadata=dict(format='pt'))
    assert got == {i: generate(tmp_path, prompt) for i, prompt in enumerate(prompts())}

def test_what_is_taken(tmp_path):
    "One byte for a number of the cache, and for a weight of a projection, with four for each output"
    def resolved(**more):
        return ResolvedConfig.of(EngineConfig(device='cpu', dtype='bfloat16', max_running_req=4000, **more))
    half, plain = resolved(kv_dtype='fp8'), resolved()
    pages = [plan_memory(o, free=10**7, weights=0).num_pages for o in (half, plain)]
    assert pages[0] + 1 == pytest.approx(2 * (pages[1] + 1), abs=2)
    both = [weight_bytes(plain.model, torch.bfloat16, o) for o in (Fp8Projections(), None)]
    taken = sum(w.nbytes if isinstance(w, torch.Tensor) else w.data.nbytes + w.scales.nbytes
                if isinstance(w, Fp8Weight) else w.data.nbytes
                for name, w in resolved(quantization='fp8', dummy_weights=True).weights().items()
                if 'embed' not in name)
    table = plain.model.vocab_size * plain.model.hidden_size * 2
    assert both[0] < both[1] and taken == pytest.approx(both[0] - table, rel=.01)

@pytest.mark.parametrize('name, value',
                         [('quantization', 'int8'), ('quantization', 'int4'), ('kv_dtype', 'int8')])
def test_whole_numbers_are_for_a_cpu(name, value, monkeypatch):
    monkeypatch.setattr('minisgl_lit.assembly.choose_device', lambda config, rank: torch.device('cuda'))
    with pytest.raises(ValueError, match=f"{name}='{value}' is for a CPU; on cuda it can be 'fp8'"):
        ResolvedConfig.of(EngineConfig(dummy_weights=True, **{name: value}))
    for o in ('quantization', 'kv_dtype'):
        assert ResolvedConfig.of(EngineConfig(dummy_weights=True, **{o: 'fp8'}))

def test_a_product_in_8_bits_is_that_of_its_definition():
    "By torch's own matmul, where this build has it for a CPU; it is what a GPU is asked for"
    x, w = fp8.plain_to_fp8(torch.randn(5, 48)), fp8.plain_to_fp8(torch.randn(32, 48))
    try: got = fp8.scaled_matmul(*x, *w, torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as e: pytest.skip(f'not on a CPU: {e}'[:100])
    assert largest_error([(got, fp8.plain_scaled_matmul(*x, *w, torch.bfloat16))]) <= TOLERANCE

@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_only_bfloat16_is_rounded_for_a_product(monkeypatch, dtype):
    "Inputs of other dtypes get the weights that are meant"
    monkeypatch.setattr(fp8, 'can_multiply_fp8', lambda device: True)
    monkeypatch.setattr(fp8, 'to_fp8', None)
    weight, x = Fp8Weight.of(torch.randn(16, 32)), torch.randn(3, 32).to(dtype)
    assert torch.equal(weight.multiply(x), torch.nn.functional.linear(x, weight.unpack().to(dtype)))

def test_only_rows_that_lie_side_by_side_are_rounded_for_a_product(monkeypatch):
    """The kernel that rounds them reads them so; others are multiplied by the widened weight, to the same
    result but for the rounding"""
    asked, weight = [], Fp8Weight.of(torch.randn(32, 48).bfloat16())
    monkeypatch.setattr(fp8, 'can_multiply_fp8', lambda device: True)
    monkeypatch.setattr(fp8, 'to_fp8', lambda x: asked.append(x.stride()) or fp8.plain_to_fp8(x))
    monkeypatch.setattr(fp8, 'scaled_matmul', fp8.plain_scaled_matmul)
    x = torch.randn(48, 5).bfloat16().T
    widened, rounded = weight.multiply(x), weight.multiply(x.contiguous())
    assert asked == [(48, 1)] and (rounded - widened).abs().max() < .1*widened.abs().max()
