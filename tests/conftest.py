"""Settings of the test run: one thread per worker, the `long` marker, two profiles of hypothesis."""
import gc, os, signal, sys
gc.disable()   # while tests are collected, which makes millions of objects and no garbage
sys.dont_write_bytecode = False   # tests start hundreds of processes: each would compile the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# whoever started us in the background may have Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")   # two busy workers on two cores: before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")    # no test may need the network
# runs our kernels where Triton cannot
os.environ.setdefault("TRITON_EMULATOR", "minisgl_lit.testing.triton_emulator")

import pytest
from hypothesis import settings
import warm

settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=1000)

def is_long(config): return config.getoption("--long") or os.environ.get("TST_LONG", "0") not in ("", "0")

def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run tests marked `long` (or set TST_LONG=1)")

@pytest.fixture(scope="session")
def long(pytestconfig):
    "Whether there is time"
    return is_long(pytestconfig)

@pytest.fixture(scope="session")
def small_server():
    "Of the embedded model, for tests of what it answers: one for all of them, for it starts in seconds"
    from minisgl_lit import serve
    with serve(port=0, num_pages=512, max_running_req=16, max_seq_len=256, log_interval=0) as s: yield s

def pytest_configure(config):
    settings.load_profile("long" if is_long(config) else "default")
    if hasattr(config, "workerinput") and sys.platform == "linux": warm.begin()

def pytest_collection_modifyitems(config, items):
    # the longest of all, first: else one worker has it left when all others have nothing to do
    items.sort(key=lambda item: "test_fake_gpu" not in item.nodeid)
    if is_long(config): return
    for item in items:
        if "long" in item.keywords: item.add_marker(pytest.mark.skip(reason="long: --long or TST_LONG=1"))

def pytest_collection_finish():
    "What is there now stays: who collects garbage, as engines do, need not look through it again"
    gc.freeze()
    gc.enable()

def pytest_terminal_summary(terminalreporter):
    "What tests have measured, in one place"
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.line(f"{name}: {value}")
