# needs: openai
"Chats, streams, tools, structured output, completions, responses, embeddings, models, tokens by name, errors"
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
ask = dict(model=model, temperature=0, max_tokens=100,
           messages=[dict(role="user", content="Count from 3 to 5")])

assert model in [o.id for o in client.models.list()]
said = client.chat.completions.create(**ask)
assert said.choices[0].message.content == "3, 4, 5" and said.usage.completion_tokens > 3
pieces = [o for o in client.chat.completions.create(**ask, stream=True,
    stream_options=dict(include_usage=True))]
assert ("".join(o.choices[0].delta.content or "" for o in pieces if o.choices) == "3, 4, 5"
        and pieces[-1].usage == said.usage)
with client.chat.completions.stream(**ask) as stream:
    assert stream.get_final_completion().choices[0].message.content == "3, 4, 5"
assert client.completions.create(model=model, prompt="The page", max_tokens=5).usage.completion_tokens <= 5

class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: Literal[10, 20]

ask["messages"] = [dict(role="user", content="What is the weather in Oslo?")]
parsed = client.chat.completions.parse(**ask, response_format=Weather).choices[0].message.parsed
assert isinstance(parsed, Weather)
try: client.chat.completions.create(**ask | dict(temperature=-1))
except openai.BadRequestError as e: assert e.param == "temperature"
else: raise AssertionError("a temperature below 0 was accepted")

said = client.responses.create(model=model, input="Count from 3 to 5", temperature=0)
assert said.output_text == "3, 4, 5"
with client.responses.stream(model=model, input="Count from 3 to 5", temperature=0) as stream:
    assert "".join(o.delta for o in stream if o.type == "response.output_text.delta") == "3, 4, 5"
again = client.responses.create(model=model, input="Count from 2 to 4", previous_response_id=said.id,
                                temperature=0)
assert again.previous_response_id == said.id and again.usage.input_tokens > said.usage.input_tokens
assert isinstance(client.responses.parse(model=model, input="What is the weather in Oslo?",
                                         text_format=Weather).output_parsed, Weather)

found = client.embeddings.create(model=model, input=["a page", "a tree"]).data
assert len(found) == 2 and abs(sum(x*x for x in found[0].embedding) - 1) < 1e-3
