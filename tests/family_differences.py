"""How far the logits of each family are from those of `transformers`: the table in the guide on checkpoints.

    python tests/family_differences.py            measure and print
    python tests/family_differences.py --write    and put those into the guide that it does not have yet
    python tests/family_differences.py --write --all    put all there: figures differ by machine

The models are those of tests/test_families.py and, for the families of the core, of tests/reference.py: small
and random, in float32 on a CPU. What is compared is every logit of a text of 50 tokens.
"""
import argparse
import re
import tempfile
from collections.abc import Mapping
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

def row(name: str) -> str:
    "What is measured of a family"
    apart, differs = measure(name)
    said = '; '.join(f'{o.replace("_", " ")}: {value}' for o, value in differs.items())
    return f'| {name} | {apart:.0e} | {said or "as in a Llama"} |'

def table(known: Mapping[str, str]) -> str:
    "In Markdown, of rows that are known and others that are measured"
    lines = ['| family | largest difference | in the model that was compared |', '|---|---|---|']
    return '\n'.join(lines + [known.get(name) or row(name) for name in MODELS]) + '\n'

def rows() -> dict[str, str]:
    "Those of the guide, by family"
    text = guide.read_text(encoding='utf-8').partition(BEGIN)[2].partition(END)[0]
    return {o[1]: o[0] for o in re.finditer(r'(?m)^\| ([^|]+) \| \d.*$', text)}

def told() -> dict[str, float]:
    "What the guide has measured"
    return {name: float(line.split('|')[2]) for name, line in rows().items()}

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--write', action='store_true', help='put it into the guide')
    parser.add_argument('--all', action='store_true', help='measure those anew that it has')
    args = parser.parse_args()
    made = table(rows() if args.write and not args.all else {})
    if args.write:
        before, _, rest = guide.read_text(encoding='utf-8').partition(BEGIN)
        guide.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding='utf-8')
    print(made)
