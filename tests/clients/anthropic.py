# needs: anthropic
"Messages, streams, tools and their results, stop sequences, counted tokens, errors"
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
ask = dict(model=model, extra_body=dict(temperature=0), max_tokens=100,
           messages=[dict(role="user", content="Count from 3 to 5")])

said = client.messages.create(**ask)
assert said.content[0].text == "3, 4, 5" and said.stop_reason == "end_turn"
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream) == "3, 4, 5"
    assert stream.get_final_message().usage.output_tokens == said.usage.output_tokens
assert (client.messages.count_tokens(model=model, messages=ask["messages"]).input_tokens
        == said.usage.input_tokens)
stopped = client.messages.create(**ask, stop_sequences=["4"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "4")

tools = [dict(name="get_time", input_schema=dict(type="object", properties=dict(city=dict(type="string"))))]
dialog = [dict(role="user", content="What time is it in Oslo?")]
call = client.messages.create(**ask | dict(messages=dialog, tools=tools))
assert call.stop_reason == "tool_use" and call.content[-1].input == {"city": "Oslo"}
result = dict(type="tool_result", tool_use_id=call.content[-1].id, content="14:30")
dialog += [dict(role="assistant", content=call.content), dict(role="user", content=[result])]
assert (client.messages.create(**ask | dict(messages=dialog, tools=tools)).content[0].text
        == "It is 14:30 in Oslo.")
with client.messages.stream(**ask | dict(messages=dialog[:1], tools=tools)) as stream:
    assert stream.get_final_message().content[-1].input == {"city": "Oslo"}
try: client.messages.create(**ask | dict(max_tokens=-1))
except anthropic.BadRequestError as e: assert "max_tokens" in e.message
else: raise AssertionError("fewer tokens than none were accepted")
