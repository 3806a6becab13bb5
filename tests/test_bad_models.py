"""Models that are broken, too large or not there, as somebody at a terminal meets them: one sentence, no
traceback, code 2."""
import json, shutil, sys
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file, save_file

from minisgl_lit import cli
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.kernels.compiler import load
from minisgl_lit.kernels.linear import linear_c

TINY = ['--device', 'cpu', '--max-seq-len', '64', '--num-pages', '16', '--temperature', '0', '--max-tokens',
        '2']
NORM, DOWN = 'model.norm.weight', 'model.layers.1.mlp.down_proj.weight'

@pytest.fixture
def ask(capsys):
    "(exit code, standard output, standard error) of `generate`"
    load(linear_c)   # a machine without a compiler says so once: now, not among what is said of a model
    capsys.readouterr()
    def ask(*args):
        try: code = cli.main(['generate', *args])
        except SystemExit as e: code = e.code
        return code, *capsys.readouterr()
    return ask

@pytest.fixture
def model(tmp_path):
    "A copy of the embedded model, to be broken"
    return Path(shutil.copytree(embedded_path(), tmp_path/'model'))

def header(change):
    "A flaw in the header of the weights: its JSON changed"
    def break_it(path: Path):
        data = (file := path/'model.safetensors').read_bytes()
        size = int.from_bytes(data[:8], 'little')
        text = change(data[8:8 + size])
        file.write_bytes(len(text).to_bytes(8, 'little') + text + data[8 + size:])
    return break_it

def tensors(change):
    "A flaw in the tensors"
    def break_it(path: Path):
        change(found := load_file(path/'model.safetensors'))
        save_file(found, path/'model.safetensors')
    return break_it

def settings(**fields):
    "A flaw in config.json"
    def break_it(path: Path):
        raw = json.loads((path/'config.json').read_text()) | fields
        (path/'config.json').write_text(json.dumps(raw))
    return break_it

def cut(path: Path):
    data = (file := path/'model.safetensors').read_bytes()
    file.write_bytes(data[:-1000])

def without(name): return lambda path: (path/name).unlink()

FLAWS = {
    'truncated': (cut, ['model.safetensors is damaged or incomplete']),
    'empty': (lambda path: (path/'model.safetensors').write_bytes(b''),
              ['model.safetensors is damaged or incomplete']),
    'garbage in the header': (header(lambda text: b'\xff{' + text[2:]),
                              ['model.safetensors is damaged or incomplete']),
    'header longer than the file': (lambda path: (path/'model.safetensors').write_bytes(b'\xff'*64),
                                    ['model.safetensors is damaged or incomplete']),
    'unknown dtype in the header': (header(lambda text: text.replace(b'"BF16"', b'"BF61"')),
                                    ['model.safetensors is damaged or incomplete']),
    'missing': (tensors(lambda o: o.pop(DOWN)), ['lacks tensors', DOWN]),
    'extra': (tensors(lambda o: o.update(more=torch.ones(3))), ['does not account for', 'more']),
    'misshapen': (tensors(lambda o: o.update({NORM: torch.ones(3)})), [NORM, 'has shape [3]']),
    'infinite': (tensors(lambda o: o[NORM].fill_(torch.inf)), [NORM, 'holds NaN or infinity']),
    'dtype': (settings(dtype='float61', torch_dtype='float61'),
              ["dtype='float61'", 'known are float32, bfloat16, float16']),
    'architecture': (settings(architectures=['OPTForCausalLM']), ["'OPTForCausalLM'", 'known are Llama']),
    'no config': (without('config.json'), ['it has no config.json']),
    'no weights': (without('model.safetensors'), ['holds no weights']),
    'config is no JSON': (lambda path: (path/'config.json').write_text('{"a":'),
                          ['config.json cannot be read as JSON']),
    'no tokenizer': (without('tokenizer.json'), ['tokenizer']),
    'broken tokenizer': (lambda path: (path/'tokenizer.json').write_text('{}'), ['tokenizer']),
}

@pytest.mark.parametrize('flaw', FLAWS)
def test_each_flaw_is_one_sentence(flaw, model, ask):
    break_it, words = FLAWS[flaw]
    break_it(model)
    code, out, err = ask('Hi', '--model', str(model), *TINY)
    assert (code, out, err.count('\n')) == (2, '', 1) and err.startswith('minisgl-lit generate: '), err
    for word in words: assert word in err

def test_a_sound_copy_answers(model, ask):
    "So that the tests above see the flaw and nothing else"
    assert ask('Hi', '--model', str(model), *TINY) == ask('Hi', *TINY)
    assert ask('Hi', *TINY)[0] == 0

WISHES = {
    'no such folder': (['Hi', '--model', '/no/such'], ["model='/no/such'", 'there is no such folder']),
    'not on the hub': (['Hi', '--model', 'nobody/nothing'], ["model='nobody/nothing' is no folder here"]),
    'too many pages': (['Hi', '--num-pages', '1000000000'], ['num_pages=1000000000 needs', 'GiB']),
    'no memory': (['Hi', '--memory-ratio', '0.0000001'], ['the weights of this model need', 'may be filled']),
    'longer than the model': (['Hi', '--max-seq-len', '99999'], ['max_seq_len must be at most', 'not 99999']),
    'long prompt': (['x '*99, *TINY], ['the prompt', 'max_seq_len', '64']),
    'long answer': (['Hi', *TINY[:-1], '64'], ['max_tokens=64', 'max_seq_len']),
    'empty prompt': (['', *TINY], ['prompts must be given']),
}

@pytest.mark.parametrize('wish', WISHES)
def test_what_cannot_be_is_one_sentence(wish, ask):
    args, words = WISHES[wish]
    code, out, err = ask(*args)
    assert (code, out, err.count('\n')) == (2, '', 1), err
    for word in words: assert word in err, err

def test_a_model_that_cannot_fit(model, ask):
    "How much it needs, how much there is, and what would help: without looking at a single weight"
    settings(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=200)(model)
    code, out, err = ask('Hi', '--model', str(model), '--device', 'cpu', '--dtype', 'float32',
                         '--dummy-weights', 'true')
    assert (code, out, err.count('\n')) == (2, '', 1)
    for word in ('the weights of this model need', 'GiB as float32', "dtype='bfloat16' would need"):
        assert word in err, err

def test_numbers_that_overflow(model, ask):
    """Weights that are finite but useless: found only when they are multiplied, so the request fails, with
    code 1"""
    tensors(lambda o: o[NORM].fill_(3e38))(model)
    code, out, err = ask('Hi', '--model', str(model), *TINY)
    assert ((code, out.strip(), err.count('\n')) == (1, '', 1)
            and err == 'the model gave no finite logits for this request\n'), err

def test_the_other_commands(model, capsys):
    "`chat` here, and `serve` as a shell sees it, where another process loads the model"
    cut(model)
    code = cli.main(['chat', '--model', str(model)])
    out, err = capsys.readouterr()
    assert ((code, out, err.count('\n')) == (2, '', 1) and err.startswith('minisgl-lit chat: ')
            and 'damaged' in err)
    done = warm.run([sys.executable, '-m', 'minisgl_lit', '--port', '0', '--model', str(model)],
                          capture_output=True, text=True, timeout=100)
    *waits, said = done.stderr.splitlines()   # a busy machine may say first that it is still loading
    assert (done.returncode, done.stdout) == (2, '') and all('still loading' in o for o in waits), done.stderr
    assert said.startswith('minisgl-lit serve: ') and 'damaged' in said
