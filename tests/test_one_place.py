"""What is spelled once: a policy, a sampling parameter, a family of models, a route, an attention backend, a
weight format and a compression are each added to a copy of the project, as a contributor would, and the files
that it took are counted. All that comes with a sampling parameter tells `test_one_parameter.py`.
"""
import ast, asyncio, json, subprocess, sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import Request

from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server import messages_protocol, ollama_protocol
from minisgl_lit.server.api_server import Api, create_app
from minisgl_lit.server.batches import Batches, BatchRoutes
from minisgl_lit.server.callers import Account, Callers
from minisgl_lit.server.fields import ApiError, ApiObject
from minisgl_lit.server.routes import Route
from minisgl_lit.text.tokenizer import Tokenizer
from copied import Copy

server = Path(__file__).parents[1]/"minisgl_lit"/"server"


class Engine:
    "An engine of which nothing is asked"
    model, alive, trouble, why = "tiny", True, "", ""

@pytest.fixture(scope="module")
def tokenizer(): return Tokenizer(embedded_path())

class Poem(ApiObject):
    "A body"
    lines: list[str]
    meter: str | None = None

async def poem(body: Poem, request: Request) -> dict:
    "Write a poem"
    if not body.lines: raise RequestError("prompt", "the prompt must not be empty")
    return {"poem": "\n".join(body.lines)}

def call(app, method, path, **kw):
    async def one():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as web:
            return await web.request(method, path, **kw)
    return asyncio.run(one())

@pytest.mark.parametrize("module, protocol, error",
                         [(messages_protocol, "MessagesProtocol", messages_protocol.messages_error),
                          (ollama_protocol, "OllamaProtocol", ollama_protocol.ollama_error)])
def test_a_route_is_added_in_one_place(monkeypatch, tokenizer, module, protocol, error):
    cls = getattr(module, protocol)
    listed = cls.routes.fget
    new = Route("POST", "/poems/new", poem, error=error, field_names={"prompt": "lines"},
                stream="text/event-stream")
    monkeypatch.setattr(cls, "routes", property(lambda self: [*listed(self), new]))
    app = create_app(Engine(), tokenizer, callers=Callers({"k": Account("ann")}), max_body_mb=1)
    post = partial(call, app, "POST", "/poems/new", headers={"authorization": "Bearer k"})
    assert post(json={"lines": ["a", "b"]}).json() == {"poem": "a\nb"}

    def shape(r): return [*r.json()], type(r.json()["error"])
    own = [*error(ApiError("a sentence"))], type(error(ApiError("a sentence"))["error"])
    # by the scheduler
    # a path beside it
    asked = [(post(json={"lines": []}), 400, "the prompt must not be empty"),
             (post(json={"lines": "a"}), 400, "lines must be a list, not 'a'"),               # by pydantic
             (post(json={"lines": [], "metre": "x"}), 400, "did you mean meter?"),            # by its fields
             # before any route
             (post(content=b"x" * (2 << 20)), 413, ""), (call(app, "POST", "/poems/new"), 401, ""),
             (call(app, "GET", "/poems/new", headers={"authorization": "Bearer k"}), 405, "Allow"),
             (call(app, "POST", "/poems/old", headers={"authorization": "Bearer k"}), 404, "there is no")]
    for r, status, words in asked:
        assert (r.status_code, shape(r)) == (status, own) and words in r.text, r.text

    told = app.openapi()["paths"]["/poems/new"]["post"]
    assert (told["description"] == "Write a poem"
            and [*told["responses"]["200"]["content"]] == ["application/json", "text/event-stream"])
    assert told["responses"]["400"]["content"]["application/json"]["schema"]["required"] == own[0]
    assert "Poem" in json.dumps(told["requestBody"])

def test_errors_are_named_after_the_fields_of_a_route(monkeypatch, tokenizer):
    listed = Api.routes.fget
    monkeypatch.setattr(Api, "routes",
                        property(lambda self: [*listed(self),
                            Route("POST", "/poems", poem, field_names={"prompt": "lines"})]))
    app = create_app(Engine(), tokenizer)
    assert call(app, "POST", "/poems", json={"lines": []}).json()["error"]["param"] == "lines"

def test_no_path_stands_in_two_modules(tokenizer):
    """A route's path is a key of nothing; what the lines of a batch may name is a format of files, and no
    route"""
    paths = {r.path for r in [*Api(Engine(), tokenizer, {}).routes, *BatchRoutes(Batches()).routes]} - {"/"}
    found = defaultdict(set)
    for module in server.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and node.value in paths: found[node.value].add(module.stem)
    assert (len(found) > 40
            and {path: o - {"batch_file"} for path, o in found.items() if len(o - {"batch_file"}) > 1} == {})

# ---- in a copy of the project: what one edits, and what then runs

MAP = "nbs/index.ipynb"   # where a new chapter has a line, whatever is in it
ADDED = {   # by what it is: chapters, and what is put before a text in each; and the files that it may take
    "policy": ({"core/16_scheduler.policy": ("def make_policy(", """class Shortest(Fcfs):
    "The shortest prompt first."
    def keys(self, waiting: Sequence[PendingReq]) -> Sequence[Key]:
        "The length of each"
        return [o.input_len for o in waiting]

policies.register('shortest', Shortest)

""")}, 1),
    "parameter": ({"core/01_sampling_params": ("    max_tokens: int | None = param(",
        "    zz_test: float = param(0., real(0, 1), 'A number that does nothing')\n")}, 1),
    "family": ({"core/34_models.checkpoint": ("    MistralForCausalLM=Family(",
                                              "    NovaForCausalLM=Family(qk_norm=True),\n")}, 1),
    "route": ({"server/messages_protocol": ("                route('/v1/messages/count_tokens'",
        "                Route('GET', '/v1/messages/limit', self.limit, error=messages_error),\n"),
}, 1),
    "backend": ({"config": ("backends.announce('minisgl_lit.kernels.cpu_attention'",
                            "backends.announce('minisgl_lit.kernels.near_attention', 'near')\n"),
                 "index": ("[recorded steps](kernels/recorded_steps.ipynb)",
                           "[near](kernels/near_attention.ipynb) · ")}, 2),
    "weight format": ({"formats/packed_files": ("def method_of(",
        """def read_steps(layer: Layer, settings: Settings) -> torch.Tensor:
    "Whole numbers, and a step for each output"
    return layer['weight'].float() * layer['weight_step']

quant_methods.register('steps', Method(('weight_step',), read_steps))

""")}, 1),
    "compression": ({"formats/quantization": ("def weight_bytes(",
                                              "compressions.register('sixteens', lambda group, rounds_input: "
                                              "Quantization(4, 16, rounds_input))\n\n")}, 1)}
METHOD = """    async def limit(self) -> dict[str, object]:
        "The most blocks of an answer"
        return {'blocks': 3}

"""
NEAR = ("#| default_exp kernels.near_attention", """#| export
from collections.abc import Sequence
import torch
from minisgl_lit.core.attention.torch import TorchAttention
from minisgl_lit.core.config import backends
from minisgl_lit.core.kv_cache.pool import KVPool""", """#| export
class NearAttention(TorchAttention):
    "No token sees more than the last eight."
    def __init__(self, pool: KVPool, page_table: torch.Tensor, windows: Sequence[int | None] = ()):
        super().__init__(pool, page_table, [8] * len(pool.buffer))

backends.register('near', NearAttention)""")

USES = ("""
import asyncio, json, shutil
from pathlib import Path
import httpx, torch
from safetensors.torch import load_file, save_file
from minisgl_lit import LLM
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server.api_server import create_app
from minisgl_lit.text.tokenizer import Tokenizer

shutil.copytree(embedded_path(), "nova")
raw, told = json.loads(Path("nova/config.json").read_text()), {}
def greedy(model=None, **more):
    with LLM(model, device="cpu", num_pages=64, dtype="float32", **more) as llm: return llm.chat("What is a lock?", temperature=0, max_tokens=20).token_ids
def say(**fields): Path("nova/config.json").write_text(json.dumps(raw | fields))

with LLM(device="cpu", num_pages=64, max_running_req=1, policy="shortest") as llm:
    outs = llm.generate(["The page " * n for n in (30, 10, 20)], max_tokens=4)
    told["parameter"] = [len(llm.generate("x", max_tokens=2, ignore_eos=True, zz_test=1)[0].token_ids)]
    try: llm.generate("x", zz_test=2)
    except ValueError as e: told["parameter"].append(str(e))
told["policy"] = sorted(range(3), key=lambda i: outs[i].times[0])

told["plain"] = greedy()
say(architectures=["NovaForCausalLM"])
told["family"] = greedy("nova")
told["backend"], told["one that sees all"] = greedy(attention="near"), greedy(attention="torch")

tensors = load_file("nova/model.safetensors")
for name in [o for o in tensors if o.endswith("_proj.weight")]:
    step = torch.full((len(tensors[name]), 1), 2.**-12)
    codes = (tensors[name] / step).round()
    assert codes.abs().max() < 2**15
    tensors |= {name: codes.to(torch.int16), name + "_step": step}
save_file(tensors, "nova/model.safetensors")
say(quantization_config=dict(quant_method="steps"))
told["weight format"] = greedy("nova")
told["compression"] = [greedy(quantization="sixteens"), greedy(quantization="int4", quantization_group=16)]

class Engine: model, alive, trouble, why = "tiny", True, "", ""
async def asked():
    app = create_app(Engine(), Tokenizer(embedded_path()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as web:
        got, wrong = await web.get("/v1/messages/limit"), await web.get("/v1/messages/limits")
        return [got.json(), wrong.json()["type"], "/v1/messages/limit" in app.openapi()["paths"]]
told["route"] = asyncio.run(asked())
print(json.dumps(told))
""")   # noqa: E501

def test_each_thing_is_added_in_one_place(tmp_path, long):
    """All are added to one copy, one after the other, and each is seen at work: greedy tokens through `LLM`,
    an answer of the application.

    With time, that the copy is a project in order: no chapter reads ahead, each room imports what it may."""
    copy, known = Copy(tmp_path), set()
    for what, (edits, most) in ADDED.items():
        for chapter, (before, new) in edits.items(): copy.edit(chapter, before, new + before)
        if what == "route":
            copy.edit("server/messages_protocol", "    async def count_tokens(",
                      METHOD + "    async def count_tokens(")
        if what == "backend": copy.write("kernels/near_attention", *NEAR)
        took = copy.touched() - known - {MAP}
        assert len(took) == most, f"{what} took {took}"
        known |= took | {MAP}
    copy.export()
    assert copy.touched() == known, "the export changes nothing but the package"
    told = copy.run(USES)
    assert (told["policy"] == [1, 2, 0]
            and told["parameter"] == [2, "zz_test must be a finite number from 0 to 1, not 2"])
    assert (told["family"] == told["weight format"] == told["one that sees all"] == told["plain"]
            != told["backend"])
    sixteens, four_bits = told["compression"]
    assert sixteens == four_bits
    assert told["route"] == [{"blocks": 3}, "error", True]
    if not long: return
    order = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
             "tests/test_project.py", "-k", "later or rooms or lines_fit or names_say or plain"]
    done = subprocess.run(order, cwd=tmp_path, env=copy.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
