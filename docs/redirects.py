"""Old addresses of pages lead to the new ones: a small page each, written beside the built book."""
import os, re
from pathlib import Path

chapters = {   # before 0.2.0: since
    "00_core": "00b_core.request", "03_toy": "03_testing.toy_engine", "04_native": "04_kernels.compiler",
    "05_news": "05_core.outputs", "06_products": "06_kernels.linear", "10_kv.pool": "10_kv_cache.pool",
    "11_kv.table": "11_kv_cache.table", "12_kv.prefix": "12_kv_cache.radix",
    "13_kv.cache": "13_kv_cache.manager", "14_kernels": "14_testing.flashinfer_emulator",
    "19_pictures": "19_tools.svg", "23_scheduler.finish": "23_scheduler.lifecycle",
    "24_scheduler.prepare": "24_scheduler.batch", "25_scheduler.loop": "25_scheduler.scheduler",
    "27_scheduler.cost": "27_tools.scheduler_cost", "30_model.layers": "30_models.layers",
    "31_model.attention": "31_attention.torch", "32_model.attention_cpu": "32_attention.cpu",
    "33_model.attention_flashinfer": "33_attention.flashinfer", "34_model.decoder": "34_models.decoder",
    "35_model.moe": "35_models.moe", "36_model.weights": "36_models.weights",
    "37_model.embedded": "37_tools.embedded", "38_model.checkpoint": "38_models.checkpoint",
    "39_engine.resources": "39_engine.memory", "40_engine.sampling": "40_engine.sampler",
    "42_engine.graph": "42_engine.cuda_graph", "43_engine.parallel": "43_engine.tensor_parallel",
    "44_engine.build": "51a_runtime", "46_serving.finders": "46_text.stop",
    "47_serving.stream": "47_server.sse", "48_serving.wishes": "48_server.protocol",
    "49_serving.door": "49_server.middleware", "50_serving.messages": "50_server.messages",
    "51_serving.tokenizer": "51_text.tokenizer", "53_serving.workers": "53_server.engine_core",
    "54_serving.openai": "54_server.openai_protocol", "55_serving.http": "55_server.api_server",
    "56_serving.serve": "56_server.serve", "57_limits": "57_tools.roofline",
    "58_load": "58_tools.load_generator", "59_traces": "59_tools.traces",
    "60_viz": "60_tools.widgets", "61_bench": "61_tools.bench", "62_sim": "62_tools.simulator",
    "66_calibrate": "66_tools.calibrate",
    # while 0.3.0 was made
    "14_kernels.flashinfer_reference": "14_testing.flashinfer_emulator",
    "14a_kernels.triton_reference": "14a_testing.triton_emulator",
    "36a_models.embedded_tasks": "36a_tools.embedded_tasks", "37_models.embedded": "37_tools.embedded",
    "19a_scheduler.fairness": "20a_scheduler.fairness", "22a_scheduler.thinking": "22a_text.thinking",
    "server/all_protocols": "server/routes", "server/engine_core": "loop/engine_core",
    "server/messages": "loop/messages", "server/weight_updates": "loop/weight_updates",
    "server/live_view": "loop/live_view"}
# before 0.3.0: folders, and the chapters that have moved there, with the new name where that differs
moved = {
    "core": """00a_core.sampling_params=01_sampling_params 00b_core.request=02_request 00c_core.registry=03_registry 01_config=04_config
        02_device=05_device 05_core.outputs=07_outputs 10_kv_cache.pool=08_kv_cache.pool 11_kv_cache.table=09_kv_cache.table
        11a_kv_cache.eviction=10_kv_cache.eviction 12_kv_cache.radix=11_kv_cache.radix 13_kv_cache.manager=12_kv_cache.manager
        13b_core.library=22_attention.library 20_scheduler.policy=13_scheduler.policy 21_scheduler.prefill=14_scheduler.prefill
        22_scheduler.decode=15_scheduler.decode 23_scheduler.lifecycle=16_scheduler.lifecycle 24_scheduler.batch=17_scheduler.batch
        25_scheduler.scheduler=18_scheduler.scheduler 26_scheduler.control=19_scheduler.control 30_models.layers=20_models.operations
        31_attention.torch=21_attention.torch 33_attention.flashinfer=23_attention.flashinfer 34_models.decoder=24_models.decoder
        35_models.moe=25_models.moe 36_models.weights=26_models.weights 38_models.checkpoint=27_models.checkpoint
        39_engine.memory=28_engine.memory 40_engine.sampler=29_engine.sampler 40a_engine.pooling=30_engine.pooling
        41_engine.engine=31_engine.engine 42_engine.cuda_graph=32_engine.cuda_graph""",   # noqa: E501
    "": """01a_config_sources 02a_process 02b_log 44_engine.worker=assembly 44b_engine.second_tier 51a_runtime 51f_keywords 51g_engine_driver
        52_llm 52c_async_llm 62a_cli_arguments 63_cli 64_main 79c_second_tier""",   # noqa: E501
    "testing": """03_testing.toy_engine 05b_testing.weekend_table
        14_testing.flashinfer_emulator 14a_testing.triton_emulator 53b_testing.toy_core""",
    "kernels": """04_kernels.compiler 04a_kernels.plan 06_kernels.linear 06a_kernels.vector_math 06b_kernels.quantized 13a_kernels.trials
        13c_kernels.library 14b_kernels.fused_heads 14c_kernels.sampling 14d_kernels.grouped_matmul 14e_kernels.page_list 14f_kernels.fp8
        30a_models.stored_heads=gpu_operations 31a_attention.cpu_kernels=attention_c 32_attention.cpu=cpu_attention
        33a_attention.choice=attention_choice 42a_engine.recorded_steps 43a_engine.kernel_trials""",   # noqa: E501
    "tools": """05a_tools.drawing 19_tools.svg 27_tools.scheduler_cost 36a_tools.embedded_tasks 37_tools.embedded 57_tools.roofline
        58_tools.load_generator 59_tools.traces 60_tools.widgets 60a_tools.model_rate 61_tools.bench 61a_tools.bench_page 62_tools.simulator
        62b_tools.doctor 62c_tools.quantize 62d_tools.batch 62e_tools.chat 65_tools.routing 66_tools.calibrate 66a_tools.sleeping_replicas""",   # noqa: E501
    "distributed": """12a_kv_cache.events=kv_events 12b_kv_cache.page_file
        12c_kv_cache.tier 12d_kv_cache.handoff 43_engine.tensor_parallel""",
    "rules": """20a_scheduler.fairness""",
    "text": """22a_text.thinking 44a_engine.json_schema 45_engine.grammar 45a_text.json_object 46_text.stop 46a_text.tool_calls 46b_text.reasoning
        46c_text.tool_formats 46d_text.tool_grammar 49c_text.control_tokens 49d_text.template_sandbox 50a_text.chat_template
        50b_text.tokenizer_files 51_text.tokenizer 51b_text.embedding 51c_text.tool_calling 51d_text.answer_html 51e_text.answer""",   # noqa: E501
    "experiments": """28_pressure 29_future_map 70_chunk_size 71_policies 72_page_size 73_admission 74_overlap 75_prefix_chat 76_batching 77_fairness
        78_replicas 79_evictions 79a_hostile 79b_fewer_bits 79d_prefill_apart""",   # noqa: E501
    "formats": """34a_models.gguf_text 35a_models.gguf 35b_models.packed_files 36b_models.quantization 36c_models.hub 36d_models.dummy_weights
        38a_models.weight_update""",   # noqa: E501
    "server": """56a_cluster 47_server.sse 47a_server.fields 48_server.protocol 48a_server.callers 48b_server.web_pages 49_server.middleware 49a_server.metrics
        49b_server.connection 50_server.messages 52a_server.weight_updates 52b_server.live_view 53_server.engine_core 53a_server.engine_client
        53c_server.router 53d_server.prefill_router 53f_server.engine_link 53g_server.ray_engine 54_server.openai_protocol
        54a_server.native_protocol 54b_server.tokenizing 54c_server.blocks 54d_server.responses_protocol 54e_server.responses
        54f_server.embedding_protocol 54g_server.messages_protocol 54h_server.ollama_protocol 54i_server.all_protocols
        54j_server.completions_protocol 54k_server.batch_file 54l_server.files 54m_server.batches 54x_server.operations 55_server.api_server
        56_server.serve""",   # noqa: E501
}
# in core, when long chapters became two
renumbered = (
    ("""03_registry=04_registry 04_config=05_config 05_device=06_device 06_host=07_host 07_outputs=08_outputs
        08_kv_cache.pool=09_kv_cache.pool 09_kv_cache.table=10_kv_cache.table 10_kv_cache.eviction=11_kv_cache.eviction
        11_kv_cache.radix=12_kv_cache.radix 12_kv_cache.manager=14_kv_cache.manager 13_scheduler.policy=16_scheduler.policy
        14_scheduler.prefill=17_scheduler.prefill 15_scheduler.decode=18_scheduler.decode
        16_scheduler.lifecycle=19_scheduler.lifecycle 17_scheduler.batch=21_scheduler.batch
        18_scheduler.scheduler=22_scheduler.scheduler 19_scheduler.control=23_scheduler.control
        20_models.operations=24_models.operations 21_attention.torch=25_attention.torch 22_attention.library=26_attention.library
        23_attention.flashinfer=27_attention.flashinfer 24_models.decoder=30_models.decoder 25_models.moe=31_models.moe
        26_models.weights=33_models.weights 27_models.checkpoint=34_models.checkpoint 28_engine.memory=35_engine.memory
        29_engine.sampler=36_engine.sampler 30_engine.pooling=37_engine.pooling 31_engine.engine=38_engine.engine
        32_engine.cuda_graph=39_engine.cuda_graph 33_engine.assembly=40_engine.assembly 34_tokenizer=41_tokenizer 35_llm=42_llm"""))   # noqa: E501
chapters |= {f"core/{old}": f"core/{new}" for old, new in (o.split("=") for o in renumbered.split())}
chapters |= {old: f"{room}/{new or old.partition('_')[2].rpartition('.')[2]}".removeprefix("/")
             for room, names in moved.items() for old, _, new in (o.partition("=") for o in names.split())}

# pages of the map's rows that were parts while 0.3.0 was made
rows = {5: "kernels", 6: "formats", 7: "text", 8: "server", 9: "tools", 10: "experiments"}

def newest(chapter):
    "Where a chapter is now"
    return newest(chapters[chapter]) if chapter in chapters else chapter

def module(chapter):
    "The module that has a chapter's name"
    return "minisgl_lit." + re.sub(r"(^|/)\d+[a-z]?_", r"\1", chapter).replace("/", ".")

def exported(chapter):
    "The module that a chapter is in today, if any"
    text = Path(__file__).parents[1].joinpath(f"nbs/{chapter}.ipynb").read_text(encoding="utf-8")
    found = re.search(r"#\|\s*default_exp\s+([\w.]+)", text)
    return found and f"minisgl_lit.{found[1]}"

def pages():
    "(old address, new address) of each page that has moved, without the ending"
    yield from ((f"made/part-{old}", f"made/ring-{new}") for old, new in rows.items())
    for old in chapters:
        new = newest(old)
        yield f"nbs/{old}", f"nbs/{new}"
        if (now := exported(new)) and module(old) != now: yield f"src/{module(old)}", f"src/{now}"

def page(old, new):
    "What stands at an old address"
    way = os.path.relpath(new, Path(old).parent) + ".html"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{way}</title><meta '
            'name="robots" content="noindex">\n'
            f'<link rel="canonical" href="{way}"><meta http-equiv="refresh" content="0; url={way}"></head>\n'
            f'<body><p>This page is now <a href="{way}">{way}</a>.</p></body></html>\n')

def write(app, error):
    if error or app.builder.name != "html": return
    for old, new in pages():
        if not Path(app.outdir, f"{new}.html").exists():
            raise ValueError(f"docs/redirects.py: {new} is no page of the book")
        if old not in app.env.found_docs:
            Path(app.outdir, f"{old}.html").write_text(page(old, new), encoding="utf-8")

def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
