# needs: openai-agents
"""An agent that calls a tool and answers, over responses (its default) and over chat completions, whole and
streamed"""
import asyncio, sys
from typing import Literal

from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner,
                    function_tool,
                    set_tracing_disabled)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)

@function_tool
def get_time(city: str) -> str: return "14:30"

class Choice(BaseModel): city: Literal["Oslo", "Rome"]

async def main():
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        fields = dict(name="Clock", model=kind(name, client), model_settings=ModelSettings(temperature=0))
        agent = Agent(**fields, tools=[get_time])
        assert (await Runner.run(agent, "What time is it in Oslo?")).final_output == "It is 14:30 in Oslo."
        streamed = Runner.run_streamed(agent, "What time is it in Oslo?")
        kinds = [o.type async for o in streamed.stream_events()]
        assert streamed.final_output == "It is 14:30 in Oslo." and "run_item_stream_event" in kinds
        assert isinstance((await Runner.run(Agent(**fields, output_type=Choice),
                                            "Oslo or Rome?")).final_output, Choice)

asyncio.run(main())
