# needs: litellm
"""One call for all providers: as OpenAI's chat, as a stream, with a tool, as responses, as Anthropic's
messages, embeddings"""
import os, sys

os.environ |= dict(LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False")
import litellm

url, model = sys.argv[1:]
ask = dict(api_key="none", temperature=0, max_tokens=100,
           messages=[dict(role="user", content="Count from 3 to 5")])
as_openai = dict(model=f"openai/{model}", api_base=url + "/v1")
text = lambda o: o.choices[0].message.content
assert text(litellm.completion(**ask, **as_openai)) == "3, 4, 5"
assert ("".join(o.choices[0].delta.content or "" for o in litellm.completion(**ask, **as_openai, stream=True))
        == "3, 4, 5")
assert text(litellm.completion(**ask, model=f"anthropic/{model}", api_base=url)) == "3, 4, 5"
function = dict(name="get_time", parameters=dict(type="object", properties=dict(city=dict(type="string"))))
ask["messages"] = [dict(role="user", content="What time is it in Oslo?")]
(call,) = litellm.completion(**ask, **as_openai,
                             tools=[dict(type="function", function=function)]).choices[0].message.tool_calls
assert call.function.name == "get_time" and "Oslo" in call.function.arguments
assert "3, 4, 5" in str(litellm.responses(**as_openai, api_key="none", input="Count from 3 to 5",
                                          temperature=0).output)
assert len(litellm.embedding(**as_openai, api_key="none", input=["a page"]).data[0]["embedding"]) > 8
