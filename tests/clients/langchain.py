# needs: langchain langchain-openai langchain-anthropic langchain-ollama
"Chats, streams, a bound tool, structured output, an agent; over three protocols, and embeddings"
import sys
from typing import Literal
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, model = sys.argv[1:]

@tool
def get_time(city: str) -> str:
    "The time in a city"
    return "14:30"

class Choice(BaseModel): city: Literal["Oslo", "Rome"]

openai = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_retries=0, temperature=0)
chats = [openai, ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_retries=0, temperature=0,
                            use_responses_api=True),
         ChatAnthropic(base_url=url, api_key="none", model=model, max_retries=0, temperature=0,
                       max_tokens=100),
         ChatOllama(base_url=url, model=model, temperature=0)]
for chat in chats:
    whole = chat.invoke("Count from 3 to 5")
    assert whole.text == "3, 4, 5" and whole.usage_metadata["output_tokens"] > 3, chat
    assert "".join(o.text for o in chat.stream("Count from 3 to 5")) == "3, 4, 5", chat
    (call,) = chat.bind_tools([get_time]).invoke("What time is it in Oslo?").tool_calls
    assert (call["name"], call["args"]) == ("get_time", {"city": "Oslo"})
    said = create_agent(chat, [get_time]).invoke(dict(messages=[("user", "What time is it in Oslo?")]))
    assert said["messages"][-1].text == "It is 14:30 in Oslo.", said
assert isinstance(openai.with_structured_output(Choice).invoke("Oslo or Rome?"), Choice)
assert isinstance(openai.with_structured_output(Choice, method="function_calling").invoke("Oslo or Rome?"),
                  Choice)
found = OpenAIEmbeddings(base_url=url + "/v1", api_key="none", model=model,
                         check_embedding_ctx_length=False).embed_documents(["a page"])
assert len(found[0]) > 8
