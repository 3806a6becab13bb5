"""Clients that others have written, each in an environment of its own: `make test-clients` makes these and
runs all that is in `tests/clients`. A script says on its first line what it needs, gets the server's address
and model, and fails where a client does."""
import os, shutil, subprocess, sys
from pathlib import Path

import pytest

from test_hub import start_hub
from minisgl_lit import serve

HERE = Path(__file__).parent
SEVERAL = [HERE/"clients"/"ollama_models.py"]   # which wants several models, and a hub
SCRIPTS = sorted({*(HERE/"clients").glob("*.py"), *(HERE/"clients").glob("*.mjs")} - {*SEVERAL})
ENVIRONMENTS = HERE.parent/".clients"
pytestmark = pytest.mark.skipif(not os.environ.get("TST_CLIENTS"),
                                reason="environments of other clients: make test-clients")


def needs(script): return script.read_text().splitlines()[0].split("needs:")[1].split()

def installed(script):
    "The environment of a script, made if it is not there; skips where a package cannot be had"
    folder, wanted = ENVIRONMENTS/script.stem, " ".join(needs(script))
    stamp, is_python = folder/"installed", script.suffix == ".py"
    if stamp.exists() and stamp.read_text() == wanted: return folder
    if not is_python and not shutil.which("npm"): pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    if is_python: subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = ([folder/"bin/python", "-m", "pip", "install", "-q"] if is_python
               else ["npm", "install", "--silent", "--no-fund", "--prefix", folder])
    done = subprocess.run([*install, *needs(script)], capture_output=True, text=True)
    if done.returncode: pytest.skip(f"cannot be installed: {wanted}: {done.stderr.strip()[-300:]}")
    stamp.write_text(wanted)
    return folder

@pytest.fixture(scope="module")
def server():
    with serve(port=0, device="cpu", num_pages=1024, max_running_req=16, log_interval=0) as s: yield s

def run_client(script, url, model):
    folder = installed(script)
    run = [folder/"bin/python", "-P", script]
    if script.suffix == ".mjs":   # node looks for packages beside a script
        run = ["node", shutil.copy(script, folder)]
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    done = subprocess.run([*run, url, model], capture_output=True, text=True, timeout=200,
                          env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

@pytest.mark.timeout(900)   # npm and pip may take minutes
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda o: o.stem)
def test_client(server, script):
    "All that this client does by default"
    run_client(script, server.url, server.model)

@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SEVERAL, ids=lambda o: o.stem)
def test_client_of_several_models(script, tmp_path, monkeypatch):
    "The same where models come and go: from a hub of this machine into a folder"
    hub = start_hub()
    for name, value in dict(HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_HUB_OFFLINE="0").items():
        monkeypatch.setenv(name, value)
    (folder := tmp_path/"models").mkdir()
    with serve(models=str(folder), port=0, device="cpu", num_pages=128, log_interval=0) as s:
        run_client(script, s.url, "some/model")
    hub.shutdown()
    hub.server_close()
