"""A server of a language model in a thread of its own, and one that answers as it is told."""

import asyncio
import contextlib
import threading
import time

from aiohttp import web

from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import make_engine
from embodied.serving.config import ServeConfig
from embodied.serving.language_server import LanguageServer, Origin, stop_accepting

SECRET = "a-secret-of-enough-letters"


@contextlib.contextmanager
def served(policy, folder, version=0, **options):
    """Gives the server with its address."""
    config, told = ServeConfig(checkpoint="x", **({"port": 0} | options)), []
    server = LanguageServer(policy, config, Origin("m", folder, version), told.append)

    async def run(ready, stop):
        loop, thread = asyncio.get_running_loop(), threading.current_thread()
        server.end = lambda: (loop.call_soon_threadsafe(stop.set), thread.join(60))
        await server.run(ready, stop)

    with in_a_thread(run) as server.url:
        yield server
    server.policy = server.generation = None  # aiohttp keeps the last thousand servers that had requests
    assert not [line for line in told if "Traceback" in line], told


@contextlib.contextmanager
def scripted(reply):
    """A server that is none of ours; `reply(request, body)` is what it answers. Gives its address."""

    async def handle(request):
        body = await request.json() if request.can_read_body else None
        found = reply(request, body)
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def run(ready, stop):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
        ready(server.sockets[0].getsockname()[1])
        await stop.wait()
        await stop_accepting(server)
        await runner.cleanup()

    with in_a_thread(run) as url:
        yield url


@contextlib.contextmanager
def in_a_thread(run):
    ports, started, loop = [], threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    def ready(port):
        ports.append(port)
        started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run(ready, stop)))
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@contextlib.contextmanager
def engine_at(url, policy, folder, **options):
    """The engine of a policy that asks one server, or several."""
    asked = {"engine": "http", "url": url, "weights": folder and folder / "weights", "away_s": 5.0}
    engine = make_engine(LanguageConfig(**policy.config.model_dump() | asked | options), policy)
    try:
        yield engine
    finally:
        engine.close()


def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
