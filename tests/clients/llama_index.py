# needs: llama-index-core llama-index-llms-openai-like llama-index-embeddings-openai-like
"Completions, chats, streams, an agent with a tool, structured output, embeddings"
import asyncio, sys
from typing import Literal
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:]
llm = OpenAILike(model=model, api_base=url + "/v1", api_key="none", is_chat_model=True,
                 is_function_calling_model=True,
                 temperature=0, max_tokens=100, max_retries=0)
def get_time(city: str) -> str: return "14:30"

class Choice(BaseModel): city: Literal["Oslo", "Rome"]

dialog = [ChatMessage(role="user", content="Count from 3 to 5")]
assert llm.chat(dialog).message.content == llm.complete("Count from 3 to 5").text == "3, 4, 5"
assert "".join(o.delta for o in llm.stream_chat(dialog)) == "3, 4, 5"
assert isinstance(llm.as_structured_llm(Choice).complete("Oslo or Rome?").raw, Choice)

async def agent(): return str(await FunctionAgent(tools=[get_time], llm=llm).run("What time is it in Oslo?"))
assert asyncio.run(agent()) == "It is 14:30 in Oslo."
embedder = OpenAILikeEmbedding(model_name=model, api_base=url + "/v1", api_key="none")
assert len(embedder.get_text_embedding("a page")) > 8
