"""What the site's search knows beside Sphinx's index: how often each page has a word, and what other engines
call the same.

`_static/search.js` ranks with it. It is made of the sources of the pages, outputs, imports and listings of
modules left out, and written beside the built book.
"""
import json, re
from collections import Counter
from functools import cache
from pathlib import Path
from sphinx.search.en import SearchEnglish

# page, without the number of a chapter: what people type who mean it, where its title has other words
SAID = {
    "nbs/core/sampling_params": "temperature, top_p, top_k, min_p, top p, min p, top k, seed",
    "nbs/core/engine.sampler": "sampling, repetition penalty, frequency penalty, presence penalty, logit "
                               "processor, logits processor, custom logit processor, logit_bias, "
                               "deterministic inference, batch invariance",
    "nbs/core/scheduler.prefill": "chunked prefill, max_num_batched_tokens, chunked_prefill_size",
    "nbs/core/scheduler.decode": "recompute preemption, swap, retract_decode, new_token_ratio, "
                                 "schedule_conservativeness, "
                                 "preemption",
    "nbs/core/kv_cache.radix": "prefix caching, radix attention, RadixAttention, automatic prefix caching, "
                               "APC, hash of a block, lock_ref, inc_lock_ref, dec_lock_ref, match_prefix",
    "nbs/core/kv_cache.pool": "kv cache, block size, page_size, token_to_kv_pool, MHATokenToKVPool, "
                              "memory_pool",
    "nbs/experiments/page_size": "page_size, block_size",
    "nbs/core/kv_cache.eviction": "LRU eviction, evictor, radix cache eviction",
    "nbs/core/scheduler.scheduler": "overlap scheduling, overlap scheduler, zero-overhead scheduler, async "
                                    "scheduling, event loop",
    "nbs/experiments/overlap": "overlap scheduling, async scheduling",
    "nbs/core/attention.torch": "PagedAttention, paged attention, flash attention, sliding window",
    "nbs/core/engine.cuda_graph": "CUDA graphs, cudagraph, graph capture, cuda_graph_bs, cuda graph padding, "
                                  "CudaGraphRunner, cuda_graph_max_bs, piecewise cuda graph",
    "nbs/core/models.moe": "mixture of experts, MoE, expert routing, expert parallel, expert parallelism, "
                           "EP, EPLB, DeepEP",
    "nbs/families/layers": "post norm, pre norm, sandwich norm, QK norm, LayerNorm, parallel attention, "
                           "gated attention, attention sink, attention sinks, learned sink, "
                           "parallel residual, use_parallel_residual, qk_layernorm",
    "nbs/families/mlps": "GELU, GeGLU, SwiGLU, squared ReLU, xIELU, sigmoid router, router bias, "
                         "expert bias, auxiliary-loss-free, grouped top-k",
    "nbs/families/dense": "Gemma, Gemma 3, OLMo, OLMo 2, OLMo 3, EXAONE, Cohere, Command R, SmolLM3, "
                          "Hunyuan, Apertus, Arcee, StarCoder2, StableLM, Nemotron, NoPE, soft cap, "
                          "logit softcapping, Phi-1, Phi 1.5, Phi-2, nanochat",
    "nbs/families/experts": "GLM 4.5, MiniMax, OLMoE, FlexOlmo, dots.llm1, AFMoE, Trinity, ERNIE, "
                            "Granite MoE, gpt-oss, gpt-oss-20b",
    "guides/serve-a-checkpoint": "supported models, which models, Phi-4, Mistral, Qwen3",
    "nbs/core/models.weights": "safetensors, weight loading",
    "nbs/distributed/tensor_parallel": "tensor parallel, TP, NCCL, all-reduce, multi GPU, sharding",
    "guides/tensor-parallel": "tensor parallel, TP, tensor_parallel_size, multi GPU, "
                              "replicas, data parallel, dp_size, disaggregated prefill, PD disaggregation",
    "nbs/distributed/tier": "HiCache, hierarchical cache, LMCache, KV cache offloading, offload, CPU "
                            "offload, swap space, kv connector, write_through, write through, write back, "
                            "hicache_ratio, hicache_size",
    "nbs/second_tier": "KV cache offloading, HiCache",
    "nbs/server/prefill_router": "disaggregated prefill, prefill decode disaggregation, PD disaggregation, "
                                 "disaggregation, P/D, Dynamo, Mooncake",
    "nbs/experiments/prefill_apart": "disaggregated prefill, PD disaggregation",
    "nbs/distributed/handoff": "KV transfer, kv connector",
    "nbs/server/router": "data parallel, DP, load balancing, cache-aware routing, sglang router, replicas, "
                         "cache aware router, cache aware load balancing, data parallel attention, DP "
                         "attention, dp_size, "
                         "cache-aware, router policy, routing policy",
    "nbs/formats/packed_files": "AWQ, GPTQ, compressed-tensors, FP8 checkpoint, MXFP4, microscaling",
    "nbs/kernels/kv_formats": "fp8 kv cache, int8 kv cache, kv_cache_dtype",
    "nbs/formats/quantization": "quantize, quantization, int4, int8",
    "guides/serve-a-compressed-model": "quantize, quantization, GGUF, AWQ, GPTQ, llama.cpp",
    "guides/change-one-thing": "add a model, new model, custom model, support a model, plugin, add a "
                               "sampling parameter, custom policy, add an attention backend, "
                               "custom scheduling policy, custom schedule policy, add a policy",
    "nbs/text/grammar": "structured output, guided decoding, guided generation, xgrammar, outlines, json "
                        "schema, constrained decoding, bitmask, vocab mask, vocabulary mask, regex, EBNF, "
                        "llguidance, grammar backend, grammar_backend, jump forward decoding, jump forward",
    "guides/structured-output": "structured output, json schema, json mode, guided decoding, response_format",
    "guides/which-models": "supported models, supported architectures, model list, model support, "
                           "doctor, Gemma 3, gemma3, OLMo 3, olmo3, Gemma 3n, EmbeddingGemma",
    "guides/add-a-family": "add a model, new model, new architecture, port a model, add a model architecture",
    "guides/gpu": "soft cap, softcap, attention backend, attention_backend, soft cap attention backend",
    "guides/tools": "tool calling, function calling, tools, "
                    "qwen25, llama3, deepseekv3, tool_call_parser",
    "nbs/text/tool_calling": "tool calling, function calling",
    "nbs/text/reasoning": "reasoning parser, reasoning_content, think tags",
    "nbs/text/stop": "stop string, stop sequence, stop word",
    "nbs/server/sse": "streaming, SSE, stream an answer, client disconnect, slow client",
    "nbs/server/openai_protocol": "OpenAI API, chat completions",
    "guides/openai-client": "OpenAI API, chat completions, logprobs, streaming",
    "nbs/server/messages_protocol": "Anthropic, Anthropic API, Claude",
    "guides/clients": "Anthropic, ollama, Claude Code, LangChain",
    "guides/several-models": "ollama pull, ollama list, ollama ps, ollama rm, keep_alive",
    "nbs/server/ollama_protocol": "ollama",
    "nbs/server/batches": "batch API",
    "guides/batch": "batch API, offline batch, batch inference",
    "nbs/server/callers": "API key, rate limit, quota",
    "guides/callers": "API key, rate limit, quota, tenants, multi-tenant",
    "nbs/server/metrics": "Prometheus, Grafana, metrics",
    "guides/monitor": "Prometheus, Grafana, metrics, tracing, dashboard",
    "guides/many-machines": "Ray, cluster, Kubernetes, multi node, pipeline parallel, nnodes, "
                            "dist_init_addr, multi host",
    "guides/deploy": "Docker, container, Kubernetes, nginx, systemd, TLS, HTTPS, production",
    "made/benchmarks": "benchmark, throughput, performance, vs vLLM, vs SGLang, tokens per second",
    "nbs/tools/bench": "benchmark",
    "guides/tune": "throughput, latency, tuning, performance, out of memory, OOM, "
                   "HiCache, hierarchical cache, KV cache offloading, hicache_ratio, hicache_size",
    "nbs/rules/fairness": "fairness, fair scheduling, VTC, virtual token counter",
    "nbs/experiments/fairness": "priority, priority scheduling",
    "nbs/experiments/guesses": "speculative decoding, acceptance rate, acceptance length, prompt lookup",
    "nbs/core/scheduler.policy": "priority, schedule policy, scheduling policy, cache-aware scheduling, "
                                 "cache-aware",
    "nbs/core/engine.pooling": "embeddings, pooling",
    "guides/embeddings": "embeddings, rerank, reranker, score, classification, is_embedding, embedding "
                         "models, embedding model",
    "nbs/formats/weight_update": "RLHF, weight sync, update weights, update_weights_from_disk, "
                                 "update_weights_from_tensor, update_weights_from_distributed",
    "nbs/tools/roofline": "MFU, bandwidth bound, arithmetic intensity",
    "nbs/formats/hub": "Hugging Face, download a model, HF_TOKEN, offline",
    "nbs/core/kv_cache.manager": "inc_lock_ref, dec_lock_ref, cache_finished_req, cache_unfinished_req, KV "
                                 "allocator, TokenToKVPoolAllocator",
    "nbs/core/kv_cache.table": "block table, req_to_token_pool, req_to_token, ReqToTokenPool",
    "nbs/core/scheduler.lifecycle": "retract_decode",
    "nbs/core/scheduler.batch": "ScheduleBatch, ModelWorkerBatch, ForwardBatch",
    "nbs/core/engine.memory": "mem_fraction_static, gpu_memory_utilization, memory fraction",
    "nbs/core/engine.engine": "ModelRunner, model_runner, TpModelWorker, tp_worker",
    "nbs/server/protocol": "custom logit processor",
    "nbs/text/tokenizer": "TokenizerManager, DetokenizerManager, tokenizer manager, detokenizer manager",
    "nbs/server/tokenizing": "TokenizerManager, tokenizer manager",
    "nbs/server/engine_process": "DetokenizerManager, detokenizer manager, backpressure, back-pressure, "
                                 "heartbeat",
    "nbs/server/operations": "release_memory_occupation, sleep mode",
    "guides/coming-from": "max_model_len, ServerArgs, server_args, EAGLE, MTP, MLA, DeepSeek, DeepSeek "
                          "V3, reward model, torch compile, data parallel attention, DP attention",
    "nbs/server/web_pages": "CORS, cross-origin",
    "nbs/server/connection": "keep-alive, keepalive",
    "nbs/server/fields": "retry-after, error format, HTTP status",
    "nbs/server/serve": "graceful shutdown, SIGTERM",
    "nbs/core/attention.flashinfer": "flashinfer, flashinfer backend",
    "guides/lora": "LoRA, lora adapter, adapters, PEFT, fine-tune, fine-tuning, "
                   "multi-LoRA, enable_lora, lora_modules",
    "nbs/adapters/low_rank": "LoRA, multi-LoRA, LoRA kernel, LoRA batch, Punica, S-LoRA",
    "nbs/speculation/drafts": "speculative decoding, spec decode, verify",
    "nbs/speculation/draft_model": "draft model",
    "design": "architecture, multimodal, vision, images, roadmap, EAGLE, MTP, Medusa",
}
INCLUDED = "made/menu", "made/models"   # in other pages
_import = re.compile(r"(?m)^(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$")
_flag = re.compile(r"(?<!\w)--[a-z0-9]+(?:-[a-z0-9]+)+")
_word = re.compile(r"[^\W_]+(?:_[^\W_]+)*", re.UNICODE)
# addresses of links, anchors and roles are no words
_markup = re.compile(r"(?m)(?<=\])\([^)\s]*\)|<[^>\n]*>|^\(cell-.*\)=$|\{[\w:.]+\}")
SearchEnglish.stem = cache(SearchEnglish.stem)   # Sphinx asks for the same words on each page
_stem = SearchEnglish({}).stem

def unnumbered(place): return re.sub(r"/\d+[a-z]?_(?=[^/]*$)", "/", place)

def words(text):
    "Its words as the search knows them: stems; of `page_size` and `--page-size` the whole name and its parts"
    for o in _word.findall(_flag.sub(lambda m: m[0].replace("-", "_"), text.lower())):
        yield _stem(o) if "_" not in o else o
        if "_" in o: yield from map(_stem, o.split("_"))

def source(path):
    "What a page says, without imports and the outputs of its cells"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb": text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"])
    return _markup.sub(" ", _import.sub("", text))

def index(docs):
    """{pages: their lengths; words: {stem: [page, count, …]}} by the numbers of pages, and what is said for
    them"""
    found = {}
    for path in sorted([*docs.rglob("*.md"), *docs.rglob("*.ipynb")]):
        place = path.relative_to(docs).with_suffix("").as_posix()
        if (not place.startswith(("_build", "src/", "_static", *INCLUDED))
                and ".ipynb_checkpoints" not in place):
            found[place] = Counter(words(source(path)))
    if "index" in found:
        found["index"] += Counter(words((docs.parent/"README.md").read_text(encoding="utf-8")))
    if (made := docs/"made"/"models.md").exists():
        found["guides/which-models"] += Counter(words(source(made)))
    known = {}
    for i, (place, counts) in enumerate(found.items()):
        for o, n in counts.items(): known.setdefault(o, []).extend((i, n))
    said = [[" ".join(words(o)), place] for place in found
            for o in SAID.get(unnumbered(place), "").split(", ") if o]
    return dict(pages=[*found], lengths=[sum(o.values()) for o in found.values()], words=known, said=said)

def write(app, error):
    if not error and app.builder.name == "html":
        text = json.dumps(index(Path(app.srcdir)), ensure_ascii=False, separators=(",", ":"))
        Path(app.outdir, "_static/counts.js").write_text(f"const Counts = {text}\n", encoding="utf-8")

def add_js(app, page, template, context, doctree):
    if page == "search":
        for name in ("counts.js", "search.js"): app.add_js_file(name, loading_method="defer")

def setup(app):
    app.connect("build-finished", write)
    app.connect("html-page-context", add_js)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
