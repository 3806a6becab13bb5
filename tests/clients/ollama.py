# needs: ollama
"Chats, completions, streams, tools, a schema, lists of models"
import sys
import ollama

url, model = sys.argv[1:]
client, options = ollama.Client(host=url), dict(temperature=0, num_predict=100)
dialog = [dict(role="user", content="Count from 3 to 5")]
assert (model in [o.model.removesuffix(":latest") for o in client.list().models]
        and client.show(model).capabilities)
said = client.chat(model, dialog, options=options)
assert said.message.content == "3, 4, 5" and said.done_reason == "stop" and said.eval_count > 3
assert ("".join(o.message.content for o in client.chat(model, dialog, stream=True, options=options))
        == "3, 4, 5")
assert client.generate(model, "Count from 3 to 5", options=options).response == "3, 4, 5"
assert ("".join(o.response for o in client.generate(model, "Count from 3 to 5", stream=True, options=options))
        == "3, 4, 5")
def get_time(city: str) -> str:
    """The time in a city.

    Args:
        city: Its name
    """
    return "14:30"
dialog = [dict(role="user", content="What time is it in Oslo?")]
call = client.chat(model, dialog, tools=[get_time], options=options).message
assert (call.tool_calls[0].function.name == "get_time"
        and call.tool_calls[0].function.arguments == {"city": "Oslo"})
dialog += [call, dict(role="tool", tool_name="get_time", content=get_time("Oslo"))]
assert client.chat(model, dialog, tools=[get_time], options=options).message.content == "It is 14:30 in Oslo."
schema = dict(type="object", properties=dict(city=dict(enum=["Oslo", "Rome"])), required=["city"])
assert "city" in client.chat(model, dialog[:1], format=schema, options=options).message.content
