"""Small valid checkpoints with one number changed, each tried in a process of its own that is a fork of this
one: what a file says may cost its size ten times and 200 MB of memory, and five seconds, before it is refused
in a sentence or served. Run as a program it prints a line of JSON for each: `hostile_files.py 200 seed` tries
200 from a seed on, `hostile_files.py bombs` those that are made to do harm."""
import json, os, random, shutil, signal, struct, sys, tempfile, time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from minisgl_lit import LLM, SamplingParams
from minisgl_lit.kernels.compiler import cache_folder
from minisgl_lit.formats.hub import embedded_path

DATA = Path(__file__).parent/'data'
MB, SECONDS = 1 << 20, 5
NUMBERS = [0, -1, 1, 3, 7, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 10**30, 1e300, -1e300, 1e-300,
           .5, True, None, '', 'x', [], [0], [2**40], {}, {'a': 1}]
WORDS = [0, 1, 3, 0x7fffffff, 0xffffffff, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

def leaves(value, at=()) -> Iterator[tuple]:
    "Where a JSON value has numbers, texts and lists"
    yield at
    if isinstance(value, dict): more = value.items()
    elif isinstance(value, list): more = list(enumerate(value))[:3]
    else: return
    for k, v in more: yield from leaves(v, (*at, k))

def changed_json(file: Path, rng: random.Random, under=()) -> str:
    "One value of a JSON file is another; what it was"
    raw = json.loads(file.read_text())
    inner = raw
    for k in under: inner = inner[k]
    *path, last = rng.choice([o for o in leaves(inner) if o])
    for k in path: inner = inner[k]
    value = rng.choice(NUMBERS)
    inner[last] = value
    file.write_text(json.dumps(raw))
    return f'{file.name}: {".".join(map(str, (*under, *path, last)))}={value!r}'

def changed_words(file: Path, rng: random.Random, header: int) -> str:
    "Four or eight bytes of the header are another number"
    data, kind = bytearray(file.read_bytes()), rng.choice('IQ')
    at, value = rng.randrange(0, header), rng.choice(WORDS) & (0xffffffff if kind == 'I' else 2**64 - 1)
    struct.pack_into(f'<{kind}', data, at, value)
    file.write_bytes(data)
    return f'{file.name}: {kind} at {at} is {value}'

def counts(file: Path) -> tuple[list[int], list[int]]:
    "Where a GGUF file has numbers that say how long something is, what kind it has, or where it lies"
    import gguf
    found, more, reader = [8, 16], list[int](), gguf.GGUFReader(file)
    for field in reader.fields.values():
        if field.name.startswith('GGUF.'): continue
        at = field.offset
        for part in field.parts[:8]:
            if part.dtype.itemsize > 1: found.append(at)
            at += part.nbytes
    for tensor in reader.tensors:
        at = tensor.field.offset
        for part in tensor.field.parts:
            if part.dtype.itemsize > 1: more += range(at, at + part.nbytes, part.dtype.itemsize)
            at += part.nbytes
    return found, more

def changed_counts(file: Path, rng: random.Random) -> str:
    "One of those"
    data, at, kind = bytearray(file.read_bytes()), rng.choice(rng.choice(counts(file))), rng.choice('IQ')
    value = rng.choice(WORDS) & (0xffffffff if kind == 'I' else 2**64 - 1)
    struct.pack_into(f'<{kind}', data, at, value)
    file.write_bytes(data)
    return f'{file.name}: {kind} at {at} is {value}'

def without_files(file: Path) -> None:
    "Its tokenizer is made of its vocabulary: the field that holds the whole file of one has another name"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'tokenizer.huggingface.json', b'general.huggingface.json_x'))

def variant(seed: int, home: Path) -> tuple[Path, str]:
    "A checkpoint with one thing changed, and what that is"
    rng = random.Random(seed)
    folders = [embedded_path(), *(o for o in DATA.iterdir() if o.is_dir() and (o/'config.json').exists())]
    how = rng.choice(['config', 'config', 'quantization', 'safetensors', 'tokenizer', 'gguf counts',
                      'gguf counts', 'gguf words'])
    if how.startswith('gguf'):
        file = Path(shutil.copy(rng.choice(sorted(DATA.glob('*.gguf'))), home))
        if rng.random() < .5: without_files(file)
        return file, changed_counts(file, rng) if how == 'gguf counts' else changed_words(file, rng, 4000)
    folder = Path(shutil.copytree(rng.choice(folders[1:] if how == 'quantization' else folders[:1]
                                             if how == 'tokenizer' else folders), home/'model'))
    if how == 'quantization':
        return folder, f'{folder.name} ' + changed_json(folder/'config.json', rng, ('quantization_config',))
    if how == 'safetensors':
        file = next(folder.glob('*.safetensors'))
        return folder, changed_words(file, rng, 8 + struct.unpack('<Q', file.read_bytes()[:8])[0])
    names = dict(config=['config.json', 'generation_config.json'],
                 tokenizer=['tokenizer.json', 'tokenizer_config.json'])[how]
    return folder, changed_json(rng.choice([o for name in names if (o := folder/name).exists()]), rng)

def serve(model: Path) -> dict:
    "What comes of it"
    try:
        with LLM(model, device='cpu', memory_ratio=.05) as llm:
            return dict(served=len(llm.generate([[5, 6, 7]],
                                                SamplingParams(max_tokens=2, temperature=0))[0].token_ids))
    except ValueError as e: return dict(refused=str(e))
    except BaseException as e: return dict(raised=f'{type(e).__name__}: {e}')

def memory(pid: int, what: str) -> int:
    "Bytes that a process has filled now, 'VmRSS', or at most, 'VmHWM'; 0 if it has ended"
    try: lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    except OSError: return 0
    return next((int(o.split()[1]) << 10 for o in lines if o.startswith(what)), 0)

def cost(model: Path, limit: int) -> dict:
    "What comes of it in a fork, with seconds and bytes; it is killed at three times what is allowed"
    read, write = os.pipe()
    began = time.monotonic()
    if not (pid := os.fork()):
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(write, json.dumps(serve(model))[:60_000].encode())
        os._exit(0)
    os.close(write)
    before = most = memory(pid, 'VmRSS')
    while not os.waitpid(pid, os.WNOHANG)[0]:
        most = max(most, memory(pid, 'VmHWM'))
        if most - before > 3 * limit or time.monotonic() - began > (3 * SECONDS if limit < 1 << 40 else 60):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(.02)
    with os.fdopen(read) as f: said = f.read()
    return (dict(seconds=time.monotonic() - began, bytes=most - before)
            | (json.loads(said) if said else dict(raised='it was killed')))

def size(model: Path) -> int:
    return sum(o.stat().st_size for o in ([model] if model.is_file() else model.iterdir()))

def judged(told: dict, limit: int) -> dict:
    "With what is wrong about it"
    wrong = [] if told['bytes'] <= limit else [f'{told["bytes"] / MB:.0f} MB']
    if told['seconds'] > SECONDS: wrong.append(f'{told["seconds"]:.1f} s')
    if 'raised' in told: wrong.append(told['raised'])
    said = told.get('refused', '')
    if '\n' in said or len(said) > 600: wrong.append('no sentence')
    return {k: v[:2000] if isinstance(v, str) else v for k, v in told.items()} | dict(wrong=wrong)

def trial(make: Callable[[Path], tuple[Path, str]]) -> dict:
    "What was changed, what came of it, and what is wrong with that"
    with tempfile.TemporaryDirectory() as home:
        model, what = make(Path(home))
        limit = 10 * size(model) + 200 * MB
        return judged(dict(what=what) | cost(model, limit), limit)

def trials(seeds: range) -> Iterator[dict]:
    "Variants, with kernels that are compiled before"
    for model in (embedded_path(), *DATA.glob('*.gguf'),
                  *(o for o in DATA.iterdir() if (o/'config.json').exists())):
        cost(model, 1 << 40)
    for seed in seeds: yield dict(seed=seed) | trial(partial(variant, seed))

def gguf_bomb(*words, home: Path) -> tuple[Path, str]:
    "A header of one field, whose value is these bytes"
    (file := home/'bomb.gguf').write_bytes(struct.pack('<4sIQQQ1s', b'GGUF', 3, 0, 1, 1, b'a')
                                           + b''.join(words))
    return file, f'{len(file.read_bytes())} bytes of GGUF'

def gguf_tensor(*dims: int, home: Path) -> tuple[Path, str]:
    "A header of one tensor"
    shape = struct.pack(f'<I{len(dims)}Q', len(dims), *dims)
    (file := home/'bomb.gguf').write_bytes(struct.pack('<4sIQQQ17s', b'GGUF', 3, 1, 0, 17,
        b'token_embd.weight') + shape + struct.pack('<IQ', 0, 0) + bytes(64))
    return file, f'a tensor of {dims}'

def text_field(name: str, value: str | int | list) -> bytes:
    "A field of a GGUF file: a text, a number, or a list of texts or of small numbers"
    def text(o: str) -> bytes: return struct.pack('<Q', len(o.encode())) + o.encode()
    if isinstance(value, str): return text(name) + word('I', 8) + text(value)
    if isinstance(value, int): return text(name) + word('II', 4, value)
    texts = isinstance(value[0], str)
    return (text(name) + word('IIQ', 9, 8 if texts else 5, len(value))
            + b''.join(text(o) if texts else word('i', o) for o in value))

def vocabulary(home: Path, n_letters: int = 0, **fields) -> tuple[Path, str]:
    """A small model with a vocabulary of 512 tokens, one of which has many letters, and other fields of its
    text"""
    data = (DATA/'llama-Q5_K_M.gguf').read_bytes().replace(b'tokenizer.ggml.model', b'general.ggml.model_x')
    tokens = ['<unk>', '<s>', '</s>', 'h' * n_letters or 'h', *(f't{i}' for i in range(508))]
    given = (dict(model='llama', tokens=tokens, token_type=[2, 3, 3, 1, *[1] * 508],
                  scores=[-o for o in range(512)]) | fields)
    added = b''.join(text_field(f'tokenizer.ggml.{k}', v) for k, v in given.items())
    # tensors stay aligned
    padding = text_field('general.x', 'x' * (32 - (len(added) + len(text_field('general.x', ''))) % 32))
    n_fields = struct.unpack_from('<Q', data, 16)[0] + len(given) + 1
    (file := home/'text.gguf').write_bytes(data[:16] + word('Q', n_fields) + added + padding + data[24:])
    return file, f'a token of {n_letters} letters and {list(fields)}'

def folder_bomb(source: Path, under: tuple, home: Path, **fields) -> tuple[Path, str]:
    "Numbers of a config.json"
    folder = Path(shutil.copytree(source, home/'model'))
    raw = inner = json.loads((folder/'config.json').read_text())
    for k in under: inner = inner[k]
    inner |= fields
    (folder/'config.json').write_text(json.dumps(raw))
    return folder, f'{fields} of {source.name}'

def word(code: str, *numbers: int) -> bytes: return struct.pack('<' + code, *numbers)

BOMBS = [partial(gguf_bomb, word('IIQ', 9, 0, 1 << 40)), partial(gguf_bomb, word('IIQ', 9, 8, 1 << 60)),
         partial(gguf_bomb, word('IQ', 8, 1 << 62)),
         partial(gguf_bomb, word('I', 9), *[word('IQ', 9, 1)] * 5000), partial(gguf_bomb, word('II', 77, 0)),
         *(partial(vocabulary, n_letters=o) for o in (1, 60_000)),
         partial(vocabulary, precompiled_charsmap=[255, 255, 255, 127, 1]),
         partial(vocabulary, model='gpt2', merges=['h h'], pre='x' * 100_000),
         partial(vocabulary, add_bos_token='x' * 100_000),
         partial(vocabulary, n_letters=60_000, token_type=[3] * 512),
         partial(gguf_tensor, 1 << 40, 1 << 40), partial(gguf_tensor, 0, 5),
         partial(gguf_tensor, *[1 << 32] * 9), partial(gguf_tensor, 3, 1 << 62),
         *(partial(folder_bomb, embedded_path(), (), **{name: 2**n}) for n in (26, 40) for name in (
             'max_position_embeddings', 'hidden_size', 'vocab_size', 'num_hidden_layers',
             'num_attention_heads', 'head_dim', 'intermediate_size')),
         *(partial(folder_bomb, DATA/'fp8-blocks', ('quantization_config',), weight_block_size=o)
           for o in ([1 << 40, 1 << 40], [0, 0], [-1, 3], [128], ['a', {}], 7)),
         *(partial(folder_bomb, DATA/'gptq-4-bits-32', ('quantization_config',), **o)
           for o in (dict(bits=2**40), dict(quant_method=[])))]

if __name__ == '__main__':
    def bombs() -> Iterator[dict]:
        cost(DATA/'llama-Q5_K_M.gguf', 1 << 40)
        for make in BOMBS: yield trial(lambda home: make(home=home))
    n, first = (int(o) for o in (*sys.argv[1:], '0')[:2]) if sys.argv[1:] != ['bombs'] else (0, 0)
    with tempfile.TemporaryDirectory() as home:
        kernels = cache_folder()[0]   # what is compiled already need not be again
        os.environ['XDG_CACHE_HOME'] = home
        shutil.copytree(kernels, cache_folder()[0], dirs_exist_ok=True,
                        ignore=lambda folder, names: [o for o in names if not o.endswith('.so')])
        for o in trials(range(first, first + n)) if n else bombs(): print(json.dumps(o), flush=True)
