# needs: llm
"""The command line `llm`, with this server in its list of models: an answer, a stream, a chat that goes on, a
schema"""
import os, subprocess, sys, tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder)/"extra-openai-models.yaml").write_text(
        f"- model_id: lit\n  model_name: {model}\n  api_base: {url}/v1\n  supports_schema: true\n  "
        "supports_tools: true\n")
    def llm(*args):
        program = "from llm.cli import cli; cli()"
        done = subprocess.run([sys.executable, "-P", "-c", program, *args], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL,
                              env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"},
                              cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
    assert llm("-m", "lit", "-o", "temperature", "0", "Count from 3 to 5") == "3, 4, 5"
    assert llm("-m", "lit", "--no-stream", "-o", "temperature", "0", "Count from 3 to 5") == "3, 4, 5"
    assert llm("-c", "-o", "temperature", "0", "Count from 2 to 4")
    assert '"age"' in llm("-m", "lit", "--schema", "age int", "-o", "max_tokens", "60", "Who is Ada?")
