"""Ordinary traffic with hostile callers beside it, for a while: nothing lost, every answer the expected one,
memory flat, pages back.

    python tests/soak.py --minutes 20 --out soak.json

Ordinary requests are greedy, so each has one right answer, which is asked for before the hostile callers
begin."""
import argparse, asyncio, json, random, re, sys, tempfile, time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from beside import PROMPTS, Program, hostile_callers, program, until

WORDS = ('the page of a tree is shared by requests that begin alike and the scheduler decides which of them '
         'runs next'.split())
SHAPE = {'type': 'object', 'properties': {'name': {'type': 'string', 'maxLength': 8},
    'n': {'type': 'integer'}}, 'required': ['name', 'n'], 'additionalProperties': False}

def ordinary(seed: int = 0, n: int = 60) -> list[tuple[str, dict]]:
    "Requests of every kind: a route and a body"
    rng, made = random.Random(seed), []
    for i in range(n):
        prompt = rng.choice(PROMPTS) + ' ' + ' '.join(rng.choices(WORDS, k=rng.choice([0, 5, 40, 200])))
        common = dict(max_tokens=rng.choice([4, 30, 120]), temperature=0)
        chat = common | dict(messages=[{'role': 'user', 'content': prompt}])
        kinds = [('/v1/chat/completions', chat),
                 ('/v1/completions', common | dict(prompt=prompt, ignore_eos=True)),
                 ('/v1/completions', common | dict(prompt=[prompt, prompt[:9], PROMPTS[0]])),
                 ('/v1/completions', common | dict(prompt=prompt, n=3)),
                 ('/v1/completions', common | dict(prompt=prompt, stop=['e', 'page'], ignore_eos=True)),
                 ('/v1/completions', common | dict(prompt=prompt, stop_regex='[a-d]{2}', ignore_eos=True)),
                 ('/v1/chat/completions', chat | dict(response_format={'type': 'json_schema',
                     'json_schema': {'schema': SHAPE}}, max_tokens=80)),
                 ('/v1/completions', common | dict(prompt=prompt, regex=r'[a-f]{3,9}\.')),
                 ('/generate', dict(text=prompt,
                     sampling_params=dict(max_new_tokens=common['max_tokens'], temperature=0))),
                 ('/v1/completions', common | dict(prompt=prompt, logprobs=2))]
        made.append(kinds[i % len(kinds)])
    return made

def answer(body: dict) -> list[str]:
    "The texts of a whole answer"
    if 'text' in body: return [body['text']]
    return [o['message']['content'] or '' if 'message' in o else o['text']
            for o in sorted(body['choices'], key=lambda o: o['index'])]

def joined(lines: list[str]) -> list[str]:
    "The same of a stream"
    texts: dict[int, str] = {}
    for line in lines:
        if not line.startswith('data: {'): continue
        event = json.loads(line[6:])
        if 'error' in event: raise ValueError(event['error']['message'])
        for o in event.get('choices') or [event | {'index': 0}]:
            texts[o['index']] = (texts.get(o['index'], '')
                                 + (o['delta'].get('content') or '' if 'delta' in o else o.get('text', '')))
    return [texts[i] for i in sorted(texts)]

@dataclass
class Soak:
    "What has been asked, and what came of it."
    server: Program
    requests: list[tuple[str, dict]]
    expected: list[list[str]] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    # when an answer came, and how long it took
    seconds: list[tuple[float, float]] = field(default_factory=list)
    memory: list[dict] = field(default_factory=list)
    hostile: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        headers = {'authorization': f'Bearer {self.server.key}'}
        self.web = httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=120, trust_env=False,
                                     limits=httpx.Limits(max_connections=100))

    async def learn(self) -> None:
        "The right answers, asked for one by one"
        for path, body in self.requests:
            r = await self.web.post(path, json=body)
            assert r.status_code == 200, (body, r.text)
            self.expected.append(answer(r.json()))

    async def caller(self, seed: int, end: float) -> None:
        "Asks until the end: whole or streamed, and sometimes leaves in the middle"
        rng = random.Random(seed)
        while time.monotonic() < end:
            i, how, begin = (rng.randrange(len(self.requests)),
                             rng.choice(['whole', 'stream', 'stream', 'leave']), time.monotonic())
            path, body = self.requests[i]
            try:
                if how == 'whole':
                    r = await self.web.post(path, json=body)
                    told = answer(r.json()) if r.status_code == 200 else [r.text[:300]]
                else: told = await self._stream(path, body, rng.randrange(8) if how == 'leave' else None)
                self.counts[how] += 1
                if how != 'leave':
                    self.seconds.append((time.monotonic(), time.monotonic() - begin))
                    if told != self.expected[i]:
                        self.wrong.append(f'{path} {str(body)[:200]}: {told} instead of {self.expected[i]}')
            except (httpx.HTTPError, ValueError, KeyError) as e:
                self.wrong.append(f'{how} {path} {str(body)[:100]}: {e!r}')
            await asyncio.sleep(rng.random() * .2)

    async def _stream(self, path: str, body: dict, n_events: int | None) -> list[str]:
        lines = []
        async with self.web.stream('POST', path, json=body | {'stream': True}) as r:
            async for line in r.aiter_lines():
                lines.append(line)
                if n_events is not None and len(lines) > n_events: return []
        if r.status_code != 200: raise ValueError(f'status {r.status_code}: {lines[:1]}')
        return joined(lines)

    async def watch(self, every: float) -> None:
        "Memory, now and then"
        begin = time.monotonic()
        while True:
            self.memory.append(dict(minute=round((time.monotonic() - begin) / 60, 2),
                                    mb={str(pid): round(mb) for pid, mb in self.server.memory().items()},
                                    answers=sum(self.counts.values()), wrong=len(self.wrong)))
            print(json.dumps(self.memory[-1]), file=sys.stderr, flush=True)
            await asyncio.sleep(every)

    async def listen(self, callers: asyncio.subprocess.Process) -> None:
        "What came of the hostile callers"
        assert callers.stdout
        async for line in callers.stdout:
            o = json.loads(line)
            self.hostile['entries'] += 1
            if o['wrong']: self.hostile[f"{o['name']}: {o['wrong']}"] += 1

async def soak(minutes: float, folder: Path, n_callers: int, flags: list[str], hostile: list[str]) -> dict:
    "All that a run has shown"
    with program(folder, '--log-interval', '0', *flags, key='ordinary') as server:
        s = Soak(server, ordinary())
        await s.learn()
        callers = await hostile_callers(server, '--rounds', '0', '--pause', '1', *hostile)
        callers.stdin.write(b'\n')
        end, every = time.monotonic() + minutes * 60, min(60., minutes * 6)
        others = [asyncio.ensure_future(o) for o in (s.watch(every), s.listen(callers))]
        try: await asyncio.gather(*(s.caller(i, end) for i in range(n_callers)))
        finally:
            callers.kill()
            await callers.wait()
            for o in others: o.cancel()
        idle = await until(server.idle, 60)
        await asyncio.sleep(5)
        s.memory.append(dict(minute='idle', mb={str(pid): round(mb) for pid, mb in server.memory().items()},
                             answers=sum(s.counts.values()), wrong=len(s.wrong)))
        late = sorted(seconds for _, seconds in s.seconds)
        await s.web.aclose()
        log = server.log.read_text()
        return dict(minutes=minutes, answers=dict(s.counts), wrong=s.wrong[:20], n_wrong=len(s.wrong),
                    hostile=dict(s.hostile), idle=idle, memory=s.memory,
                    pages=server.ask('/get_server_info')['pages'],
                    seconds={q: round(late[int(len(late) * q)], 2) for q in (.5, .9, .99)}
                    | {'max': round(late[-1], 2)}, log_lines=log.count('\n'),
                    tracebacks=len(re.findall('Traceback', log)))

def table(result: dict) -> str:
    "The memory curve: a line for each minute, a column for each process"
    pids = sorted({pid for o in result['memory'] for pid in o['mb']}, key=int)
    lines = [f"{'minute':>8} " + ' '.join(f'{"MB of " + pid:>12}' for pid in pids) + '   answers']
    for o in result['memory']:
        lines.append(f"{o['minute']:>8} " + ' '.join(f"{o['mb'].get(pid, ''):>12}" for pid in pids)
                     + f"{o['answers']:>10}")
    return '\n'.join(lines)

def main() -> int:
    "Run, print, save; 0 if nothing was lost or wrong"
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--minutes', type=float, default=20)
    p.add_argument('--callers', type=int, default=12, help='ordinary ones, at once')
    p.add_argument('--rows', default='text,stop,names,json,grammar,http',
                   help='of the corpus; `control` would stop the others, on a server that lets it')
    p.add_argument('--only', default='', help='a pattern that names of the corpus must contain')
    p.add_argument('--out', default='soak.json')
    a, flags = p.parse_known_args()   # the rest goes to the server
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(a.minutes, Path(folder), a.callers, flags,
                                  ['--rows', a.rows, '--only', a.only]))
    Path(a.out).write_text(json.dumps(result, indent=1))
    print(table(result), json.dumps({k: v for k, v in result.items() if k != 'memory'}, indent=1), sep='\n')
    return int(bool(result['n_wrong'] or not result['idle']))

if __name__ == '__main__': sys.exit(main())
