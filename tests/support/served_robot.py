"""A robot policy's server in a thread of its own."""

import asyncio
import contextlib
import threading

from embodied.serving.config import ServeConfig


@contextlib.contextmanager
def served(policy, **options):
    """Gives its address, and the lines that it prints."""
    from embodied.serving.robot_server import Answers, PolicyServer

    config = ServeConfig(checkpoint="x", port=0, **options)
    told, ports, started = [], [], threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def ready(port):
        ports.append(port)
        started.set()

    server = PolicyServer(Answers(policy, config), config, told.append)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.run(ready, stop)))
    thread.start()
    assert started.wait(60)
    try:
        yield f"ws://127.0.0.1:{ports[0]}", told
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
