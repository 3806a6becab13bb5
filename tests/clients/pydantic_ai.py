# needs: pydantic-ai-slim[openai,anthropic]
"An agent with a tool, whole and streamed, and one whose answer is an object; over three protocols"
import asyncio, sys
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
openai = OpenAIProvider(base_url=url + "/v1", api_key="none")
def get_time(city: str) -> str: return "14:30"

class Choice(BaseModel): city: Literal["Oslo", "Rome"]

async def main():
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    for model in (OpenAIChatModel(name, provider=openai), OpenAIResponsesModel(name, provider=openai),
                  AnthropicModel(name, provider=anthropic)):
        settings = dict(temperature=0, max_tokens=100)
        agent = Agent(model, tools=[get_time], model_settings=settings)
        assert (await agent.run("What time is it in Oslo?")).output == "It is 14:30 in Oslo."
        async with agent.run_stream("What time is it in Oslo?") as streamed:
            assert [o async for o in streamed.stream_text()][-1] == "It is 14:30 in Oslo."
        assert isinstance((await Agent(model, output_type=Choice,
                                       model_settings=settings).run("Oslo or Rome?")).output, Choice)

asyncio.run(main())
