# needs: outlines openai
"Choices, objects and plain text"
import sys
from typing import Literal
import openai
import outlines
from pydantic import BaseModel

url, name = sys.argv[1:]

class Choice(BaseModel): city: Literal["Oslo", "Rome"]

model = outlines.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), name)
assert model("Count from 3 to 5", temperature=0) == "3, 4, 5"
assert Choice.model_validate_json(model("Oslo or Rome?", Choice))
assert "".join(model.stream("Count from 3 to 5", temperature=0)) == "3, 4, 5"
served = outlines.from_vllm(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), name)
assert served("Oslo or Rome?", Literal["Oslo", "Rome"]) in ("Oslo", "Rome")
