"""Watch runs in a browser, live: python -m embodied.ui [RUNS ...]

Serves the list of all runs below some folders, and the page of each: curves as rows come, videos as evaluations end,
conversations, timings, the prediction beside the measurement. Tick several runs to compare them.

usage: python -m embodied.ui [RUNS ...] [port=8080] [--help]

  RUNS                          folders with runs, or runs' own folders; default: runs
  port=N                        port to listen at; 0: a free one, which is printed

Only programs of this machine can connect, without a token; nothing can be changed from a page. From elsewhere:
ssh -L 8080:localhost:8080 MACHINE. Ctrl-C ends it, and no run.
"""

from __future__ import annotations

from contextlib import suppress

from embodied.core.errors import ConfigError
from embodied.core.files import as_path
from embodied.run import launch
from embodied.serving.page_server import HOST, PageServer


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> int:
    ports = [word.removeprefix("port=") for word in argv if word.startswith("port=")]
    roots = [as_path(word) for word in argv if not word.startswith("port=")] or [as_path("runs")]
    port = ports[-1] if ports else "8080"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"port={port} is no port; name a number up to 65535 (0: a free one)")
    for root in roots:
        if not root.is_dir():
            train = "python -m embodied.train recipe=pointmass_ppo"
            raise ConfigError(f"{root} is not a folder; name one with runs, or make one: {train}")
    try:
        server = PageServer(roots, int(port))
    except OSError as err:
        raise ConfigError(f"port={port}: {err.strerror or err}; choose another (port=0: a free one)") from None
    with server, suppress(KeyboardInterrupt):
        print(f"runs        {', '.join(map(str, server.roots))}")
        print(f"listening   http://{HOST}:{server.server_port}/", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
