"""How far the logits of each family are from those of `transformers`: the table in the guide on checkpoints.

    python tests/family_differences.py            measure and print
    python tests/family_differences.py --write    and put it into the guide

The models are those of tests/test_families.py and, for the families of the core, of tests/reference.py: small
and random, in float32 on a CPU. What is compared is every logit of a text of 50 tokens.
"""
import argparse
import re
import tempfile
from pathlib import Path

import torch

from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.testing.random_family import knobs
from reference import VARIANTS, load, make_checkpoint, prompts
from test_families import FAMILIES, logits

guide = Path(__file__).resolve().parents[1]/'docs/guides/serve-a-checkpoint.md'
BEGIN, END = '<!-- by tests/family_differences.py -->\n', '<!-- end -->\n'
CORE = {'Llama': ('Llama', {}), 'Mistral': VARIANTS['window everywhere'], 'Qwen2': ('Qwen2', {}),
        'Qwen3': ('Qwen3', {}), 'Qwen2Moe': VARIANTS['shared expert'], 'Qwen3Moe': VARIANTS['experts']}
MODELS = CORE | {name: (name.partition(' ')[0], fields) for name, fields in FAMILIES.items()}

def measure(name: str) -> tuple[float, dict[str, str]]:
    "The largest difference, as a share of the largest logit; and in what the model differs from a Llama"
    family, fields = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_checkpoint(family, path, **fields)
        config = read_config(path)
        ours = logits(path, config)
        with torch.inference_mode(): right = load(path)(torch.tensor([prompts()[4]])).logits[0]
    return float((ours - right).abs().max() / right.abs().max()), knobs(config)

def table() -> str:
    "In Markdown"
    lines = ['| family | largest difference | in the model that was compared |', '|---|---|---|']
    for name in MODELS:
        apart, differs = measure(name)
        said = '; '.join(f'{o.replace("_", " ")}: {value}' for o, value in differs.items())
        lines.append(f'| {name} | {apart:.0e} | {said or "as in a Llama"} |')
    return '\n'.join(lines) + '\n'

def told() -> dict[str, float]:
    "What the guide has"
    text = guide.read_text(encoding='utf-8').partition(BEGIN)[2].partition(END)[0]
    return {name: float(apart) for name, apart in re.findall(r'(?m)^\| ([^|]+) \| (\d\S*) \|', text)}

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--write', action='store_true', help='put it into the guide')
    made = table()
    if parser.parse_args().write:
        before, _, rest = guide.read_text(encoding='utf-8').partition(BEGIN)
        guide.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding='utf-8')
    print(made)
