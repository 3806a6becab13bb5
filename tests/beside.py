"""A server in a process of its own, streams and a caller of /health beside whatever else it is sent, and what
they notice: gaps, texts, memory."""
import asyncio, json, os, re, subprocess, sys, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

Answer = dict[str, object]
PROMPTS = ['The page', 'Hello', 'A prefix tree', 'Count from 3 to 9', 'The scheduler', 'Attention',
           'What is a batch?', 'One, two']
_opener = build_opener(ProxyHandler({}))   # no proxy, whatever the environment says


@dataclass
class Program:
    "The command line's server."
    process: subprocess.Popen
    url: str
    key: str          # that its callers must send; '' if none
    log: Path         # its standard error

    @property
    def pids(self) -> list[int]:
        "Its process and all that it has started"
        rows = [tuple(map(int, o.split()))
                for o in subprocess.check_output(['ps', '-A', '-o', 'pid=,ppid='], text=True).splitlines()]
        found = [self.process.pid]
        # the list grows while it is walked
        for pid in found: found += [child for child, parent in rows if parent == pid]
        return found

    def memory(self, which: str = 'VmRSS') -> dict[int, float]:
        "MB by process; 'VmHWM' is the most since `forget_peaks`"
        def of(pid: int) -> float:
            try:
                return int(re.search(rf'{which}:\s+(\d+)', Path(f'/proc/{pid}/status').read_text())[1]) / 1024
            except (OSError, TypeError): pass   # no such file, or it ends just now
            return float(subprocess.run(['ps', '-o', 'rss=', '-p', str(pid)], capture_output=True,
                                        text=True).stdout or 0) / 1024
        return {pid: of(pid) for pid in self.pids}

    def forget_peaks(self) -> None:
        for pid in self.pids:
            with suppress(OSError): Path(f'/proc/{pid}/clear_refs').write_text('5')

    def ask(self, path: str, body: Answer | None = None, timeout: float = 60) -> Answer:
        "The reply of a route, as JSON"
        headers = ({'content-type': 'application/json'}
                   | ({'authorization': f'Bearer {self.key}'} if self.key else {}))
        data = None if body is None else json.dumps(body).encode()
        with _opener.open(Request(self.url + path, data, headers), timeout=timeout) as r:
            return json.loads(r.read() or b'{}')

    def idle(self) -> bool:
        "Whether nothing runs and every page is back"
        stats = self.ask('/get_server_info')
        pages = stats['pages']
        return (stats['running'] == stats['waiting'] == pages['held'] == pages['protected'] == 0
                and pages['free'] + pages['evictable'] == pages['total'])


@contextmanager
def program(folder: Path, *flags: str, key: str = '', max_gb: float = 4) -> Iterator[Program]:
    "A server until the block ends; none of its processes may have more than `max_gb` of its own data"
    command = ['sh', '-c', f'ulimit -d {int(max_gb * 1e6)}; exec "$@"', 'sh', sys.executable, '-m',
               'minisgl_lit', 'serve', '--port', '0',
               '--num-pages', '1024', '--max-running-req', '32', '--threads', '1', *flags]
    env = os.environ | dict(TMPDIR=str(folder)) | (dict(MINISGL_LIT_API_KEY=key) if key else {})
    with open(folder/'stderr', 'w') as log:
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
    try:
        line = p.stdout.readline()
        assert (found := re.search(r'(http://\S+)\n$', line)), (folder/'stderr').read_text()[-2000:]
        yield Program(p, found[1], key, folder/'stderr')
    finally:
        p.terminate()
        try: p.wait(20)
        except subprocess.TimeoutExpired: p.kill()
        p.wait(20)


@dataclass
class Beside:
    "Streams that begin again when they end, and a caller of /health; all that they notice, with the time."
    server: Program
    prompts: list[str] = field(default_factory=lambda: PROMPTS)
    n_tokens: int = 300
    health_pause: float = .05    # seconds between two calls
    # by stream: when it asked, and when something came
    marks: list[list[float]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)         # by stream: its answers
    # begin, end and status of each call
    health: list[tuple[float, float, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def __aenter__(self) -> 'Beside':
        self.marks, self.texts = [[] for _ in self.prompts], [[] for _ in self.prompts]
        self._tasks = [asyncio.ensure_future(o)
                       for o in (*map(self._stream, range(len(self.prompts))), self._watch_health())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks: task.cancel()
        await asyncio.wait(self._tasks)

    async def _connect(self, start: str, body: bytes = b'') -> tuple[asyncio.StreamReader,
            asyncio.StreamWriter]:
        host, port = re.match(r'http://(.*):(\d+)', self.server.url).groups()
        reader, writer = await asyncio.open_connection(host, int(port))
        key = f'Authorization: Bearer {self.server.key}\r\n' if self.server.key else ''
        writer.write(f'{start} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: '
                     f'application/json\r\nContent-Length: {len(body)}\r\n{key}\r\n'.encode() + body)
        return reader, writer

    async def _stream(self, i: int) -> None:
        body = json.dumps(dict(text=self.prompts[i], stream=True,
            sampling_params=dict(max_new_tokens=self.n_tokens, temperature=0, ignore_eos=True))).encode()
        while True:
            events, marks = [], self.marks[i]
            marks.append(time.monotonic())
            try:
                reader, writer = await self._connect('POST /generate', body)
                async for line in reader:
                    if not line.startswith(b'data: {'): continue
                    marks.append(time.monotonic())
                    events.append(line)
                writer.close()
            except OSError as e: self.errors.append(f'stream {i}: {e!r}')
            told = [json.loads(o[6:]) for o in events]
            reason = told and 'meta_info' in told[-1] and told[-1]['meta_info']['finish_reason']
            if reason and reason['type'] == 'length': self.texts[i].append(told[-1]['text'])
            else:
                self.errors.append(f'stream {i} ended with {events[-1][:300] if events else None}')
                await asyncio.sleep(.5)

    async def _watch_health(self) -> None:
        while True:
            begin, status = time.monotonic(), 0
            try:
                reader, writer = await self._connect('GET /health')
                status = int((await reader.readline()).split()[1])
                await reader.read()
                writer.close()
            except (OSError, IndexError): pass
            self.health.append((begin, time.monotonic(), status))
            await asyncio.sleep(self.health_pause)

    def worst_gap(self, begin: float, end: float) -> float:
        "Longest time without an event in any stream, of those that touch this span; seconds"
        now = time.monotonic()
        return max((b - a for marks in self.marks for a, b in zip(marks, marks[1:] + [now]) if b > begin
                    and a < end), default=0.)

    def worst_health(self, begin: float, end: float) -> float:
        "Longest call of /health that touches this span; seconds"
        return max((b - a for a, b, _ in self.health if b > begin and a < end), default=0.)

async def until(true: Callable[[], bool], seconds: float) -> bool:
    "Wait for something, but not for ever; whether it has come"
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end: return False
        await asyncio.sleep(.2)
    return True

async def hostile_callers(server: Program, *flags: str) -> asyncio.subprocess.Process:
    "The program that sends the corpus, ready to begin when it is told"
    p = await asyncio.create_subprocess_exec(sys.executable, str(Path(__file__).with_name('hostile.py')),
                                             server.url, '--key', server.key, *flags,
                                             stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert p.stdout and await p.stdout.readline() == b'ready\n'
    return p
