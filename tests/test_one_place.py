"What is spelled once: to add a route, one notebook is touched, that of its protocol."
import ast, asyncio, json
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
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as web: return await web.request(method, path, **kw)
    return asyncio.run(one())

@pytest.mark.parametrize("module, protocol, error", [(messages_protocol, "MessagesProtocol", messages_protocol.messages_error), (ollama_protocol, "OllamaProtocol", ollama_protocol.ollama_error)])
def test_a_route_is_added_in_one_place(monkeypatch, tokenizer, module, protocol, error):
    cls = getattr(module, protocol)
    listed = cls.routes.fget
    new = Route("POST", "/poems/new", poem, error=error, field_names={"prompt": "lines"}, stream="text/event-stream")
    monkeypatch.setattr(cls, "routes", property(lambda self: [*listed(self), new]))
    app = create_app(Engine(), tokenizer, callers=Callers({"k": Account("ann")}), max_body_mb=1)
    post = partial(call, app, "POST", "/poems/new", headers={"authorization": "Bearer k"})
    assert post(json={"lines": ["a", "b"]}).json() == {"poem": "a\nb"}

    def shape(r): return [*r.json()], type(r.json()["error"])
    own = [*error(ApiError("a sentence"))], type(error(ApiError("a sentence"))["error"])
    asked = [(post(json={"lines": []}), 400, "the prompt must not be empty"),                 # by the scheduler
             (post(json={"lines": "a"}), 400, "lines must be a list, not 'a'"),               # by pydantic
             (post(json={"lines": [], "metre": "x"}), 400, "did you mean meter?"),            # by its fields
             (post(content=b"x" * (2 << 20)), 413, ""), (call(app, "POST", "/poems/new"), 401, ""),   # before any route
             (call(app, "GET", "/poems/new", headers={"authorization": "Bearer k"}), 405, "Allow"),
             (call(app, "POST", "/poems/old", headers={"authorization": "Bearer k"}), 404, "there is no")]   # a path beside it
    for r, status, words in asked:
        assert (r.status_code, shape(r)) == (status, own) and words in r.text, r.text

    told = app.openapi()["paths"]["/poems/new"]["post"]
    assert told["description"] == "Write a poem" and [*told["responses"]["200"]["content"]] == ["application/json", "text/event-stream"]
    assert told["responses"]["400"]["content"]["application/json"]["schema"]["required"] == own[0]
    assert "Poem" in json.dumps(told["requestBody"])

def test_errors_are_named_after_the_fields_of_a_route(monkeypatch, tokenizer):
    listed = Api.routes.fget
    monkeypatch.setattr(Api, "routes", property(lambda self: [*listed(self), Route("POST", "/poems", poem, field_names={"prompt": "lines"})]))
    app = create_app(Engine(), tokenizer)
    assert call(app, "POST", "/poems", json={"lines": []}).json()["error"]["param"] == "lines"

def test_no_path_stands_in_two_modules(tokenizer):
    "A route's path is a key of nothing; what the lines of a batch may name is a format of files, and no route"
    paths = {r.path for r in [*Api(Engine(), tokenizer, {}).routes, *BatchRoutes(Batches()).routes]} - {"/"}
    found = defaultdict(set)
    for module in server.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and node.value in paths: found[node.value].add(module.stem)
    assert len(found) > 40 and {path: o - {"batch_file"} for path, o in found.items() if len(o - {"batch_file"}) > 1} == {}
