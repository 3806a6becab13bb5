# needs: instructor
"An answer as an object of a class, in each of its modes for OpenAI"
import sys
import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]

class Person(BaseModel):
    name: str = Field(max_length=9)
    age: int = Field(ge=1, le=99)

plain = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    said = instructor.from_openai(plain, mode=mode).chat.completions.create(
        model=model, response_model=Person, max_retries=0, max_tokens=120, temperature=0,
        messages=[dict(role="user", content="Who is Ada?")])
    assert isinstance(said, Person)
