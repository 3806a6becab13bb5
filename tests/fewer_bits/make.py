"""Write two models in the formats that people have, for `measure.py`: by llama.cpp, GPTQModel, AutoRound, and
`minisgl-lit quantize`.

    pip install torch==2.13.0 transformers==5.24.0 auto-round==0.16.1 gptqmodel==7.6.0 gguf
    llama-cpp-python==0.3.36
    PYTHONPATH=.:tests python tests/fewer_bits/train.py WORK/second
    PYTHONPATH=.:tests python tests/fewer_bits/make.py WORK"""
import json, os, shutil, sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from script import load
from minisgl_lit.formats.hub import embedded_path

KINDS = ('Q8_0', 'Q6_K', 'Q5_K_M', 'Q4_K_M', 'Q4_0')   # of llama.cpp
GROUPS = (32, 64, 128)
EXAMPLES, LENGTH, AT_LEAST = 128, 256, 64   # texts for calibration, and their tokens


def examples(folder: Path) -> list[str]:
    "Texts of the kind that the model was trained with"
    if (folder/'ids.pt').exists():
        ids, tokenizer, rng = (torch.load(folder/'ids.pt'), Tokenizer.from_file(str(folder/'tokenizer.json')),
                               Random(0))
        starts = [rng.randrange(len(ids) - LENGTH) for _ in range(EXAMPLES)]
        return [tokenizer.decode(ids[i:i + LENGTH].tolist()) for i in starts]
    conversation, rng = load('tools/embedded_tasks')['conversation'], Random(0)
    return [''.join(text for text, _ in conversation(rng, 3)) for _ in range(EXAMPLES)]

def by_llamacpp(plain: Path, work: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1]/'data'))
    from make_gguf import quantize, write
    full = work/f'{plain.name}.gguf'
    write(plain, full)
    for kind in KINDS: quantize(full, work/f'{plain.name}-{kind}.gguf', kind)

def by_gptqmodel(plain: Path, work: Path, texts: Sequence[str]) -> None:
    "GPTQ; its AWQ asks for a GPU"
    os.environ |= dict(GPTQMODEL_DISABLE_PACK_EXT='1', GPTQMODEL_CPU_WORKERS='2')
    from gptqmodel import GPTQModel, QuantizeConfig
    tokenizer = Tokenizer.from_file(str(plain/'tokenizer.json'))
    coded = [dict(input_ids=ids, attention_mask=[1] * len(ids))
             for ids in (tokenizer.encode(o).ids[:LENGTH] for o in texts)]
    for name, act_order in (('gptq', False), ('gptq-act-order', True)):
        if (to := work/f'{plain.name}-{name}').exists(): continue
        how = QuantizeConfig(bits=4, group_size=128, sym=True, desc_act=act_order, act_group_aware=False)
        model = GPTQModel.load(str(plain), how, device='cpu')
        model.quantize(coded, batch_size=8)
        model.save(str(to))

def by_autoround(plain: Path, work: Path, texts: Sequence[str]) -> None:
    "AWQ"
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer
    if (to := work/f'{plain.name}-awq').exists(): return
    tokenizer, model = (AutoTokenizer.from_pretrained(plain),
                        AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    coded = [ids for ids in tokenizer(list(texts), return_tensors=None)['input_ids'] if len(ids) >= AT_LEAST]
    examples = [torch.tensor([ids[:AT_LEAST]]) for ids in coded]
    rounding = AutoRound(model, tokenizer=tokenizer, bits=4, group_size=128, sym=False, alg_configs='awq',
                         dataset=examples, seqlen=AT_LEAST,
                         nsamples=len(examples), device_map='cpu')
    rounding.quantize_and_save(str(work/'autoround'), format='auto_awq')
    shutil.move(next((work/'autoround').rglob('model.safetensors')).parent, to)

def by_us(plain: Path, work: Path) -> None:
    from minisgl_lit.tools.quantize import quantize_checkpoint
    for bits, group in ((8, 64), *((4, o) for o in GROUPS)):
        for name, texts in ((f'ct{bits}-{group}', None),
                            (f'ct{bits}-{group}-calibrated', plain/'texts.jsonl')):
            if not (work/f'{plain.name}-{name}').exists():
                quantize_checkpoint(str(plain), work/f'{plain.name}-{name}', bits, group, texts)

def main(work: Path, only: Sequence[str]) -> None:
    if not (work/'embedded').exists(): shutil.copytree(embedded_path(), work/'embedded')
    for plain in (work/'embedded', work/'second'):
        if not (plain/'model.safetensors').exists(): continue
        texts = examples(plain)
        (plain/'texts.jsonl').write_text(''.join(json.dumps(o) + '\n' for o in texts))
        if 'us' in only: by_us(plain, work)
        if 'llamacpp' in only: by_llamacpp(plain, work)
        if 'gptqmodel' in only: by_gptqmodel(plain, work, texts)
        if 'autoround' in only: by_autoround(plain, work, texts)

if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2:] or ('us', 'llamacpp', 'gptqmodel', 'autoround'))
