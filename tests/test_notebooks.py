"""Every notebook runs from top to bottom in a fresh kernel, and its stored outputs are true."""
import os, signal, subprocess, sys, time
from pathlib import Path

import nbformat, pytest
from nbrun import ForkingManager, _key, chapter, directives, execute, notebooks, run
from test_products import no_compiler

flags, package = os.environ.get("TST_FLAGS", "").split(), bool(os.environ.get("TST_PACKAGE"))

# chapters whose stored outputs only a compiler can give; all others are compared without one, too
SHOW_KERNELS = ["kernels/compiler", "kernels/plan", "kernels/linear", "kernels/vector_math",
                "kernels/quantized", "kernels/cpu_attention", "core/39_engine.cuda_graph",
                "core/27_attention.flashinfer", "core/36_engine.sampler", "kernels/recorded_steps",
                "tools/bench"]

# five seconds and more each, and nothing else leans on them; what those of the last three lines build is also
# tested elsewhere: the program by test_cli, test_faults and test_guides, engines in processes by test_serve
# and test_faults, plans by test_recorded_steps, and each tool by the tests that are named after it
FOR_A_WHILE = ["experiments/fewer_bits", "experiments/prefill_apart", "experiments/hostile",
               "experiments/page_size", "experiments/policies", "experiments/batching",
               "experiments/evictions", "experiments/replicas", "experiments/prefix_chat",
               "experiments/chunk_size", "experiments/fairness", "experiments/overlap",
               "experiments/admission", "experiments/second_tier", "tools/scheduler_cost", "tools/embedded",
               "main", "cli", "server/engine_process", "server/engine_client", "kernels/plan",
               "tools/simulator", "tools/bench", "tools/load_generator", "tools/batch", "tools/quantize",
               "tools/routing"]

# of the others, cells of half a second and more of which no later cell needs a name: by chapter, their ids.
# These only measure,
MEASURES = {
    "00_one_evening": ["f37bc766"],   # the tree serves in the next section, too
    "async_llm": ["17055993"], "llm": ["84ab2425"],
    "core/09_kv_cache.pool": ["b6da4c30"], "core/10_kv_cache.table": ["236d4cb8"],
    "core/11_kv_cache.eviction": ["969f67e1"], "core/13_kv_cache.namespaces": ["e937674a"],
    "core/16_scheduler.policy": ["4bfa9c3f"], "core/22_scheduler.scheduler": ["707d84df"],
    "core/25_attention.torch": ["c2012896"], "core/31_models.moe": ["8cf65537"],
    "core/36_engine.sampler": ["024f1f22"], "core/41_tokenizer": ["0163ef9a"],
    "kernels/cpu_attention": ["c8cef341", "a769cc73"], "kernels/quantized": ["0f1b7035"],
    "kernels/linear": ["6a5fbe12", "e65bace7", "279c0322"], "kernels/recorded_steps": ["3c5c27f9"],
    "server/api_server": ["f2482b5c"], "server/middleware": ["978e1fa6"],
    "testing/toy_engine": ["308ef041"], "text/grammar": ["900fa0b9"], "text/stop": ["67ecb718"],
    "text/tokenizer": ["4d578e00"], "tools/roofline": ["e2f096a4", "416a8c6d"],
    "tools/traces": ["979cfe4b"], "weekend/01_model": ["99ea1209", "d2496ba7", "bcc52d72"],
    "weekend/02_pages": ["1d6818c8"], "weekend/03_batch": ["0b87fdac"], "weekend/04_decode": ["a50e4485"],
    "weekend/05_radix": ["23e0c461"], "weekend/06_prefill": ["c48fce2a"],
    "weekend/08_overlap": ["a57e995f", "b7540c7b"],
    "weekend/09_cuda": ["ef209a25"], "weekend/10_server": ["63d188a5"]}
# these draw or check what was measured,
MEASURED = {"00_one_evening": ["21a0b7fe", "f6512aaa"], "server/api_server": ["d1054d9c"]}
# and these check what the tests behind them check, too
CHECKED = {
    "weekend/08_overlap": ["f6fbbaa2"], "weekend/09_cuda": ["c82e8ee8"],     # test_weekend
    "weekend/10_server": ["727a6ce3"],
    "core/22_scheduler.scheduler": ["01672bab"],                             # test_scheduler, test_toy
    "core/23_scheduler.control": ["2a76c263"],
    "text/tool_calls": ["f2f77ebc"], "text/tool_formats": ["7fcb5f66"],      # test_tool_formats
    "text/reasoning": ["666bbfc6"],                                          # test_reasoning
    "kernels/sampling": ["7784fc0c"],                                        # test_triton
    "second_tier": ["3862a027"], "tools/chat": ["169cd146"], "formats/hub": ["d762a063"]}   # their own

@pytest.mark.parametrize("path", [pytest.param(o, marks=[pytest.mark.long] * (chapter(o) in FOR_A_WHILE))
                                  for o in notebooks()], ids=chapter)
def test_notebook(path, long):
    name = chapter(path)
    skip = [] if long else [o for ids in (MEASURES, MEASURED, CHECKED) for o in ids.get(name, ())]
    err, stale, _ = run(path, flags, package=package, skip=skip)
    if err: pytest.fail(err, pytrace=False)
    if package: return   # which need not print what the cells' own functions do
    if stale and no_compiler and path.stem in SHOW_KERNELS:
        pytest.skip(f"needs a C compiler: cells {stale} show what kernels compute")
    if stale:
        pytest.fail(f"stored outputs are not those of this code, in cells {stale}: run `make nbs`",
                    pytrace=False)

@pytest.mark.parametrize("ids, mark", [(MEASURES, "volatile"), (CHECKED, "checks")],
                         ids=["volatile", "checks"])
def test_what_is_left_out_is_there_and_marked(ids, mark):
    "Of a measurement only the words would be compared"
    for path in notebooks():
        cells = {c.id: directives(c) for c in nbformat.read(path, as_version=4).cells}
        for id in ids.get(chapter(path), ()): assert mark in cells.get(id, ()), (path, id)
        assert {*MEASURED.get(chapter(path), ())} <= {*cells}, path

def test_a_volatile_output_is_compared_without_its_numbers():
    "A difference of two times may be below zero"
    def key(text): return _key([nbformat.v4.new_output("stream", text=text)], volatile=True)
    assert (key("0.27 µs an event, 3 pages") == key("-1.5e-02 µs an event, 12 pages")
            != key("0.27 µs an event, 3 tokens"))

def test_what_the_machine_decides_is_not_compared(tmp_path):
    "An output that another processor would not give is shown; any other must be true"
    def cell(mark):
        return nbformat.v4.new_code_cell(f"{mark}print('ours')",
                                         outputs=[nbformat.v4.new_output("stream", text="theirs\n")])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell("#| machine\n"), cell("")]),
                   path := tmp_path/"x.ipynb")
    err, stale, _ = run(path)
    assert not err and stale == [nbformat.read(path, as_version=4).cells[1].id]

def test_a_kernel_whose_port_was_taken_is_started_again(tmp_path, monkeypatch):
    "Ports are chosen here and bound there, and another process may be quicker"
    kernels, start = [], ForkingManager._async_launch_kernel
    async def killed_at_first(self, *args, **settings):
        await start(self, *args, **settings)
        kernels.append(self.provisioner.pid)
        if len(kernels) == 1: os.kill(kernels[0], signal.SIGKILL)
    monkeypatch.setattr(ForkingManager, "_async_launch_kernel", killed_at_first)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)")])
    assert (execute(nb, tmp_path/"x.ipynb", 60) == "" and nb.cells[0].outputs[0].text == "42\n"
            and len(kernels) == 2)

def test_a_kernel_ends_with_who_started_it(tmp_path):
    "Even if that is killed in the middle of a notebook"
    told, path = tmp_path/"pid", tmp_path/"slow.ipynb"
    cell = nbformat.v4.new_code_cell(f"import os, time\nopen({str(told)!r}, "
                                     "'w').write(str(os.getpid()))\ntime.sleep(100)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    runner = subprocess.Popen([sys.executable, Path(__file__).with_name("nbrun.py"), path])
    def wait(done):
        until = time.monotonic() + 60
        while not done() and time.monotonic() < until: time.sleep(.1)
        return done()
    try: assert wait(lambda: told.exists() and told.read_text())
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    def gone():
        try: os.kill(int(told.read_text()), 0)
        except ProcessLookupError: return True
    assert wait(gone)
