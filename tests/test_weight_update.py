"""Other weights in the same memory: every answer is that of one checkpoint, whatever ran when they were
changed."""
import json, os, shutil, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_lit import LLM, SamplingParams, serve
from minisgl_lit.formats.hub import embedded_path

SETTINGS = dict(num_pages=256, max_running_req=8, max_seq_len=256, device='cpu', dtype='float32')
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = ['The page', 'What is a row?', 'A tree of pages', 'Hello', 'Count from 3 to 9'] * 4


@pytest.fixture(scope='module')
def other(tmp_path_factory):
    "A checkpoint like the embedded one, but of another opinion"
    folder = tmp_path_factory.mktemp('checkpoints')/'other'
    shutil.copytree(embedded_path(), folder)
    tensors, noise = load_file(folder/'model.safetensors'), torch.Generator().manual_seed(1)
    changed = {k: v + .3 * v.float().std().nan_to_num() * torch.randn(v.shape, generator=noise).to(v.dtype)
               for k, v in tensors.items()}
    save_file({k: v.to(tensors[k].dtype).contiguous() for k, v in changed.items()},
              folder/'model.safetensors')
    return str(folder)

def answers(model, **settings):
    with LLM(model, **SETTINGS | settings) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS[:5], GREEDY)]

@pytest.mark.parametrize('settings', [{}, dict(quantization='int8')], ids=str)
def test_as_if_loaded_anew(other, settings):
    "There and back: recorded steps and packed weights follow"
    old, new = answers('embedded', **settings), answers(other, **settings)
    assert old != new
    with LLM(**SETTINGS | settings) as llm:
        for path, version, right in ((None, 'default', old), (other, '2', new),
                                     (str(embedded_path()), '3', old)):
            if path: llm.update_weights(path, version)
            outs = llm.generate(PROMPTS[:5], GREEDY)
            assert [o.token_ids for o in outs] == right and {o.weight_version for o in outs} == {version}
        llm.runtime.scheduler.self_check()

def test_answers_that_have_begun(other, tmp_path):
    """A stream that is half read ends with the weights that it began with; a folder that is refused changes
    nothing"""
    old, new = answers('embedded'), answers(other)
    with LLM(**SETTINGS) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        first = next(stream)
        with pytest.raises(ValueError, match='model_path must be a folder'):
            llm.update_weights(tmp_path/'nowhere')
        llm.update_weights(other)
        assert first.token_ids + [t for piece in stream for t in piece.token_ids] == old[0]
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == new[0]

def test_a_load_that_fails(other, monkeypatch):
    "Half of the weights are new: nothing is computed until an update succeeds"
    with LLM(**SETTINGS) as llm:
        updater, read = llm.runtime.weights.updater, llm.runtime.weights.updater._read
        def breaks(path, put):
            def once(name, weight):
                if 'layers.1' in name: raise OSError('the disk is gone')
                return put(name, weight)
            return read(path, once)
        updater._read = breaks
        with pytest.raises(RuntimeError, match='the disk is gone'): llm.update_weights(other)
        with pytest.raises(RuntimeError, match='update them once more'): llm.generate('x', GREEDY)
        updater._read = read
        llm.update_weights(other)
        assert llm.generate(PROMPTS[:5], GREEDY)[0].token_ids == answers(other)[0]

def resident():
    "Bytes of memory that this process has"
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')

@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='needs Linux')
@pytest.mark.parametrize('quantization', [None, 'int8'])
def test_asleep(other, quantization):
    """Memory goes back to the system; then answers are those of before, or those of the weights that were
    loaded meanwhile"""
    old, new = answers('embedded', quantization=quantization), answers(other, quantization=quantization)
    with LLM(**SETTINGS | dict(num_pages=3000), quantization=quantization) as llm:
        pool = llm.runtime.engine.attention.pool.buffer
        pool.fill_(1.)
        assert [o.token_ids for o in llm.generate(PROMPTS[:5], GREEDY)] == old
        before, stream = resident(), llm.stream(PROMPTS[0], GREEDY)
        first = next(stream)
        llm.sleep()
        # it was ended first
        assert first.token_ids + [t for piece in stream for t in piece.token_ids] == old[0]
        assert before - resident() > .9 * pool.nbytes
        with pytest.raises(RuntimeError, match='memory has been released'): llm.generate('x', GREEDY)
        llm.wake()
        assert [o.token_ids for o in llm.generate(PROMPTS[:5], GREEDY)] == old
        # None: the same once more
        for path, right in ((other, new), (None, new), (str(embedded_path()), old)):
            llm.sleep(weights=path is not None)
            llm.update_weights(path) if path else llm.wake()
            llm.wake()   # it is awake already
            assert [o.token_ids for o in llm.generate(PROMPTS[:5], GREEDY)] == right
        llm.runtime.scheduler.self_check()

@pytest.mark.long
def test_asleep_over_http(other):
    """As trainers call it: everything is released, the weights are resumed and updated, the rest is resumed;
    who came meanwhile is answered"""
    new = answers(other)
    with serve(port=0, **SETTINGS) as s, ThreadPoolExecutor(5) as pool:
        post = lambda path, **body: httpx.post(s.url + path, json=body, timeout=120)
        assert post('/release_memory_occupation').json() == {'success': True}
        waiting = [pool.submit(ask, s, p) for p in PROMPTS[:5]]
        assert post('/release_memory_occupation', tags=['graphs']).status_code == 400
        assert post('/resume_memory_occupation', tags=['weights']).json()['success']
        time.sleep(.3)
        assert not any(o.done() for o in waiting)
        assert post('/update_weights_from_disk', model_path=other).status_code == 200
        assert post('/resume_memory_occupation', tags=['kv_cache']).json()['success']
        assert [o.result()['output_ids'] for o in waiting] == new

@pytest.mark.long
def test_two_ranks(other):
    "All ranks change at once"
    with LLM(**SETTINGS, tp=2) as llm:
        for path, model in ((other, other), (str(embedded_path()), 'embedded')):
            llm.update_weights(path)
            assert [o.token_ids for o in llm.generate(PROMPTS[:5], GREEDY)] == answers(model)

def ask(server, prompt, **more):
    body = dict(text=prompt, sampling_params=dict(temperature=0, max_new_tokens=40, ignore_eos=True)) | more
    r = httpx.post(server.url + '/generate', json=body, timeout=120)
    return r.json() if not more.get('stream') else json.loads(r.text.split('\n\n')[-3][6:])

@pytest.mark.long
def test_no_mix_over_http(other):
    """Forty requests, streamed and not, and two updates in the middle of them: each answer is wholly of the
    weights that it names"""
    right = {'default': answers('embedded'), '2': answers(other), '3': answers('embedded')}
    with serve(port=0, **SETTINGS) as s, ThreadPoolExecutor(20) as pool:
        post = lambda path, **body: httpx.post(s.url + path, json=body, timeout=120)
        for path, version in ((other, '2'), (str(embedded_path()), '3')):
            asked = [(i % 5, pool.submit(ask, s, p, stream=bool(i % 2))) for i, p in enumerate(PROMPTS)]
            r = post('/update_weights_from_disk', model_path=path, weight_version=version)
            assert r.status_code == 200 and r.json()['success'], r.text
            later = [(i, pool.submit(ask, s, PROMPTS[i])) for i in range(5)]
            versions = set()
            for i, answer in asked + later:
                told = answer.result()
                versions.add(v := told['meta_info']['weight_version'])
                assert told['output_ids'] == right[v][i], (i, v)
            assert ({answer.result()['meta_info']['weight_version'] for _, answer in later} == {version}
                    <= versions)
            info = httpx.get(s.url + '/model_info').json()
            assert (info['weight_version'], info['model_path']) == (version, path)
        # aborted, where the trainer does not wait
        asked = [pool.submit(ask, s, p) for p in PROMPTS]
        assert post('/update_weights_from_disk', model_path=other, abort_all_requests=True).status_code == 200
        for answer in asked:
            told = answer.result()
            assert (told['meta_info']['finish_reason']['type'] == 'abort'
                    or told['output_ids'] in right['2'] + right['3'])
        # refused: nothing has changed
        r = post('/update_weights_from_disk', model_path='/no/such/folder')
        assert r.status_code == 400 and 'model_path must be a folder' in r.json()['error']['message']
        assert post('/update_weight_version', new_version='four').json()['success']
        assert ask(s, PROMPTS[0])['meta_info']['weight_version'] == 'four'
