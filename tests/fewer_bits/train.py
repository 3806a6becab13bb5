"""Train the second model of chapter 79b: 12 million weights that have read Python's standard library, whose
next token is seldom certain.

    PYTHONPATH=.:tests python tests/fewer_bits/train.py FOLDER            # about ten minutes on two quiet
    cores
    PYTHONPATH=.:tests python tests/fewer_bits/train.py FOLDER --minutes 4    # a piece of it; the next call
    goes on

The figures in `nbs/experiments/formats.json` are of one run without a break.
FOLDER becomes a checkpoint, with `held_out.json`: pieces of the modules that training never saw."""
import argparse, json, sysconfig, time, zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from script import load

of_chapter = load('tools/embedded_tasks', 'tools/embedded')
END, MARKS, PAD, Optimizer, save_checkpoint = map(of_chapter.get,
    ('END', 'MARKS', 'PAD', 'Optimizer', 'save_checkpoint'))

STEPS, ROWS, LENGTH, VOCABULARY = 230, 16, 256, 4096
# folders that are not read
OTHERS = ('test', 'tests', 'site-packages', 'dist-packages', 'idlelib', 'lib2to3', '__pycache__')


def modules() -> dict[str, str]:
    "The source of every module of the standard library, by its path"
    root = Path(sysconfig.get_paths()['stdlib'])
    files = (o for o in sorted(root.rglob('*.py')) if not {*o.relative_to(root).parts} & {*OTHERS})
    return {str(o.relative_to(root)): o.read_text(encoding='utf-8', errors='replace') for o in files}

def is_held_out(name: str) -> bool:
    "One module in twenty"
    return zlib.crc32(name.encode()) % 20 == 7

def make_tokenizer(texts: list[str]) -> Tokenizer:
    "Byte-level BPE"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder, tokenizer.pre_tokenizer = (decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.train_from_iterator(texts,
        trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, special_tokens=list(MARKS),
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer

def new_model() -> Qwen3ForCausalLM:
    "As the embedded model, twice as wide"
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True, hidden_size=512,
        intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, bos_token_id=None, eos_token_id=END, pad_token_id=PAD))

def token_ids(folder: Path) -> tuple[Tokenizer, torch.Tensor]:
    "The tokenizer, and all that is learned, end to end; made at the first call, with the texts that are not"
    if not (folder/'ids.pt').exists():
        found = modules()
        tokenizer = make_tokenizer([text for name, text in found.items() if not is_held_out(name)])
        coded = {name: tokenizer.encode(text).ids for name, text in found.items()}
        rest = [ids[:LENGTH] for name, ids in coded.items() if is_held_out(name) and len(ids) >= LENGTH]
        learned = [i for name, ids in coded.items() if not is_held_out(name) for i in [*ids, END]]
        (folder/'held_out.json').write_text(json.dumps(rest))
        tokenizer.save(str(folder/'tokenizer.json'))
        torch.save(torch.tensor(learned), folder/'ids.pt')
    return Tokenizer.from_file(str(folder/'tokenizer.json')), torch.load(folder/'ids.pt')

def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast('cpu', torch.bfloat16): logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

def train(folder: Path, minutes: float) -> None:
    "Go on where the call before ended, for so long"
    folder.mkdir(exist_ok=True)
    tokenizer, ids = token_ids(folder)
    model, start, step, smooth = new_model(), time.perf_counter(), 0, 0.
    optimizer = Optimizer(model)
    if (folder/'state.pt').exists():
        step, smooth, weights, momenta, adamw = torch.load(folder/'state.pt', weights_only=False)
        model.load_state_dict(weights), optimizer.adamw.load_state_dict(adamw)
        optimizer.momenta = momenta
    while step < STEPS and time.perf_counter() - start < 60 * minutes:
        drawn = torch.Generator().manual_seed(step)
        first = torch.randint(len(ids) - LENGTH, (ROWS, 1), generator=drawn)
        loss = loss_of(model, ids[first + torch.arange(LENGTH + 1)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step(min(1., (step + 1) / 50, 3 * (1 - step / STEPS)))   # it falls in the last third
        smooth = loss.item() if step == 0 else .98 * smooth + .02 * loss.item()
        step += 1
        if step % 20 == 0: print(f'{step} of {STEPS}: loss {smooth:.3f}', flush=True)
    torch.save((step, smooth, model.state_dict(), optimizer.momenta, optimizer.adamw.state_dict()),
               folder/'state.pt')
    if step == STEPS: save_checkpoint(model, tokenizer, folder)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--minutes', type=float, default=60)
    args = parser.parse_args()
    train(args.folder, args.minutes)
