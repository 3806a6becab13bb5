"""Embeddings, scores and relevance equal those of `transformers`, pooled by hand, whatever the settings that
must not matter."""
import json
import shutil
import threading

import httpx
import numpy as np
import pytest
import torch

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.embedding import _doubt
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.llm import LLM
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.runtime import build
from reference import load, make_checkpoint, prompts

EPS = 1e-5
SETTINGS = {
    'small pages': dict(page_size=1, max_prefill_tokens=16, overlap=True),
    'mixed': dict(page_size=4, max_prefill_tokens=4096, overlap=False, mixed_chunk=True),
    'hardly a page': dict(page_size=16, chunked_prefill_size=7, overlap=True, mixed_chunk=True,
                          admission='optimistic', num_pages=9),
    'no cache': dict(page_size=4, cache='none', attention='torch', max_prefill_tokens=16)}
LABELS = (3, 150, 7)

@torch.inference_mode()
def reference(path, asked):
    "By pooling, vectors of length 1; and probabilities of the next token"
    model = load(path)
    hidden = [model.model(torch.tensor([o])).last_hidden_state[0] for o in asked]
    pooled = dict(last=torch.stack([o[-1] for o in hidden]), mean=torch.stack([o.mean(0) for o in hidden]))
    probs = torch.stack([model.lm_head(o[-1]) for o in hidden]).softmax(-1).numpy()
    return {k: torch.nn.functional.normalize(v, dim=1).numpy() for k, v in pooled.items()}, probs

def texts(): return [o for o in prompts() if len(o) < 128]

@pytest.fixture(scope='module',
    params=['Qwen3', *(pytest.param(o, marks=pytest.mark.long) for o in ('Llama', 'Qwen2Moe', 'Mistral'))])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    fields = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                  shared_expert_intermediate_size=20, head_dim=None)
    make_checkpoint(request.param, path, **(fields if 'Moe' in request.param else {}))
    return path, *reference(path, texts())

@pytest.mark.parametrize('settings', [pytest.param(o, marks=[pytest.mark.long][:i % 2], id=name)
                                      for i, (name, o) in enumerate(SETTINGS.items())])
def test_all_at_once(checkpoint, settings):
    "Both poolings, labels and answers in the same batches; the second time from the cache"
    path, vectors, probs = checkpoint
    runtime = build(EngineConfig.of(path, **dict(num_pages=400) | settings, max_running_req=6, device='cpu',
                                    schedule_conservativeness=.1))
    kinds = ({o: SamplingParams(max_tokens=0, pooling=o) for o in vectors} | dict(
        score=SamplingParams(max_tokens=1, temperature=0, logprobs=0, token_ids_logprob=LABELS),
        text=SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)))
    answers = []
    for turn in range(2):
        for i, ids in enumerate(texts()):
            for kind, params in kinds.items(): runtime.scheduler.add(f'{kind} {i}', ids, params)
        ends, tokens = {}, {}
        while runtime.scheduler.has_work:
            for o in runtime.scheduler.step():
                tokens.setdefault(o.rid, []).extend(o.token_ids)
                if o.finish_reason: ends[o.rid] = o
        for kind, right in vectors.items():
            for i, vector in enumerate(right):
                found = ends[f'{kind} {i}'].embedding
                assert np.abs(found / np.linalg.norm(found) - vector).max() < EPS, (turn, kind, i)
                assert ends[f'{kind} {i}'].cached_tokens == 0 or kind == 'last'
        for i, row in enumerate(probs):
            entry, = ends[f'score {i}'].logprobs
            assert [t for t, _ in entry.named] == [*LABELS]
            assert np.abs(np.exp([x for _, x in entry.named]) - row[[*LABELS]]).max() < EPS
        answers.append({k: v for k, v in tokens.items() if k.startswith('text')})
    assert answers[0] == answers[1] and all(len(o) == 9 for o in answers[0].values())
    if runtime.config.cache == 'radix': assert any(o.cached_tokens for o in ends.values())
    runtime.scheduler.self_check()
    runtime.close()

def test_public_face_beside_a_stream(checkpoint):
    """`LLM.embed` and `LLM.score` while another thread reads an answer; and logprobs of named tokens in a
    prompt"""
    path, vectors, probs = checkpoint
    asked = texts()
    with LLM(path, device='cpu', page_size=4, num_pages=400, max_prefill_tokens=16) as llm:
        alone = llm.generate([asked[0]],
                             SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))[0].token_ids
        told = []
        thread = threading.Thread(target=lambda: told.extend(i for p in llm.stream(asked[0],
            SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)) for i in p.token_ids))
        thread.start()
        for pooling in vectors: assert np.abs(llm.embed(asked, pooling) - vectors[pooling]).max() < EPS
        cut = vectors['mean'][:, :16]
        assert (np.abs(llm.embed(asked, 'mean', dimensions=16)
                       - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < EPS)
        scores = llm.score(asked[1][:-3], [asked[1][-3:]], LABELS)
        assert np.abs(np.array(scores) - probs[1, [*LABELS]]).max() < EPS
        shares = llm.score([], asked, LABELS, apply_softmax=True)
        assert (np.abs(np.array(shares) - probs[:, [*LABELS]]
                       / probs[:, [*LABELS]].sum(1, keepdims=True)).max() < EPS)
        thread.join()
        assert told == alone
        out, = llm.generate([asked[1]],
                            SamplingParams(max_tokens=0, prompt_logprobs=0, token_ids_logprob=LABELS))
        with torch.inference_mode(): right = load(path)(torch.tensor([asked[1]])).logits[0].log_softmax(-1)
        found = np.array([[x for _, x in o.named] for o in out.prompt_logprobs[1:]])
        assert np.abs(found - right[:-1, [*LABELS]].numpy()).max() < 1e-4

@pytest.mark.long
def test_two_ranks(checkpoint):
    "Hidden states are whole in each rank, so rank 0 pools them; logits are gathered"
    path, vectors, probs = checkpoint
    with LLM(path, device='cpu', page_size=4, num_pages=400, max_prefill_tokens=16, tp=2) as llm:
        for pooling in vectors: assert np.abs(llm.embed(texts(), pooling) - vectors[pooling]).max() < EPS
        assert np.abs(np.array(llm.score([], texts(), LABELS)) - probs[:, [*LABELS]]).max() < EPS
        out, = llm.generate([texts()[1]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0,
            logprobs=0, token_ids_logprob=LABELS))
        assert len(out.prompt_logprobs[5].named) == len(out.logprobs[0].named) == 3

@pytest.mark.parametrize('name, shards',
                         [('Qwen3Model', '40KB'), ('Qwen3ForCausalLM', '40KB'), ('Qwen3ForCausalLM', '1GB')])
def test_base_model(tmp_path, name, shards):
    """A folder without a head, as models for embeddings are saved, with what sentence-transformers writes
    beside it"""
    whole, path = tmp_path/'whole', tmp_path/'base'
    make_checkpoint('Qwen3', whole)
    load(whole).model.save_pretrained(path, max_shard_size=shards)
    config = json.loads((path/'config.json').read_text())
    (path/'config.json').write_text(json.dumps(config | dict(architectures=[name],
        tie_word_embeddings=False)))
    modules = [dict(idx=i, name=f'{i}', path=f'{i}_{o}' if i else '',
        type=f'sentence_transformers.models.{o}') for i, o in enumerate(('Transformer', 'Pooling'))]
    (path/'modules.json').write_text(json.dumps(modules))
    (path/'1_Pooling').mkdir()
    (path/'1_Pooling'/'config.json').write_text(json.dumps(dict(word_embedding_dimension=48,
        pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)))
    asked, right = texts(), reference(whole, texts())[0]
    with LLM(path, device='cpu', page_size=4, num_pages=400, max_prefill_tokens=16) as llm:
        found = llm.embed(asked)   # as its files say: the mean, not scaled
        assert np.abs(np.linalg.norm(found, axis=1) - 1).min() > .01
        assert np.abs(found / np.linalg.norm(found, axis=1, keepdims=True) - right['mean']).max() < EPS
        assert np.abs(llm.embed(asked, 'last', normalize=True) - right['last']).max() < EPS
        for ask in (lambda: llm.generate([asked[0]]), lambda: llm.score([], asked, LABELS),
                    lambda: llm.generate([asked[0]], SamplingParams(max_tokens=0, prompt_logprobs=0))):
            with pytest.raises(RequestError, match='has no lm_head'): ask()
        llm.update_weights(path)
        assert np.abs(llm.embed(asked) - found).max() < EPS

# As it is published with Qwen3-Reranker: token ids of each of these, and of the question between them
BEFORE = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the '
          'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
BEHIND = '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
WEB_SEARCH = 'Given a web search query, retrieve relevant passages that answer the query'

@pytest.mark.parametrize('instruct', [None, 'Find answers.'])
def test_rerank(tmp_path, instruct):
    "The share of 'yes' in what comes next, as `transformers` computes it"
    from transformers import PreTrainedTokenizerFast
    make_checkpoint('Qwen3', tmp_path, vocab_size=1536, max_position_embeddings=1024)
    for name in ('tokenizer.json', 'tokenizer_config.json'): shutil.copy(embedded_path()/name, tmp_path)
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(tmp_path), load(tmp_path)
    def coded(text): return tokenizer.encode(text, add_special_tokens=False)
    query, documents = 'What holds slots?', ['A page holds slots.', 'Berlin', '', 'A row.\n' * 20]
    right = []
    for o in documents:
        ids = (coded(BEFORE) + coded(f'<Instruct>: {instruct or WEB_SEARCH}\n<Query>: {query}\n<Document>: '
                                     f'{o}') + coded(BEHIND))
        with torch.inference_mode(): logits = model(torch.tensor([ids])).logits[0, -1]
        right.append(float(logits[[coded('yes')[0], coded('no')[0]]].softmax(0)[0]))
    with LLM(tmp_path, device='cpu', page_size=4, num_pages=600, max_prefill_tokens=64) as llm:
        for turn in range(2):
            assert np.abs(np.array(llm.rerank(query, documents, instruct)) - right).max() < EPS
    assert max(right) - min(right) > .1

@pytest.mark.long
def test_over_http():
    "OpenAI's client, which asks for base64 unless it is told not to; and SGLang's route, and Jina's"
    openai, urllib = pytest.importorskip('openai'), pytest.importorskip('urllib.request')
    from minisgl_lit import serve
    asked = ['A page holds slots.', 'The scheduler runs.', 'Berlin']
    with LLM() as llm: right, scores = llm.embed(asked, 'mean'), llm.score('A page', [' has', ''], LABELS)
    with LLM() as llm: relevance = llm.rerank('A page', asked)
    with serve(port=0) as server, openai.OpenAI(base_url=server.url + '/v1', api_key='x') as client:
        for given in ({}, {'encoding_format': 'float'}):
            data = client.embeddings.create(model=server.model, input=asked, extra_body={'pooling': 'mean'},
                                            **given).data
            assert [o.index for o in data] == [0, 1, 2]
            assert np.abs(np.array([o.embedding for o in data]) - right).max() < EPS
        few = np.array(client.embeddings.create(model=server.model, input=asked[0],
                                                dimensions=8).data[0].embedding)
        assert len(few) == 8 and abs(np.linalg.norm(few) - 1) < EPS
        with pytest.raises(openai.BadRequestError, match='dimensions=0'):
            client.embeddings.create(model=server.model, input='a', dimensions=0)
        body = json.dumps({'query': 'A page', 'items': [' has', ''], 'label_token_ids': LABELS}).encode()
        request = urllib.Request(server.url + '/v1/score', body, {'content-type': 'application/json'})
        with urllib.urlopen(request) as reply:
            assert np.abs(np.array(json.load(reply)['scores']) - scores).max() < EPS
        body = json.dumps({'query': 'A page', 'documents': asked, 'return_documents': True}).encode()
        request = urllib.Request(server.url + '/v1/rerank', body, {'content-type': 'application/json'})
        with urllib.urlopen(request) as reply: results = json.load(reply)['results']
        assert [o['index'] for o in results] == sorted(range(3), key=lambda i: -relevance[i])
        assert all(abs(o['relevance_score'] - relevance[o['index']]) < EPS
                   and o['document']['text'] == asked[o['index']] for o in results)


def test_a_model_that_was_not_trained_to_rank_says_so_once(small_server, capfd):
    "By a server and then by `LLM`; the chapter on embeddings has models that are called rerankers"
    _doubt.cache_clear()
    body = dict(query='a', documents=['b'])
    for _ in range(2): assert httpx.post(small_server.url + '/v1/rerank', json=body).status_code == 200
    with LLM(device='cpu', num_pages=64) as llm: llm.rerank('a', ['b'])
    assert capfd.readouterr().err.count('was trained to rank') == 1
