"""Every notebook runs from top to bottom in a fresh kernel, and its stored outputs are true."""
import os, signal, subprocess, sys, time
from pathlib import Path

import nbformat, pytest
from nbrun import ForkingManager, _key, chapter, execute, notebooks, run
from test_products import no_compiler

flags, package = os.environ.get("TST_FLAGS", "").split(), bool(os.environ.get("TST_PACKAGE"))

# chapters whose stored outputs only a compiler can give; all others are compared without one, too
SHOW_KERNELS = ["kernels/compiler", "kernels/plan", "kernels/linear", "kernels/vector_math",
                "kernels/quantized", "kernels/cpu_attention", "core/39_engine.cuda_graph",
                "core/27_attention.flashinfer", "core/36_engine.sampler", "kernels/recorded_steps",
                "tools/bench"]

# five seconds and more each, and nothing else leans on them; what those of the last two lines build is also
# tested elsewhere: the program by test_cli, test_faults and test_guides, plans by test_recorded_steps, and
# each tool by the tests that are named after it
FOR_A_WHILE = ["experiments/fewer_bits", "experiments/prefill_apart", "experiments/hostile",
               "experiments/page_size", "experiments/policies", "experiments/batching",
               "experiments/evictions", "experiments/replicas", "experiments/prefix_chat",
               "experiments/chunk_size", "experiments/fairness", "experiments/overlap",
               "experiments/admission", "experiments/second_tier", "tools/scheduler_cost", "tools/embedded",
               "main", "kernels/plan", "tools/simulator", "tools/bench", "tools/batch", "tools/quantize",
               "tools/routing"]

@pytest.mark.parametrize("path", [pytest.param(o, marks=[pytest.mark.long] * (chapter(o) in FOR_A_WHILE))
                                  for o in notebooks()], ids=chapter)
def test_notebook(path):
    err, stale, _ = run(path, flags, package=package)
    if err: pytest.fail(err, pytrace=False)
    if package: return   # which need not print what the cells' own functions do
    if stale and no_compiler and path.stem in SHOW_KERNELS:
        pytest.skip(f"needs a C compiler: cells {stale} show what kernels compute")
    if stale:
        pytest.fail(f"stored outputs are not those of this code, in cells {stale}: run `make nbs`",
                    pytrace=False)

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
