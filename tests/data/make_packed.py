"""Make the folders beside this file: a model of few random weights, quantized by programs that people
quantize with.

    pip install torch==2.13.0 transformers==5.24.0 auto-round==0.16.1 gptqmodel==7.6.0
    python tests/data/make_packed.py

AutoRound writes the layouts of GPTQ and AWQ, GPTQModel calibrates with act-order, transformers writes FP8
with scales for blocks. `packed_files.json` has for each layer the SHA-256 of its weights, dequantized by
GPTQModel (FP8: by transformers) and rounded to float16: what those who made the file mean by it."""
import hashlib, json, os, random, shutil, sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32,
             vocab_size=96, eos_token_id=95, initializer_range=.09)
# by AutoRound, to the nearest code: the format, bits, group, and whether zero is the middle code
ROUNDED = {
    'gptq-4-bits-32': ('auto_gptq', 4, 32, False),
    'gptq-4-bits-128': ('auto_gptq', 4, 128, True),
    'gptq-8-bits': ('auto_gptq', 8, -1, True),
    'awq-32': ('auto_awq', 4, 32, False)}
BLOCK = 64   # of FP8, in both directions


def tokenizer():
    "Any: the programs ask for one"
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    letters = {chr(33 + i): i for i in range(90)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=letters, merges=[])),
                                   eos_token='a', pad_token='b')

def keep(source: Path, name: str) -> Path:
    "Config and weights alone"
    to = HERE/name
    to.mkdir(exist_ok=True)
    for file in ('config.json', 'model.safetensors'): shutil.copy(source/file, to/file)
    return to

def by_autoround(plain: Path, folder: Path, name: str) -> Path:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM
    form, bits, group, symmetric = ROUNDED[name]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    rounding = AutoRound(model, tokenizer=tokenizer(), bits=bits, group_size=group, sym=symmetric, iters=0,
                         disable_opt_rtn=True, device_map='cpu')
    rounding.quantize_and_save(str(folder/name), format=form)
    return keep(next((folder/name).rglob('model.safetensors')).parent, name)

def by_gptqmodel(plain: Path, folder: Path, name: str) -> Path:
    from gptqmodel import GPTQModel, QuantizeConfig
    rng = random.Random(0)
    drawn = [[rng.randrange(90) for _ in range(64)] for _ in range(32)]
    how = QuantizeConfig(bits=4, group_size=32, sym=False, desc_act=True, act_group_aware=False)
    model = GPTQModel.load(str(plain), how, device='cpu')
    model.quantize([dict(input_ids=ids, attention_mask=[1] * 64) for ids in drawn], batch_size=4)
    model.save(str(folder/name))
    return keep(folder/name, name)

def by_transformers(plain: Path, name: str) -> Path:
    "Its own conversion; the loader that calls it asks for a GPU"
    from types import SimpleNamespace
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    settings = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=['lm_head'])
    convert, found = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert, {}
    for part, weight in tensors(plain):
        found |= convert({part: weight}) if part.endswith('_proj.weight') else {part: weight}
    (HERE/name).mkdir(exist_ok=True)
    save_file(found, HERE/name/'model.safetensors', metadata=dict(format='pt'))
    config = json.loads((plain/'config.json').read_text())
    (HERE/name/'config.json').write_text(json.dumps(config | dict(quantization_config=settings.to_dict()),
        indent=2))
    return HERE/name

def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob('*.safetensors')): yield from load_file(file).items()

@torch.inference_mode()
def meant(folder: Path) -> dict[str, torch.Tensor]:
    "The weights of all quantized layers, as others read them, [n_out, n_in]"
    from transformers import AutoModelForCausalLM
    if 'fp8' in folder.name:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return {name: o for name, o in model.named_parameters() if name.endswith('_proj.weight')}
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    backend = BACKEND.TORCH_AWQ if 'awq' in folder.name else BACKEND.TORCH
    found = {}
    # GPTQModel reads codes that mean zero only from files that it believes to be its own
    with TemporaryDirectory() as other:
        copy = shutil.copytree(folder, Path(other)/folder.name)
        config = json.loads((copy/'config.json').read_text())
        config['quantization_config'].setdefault('meta',
            dict(quantizer=[f'gptqmodel:{version("gptqmodel")}']))
        (copy/'config.json').write_text(json.dumps(config))
        model = GPTQModel.load(str(copy), device='cpu', backend=backend, dtype=torch.float16).model
    for name, o in model.named_modules():
        if not hasattr(o, 'qweight'): continue
        weight = (dequantize_gemm(o.qweight, o.qzeros, o.scales, o.bits, o.group_size) if 'awq' in folder.name
                  else type(o).dequantize_weight(o))
        found[f'{name}.weight'] = weight.T
    return found

def checksum(weight: torch.Tensor) -> str:
    return hashlib.sha256((weight.detach().half() + 0.).contiguous().numpy().tobytes()).hexdigest()

def main() -> None:
    os.environ |= dict(GPTQMODEL_DISABLE_PACK_EXT='1', GPTQMODEL_CPU_WORKERS='2')   # as GPTQModel reads them
    from reference import make_checkpoint
    with TemporaryDirectory() as folder:
        plain = Path(folder)/'plain'
        make_checkpoint('Qwen3', plain, **SMALL)
        tokenizer().save_pretrained(plain)
        made = {name: by_autoround(plain, Path(folder), name) for name in ROUNDED}
        made['gptq-act-order'] = by_gptqmodel(plain, Path(folder), 'gptq-act-order')
        made['fp8-blocks'] = by_transformers(plain, 'fp8-blocks')
        sums = {name: {layer: checksum(o) for layer, o in meant(path).items()} for name, path in made.items()}
    versions = {o: version(o) for o in ('torch', 'transformers', 'auto-round', 'gptqmodel')}
    (HERE/'packed_files.json').write_text(json.dumps(dict(versions=versions, sha256=sums), indent=1) + '\n')

if __name__ == '__main__': main()
