"""What a module of one's own registers is known in every process that is told of it: `plugins`."""
import json, os, shutil, subprocess, sys

import httpx, pytest

from minisgl_lit.config import EngineConfig
from minisgl_lit.formats.hub import embedded_path

MINE = """
from fastapi import Request
from minisgl_lit.core.config import policies
from minisgl_lit.core.models.checkpoint import Family, families
from minisgl_lit.core.scheduler.policy import Fcfs
from minisgl_lit.server.blocks import protocols
from minisgl_lit.server.fields import ApiObject
from minisgl_lit.server.routes import Route

class Question(ApiObject):
    text: str

class Count:
    def __init__(self, server): self.server = server
    async def ask(self, body: Question, request: Request): return {"letters": len(body.text)}
    @property
    def routes(self): return [Route("POST", "/count", self.ask)]

families.register("NovaForCausalLM", Family(qk_norm=True))
policies.register("mine", Fcfs)
protocols.register("count", Count)
"""

def test_a_plugin_is_known_in_all_processes(tmp_path):
    "A family in the engine's, a route in that of HTTP, a policy in both"
    (tmp_path/"mine.py").write_text(MINE)
    model = shutil.copytree(embedded_path(), tmp_path/"model")
    raw = json.loads((model/"config.json").read_text())
    (model/"config.json").write_text(json.dumps(raw | dict(architectures=["NovaForCausalLM"])))
    args = [sys.executable, "-m", "minisgl_lit", "serve", "--plugins", "mine", "--policy", "mine", "--model",
            str(model), "--port", "0", "--num-pages", "64"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        try:
            line = next(o for o in p.stdout if "http://" in o)
            url = line[line.index("http://"):].split()[0].rstrip("/.,")
            assert httpx.post(url + "/count", json=dict(text="abc")).json() == {"letters": 3}
            said = httpx.post(url + "/v1/completions", json=dict(prompt="The page", max_tokens=3),
                              timeout=60).json()
            assert said["usage"]["completion_tokens"] == 3
        finally: p.terminate()

def test_a_plugin_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path/"breaks.py").write_text("1/0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="plugins='breaks' cannot be loaded: division by zero"):
        EngineConfig(plugins="breaks")
    with pytest.raises(ValueError, match="cannot be loaded"): EngineConfig(plugins="..")
    with pytest.raises(ValueError, match="plugins='no_such' cannot be loaded: No module named 'no_such'"):
        EngineConfig(plugins="no_such")
    with pytest.raises(ValueError, match="plugins must be names of modules"): EngineConfig(plugins="json;")
