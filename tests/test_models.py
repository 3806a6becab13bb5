"""`minisgl-lit models` and `doctor MODEL`: what is listed is what is registered, and a model is judged before
it is downloaded."""
import json, re, sys
from pathlib import Path

import pytest

import minisgl_lit.assembly   # noqa: F401 (registers all rows before a test adds one)
from minisgl_lit import cli
from minisgl_lit.core.models.checkpoint import Family, families, read_config
from minisgl_lit.core.models.weights import quant_methods, sources
from minisgl_lit.formats.hub import embedded_path
import test_hub

root = Path(__file__).resolve().parents[1]

PLUGIN = """
from minisgl_lit.core.models.checkpoint import Family, families
from minisgl_lit.core.models.weights import quant_methods, sources
from minisgl_lit.families.edits import edited

def plus_two(part, model):
    "Norms are stored without the 1 that is added to them"
    return [part]

families.register('NovaForCausalLM', Family(qk_norm=True, shared_expert=True))
sources.register('NovaForCausalLM', edited(plus_two))
quant_methods.register('steps', None)
"""

@pytest.fixture
def run(capsys):
    "(exit code, standard output, standard error) of the program"
    def run(*args):
        code = cli.main([*map(str, args)])
        return code, *capsys.readouterr()
    return run

@pytest.fixture
def plugin(tmp_path, monkeypatch):
    "A module with a family, an edit and a method; all is forgotten afterwards"
    (tmp_path/'nova_plugin.py').write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'nova_plugin', raising=False)
    before = [(o, {**o}) for o in (families, sources, quant_methods)]
    yield 'nova_plugin'
    for registry, things in before:
        registry.clear()
        registry.update(things)

def test_what_is_listed_is_what_is_registered(run, plugin):
    "Names alone on the left for people, keys for programs; a plugin's beside ours; lines fit"
    for flags, more in ((), []), (('--plugins', plugin), ['NovaForCausalLM']):
        code, told, err = run('models', *flags)
        data = json.loads(run('models', '--json', *flags)[1])
        assert (code, err) == (0, '') and max(map(len, told.splitlines())) <= 100
        assert [*data['families']] == [*families] and [*families][-1:] == more or not more
        assert data['weights']['quant_methods'] == quant_methods.names
        section = told.partition('\n\n')[0].splitlines()[1:]
        assert [o.split()[0] for o in section if o[2] != ' '] == [*families]
    assert 'QK norm, shared expert; loading: plus_two' in told and 'Norms are stored without the 1' in told
    assert data['families']['NovaForCausalLM'] == dict(
        differs=dict(qk_norm=True, shared_expert=True), edits=['plus_two'])

def test_a_field_that_makes_a_difference_is_shown(run, monkeypatch):
    "Whatever a row has that a Llama has not"
    usual = json.loads(run('models', '--json')[1])['families']
    assert usual['LlamaForCausalLM'] == dict(differs={}, edits=[])
    for name, row in families.items():
        assert (row == Family()) == (usual[name]['differs'] == {}), name

def changed(folder, **fields):
    "A folder with the embedded model's config, and other fields in it"
    folder.mkdir()
    raw = json.loads((embedded_path()/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(raw | fields))
    return folder

def test_refused_is_1_and_not_found_is_2(run, tmp_path, plugin):
    "The sentence is that of `serve`; programs find it, too"
    nova = changed(tmp_path/'nova', architectures=['NovaForCausalLM'])
    code, told, err = run('doctor', nova)
    assert (code, err) == (1, '') and "served " in told and "'NovaForCausalLM' of config.json is not" in told
    code, told, _ = run('doctor', '--json', nova)
    last = json.loads(told)[-1]
    assert (code, last['name']) == (1, 'served') and last['found'].startswith('no: architecture')
    with pytest.raises(ValueError) as refusal: read_config(nova)
    assert last['found'] == f'no: {refusal.value}'
    code, told, _ = run('doctor', nova, '--plugins', plugin)
    assert code == 0 and 'QK norm, shared expert; loading: plus_two' in told
    for name in tmp_path/'nowhere', 'hf:a/b/c.gguf':
        code, told, err = run('doctor', name)
        assert (code, told, err.count('\n')) == (2, '', 1) and err.startswith('minisgl-lit doctor: ')
    broken = tmp_path/'broken.gguf'
    broken.write_bytes(b'GGUF' + b'\0' * 40)
    assert run('doctor', broken)[0] == 1

@pytest.fixture
def hub(tmp_path, monkeypatch):
    "That of test_hub, in this process, and a cache of its own"
    from huggingface_hub import constants
    server = test_hub.start_hub()
    url = f'http://127.0.0.1:{server.server_port}'
    for name, value in dict(ENDPOINT=url, HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path/'cache'),
        HUGGINGFACE_CO_URL_TEMPLATE=url + '/{repo_id}/resolve/{revision}/{filename}').items():
        monkeypatch.setattr(constants, name, value)
    yield server
    server.shutdown()
    server.server_close()

def test_on_the_hub_only_small_files_are_fetched(run, hub, monkeypatch):
    "Its index says how large it is; without the hub the cache answers; else there is a sentence"
    index = json.dumps(dict(metadata=dict(total_size=3 << 30), weight_map={})).encode()
    monkeypatch.setitem(test_hub.COMMITS, 'a' * 40,
                        test_hub.FILES | {'model.safetensors.index.json': index})
    code, told, _ = run('doctor', '--json', 'some/model')
    assert code == 0
    found = {o['name']: o['found'] for o in json.loads(told)}
    assert found['to download'] == '3.00 GiB' and found['served'] == 'yes, as it is'
    assert found['model'] == 'some/model, Qwen3ForCausalLM, 4 layers'
    names = {name for name, _ in hub.asked}
    assert {'config.json', 'model.safetensors.index.json'} <= names and 'model.safetensors' not in names
    hub.asked.clear()
    code, told, err = run('doctor', 'other/model')
    assert (code, told, err.count('\n')) == (2, '', 1) and 'it has no such model' in err
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert run('doctor', 'some/model')[0] == 0 and not hub.asked
    code, told, err = run('doctor', 'third/model')
    assert (code, told, err.count('\n')) == (2, '', 1) and 'cannot be reached' in err

def test_the_guide_which_models_is_made_of_the_registry(plugin, run, monkeypatch):
    "Its tables have the families, edits and formats that there are; its prose names no other"
    monkeypatch.syspath_prepend(root/'docs')
    import pages
    guide = (root/'docs'/'guides'/'which-models.md').read_text()
    assert '```{include} ../made/models.md\n' in guide
    for flags, nova in ((), False), (('--plugins', plugin), True):
        data = json.loads(run('models', '--json', *flags)[1])
        made = pages.models(data)
        def first(title):
            section = made.partition(f'## {title}\n')[2].partition('\n## ')[0]
            return re.findall(r'(?m)^\| `([^`]+)`', section)
        assert first('Families') == [*families] and ('NovaForCausalLM' in made) == nova
        assert first('Edits') == [*data['edits']] and ('`plus_two`' in made) == nova
        for name in (o for names in data['weights'].values() for o in names): assert f'`{name}`' in made
    assert {*re.findall(r'`(\w+For[A-Z]\w+)`', guide)} <= {*families}
