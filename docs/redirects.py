"""Old addresses of pages lead to the new ones: a small page each, written beside the built book."""
from pathlib import Path

chapters = {   # before 0.2.0: since
    "00_core": "00b_core.request", "03_toy": "03_testing.toy_engine", "04_native": "04_kernels.compiler", "05_news": "05_core.outputs",
    "06_products": "06_kernels.linear", "10_kv.pool": "10_kv_cache.pool", "11_kv.table": "11_kv_cache.table", "12_kv.prefix": "12_kv_cache.radix",
    "13_kv.cache": "13_kv_cache.manager", "14_kernels": "14_testing.flashinfer_emulator", "19_pictures": "19_tools.svg",
    "23_scheduler.finish": "23_scheduler.lifecycle", "24_scheduler.prepare": "24_scheduler.batch", "25_scheduler.loop": "25_scheduler.scheduler",
    "27_scheduler.cost": "27_tools.scheduler_cost", "30_model.layers": "30_models.operations", "31_model.attention": "31_attention.torch",
    "32_model.attention_cpu": "32_attention.cpu", "33_model.attention_flashinfer": "33_attention.flashinfer", "34_model.decoder": "34_models.decoder",
    "35_model.moe": "35_models.moe", "36_model.weights": "36_models.weights", "37_model.embedded": "37_tools.embedded",
    "38_model.checkpoint": "38_models.checkpoint", "39_engine.resources": "39_engine.memory", "40_engine.sampling": "40_engine.sampler",
    "42_engine.graph": "42_engine.cuda_graph", "43_engine.parallel": "43_engine.tensor_parallel", "44_engine.build": "51a_runtime",
    "46_serving.finders": "46_text.stop", "47_serving.stream": "47_server.sse", "48_serving.wishes": "48_server.protocol",
    "49_serving.door": "49_server.middleware", "50_serving.messages": "50_server.messages", "51_serving.tokenizer": "51_text.tokenizer",
    "53_serving.workers": "53_server.engine_core", "54_serving.openai": "54_server.openai_protocol", "55_serving.http": "55_server.api_server",
    "56_serving.serve": "56_server.serve", "57_limits": "57_tools.roofline", "58_load": "58_tools.load_generator", "59_traces": "59_tools.traces",
    "60_viz": "60_tools.widgets", "61_bench": "61_tools.bench", "62_sim": "62_tools.simulator", "66_calibrate": "66_tools.calibrate",
    # before 0.3.0
    "14_kernels.flashinfer_reference": "14_testing.flashinfer_emulator", "14a_kernels.triton_reference": "14a_testing.triton_emulator",
    "36a_models.embedded_tasks": "36a_tools.embedded_tasks", "37_models.embedded": "37_tools.embedded",
    "19a_scheduler.fairness": "20a_scheduler.fairness", "22a_scheduler.thinking": "22a_text.thinking",
    "30_models.layers": "30_models.operations", "30a_models.stored_heads": "30c_kernels.gpu_operations"}

def module(chapter): return "minisgl_lit." + chapter.split("_", 1)[1]

def pages():
    "(old address, new address) of each page that has moved, without the ending"
    for old, new in chapters.items():
        yield f"nbs/{old}", f"nbs/{new}"
        yield f"src/{module(old)}", f"src/{module(new)}"

def page(old, new):
    "What stands at an old address"
    way = Path(new).name + ".html"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{way}</title><meta name="robots" content="noindex">\n'
            f'<link rel="canonical" href="{way}"><meta http-equiv="refresh" content="0; url={way}"></head>\n'
            f'<body><p>This page is now <a href="{way}">{way}</a>.</p></body></html>\n')

def write(app, error):
    if error or app.builder.name != "html": return
    for old, new in pages():
        if not Path(app.outdir, f"{new}.html").exists(): raise ValueError(f"docs/redirects.py: {new} is no page of the book")
        Path(app.outdir, f"{old}.html").write_text(page(old, new), encoding="utf-8")

def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
