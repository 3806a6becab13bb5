"""A batch that is killed: real processes, real signals, and a server that notes what it was asked; and a
server that is killed in the middle of a batch."""
import json, signal, subprocess, sys, threading, time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

N, AT_ONCE = 120, 8


class Answers(BaseHTTPRequestHandler):
    "Answers each prompt a moment later"
    def log_message(self, *args): pass
    def do_GET(self): self.answer({'data': [{'id': 'first'}]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.asked[body['prompt']] += 1
        time.sleep(.02)
        self.answer({'model': body['model'], 'choices': [{'text': body['prompt'] * 20}],
                     'usage': {'completion_tokens': 2}})
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

class Many(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 64
    def handle_error(self, *args): pass   # a caller that was killed

@pytest.fixture
def server():
    with Many(('127.0.0.1', 0), Answers) as server:
        server.asked = Counter()
        threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
        yield server
        server.shutdown()

def lines(path): return path.read_bytes().count(b'\n') if path.exists() else 0

def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(.005)

def test_killed_twice_it_goes_on(server, tmp_path):
    """Ctrl-C, then kill -9: no answer that was written is asked again, at most what was in flight is, and in
    the end each has one record"""
    asked, told = tmp_path/'asked.jsonl', tmp_path/'told.jsonl'
    asked.write_text('\n'.join(json.dumps({'id': i, 'prompt': str(i)}) for i in range(N)))
    command = [sys.executable, '-m', 'minisgl_lit', 'batch', str(asked), '-o', str(told), '--concurrency',
               str(AT_ONCE),
               '--url', f'http://127.0.0.1:{server.server_port}']
    written = []
    for number, enough in ((signal.SIGINT, 20), (signal.SIGKILL, 60)):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as p:
            until(lambda: lines(told) >= enough)
            p.send_signal(number)
            err = p.communicate(timeout=60)[1]
        assert p.returncode == (130 if number is signal.SIGINT else -9)
        if number is signal.SIGINT:
            assert err.startswith('stopped: ') and err.endswith('The same command goes on\n'), err
        written.append((Counter(server.asked),
                        {json.loads(o)['custom_id'] for o in told.read_bytes().split(b'\n')[:-1]}))
    # as a write that was cut in two
    with told.open('ab') as file: file.write(b'{"id": "batch_req_9", "custom_')
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.split(';')[0]) == (0, f'{N} of {N} lines are answered'), done.stderr
    records = [json.loads(o) for o in told.open()]
    assert sorted(o['custom_id'] for o in records) == [*range(N)]
    assert all(o['response']['body']['choices'][0]['text'] == str(o['custom_id']) * 20 for o in records)
    for before, names in written:
        assert not [o for o in names if server.asked[str(o)] > before[str(o)]], 'written, and asked again'
    assert server.asked.total() - N <= 2 * AT_ONCE

def test_a_server_that_has_gone(tmp_path):
    "One sentence, and code 2; nothing is made"
    (tmp_path/'asked.jsonl').write_text('"Hi"')
    done = subprocess.run([sys.executable, '-m', 'minisgl_lit', 'batch', 'asked.jsonl', '-o', 'told.jsonl',
                           '--url', 'http://127.0.0.1:9'],
                          cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 2 and done.stderr.count('\n') == 1 and 'cannot be reached' in done.stderr
            and lines(tmp_path/'told.jsonl') == 0)

@pytest.mark.long
def test_a_server_that_is_killed_goes_on(tmp_path):
    """kill -9 of a server in the middle of a batch: the next one goes on with it, and its answers are those
    of the route"""
    command = [sys.executable, '-m', 'minisgl_lit', 'serve', '--port', '0', '--batch-folder',
               str(tmp_path/'kept'), '--max-seq-len', '128', '--num-pages', '128',
               '--max-running-req', '4', '--log-interval', '0']
    def start():
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return p, openai.OpenAI(base_url=p.stdout.readline().split()[-1] + '/v1', api_key='x', max_retries=0)
    body = {'max_tokens': 60, 'temperature': 0, 'ignore_eos': True}
    text = '\n'.join(json.dumps({'custom_id': f'q{i}', 'method': 'POST', 'url': '/v1/completions',
                                 'body': body | {'prompt': f'Page {i}'}}) for i in range(100))
    p, client = start()
    try:
        asked = client.files.create(file=('asked.jsonl', text.encode()), purpose='batch')
        batch = client.batches.create(input_file_id=asked.id, endpoint='/v1/completions',
                                      completion_window='24h')
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10)
        p.kill()
        p.wait(60)
        p, client = start()
        until(lambda: client.batches.retrieve(batch.id).status == 'completed')
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed, batch.error_file_id) == (100, 100, 0, None)
        records = [json.loads(o) for o in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(o['custom_id'] for o in records) == sorted(f'q{i}' for i in range(100))
        for o in records[:3] + records[-3:]:
            want = client.completions.create(model='embedded', prompt=o['custom_id'].replace('q', 'Page '),
                                             max_tokens=60, temperature=0, extra_body={'ignore_eos': True})
            assert o['response']['body']['choices'][0]['text'] == want.choices[0].text
    finally:
        p.terminate()
        p.wait(60)
