"""Every notebook runs from top to bottom in a fresh kernel, and its stored outputs are true."""
import os
import pytest
from nbrun import notebooks, run

flags, package = os.environ.get("TST_FLAGS", "").split(), bool(os.environ.get("TST_PACKAGE"))

@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_notebook(path):
    err, stale, _ = run(path, flags, package=package)
    if err: pytest.fail(err, pytrace=False)
    if stale: pytest.fail(f"stored outputs are not those of this code, in cells {stale}: run `make nbs`", pytrace=False)
