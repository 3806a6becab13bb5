"""What each format costs: probabilities of two models in all formats that `make.py` wrote, beside those in 16
bits.

    PYTHONPATH=.:tests python tests/fewer_bits/measure.py WORK nbs/experiments/formats.json"""
import json, sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from script import load
from minisgl_lit import LLM, SamplingParams
from minisgl_lit.kernels.linear import pack_weight
from minisgl_lit.core.models.operations import Weight, find_operations
from minisgl_lit.kernels.kv_formats import round_rows, widen_rows
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.decoder import Decoder, weight_shapes
from minisgl_lit.formats.gguf import gguf_folder
from minisgl_lit.formats.coded_rows import CodedAssembly
from minisgl_lit.formats.quantization import (Quantization, pack_parts, quantize_and_pack, stored_bytes,
                                              weight_bytes)
from minisgl_lit.core.models.weights import load_weights, open_checkpoint

of_chapter = load('tools/embedded_tasks')
exam, is_right, question = map(of_chapter.get, ('exam', 'is_right', 'question'))
Pack = Callable[[str, torch.Tensor], Weight]
LLAMACPP = ('Q8_0', 'Q6_K', 'Q5_K_M', 'Q4_K_M', 'Q4_0')
FOLDERS = {   # what `make.py` wrote: the name in the table, and who rounded
    'ct8-64': ('compressed-tensors, 8 bits, 64', 'quantize'),
    'ct8-64-calibrated': ('compressed-tensors, 8 bits, 64', 'quantize, GPTQ'),
    **{f'ct4-{o}': (f'compressed-tensors, 4 bits, {o}', 'quantize') for o in (32, 64, 128)},
    **{f'ct4-{o}-calibrated': (f'compressed-tensors, 4 bits, {o}', 'quantize, GPTQ') for o in (32, 64, 128)},
    'gptq': ('GPTQ, 4 bits, 128', 'GPTQModel'),
    'gptq-act-order': ('GPTQ, 4 bits, 128, act-order', 'GPTQModel'), 'awq': ('AWQ, 4 bits, 128', 'AutoRound')}
BF16 = torch.bfloat16


def attend(rounded: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    "Within one text; with keys and values in 8 bits, or as they are"
    if rounded: k, v = widen_rows(round_rows(k)), widen_rows(round_rows(v))
    q, k, v = (o.transpose(0, 1) for o in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

def as_it_is(name: str, weight: torch.Tensor) -> Weight: return pack_weight(weight)

class Model:
    "One of the two, with the texts that it never saw."
    def __init__(self, path: Path):
        self.path, self.config = path, read_config(path)
        self.tasks = exam(6) if path.name == 'embedded' else []
        encode = Tokenizer.from_file(str(path/'tokenizer.json')).encode
        self.prompts = [encode(question(o)).ids for o in self.tasks]
        steps = [f'{o.thought}\n</think>\n\n' if o.thought else '' for o in self.tasks]
        answers = [encode(step + o.answer).ids for step, o in zip(steps, self.tasks)]
        self.texts = ([a + b for a, b in zip(self.prompts, answers)]
                      or json.loads((path/'held_out.json').read_text()))
        self.parts = dict(code=torch.ones(sum(map(len, self.texts)) - len(self.texts), dtype=torch.bool))
        if self.tasks:
            is_answer = torch.cat([torch.arange(1, len(ids)) >= len(prompt)
                                   for ids, prompt in zip(self.texts, self.prompts)])
            self.parts = dict(answers=is_answer, questions=~is_answer)
        self.reference = self.log_probs(self.path, as_it_is)
        targets = torch.cat([torch.tensor(ids[1:]) for ids in self.texts])
        self.loss = float(F.nll_loss(self.reference, targets))

    @torch.inference_mode()
    def log_probs(self, folder: Path, pack: Pack, rounds: bool = False, kv: bool = False) -> torch.Tensor:
        "Of the next token, after each token of all texts"
        weights = load_weights(folder, self.config, torch.float32, finish=pack,
                               assembly=partial(CodedAssembly,
                                   join=partial(pack_parts, dtype=torch.float32, rounds_input=rounds)))
        model = Decoder(self.config, weights, operations=find_operations(torch.device('cpu'), torch.float32))
        def of(ids: list[int]) -> torch.Tensor:
            at = torch.arange(len(ids))
            return model.forward(torch.tensor(ids), at, partial(attend, kv), at[:-1]).log_softmax(-1)
        return torch.cat([of(ids) for ids in self.texts])

    def lost(self, found: torch.Tensor) -> dict[str, list[float]]:
        "Mean KL divergence, the worst token's, and the share of tokens whose likeliest next one is the same"
        kl = (self.reference.exp() * (self.reference - found)).sum(-1).clamp(min=0)
        same = (self.reference.argmax(-1) == found.argmax(-1)).float()
        return {name: [round(float(o), 6) for o in (kl[at].mean(), kl[at].max(), same[at].mean())]
                for name, at in self.parts.items()}

    def right(self, **settings) -> int | None:
        if not self.tasks: return None
        with LLM(**dict(dict(model=str(self.path), dtype='float32', num_pages=2048), **settings)) as llm:
            told = llm.generate(self.prompts, SamplingParams(max_tokens=120, temperature=0))
        return sum(is_right(task, o.text) for task, o in zip(self.tasks, told))

    def row(self, name: str, by: str, in_file: float, in_memory: float, folder: Path, pack: tuple[Pack, Pack],
            right: int | None, kv: bool = False):
        "With products of whole numbers, and with exact ones"
        exact, rounded = (self.log_probs(folder, o, rounds, kv) for o, rounds in zip(pack, (False, True)))
        made = dict(format=name, by=by, file_bits=round(in_file, 2), memory_bits=round(in_memory, 2),
                    exact=self.lost(exact), int8=self.lost(rounded), right=right)
        print(json.dumps(made), flush=True)
        return made


def while_loading(model: Model):
    "Rows of `quantization=`, of other bits for embedding and head, and of `kv_dtype`"
    n = weight_bytes(model.config, torch.float32, None) / 4
    def bits(how: Quantization) -> float: return 8 * weight_bytes(model.config, BF16, how) / n
    for n_bits, group in ((8, 64), (4, 128), (4, 64), (4, 32)):
        how = [Quantization(n_bits, group, o) for o in (False, True)]
        right = model.right(quantization=f'int{n_bits}', quantization_group=group)
        yield model.row(f"quantization='int{n_bits}', {group}", 'while loading', 16, bits(how[0]), model.path,
                        (how[0].pack, how[1].pack), right)
    four, table = Quantization(4, 64, False), weight_shapes(model.config)['model.embed_tokens.weight']
    def head(bits: int, rounds: bool, name: str, weight: torch.Tensor) -> Weight:
        if weight.shape != table: return Quantization(4, 64, rounds).pack(name, weight)
        return pack_weight(weight) if bits == 16 else quantize_and_pack(weight, bits, 64, rounds)
    share = table[0] * table[1] / n
    for n_bits, change in ((16, 16 - 8.25), (4, -4)):
        packs = partial(head, n_bits, False), partial(head, n_bits, True)
        yield model.row(f"'int4', 64, embedding and head {n_bits} bits", 'not offered', 16,
                        bits(four) + share * change, model.path, packs, None)
    yield model.row("kv_dtype='int8'", 'while running', 16, 16, model.path, (as_it_is, as_it_is),
                    model.right(kv_dtype='int8'), True)
    yield model.row("'int4', 64, and kv_dtype='int8'", 'while loading', 16, bits(four), model.path,
                    (four.pack, Quantization(4, 64, True).pack),
                    model.right(quantization='int4', kv_dtype='int8'), True)

def from_files(model: Model, work: Path):
    "Rows of the files of `make.py`"
    files = ({f'{model.path.name}-{o}.gguf': (f'GGUF {o}', 'llama.cpp') for o in LLAMACPP}
             | {f'{model.path.name}-{k}': v for k, v in FOLDERS.items()})
    n, cache = weight_bytes(model.config, torch.float32, None) / 4, Path(mkdtemp())
    for name, (form, by) in files.items():
        if not (work/name).exists(): continue
        folder = gguf_folder(work/name, cache) if name.endswith('.gguf') else work/name
        tensors = open_checkpoint(folder, model.config).tensors
        in_file, in_memory = (sum(o.nbytes for o in tensors.values()) * 8 / n,
                              stored_bytes(tensors, BF16, True) * 8 / n)
        yield model.row(form, by, in_file, in_memory, folder, (as_it_is, as_it_is),
                        model.right(model=str(work/name)))

def main(work: Path, out: Path) -> None:
    found = {}
    for name in ('embedded', 'second'):
        if not (work/name/'model.safetensors').exists(): continue
        model = Model(work/name)
        sizes = {k: int(o.sum()) for k, o in model.parts.items()}
        found[name] = dict(weights=round(weight_bytes(model.config, BF16, None) / 2), tokens=sizes,
                           loss=round(model.loss, 3),
                           right=model.right(), questions=len(model.tasks),
                           rows=[*while_loading(model), *from_files(model, work)])
        out.write_text(json.dumps(found, indent=1) + '\n')

if __name__ == '__main__': main(Path(sys.argv[1]), Path(sys.argv[2]))
