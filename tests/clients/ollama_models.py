# needs: ollama
"A server of several models that has none yet: one is pulled, listed, shown, asked, named twice, deleted"
import sys

import ollama

url, model = sys.argv[1:]
client = ollama.Client(host=url)
assert [o.model for o in client.list().models] == []
steps = [*client.pull(model, stream=True)]
assert steps[0].status == "pulling manifest" and steps[-1].status == "success"
assert steps[-2].completed == steps[-2].total > 10**6 and steps[-2].digest.startswith("sha256:")
assert client.pull(model).status == "success"   # it is there
[listed] = client.list().models
assert listed.model == f"{model}:latest" and listed.size > 10**6 and listed.details.format == "safetensors"
shown = client.show(model)
assert "completion" in shown.capabilities and shown.details.family and shown.modelinfo
ask = dict(messages=[dict(role="user", content="Count from 3 to 5")], options=dict(temperature=0))
assert client.chat(model, **ask).message.content == "3, 4, 5"
[loaded] = client.ps().models
assert loaded.model == f"{model}:latest" and loaded.expires_at and loaded.context_length > 64
assert client.copy(model, "gpt-4o").status == "success"
assert [o.model for o in client.list().models] == [f"{model}:latest", "gpt-4o:latest"]
assert "".join(o.message.content for o in client.chat("gpt-4o", stream=True, **ask)) == "3, 4, 5"
assert len(client.ps().models) == 1
assert len(client.embed("gpt-4o", ["a page", "a lock"]).embeddings) == 2
assert client.delete(model).status == "success"
assert [o.model for o in client.list().models] == ["gpt-4o:latest"]
assert client.generate("gpt-4o", "Count from 3 to 5", options=dict(temperature=0)).response == "3, 4, 5"
for wrong in ("no/model", "llama3.2:1b"):
    try: client.pull(wrong)
    except ollama.ResponseError as e: assert "hub" in e.error, e.error
    else: raise AssertionError("what no hub has was pulled")
try: client.delete("nobody")
except ollama.ResponseError as e: assert e.status_code == 404
else: raise AssertionError("what is not there was deleted")
assert client.delete("gpt-4o").status == "success" and client.list().models == []
