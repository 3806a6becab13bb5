"""Links to an engine, and what may happen to them: strangers who say nothing, or too much; a client that
speaks another language; a cable that is cut.

The engines are toys, in this process; a link is the real one, over TCP."""
import asyncio, socket, struct, time
from contextlib import ExitStack, asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from minisgl_lit.core.outputs import EngineCoreOutputs
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.server import engine_link
from minisgl_lit.server.engine_client import AsyncEngineClient
from minisgl_lit.server.engine_link import EngineHost, EngineLink, set_options
from minisgl_lit.loop.messages import AbortMsg, HelloMsg, ReadyMsg, UserMsg, encode
from minisgl_lit.testing.toy_core import ToyEngineCore
from minisgl_lit.testing.toy_engine import expected_output

READY = ReadyMsg("toy", 240, 1000)

@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    "Hosts tell that they live ten times as often, and wait a tenth as long for what is on its way"
    monkeypatch.setattr(engine_link, "_ALIVE_SECONDS", .05)

def run(main):
    async def in_time():
        async with asyncio.timeout(30): await main()
    asyncio.run(in_time())

@asynccontextmanager
async def hosting(**settings):
    "A host of a toy engine, that runs"
    host = EngineHost(ToyEngineCore(num_pages=256, **settings), READY)
    host.running = asyncio.ensure_future(host.run())
    try: yield host
    finally:
        host.running.cancel()
        await host.close()
        await asyncio.wait({host.running})

@asynccontextmanager
async def linking(address):
    "A client at an address, that listens"
    link = EngineLink(address)
    client = AsyncEngineClient(link, "toy")
    async def listen():
        try: await client.listen()
        except RuntimeError as e: client.fail(str(e))
    try:
        await link.start()
        client.listening = asyncio.ensure_future(listen())
        yield client
        client.listening.cancel()
    finally: await link.close()

async def read(client, rid, n=20):
    "The tokens of an answer, and why it ended"
    ids = []
    async for output in client.stream([UserMsg(rid, np.array([1, 2]),
                                               SamplingParams(max_tokens=n, temperature=0))]):
        ids += output.token_ids
    return ids, output.error

async def is_whole(client, rid, n=20):
    return await read(client, rid, n) == (expected_output([1, 2], n, 1000), None)

async def until(condition):
    async with asyncio.timeout(30):
        while not condition(): await asyncio.sleep(.01)


UNKNOWN = msgspec.msgpack.encode({"type": "UserMsg", "of_a_later_version": 1})

@pytest.mark.parametrize("parts",
    [[b""], [b"\x81"], [UNKNOWN], [encode(READY)], [encode(HelloMsg())[:-1]], [b"two", b"parts"]],
                         ids=["empty", "half", "of another version", "not for an engine", "cut", "two parts"])
def test_a_client_that_speaks_another_language(parts):
    "It is given up, and told why; the engine goes on for the others"
    async def main():
        async with hosting() as host, linking(host.address) as other:
          with ExitStack() as closing:
            context = zmq.asyncio.Context()
            odd = context.socket(zmq.DEALER)
            set_options(odd, host.address)
            odd.curve_serverkey = host.address.public
            odd.connect(host.address.endpoint)
            closing.callback(context.term); closing.callback(odd.close, linger=0)
            await odd.send(encode(HelloMsg()))
            assert b"ReadyMsg" in await odd.recv()
            await odd.send_multipart(parts)
            async with asyncio.timeout(10):
                while b"FailMsg" not in (last := await odd.recv()): pass
            assert b"no message" in last or b"not a message" in last or b"UserMsg" in last, last
            assert len(host._links) == 1 and not host.running.done()
            assert await is_whole(other, "a")
    run(main)

def test_strangers_who_say_nothing():
    "A hundred connections that are silent, or have said half of a greeting, keep nobody out"
    async def main():
        async with hosting() as host:
            ip, port = host.address.endpoint.removeprefix("tcp://").split(":")
            silent = [socket.create_connection((ip, int(port))) for _ in range(100)]
            for o in silent[::2]: o.sendall(b"\xff" + bytes(8))
            try:
                async with linking(host.address) as client: assert await is_whole(client, "a")
            finally:
                for o in silent: o.close()
    run(main)

# as ZMTP has it
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

@pytest.mark.parametrize("flags", [2, 6], ids=["message", "command"])
def test_a_stranger_who_says_too_much(flags):
    "Before it has shown a key, it announces a terabyte: it is not listened to"
    def stranger(ip, port):
        with socket.create_connection((ip, int(port)), timeout=20) as o:
            o.sendall(GREETING + struct.pack(">BQ", flags, 1 << 40))
            sent = 0
            with suppress(ConnectionError):
                while sent < 1 << 27: sent += o.send(bytes(1 << 16))
            return sent
    async def main():
        async with hosting() as host:
            sent = await asyncio.to_thread(stranger, *host.address.endpoint.removeprefix("tcp://").split(":"))
            assert sent < 1 << 25, f"{sent:,} bytes"
            async with linking(host.address) as client: assert await is_whole(client, "a")
    run(main)

def test_what_came_before_the_end_is_read():
    "An answer and the end of the engine come together: the answer counts"
    async def main():
        async with hosting() as host, linking(host.address) as client:
            async for output in client.stream([UserMsg("a", np.array([1, 2]),
                    SamplingParams(max_tokens=2, temperature=0))]):
                host.process.kill()   # while its last output is on its way
            assert output.finish_reason == "length" and output.error is None
            await until(lambda: client.failed)
            assert "-9" in client.failed
    run(main)

def test_who_reads_late_misses_nothing():
    "The last output and the end of the connection come while the client's process is busy"
    async def main():
        async with hosting() as host, linking(host.address) as client:
            tell = host._tell
            def tell_and_end(link, message):
                tell(link, message)
                if host._owners or not isinstance(message, EngineCoreOutputs) or host._socket.closed: return
                host._socket.close()
                host._door.stop()
                host._context.term()
                time.sleep(.1)   # so that the client, in the same loop, has not read yet
            host._tell = tell_and_end
            assert await is_whole(client, "a", 2)
            await until(lambda: client.failed)
            assert client.failed == "the link to the engine has ended"
    run(main)

def test_the_engine_dies_while_it_drains():
    "Nobody waits for what it had begun"
    async def main():
        async with hosting(step_seconds=.01) as host, linking(host.address) as client:
            begun = asyncio.ensure_future(read(client, "a", 200))
            await until(lambda: host.n_open and not host.waiting_tokens)
            draining = asyncio.ensure_future(host.drain("it is about to end"))
            await until(lambda: not client.alive)
            host.process.kill()
            await asyncio.wait_for(draining, 5)
            assert "-9" in (await begun)[1]
    run(main)

@asynccontextmanager
async def cable(address, drop_after=None):
    "A way to a host that can be cut, also in the middle of a message"
    ip, port = address.endpoint.removeprefix("tcp://").split(":")
    ways, tasks = [], []
    async def carry(a, b, bound):
        with suppress(ConnectionError, asyncio.CancelledError):
            n = 0
            while data := await a.read(512):
                n += len(data)
                b.write(data)
                if bound and n > bound: break
        for w in ways: w.close()
    async def connected(r, w):
        r2, w2 = await asyncio.open_connection(ip, int(port))
        ways.extend((w, w2))
        tasks.extend((asyncio.ensure_future(carry(r, w2, None)),
                      asyncio.ensure_future(carry(r2, w, drop_after))))
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    here = "tcp://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    def cut():
        for w in ways: w.close()
    try: yield address._replace(endpoint=here), cut
    finally:
        cut()
        for t in tasks: t.cancel()
        server.close()

@pytest.mark.parametrize("drop_after", [None, 3000], ids=["between messages", "in a message"])
def test_a_cable_is_cut(drop_after):
    "The client is told, the engine computes no more for it, and a new link is as good as the first"
    async def main():
        async with (hosting(step_seconds=.002) as host, linking(host.address) as other,
                    cable(host.address, drop_after) as (there, cut)):
            async with linking(there) as client:
                stream = asyncio.ensure_future(read(client, "a", 230))
                if drop_after is None:
                    await until(lambda: host.n_open and not host.waiting_tokens)
                    cut()
                assert (await asyncio.wait_for(stream, 10))[1] == "the link to the engine has ended"
                assert not client.alive
            await until(lambda: not host.n_open)
            async with linking(host.address) as again:
                assert await is_whole(again, "a") and await is_whole(other, "b")
            await until(lambda: len(host._links) == 1)
    run(main)

def test_a_client_aborts_what_is_anothers():
    "That goes on"
    async def main():
        async with (hosting(step_seconds=.002) as host, linking(host.address) as one,
                    linking(host.address) as two):
            begun = asyncio.ensure_future(read(one, "a", 100))
            await until(lambda: host.n_open)
            two._open["a"] = None   # as if it had been its own
            two.process.send(encode(AbortMsg("a")))
            assert (await two.stats())["generated_tokens"] >= 0
            assert (await begun) == (expected_output([1, 2], 100, 1000), None)
    run(main)
