"""What a downloaded file says is compared with its size before anything is reserved: files made to do harm,
and in `make test-long` some thousand small valid ones with one number changed (`hostile_files.py`)."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

def tried(*args: str) -> list[dict]:
    "What became of each, tried by a process that has computed nothing before"
    here = Path(__file__).parent
    env = os.environ | {'PYTHONPATH': f'{here.parent}', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, here/'hostile_files.py', *args], env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(o) for o in done.stdout.splitlines()]

def test_no_bomb_takes_memory_or_time():
    found = tried('bombs')
    assert len(found) > 30 and not [o for o in found if o['wrong']]
    assert sum('refused' in o for o in found) > 25

@pytest.mark.long
def test_no_changed_number_takes_memory_or_time():
    found = tried('3000', '0')
    assert len(found) == 3000 and not [o for o in found if o['wrong']]
    assert min(sum(kind in o for o in found) for kind in ('served', 'refused')) > 500
