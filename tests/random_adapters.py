"Adapters of random numbers, as PEFT would save them."
import json, re
from pathlib import Path

import torch
from safetensors.torch import save_file

from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.weights import tensor_placements

def write_adapter(folder: Path, model: Path, seed: int, only='.', rank=4, alpha=8., ranks={}, alphas={},
                  size=.3, **settings):
    "A random adapter of the modules whose names match; what it changes, by definition, by name"
    rng, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    for name, place in tensor_placements(read_config(model)).items():
        module = name.removesuffix('.weight')
        if not module.endswith('_proj') or not re.search(only, module): continue
        r = next((v for k, v in ranks.items() if module.endswith(k)), rank)
        s = next((v for k, v in alphas.items() if module.endswith(k)), alpha)
        s /= r ** .5 if settings.get('use_rslora') else r
        n_out, n_in = place.shape
        a, b = torch.randn(r, n_in, generator=rng) / n_in**.5, torch.randn(n_out, r, generator=rng) * size
        stem = f'base_model.model.{module}'
        tensors |= {f'{stem}.lora_A.weight': a, f'{stem}.lora_B.weight': b}
        deltas[module] = s * b @ a
    folder.mkdir(exist_ok=True)
    modules = sorted({o.rpartition('.')[2] for o in deltas})
    raw = dict(peft_type='LORA', r=rank, lora_alpha=alpha, rank_pattern=ranks, alpha_pattern=alphas,
               target_modules=modules, task_type='CAUSAL_LM', bias='none', **settings)
    (folder/'adapter_config.json').write_text(json.dumps(raw))
    save_file(tensors, folder/'adapter_model.safetensors')
    return deltas
