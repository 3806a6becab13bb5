"""Programs of tests are forked off a process that has imported what they need, whatever ran before."""
import os, subprocess, sys

import pytest, warm

@pytest.mark.skipif(warm.nursery is None, reason="needs pytest-xdist, on Linux")
def test_torch_that_has_compiled_makes_no_start_slow():
    import torch._inductor.runtime.cache_dir_utils as folder
    folder.cache_dir()   # which says it to the environment, for all processes from here on
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    loaded = warm.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"],
                      stdout=subprocess.PIPE, text=True)
    assert loaded.stdout == "True\n"

@pytest.mark.skipif(warm.nursery is None, reason="needs pytest-xdist, on Linux")
def test_a_program_ends_as_one_that_was_started():
    "Also one that has closed its output, as some of the standard library do"
    program = "import sys; print(1); sys.stdout.close()"
    done = warm.run([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"1\n")
